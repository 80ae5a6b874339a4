# SPDX-License-Identifier: Apache-2.0
"""Calls of compiled graphs while pictures are denoised: what each carries and remembers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from cocodiff_compile.v_major.denoising import denoising
from cocodiff_compile.v_major.payload import UNCOMPRESSED, Payload
from cocodiff_compile.v_major.policy import Fixed, Policy
from tests.support.counted_calls import (
    CODED,
    FULL_BYTES,
    INTRA,
    OTHER,
    WEIGHT,
    Compiled,
    Listening,
    every_first,
    kinds,
)

pytestmark = pytest.mark.usefixtures("said")


@every_first
def test_the_first_step_carries_the_first_and_later_ones_are_the_policys(first: Payload) -> None:
    compiled = Compiled(Fixed(CODED, warm_up=2, refresh=3, first=first))
    with denoising(num_steps=7) as run:
        assert kinds(compiled, run, 9) == [
            first, first, CODED, CODED, first, CODED, CODED, first, first,
        ]  # fmt: skip


def test_a_policy_that_would_choose_otherwise_begins_with_its_first_all_the_same() -> None:
    compiled = Compiled(Listening(first=INTRA))
    with denoising(num_steps=7) as run:
        assert kinds(compiled, run, 3) == [INTRA, CODED, CODED]


@every_first
def test_each_kind_is_compiled_once_and_when_it_is_first_needed(first: Payload) -> None:
    """A payload that the policy never chooses is never compiled."""
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        assert compiled.compiled == []
        compiled()
        assert compiled.compiled == [first]
        run.step()
        kinds(compiled, run, 5)
        assert compiled.compiled == [first, CODED]
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 5)
        run.step(3)
        compiled(OTHER)
    assert compiled.compiled == [first, CODED]


def test_a_kind_that_was_added_is_not_compiled() -> None:
    compiled = Compiled()
    compiled.call.add_variant(UNCOMPRESSED, compiled._compile(UNCOMPRESSED))
    compiled.compiled.clear()
    with denoising(num_steps=9):
        assert compiled() == UNCOMPRESSED
    assert compiled.compiled == []


def test_caches_are_zeros_made_once_that_every_step_finds_again() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        compiled()
        (caches,) = (item for _, item in compiled.calls)
        assert [item.tolist() for item in caches] == [[0.0] * 4] * 2
        assert {item.dtype for item in caches} == {torch.float16}
        run.step()
        kinds(compiled, run, 3)
        for _, later in compiled.calls:
            assert all(mine is first for mine, first in zip(later, caches, strict=True))


@pytest.mark.parametrize("end", ["leave", "fail", "reset"])
def test_caches_are_freed_at_the_end_of_a_picture(end: str) -> None:
    compiled = Compiled()
    references = []
    try:
        with denoising(num_steps=9) as run:
            kinds(compiled, run, 2)
            references = [weakref.ref(item) for item in compiled.calls[0][1]]
            compiled.calls.clear()
            gc.collect()
            assert all(item() is not None for item in references)
            if end == "fail":
                raise KeyError("from the loop")
            if end == "reset":
                run.reset()
                gc.collect()
                assert all(item() is None for item in references)
    except KeyError:
        assert end == "fail"
    gc.collect()
    assert len(references) == 2
    assert all(item() is None for item in references)


@every_first
def test_a_new_picture_begins_with_the_first_and_caches_of_its_own(first: Payload) -> None:
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 3)
        before = compiled.calls[0][1]
        run.reset()
        assert kinds(compiled, run, 2) == [first, CODED]
        assert compiled.calls[-1][1][0] is not before[0]


def _memories_of_step(calls: Sequence[Callable[[], Any]], compiled: Compiled) -> list[int]:
    compiled.calls.clear()
    for call in calls:
        call()
    return [id(caches[0]) for _, caches in compiled.calls]


def test_branches_blocks_and_repeated_calls_have_separate_caches() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:

        def in_branch(name: str) -> None:
            with run.branch(name):
                compiled()

        calls: list[Callable[[], Any]] = [
            compiled,
            lambda: compiled(OTHER),
            compiled,
            lambda: in_branch("cond"),
            lambda: in_branch("uncond"),
            lambda: in_branch("cond"),
        ]
        first = _memories_of_step(calls, compiled)
        assert len(set(first)) == len(calls)
        assert {payload for payload, _ in compiled.calls} == {UNCOMPRESSED}
        for _ in range(2):
            run.step()
            assert _memories_of_step(calls, compiled) == first
            assert {payload for payload, _ in compiled.calls} == {CODED}


def test_graphs_have_separate_caches() -> None:
    one, two = Compiled(), Compiled()
    with denoising(num_steps=9):
        one()
        two()
        assert one.calls[0][1][0] is not two.calls[0][1][0]


@every_first
def test_a_call_that_is_new_in_a_later_step_carries_the_first_once(first: Payload) -> None:
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
        assert [compiled(), compiled(OTHER)] == [CODED, first]
        run.step()
        assert [compiled(), compiled(OTHER)] == [CODED, CODED]


@every_first
@pytest.mark.parametrize("index", [0, 1, 2, 4, 7])
def test_after_a_step_skipped_or_again_all_carries_the_first_once(
    index: int, first: Payload
) -> None:
    """Running the same step again also counts as out of order."""
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 2) == [first, CODED]
        assert compiled() == CODED
        run.step(index)
        assert [compiled(), compiled()] == [first, first]
        run.step()
        assert compiled() == CODED


def test_nested_runs_do_not_mix() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as outer:
        assert kinds(compiled, outer, 2) == [UNCOMPRESSED, CODED]
        mine = compiled.calls[-1][1]
        with denoising(num_steps=9) as inner:
            assert kinds(compiled, inner, 2) == [UNCOMPRESSED, CODED]
            assert compiled.calls[-1][1][0] is not mine[0]
        assert compiled() == CODED
        assert compiled.calls[-1][1][0] is mine[0]


def test_outside_of_a_block_all_is_exact_and_that_is_said_once(said: Callable[[str], int]) -> None:
    compiled = Compiled()
    assert [compiled(), compiled()] == [None, None]
    assert compiled.compiled == [None]
    assert all(caches == [] for _, caches in compiled.calls)
    assert said("outside of `with cocodiff_compile.denoising") == 1
    with denoising(num_steps=2):
        assert compiled() == UNCOMPRESSED
    assert compiled() is None
    assert said("outside of `with cocodiff_compile.denoising") == 1


def test_a_call_of_another_model_is_outside_of_a_pipelines_block(
    said: Callable[[str], int],
) -> None:
    transformer = nn.Linear(2, 2)
    pipe = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer)
    compiled = Compiled()
    with denoising(pipe):
        assert compiled(transformer.weight) == UNCOMPRESSED
        assert compiled(WEIGHT) is None
        assert compiled(WEIGHT) is None
    assert said("pipeline has none of its weights") == 1
    assert said("") == 1


def test_a_call_of_an_outer_pipelines_model_belongs_to_that_block() -> None:
    """The situation arises with a base and a refiner whose blocks are both open."""
    base, refiner = (
        SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=nn.Linear(2, 2))
        for _ in range(2)
    )
    compiled = Compiled()
    with denoising(base) as outer, denoising(refiner) as inner:
        assert compiled(base.transformer.weight) == UNCOMPRESSED
        assert (len(outer.caches), len(inner.caches)) == (1, 0)
        outer.step()
        assert compiled(base.transformer.weight) == CODED
        assert compiled(refiner.transformer.weight) == UNCOMPRESSED
        assert compiled(WEIGHT) is None


def test_weights_that_are_moved_are_still_those_of_their_block() -> None:
    compiled, weight = Compiled(), nn.Parameter(torch.ones(3))
    with denoising(num_steps=9) as run:
        for kind in (UNCOMPRESSED, CODED, CODED):
            assert compiled(weight) == kind
            weight.data = weight.data.clone()
            run.step()
        assert len(run.caches) == 1


@every_first
def test_what_a_failed_call_has_half_written_is_not_leant_on(first: Payload) -> None:
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 2) == [first, CODED]
        compiled.fails = True
        with pytest.raises(KeyError):
            compiled()
        assert not run.caches
        compiled.fails = False
        run.step()
        assert kinds(compiled, run, 2) == [first, CODED]


def test_caches_serve_calls_in_and_out_of_inference_mode() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        with torch.inference_mode():
            compiled()
        run.step()
        compiled()
        for cache in compiled.calls[-1][1]:
            cache.copy_(torch.ones(4))


def test_calls_without_an_end_of_a_step_are_said_once_and_do_not_pile_up(
    said: Callable[[str], int],
) -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        assert [compiled() for _ in range(8)] == [UNCOMPRESSED] * 8
        assert said("") == 0
        assert [compiled() for _ in range(4)] == [None] * 4
        assert len(run.caches) == 8
    assert said("call .step() after each step") == 1


@every_first
def test_what_no_call_comes_for_in_three_steps_is_forgotten(first: Payload) -> None:
    """The situation arises with a model that hands over to another in the middle of a picture."""
    compiled = Compiled(Fixed(CODED, first=first), budget_bytes=ONE_CACHE_BYTES)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 1) == [first]
        found = []
        for _ in range(5):
            found.append(compiled(OTHER))
            run.step()
        assert found == [None, None, None, first, CODED]
        assert run.cache_bytes == ONE_CACHE_BYTES


@every_first
@pytest.mark.parametrize("idle", [1, 2])
def test_a_call_that_is_skipped_for_a_while_goes_on_from_what_it_caches(
    idle: int, first: Payload
) -> None:
    """The situation arises with blocks that a cache of activations skips in some steps."""
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
        mine = compiled.calls[-1][1]
        for _ in range(idle):
            compiled(OTHER)
            run.step()
        assert compiled() == CODED
        assert compiled.calls[-1][1][0] is mine[0]


@every_first
def test_other_weights_do_not_inherit_what_was_cached_for_lost_ones(first: Payload) -> None:
    """An object that comes later may have the identity of one that is gone."""
    compiled = Compiled(Fixed(CODED, first=first))
    with denoising(num_steps=9) as run:
        identities = set()
        for _ in range(9):
            weight = torch.ones(3)
            identities.add(id(weight))
            assert compiled(weight) == first
            del weight
            run.step()
            assert len(run.caches) <= 1
    assert len(identities) < 9, "none came again: nothing was tried"


def test_a_call_beyond_the_announced_steps_is_said_once(said: Callable[[str], int]) -> None:
    words = "more denoising steps than the 2 announced: every further step is sent as a keyframe"
    compiled = Compiled()
    with denoising(num_steps=2) as run:
        assert kinds(compiled, run, 2) == [UNCOMPRESSED, CODED]
        assert said(words) == 0
        assert kinds(compiled, run, 2) == [UNCOMPRESSED, UNCOMPRESSED]
        assert said(words) == 1


ONE_CACHE_BYTES = 2 * 4 * 2
"""Bytes that one call caches: two tensors of four elements of two bytes."""


@every_first
def test_what_exceeds_the_budget_is_exact_and_that_is_said_once(
    first: Payload, said: Callable[[str], int]
) -> None:
    compiled = Compiled(Fixed(CODED, first=first), budget_bytes=2 * ONE_CACHE_BYTES)
    with denoising(num_steps=9) as run:
        for kind in (first, CODED, CODED):
            assert [compiled(), compiled(OTHER), compiled()] == [kind, kind, None]
            run.step()
        assert len(run.caches) == 2
        assert run.cache_bytes == 2 * ONE_CACHE_BYTES
    assert compiled.compiled == [first, None, CODED]
    assert said("exceed the memory budget") == 1


@pytest.mark.parametrize("policy", [Fixed(CODED), Listening()])
def test_a_budget_that_is_just_enough_is_kept_quietly(
    policy: Policy, said: Callable[[str], int]
) -> None:
    """A drift is a number, which the budget of a graph does not count."""
    compiled = Compiled(policy, budget_bytes=ONE_CACHE_BYTES)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 2) == [UNCOMPRESSED, CODED]
        run.reset()
        assert kinds(compiled, run, 2) == [UNCOMPRESSED, CODED]
    assert said("") == 0


def test_all_graphs_of_a_run_share_the_budget() -> None:
    one, two = (Compiled(budget_bytes=ONE_CACHE_BYTES * 1.5) for _ in range(2))
    with denoising(num_steps=9):
        assert [one(), two()] == [UNCOMPRESSED, None]


def test_a_step_is_recorded_with_the_bytes_of_its_calls() -> None:
    """A rank sends 10 bytes uncompressed, 26 coded, and 50 where a cache has no room."""
    compiled = Compiled(budget_bytes=2 * ONE_CACHE_BYTES)
    with denoising(num_steps=9) as run:
        for _ in range(2):
            compiled()
            compiled(OTHER)
            compiled(OTHER)
            run.step()
        run.reset()
        compiled()
    sent = [(item.step, dict(item.kinds), item.sent_bytes) for item in run.history]
    assert sent == [
        (0, {"uncompressed": 2, "exact": 1}, 70),
        (1, {str(CODED): 2, "exact": 1}, 102),
        (0, {"uncompressed": 1}, 10),
    ]
    assert [item.payload for item in run.history] == [
        "uncompressed / exact",
        f"{CODED} / exact",
        "uncompressed",
    ]
    assert [item.full_bytes for item in run.history] == [150, 150, 50]
    used = [item.cache_bytes for item in run.history]
    assert used == [2 * ONE_CACHE_BYTES, 2 * ONE_CACHE_BYTES, ONE_CACHE_BYTES]


def test_an_intra_coded_first_step_is_recorded_as_what_it_carried() -> None:
    """A rank sends 42 bytes in eight bits here; what an exact call sends needs no step of it."""
    compiled = Compiled(Fixed(CODED, first=INTRA))
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
    found = [(item.payload, item.sent_bytes, item.full_bytes) for item in run.history]
    assert found == [("8 bits, intra-coded", 42, FULL_BYTES), ("4 bits", 26, FULL_BYTES)]
