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
