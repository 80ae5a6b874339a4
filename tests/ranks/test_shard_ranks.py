# SPDX-License-Identifier: Apache-2.0
"""Plain models on real gloo ranks: shared out by the compiler, through every pass and Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cocodiff_compile.compiler import compile_graph
from cocodiff_compile.compiler.stages import Deciding
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.lab.distances import largest
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.report.collect import collect_reports
from tests.ranks.test_compiled_ranks import write_topology
from tests.support.plain_dits import PLAIN, WIDTH, Block

EVERYTHING = {"shard": {"min_gain": 0}}
ALL_PASSES = {**EVERYTHING, "tapa": "on", "head_chunks": 2, "token_chunks": 2}
INDUCTOR_ERROR = 1e-3
"""Inductor on CPU is up to 5e-4 away from eager by itself."""
SITES = {
    "flux": 2,
    "flux2": 2,
    "sd3": 1,
    "sd3.5": 2,
    "qwen-image": 1,
    "wan": 1,
    "ltx": 1,
    "chroma": 2,
    "chronoedit": 1,
    "hunyuan-video": 3,
    "z-image": 5,
    "class-conditional": 2,
    "skips, a bias per head, query and key": 4,
}
"""The Ulysses attentions of a layer of each kind: models of diffusers, and two of one's own."""
UNEVEN = {"flux": {"heads": 6, "image_tokens": 45, "text_tokens": 11}}


def _model(name: str) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Returns a model with random weights, and a call of it that returns one tensor."""
    torch.manual_seed(0)
    if name in PLAIN:
        plain = PLAIN[name]
        model, given = plain.build().eval(), plain.inputs()
        return model, lambda called: called(*given)
    small, sizes = SMALL_MODELS[name], dict(UNEVEN.get(name, {"heads": 8}))
    model = small.build(num_layers=1, heads=sizes.pop("heads"), head_size=16)
    inputs = small.inputs(model, **sizes)
    return model, lambda called: small.sample(called(**inputs))


def _all_passes(_rank: int, _num_ranks: int, name: str, topology: str) -> dict[str, Any]:
    model, call = _model(name)
    options = {**ALL_PASSES, "topology": topology}
    any_gain = functools.partial(Deciding, limits=Limits(order_gain=-1.0))  # models are small
    with (
        mock.patch.object(compile_graph, "Deciding", any_gain),
        torch.no_grad(),
        collect_reports() as reports,
    ):
        expected = call(model)
        compiled = torch.compile(
            model, backend="cocodiff", dynamic=False, fullgraph=True, options=options
        )
        first, second = call(compiled), call(compiled)
    sites = [site for report in reports for site in report.summary["sites"]]
    return {
        "error": float((first - expected).abs().max() / expected.abs().max()),
        "again": torch.equal(first, second),
        "sites": len(sites),
        "phases": {len(leg["phases"]) for site in sites for leg in site["legs"]},
        "chunks": max(leg["chunks"] for site in sites for leg in site["legs"]),
        "ordered": all(report.report.is_ordered for report in reports),
        "first": first,
    }


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SITES)
def test_a_plain_model_on_four_ranks_computes_what_one_process_computes(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "grid.json"
    write_topology(file, (2, 2))
    found = run_local_ranks(_all_passes, 4, name, str(file), timeout_s=800)
    for rank in found:
        assert rank["error"] <= INDUCTOR_ERROR
        assert rank["again"]
        assert torch.equal(rank["first"], found[0]["first"])
        assert rank["sites"] == SITES[name]
        assert rank["phases"] == {2}
        assert rank["chunks"] > 1
        assert rank["ordered"]


def _resolutions(_rank: int, _num_ranks: int, name: str, topology: str) -> dict[str, Any]:
    """Calls a model with three resolutions, the first of which is captured for itself."""
    small = SMALL_MODELS[name]
    torch.manual_seed(0)
    model = small.build(num_layers=1, heads=8, head_size=16)
    options = {**ALL_PASSES, "topology": topology}
    compiled = torch.compile(model, backend="cocodiff", options=options)
    errors, found = [], []
    with torch.no_grad(), collect_reports() as reports:
        for tokens in (64, 144, 256):
            inputs = small.inputs(model, image_tokens=tokens, text_tokens=16)
            expected = small.sample(model(**inputs))
            found.append(small.sample(compiled(**inputs)))
            errors.append(float((found[-1] - expected).abs().max() / expected.abs().max()))
    return {
        "errors": errors,
        "found": found,
        "sites": [len(item.summary["sites"]) for item in reports],
        "legs": [leg for item in reports for site in item.summary["sites"] for leg in site["legs"]],
    }


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["flux", "sd3.5"])
def test_one_graph_runs_for_several_resolutions(name: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_topology(file, (2, 2))
    found = run_local_ranks(_resolutions, 4, name, str(file), timeout_s=800)
    for rank in found:
        assert largest(rank["errors"]) <= INDUCTOR_ERROR
        assert all(map(torch.equal, rank["found"], found[0]["found"]))
        assert rank["sites"] == [SITES[name]] * 2
        assert {len(leg["phases"]) for leg in rank["legs"]} == {2}
        assert all(leg["chunks"] > 1 for leg in rank["legs"])


def _seeded(rank: int, is_other: bool) -> None:
    torch.manual_seed(rank if is_other else 0)


def _errors(rank: int, _num_ranks: int) -> dict[str, str]:
    """Calls a model twice; in each case ranks differ in one thing."""
    plain = PLAIN["class-conditional"]
    errors = {}
    for fault in ("none", "inputs", "weights", "later inputs", "swapped"):
        torch._dynamo.reset()
        _seeded(rank, fault == "weights")
        model = plain.build().eval()
        options = {"shard": {"min_gain": 0, "compare": "all" if "later" in fault else "first"}}
        compiled = torch.compile(model, backend="cocodiff_eager", dynamic=False, options=options)
        try:
            with torch.no_grad():
                for call in ("inputs", "later inputs"):
                    _seeded(rank, fault == call)
                    picture, kind = plain.inputs()
                    compiled(picture.flip(0) if rank and fault == "swapped" else picture, kind)
            errors[fault] = ""
        except ValueError as error:
            errors[fault] = str(error)
    return errors


class _Scaled(torch.nn.Module):
    """A block with a buffer, and a number that its caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("scales", torch.ones(WIDTH))

    def forward(self, x: Tensor, scale: float = 1.0, least: float | None = None) -> Tensor:
        x = self.block(x * self.scales * scale)
        return x if least is None else x.clamp(min=least)


