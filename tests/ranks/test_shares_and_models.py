# SPDX-License-Identifier: Apache-2.0
"""Shares end with the call of the model that made them; ranks may compile alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from cocodiff_compile.backends import eager
from cocodiff_compile.backends.eager import run_as_it_stands
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.distances import largest
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.ranks.agreement.watch import TICK_S
from cocodiff_compile.shard.token_share import TokenShare
from tests.support.plain_dits import PLAIN, WIDTH, Block

OPTIONS = {"shard": {"min_gain": 0}}
TOLERANCE = 1e-5


@dataclass
class _Output:
    sample: Any


class _Model(nn.Module):
    """Two blocks; keeps what the first one returned, and fails if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.failure: BaseException | None = None
        self.between: Any = None
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> _Output:
        self.between = self.first(x)
        self.seen.append(type(self.between))
        if self.failure is not None:
            raise self.failure
        return _Output([self.second(self.between)])


def _model() -> tuple[_Model, Tensor, Tensor]:
    """Returns a model with compiled blocks, its input, and what it computes in one process."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = _Model().eval(), torch.randn(2, 16, WIDTH)
    expected = model(x).sample[0]
    for block in (model.first, model.second):
        block.compile(backend="cocodiff_eager", dynamic=False, options=OPTIONS)
    model(x)
    model(x)
    model.seen.clear()
    return model, x, expected


def _returned(_rank: int) -> list[Any]:
    """One rank alone reads what the model returned."""
    model, x, expected = _model()
    result = model(x).sample[0]
    return [type(result), float((result - expected).abs().max()) if _rank == 0 else 0.0]


def _left_behind(_rank: int) -> str:
    model, x, _ = _model()
    model(x)
    if _rank:
        return ""
    try:
        model.between.sum()
    except UserError as error:
        return str(error)
    return "was read"


def _interrupted(_rank: int) -> list[Any]:
    model, x, expected = _model()
    model.failure = KeyboardInterrupt()
    try:
        model(x)
    except KeyboardInterrupt:
        model.failure = None
    alone = model.first(x)
    result = model(x).sample[0]
    return [type(alone), model.seen[-1], float((result - expected).abs().max())]


def _refused_before(_rank: int) -> list[Any]:
    """A hook of the user raises before ours has run, on one rank only."""
    model, x, expected = _model()

    def refuse(*_args: Any) -> None:
        raise RuntimeError("not this rank")

    if _rank:
        hook = model.register_forward_pre_hook(refuse, prepend=True)
        with pytest.raises(RuntimeError, match="not this rank"):
            model(x)
        hook.remove()
    result = model(x).sample[0]
    return [model.seen[-1], float((result - expected).abs().max())]


TRIALS = {
    "returned": _returned,
    "left behind": _left_behind,
    "interrupted": _interrupted,
    "refused before": _refused_before,
}


@torch.no_grad()
def _all_trials(rank: int, _num_ranks: int) -> dict[str, Any]:
    return {name: trial(rank) for name, trial in TRIALS.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_local_ranks(_all_trials, 2, timeout_s=200)


@pytest.mark.gloo
def test_a_dataclass_that_a_model_returns_holds_wholes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        kind, error = rank["returned"]
        assert kind is Tensor
        assert error < TOLERANCE


@pytest.mark.gloo
def test_what_stays_behind_in_a_model_is_refused_where_others_may_not_read_it(
    found: list[dict[str, Any]],
) -> None:
    assert "has left the model as an attribute" in found[0]["left behind"]


@pytest.mark.gloo
def test_a_call_that_was_interrupted_counts_for_nothing(found: list[dict[str, Any]]) -> None:
    for rank in found:
        alone, between, error = rank["interrupted"]
        assert alone is Tensor
        assert between is TokenShare
        assert error < TOLERANCE


@pytest.mark.gloo
def test_a_call_that_was_refused_before_it_began_counts_for_nothing(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        between, error = rank["refused before"]
        assert between is TokenShare
        assert error < TOLERANCE


@torch.no_grad()
def _compile_alone(rank: int, _num_ranks: int) -> list[float]:
    torch.manual_seed(0)
    plain = PLAIN["class-conditional"]
    model, inputs = plain.build().eval(), plain.inputs()
    expected = model(*inputs)
    options = {"shard": {"min_gain": 0, "compare": "first"}}
    compiled = torch.compile(model, backend="cocodiff_eager", dynamic=False, options=options)
    errors = []
    for number in range(3):
        if rank == 0 and number == 1:
            torch.set_num_threads(2)  # a guard of Dynamo: this rank compiles once more, alone
        errors.append(float((compiled(*inputs) - expected).abs().max()))
    return errors


@pytest.mark.gloo
def test_a_rank_that_compiles_alone_compares_its_inputs_with_nobody() -> None:
    for errors in run_local_ranks(_compile_alone, 2, timeout_s=120):
        assert largest(errors) < TOLERANCE


class _FailsBehindExchanges:
    """Runs a graph op by op and, once told to, fails behind it."""

    _boxed_call = True
    is_told = False

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self.run = run

    def __call__(self, args: list[Any]) -> Any:
        results = self.run(args)
        if self.is_told:
            raise RuntimeError("out of memory")
        return results


@torch.no_grad()
def _fail_in_the_last_block(rank: int, _num_ranks: int) -> str:
    made: list[_FailsBehindExchanges] = []

    def generate(*args: Any, **kwargs: Any) -> _FailsBehindExchanges:
        made.append(_FailsBehindExchanges(run_as_it_stands(*args, **kwargs)))
        return made[-1]

    with mock.patch.object(eager, "run_as_it_stands", generate):
        model, x, _ = _model()
    made[-1].is_told = rank == 1
    try:
        model(x)
    except RuntimeError as error:
        failure = f"{type(error).__name__}: {error}"
    except UserError as error:
        failure = f"{type(error).__name__}: {error}"
    if rank:
        time.sleep(3 * TICK_S + 8)  # the others wait for what this rank will never send
    return failure


@pytest.mark.gloo
def test_a_rank_that_gathers_what_a_model_returns_learns_that_another_has_failed() -> None:
    first, second = run_local_ranks(_fail_in_the_last_block, 2, timeout_s=120)
    assert second == "RuntimeError: out of memory"
    assert first.startswith("PeerError: rank 1 failed while it ran compiled code"), first


class _Watched(nn.Module):
    """Three blocks, and something that is done with what they return."""

    def __init__(self, look: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.look = look
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        seen = []
        for block in self.blocks:
            seen.append(x := block(x))
        self.log["seen"] = self.look(seen)
        return x, self.log


def _watched(look: Callable[[list[Tensor]], Any]) -> tuple[_Watched, Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = _Watched(look).eval(), torch.randn(2, 16, WIDTH)
    for block in model.blocks:
        block.compile(backend="cocodiff_eager", dynamic=False, options=OPTIONS)
    return model, x


def _each_rank_its_own(seen: list[Tensor]) -> float:
    return float(seen[dist.get_rank()].mean())


def _first_rank_alone(seen: list[Tensor]) -> float | None:
    return float(seen[1].mean()) if dist.get_rank() == 0 else None


def _all_ranks(seen: list[Tensor]) -> list[float]:
    return [float((item * 2).mean()) for item in seen]


@torch.no_grad()
def _look(_rank: int, _num_ranks: int, look: Callable[[list[Tensor]], Any]) -> str:
    model, x = _watched(look)
    try:
        for _ in range(4):
            model(x)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.gloo
@pytest.mark.parametrize("look", [_each_rank_its_own, _first_rank_alone])
def test_ranks_that_read_different_shares_are_told(look: Callable[[list[Tensor]], Any]) -> None:
    """Their gathers would meet each other, or nothing, and give wrong values or wait for ever."""
    for said in run_local_ranks(_look, 2, look, timeout_s=120):
        assert said.startswith("PeerError: "), said
        assert "what runs outside of compiled code" in said


@torch.no_grad()
def _look_together(_rank: int, _num_ranks: int) -> tuple[list[bool], float]:
    model, x = _watched(_all_ranks)
    expected = _Watched(_all_ranks).eval()
    expected.load_state_dict(model.state_dict())
    results = [model(x) for _ in range(3)]
    wanted, log = expected(x)
    same = [found is model.log for _, found in results]
    seen = [abs(a - b) for a, b in zip(model.log["seen"], log["seen"], strict=True)]
    return same, largest([*(float((y - wanted).abs().max()) for y, _ in results), *seen])


@pytest.mark.gloo
def test_ranks_that_read_the_same_shares_get_their_values_and_objects_stay_themselves() -> None:
    for same, error in run_local_ranks(_look_together, 2, timeout_s=120):
        assert same == [True] * 3
        assert error < TOLERANCE


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        branch = torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))
        return self.block(branch)


@torch.no_grad()
def _branch(_rank: int, _num_ranks: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), _Branching()).eval()
    for block in model:
        block.compile(backend="cocodiff_eager", dynamic=False, options=OPTIONS)
    try:
        for _ in range(2):
            model(torch.randn(2, 16, WIDTH))
    except UserError as error:
        return str(error)
    return "was computed"


@pytest.mark.gloo
def test_a_block_that_reads_a_share_in_a_branch_is_refused_by_name() -> None:
    for said in run_local_ranks(_branch, 2, timeout_s=120):
        assert "torch.cond" in said, said


class _Twice(nn.Module):
    """Returns one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(x)
        return x, x


class _WritesBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Twice(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x, again = self.first(x)
        x += 1
        return self.second(again)


@torch.no_grad()
def _write_between(_rank: int, _num_ranks: int) -> list[float]:
    torch.manual_seed(0)
    model, x = _WritesBetween().eval(), torch.randn(2, 16, WIDTH)
    expected = model(x)
    for block in (model.first, model.second):
        block.compile(backend="cocodiff_eager", dynamic=False, options=OPTIONS)
    return [float((model(x) - expected).abs().max()) for _ in range(3)]


@pytest.mark.gloo
def test_a_tensor_that_a_block_returns_twice_stays_one() -> None:
    for errors in run_local_ranks(_write_between, 2, timeout_s=120):
        assert largest(errors) < TOLERANCE


class _Activated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.activation = Block(), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.block(x))


@torch.no_grad()
def _other_ops(rank: int, _num_ranks: int) -> str:
    torch.manual_seed(0)
    model = _Activated((torch.relu, torch.tanh)[rank]).eval()
    compiled = torch.compile(model, backend="cocodiff_eager", dynamic=False, options=OPTIONS)
    try:
        compiled(torch.randn(2, 16, WIDTH))
    except UserError as error:
        return str(error)
    return "was computed"


@pytest.mark.gloo
def test_ranks_that_compute_with_other_ops_are_told() -> None:
    """They would mix what two models compute."""
    first, second = run_local_ranks(_other_ops, 2, timeout_s=120)
    assert first == second
    assert "in the op aten.relu.default (nothing instead of computed)" in first