def _scaled_errors(rank: int, _num_ranks: int) -> dict[str, str]:
    """Calls blocks one by one, or a model with a number; in each case ranks differ in one thing."""
    errors = {}
    for fault in ("none", "buffer", "number", "one number", "frozen", "frozen alike"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = nn.Sequential(*(_Scaled() for _ in range(3))).eval()
        x = torch.randn(2, 16, WIDTH)
        if rank and fault in ("buffer", "frozen"):
            blocks[2].scales.mul_(3)
        options = {"shard": {"min_gain": 0}}
        with (
            torch.no_grad(),
            torch._inductor.config.patch(freezing="frozen" in fault),
        ):
            try:
                if "number" in fault:
                    model = torch.compile(
                        blocks[0], backend="cocodiff_eager", dynamic=False, options=options
                    )
                    model(x, *((1.0 + rank,) if fault == "number" else (1.5, 2.0)[: rank + 1]))
                elif "frozen" in fault:
                    model = torch.compile(
                        blocks[2], backend="cocodiff_eager", dynamic=False, options=options
                    )
                    model(x)
                else:
                    for block in blocks:
                        block.compile(backend="cocodiff_eager", dynamic=False, options=options)
                    blocks(x)
                    blocks(x)
                errors[fault] = ""
            except ValueError as error:
                errors[fault] = str(error)
    return errors


@pytest.mark.gloo
def test_buffers_and_numbers_of_a_call_are_compared() -> None:
    first, second = run_local_ranks(_scaled_errors, 2, timeout_s=120)
    assert first == second
    assert first["none"] == first["frozen alike"] == ""
    for fault in ("buffer", "number", "one number", "frozen"):
        assert "option 'shard': rank 1 was called with another value than rank 0" in first[fault]
    assert "in the numbers given to aten.mul.Tensor" in first["number"]
    assert "clamp_min.default (1 x 2.0" in first["one number"]
    assert "instead of nothing" in first["one number"]
    assert "in the constant " in first["frozen"]


def _move(model: torch.nn.Module) -> None:
    """Puts weights elsewhere in memory, as offloading does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _replace(model: torch.nn.Module) -> None:
    torch.manual_seed(torch.distributed.get_rank())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.randn_like(parameter)))


def _changed_weights(rank: int, _num_ranks: int) -> list[str]:
    """Returns what a call says after the first rank moved its weights, and after all ranks
    replaced theirs by others.
    """
    torch.manual_seed(0)
    model, inputs = PLAIN["class-conditional"].build().eval(), PLAIN["class-conditional"].inputs()
    options = {"shard": {"min_gain": 0, "compare": "all"}}
    compiled = torch.compile(model, backend="cocodiff_eager", dynamic=False, options=options)
    said = []
    with torch.no_grad():
        expected = compiled(*inputs)
        if rank == 0:
            _move(model)
        said.append("" if torch.equal(compiled(*inputs), expected) else "another result")
        _replace(model)
        try:
            compiled(*inputs)
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.gloo
def test_weights_are_compared_by_value_wherever_they_lie() -> None:
    for moved, replaced in run_local_ranks(_changed_weights, 2, timeout_s=120):
        assert not moved
        assert "option 'shard': rank 1 was called with another value than rank 0" in replaced


@pytest.mark.gloo
def test_ranks_that_are_called_with_other_values_say_so() -> None:
    first, second = run_local_ranks(_errors, 2, timeout_s=200)
    assert first == second
    assert first["none"] == ""
    for fault in ("inputs", "weights", "later inputs", "swapped"):
        assert "option 'shard': rank 1 was called with another value than rank 0" in first[fault]
    assert "[2, 3, 8, 8] float32" in first["inputs"]
    assert "[2, 3, 8, 8] float32" in first["later inputs"]
