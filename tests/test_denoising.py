"""Blocks of denoising, and the calls of compiled graphs in them: steps, branches, memories.

A compiled graph is a plain function here, which tells the kind of step it was called in.
"""

from __future__ import annotations

import contextvars
import gc
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import cocodiff_compile
from cocodiff_compile.compat import FakeTensorMode
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.say_once import forget_what_was_said
from cocodiff_compile.v_major.denoising import (
    Denoising,
    current_denoising,
    denoising,
    is_denoising,
)
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Policy, StepFacts
from cocodiff_compile.v_major.selective_call import SelectiveCall, Variant
from cocodiff_compile.v_major.travel import IN_FULL, Travel

CODED = Travel.all_in(4)


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], int]]:
    """How many of the messages so far hold the given words."""
    forget_what_was_said()
    with caplog.at_level(logging.WARNING, logger="cocodiff_compile"):
        yield lambda words: sum(words in message for message in caplog.messages)
    forget_what_was_said()


# Blocks


def test_it_is_part_of_the_public_surface() -> None:
    assert cocodiff_compile.denoising is denoising


def test_a_block_is_known_inside_of_it_only() -> None:
    assert not is_denoising()
    with denoising(num_steps=3) as run:
        assert is_denoising()
        assert current_denoising([]) is run
        assert (run.num_steps, run.current_step) == (3, 0)
    assert not is_denoising()
    assert current_denoising([]) is None


def test_a_block_needs_a_pipeline_or_a_number_of_steps() -> None:
    with pytest.raises(UserError, match=r"needs a pipeline, or num_steps="), denoising():
        pass
    assert not is_denoising()


@pytest.mark.parametrize("num_steps", [0, -1, True, 1.5, "3"])
def test_a_number_of_steps_is_a_whole_number_from_1(num_steps: Any) -> None:
    with (
        pytest.raises(UserError, match=rf"num_steps={num_steps!r}.*whole number from 1"),
        denoising(num_steps=num_steps),
    ):
        pass
    assert not is_denoising()


@pytest.mark.parametrize("index", [-1, True, 1.5, "3"])
def test_steps_are_counted_from_0_in_whole_numbers(index: Any) -> None:
    with (
        denoising(num_steps=3) as run,
        pytest.raises(UserError, match=rf"{index!r}.*counted from 0"),
    ):
        run.step(index)


def test_a_step_is_followed_by_the_next() -> None:
    with denoising(num_steps=3) as run:
        for number in range(3):
            assert run.current_step == number
            assert not run.is_out_of_order
            run.step()


@pytest.mark.parametrize(
    ("index", "is_out_of_order"), [(3, False), (2, True), (4, True), (0, True)]
)
def test_a_step_left_out_or_again_is_out_of_order_until_the_next(
    index: int, is_out_of_order: bool
) -> None:
    with denoising(num_steps=9) as run:
        run.step()
        run.step()
        run.step(index)
        assert run.current_step == index
        assert run.is_out_of_order is is_out_of_order
        run.step()
        assert run.current_step == index + 1
        assert not run.is_out_of_order


def test_a_reset_begins_a_new_picture() -> None:
    with denoising(num_steps=3) as run:
        run.memories["key"] = object()  # type: ignore[assignment]
        run.step(2)
        run.reset()
        assert (run.num_steps, run.current_step, run.is_out_of_order) == (3, 0, False)
        assert not run.memories
        run.reset(num_steps=7)
        assert run.num_steps == 7


def test_more_steps_than_announced_are_said_once(said: Callable[[str], int]) -> None:
    with denoising(num_steps=2) as run:
        run.step()
        run.step()
        assert said("more denoising steps than the 2 announced") == 0
        for _ in range(3):
            run.step()
        run.reset()
        for _ in range(5):
            run.step()
    assert said("more denoising steps than the 2 announced") == 1


def test_nested_blocks_are_apart() -> None:
    with denoising(num_steps=3) as outer:
        outer.step()
        with denoising(num_steps=5) as inner:
            assert current_denoising([]) is inner
            assert inner.current_step == 0
            inner.step()
            inner.step()
        assert current_denoising([]) is outer
        assert outer.current_step == 1


def _in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    (result,) = found
    return result


def test_blocks_of_threads_are_apart() -> None:
    def other() -> tuple[bool, bool, Denoising | None]:
        before = is_denoising()
        with denoising(num_steps=2) as run:
            found = current_denoising([])
            run.step()
        return before, is_denoising(), found

    with denoising(num_steps=3) as run:
        before, after, found = _in_thread(other)
        assert not before
        assert not after
        assert found is not run
        assert current_denoising([]) is run
        assert run.current_step == 0
        context = contextvars.copy_context()
        assert _in_thread(lambda: context.run(current_denoising, [])) is run


@pytest.mark.parametrize("fails", [True, False])
def test_however_a_block_is_left_nothing_is_remembered(fails: bool) -> None:
    memory = torch.zeros(3)
    gone = weakref.ref(memory)
    try:
        with denoising(num_steps=3) as run:
            run.memories["key"] = memory  # type: ignore[assignment]
            del memory
            if fails:
                raise KeyError("from the loop")
    except KeyError:
        assert fails
    gc.collect()
    assert gone() is None
    assert not is_denoising()


# Which call of a step


def test_calls_of_a_step_are_told_apart_by_graph_weights_branch_and_number() -> None:
    with denoising(num_steps=3) as run:
        calls = [("a", 1), ("a", 2), ("b", 1), ("a", 1), ("a", 1)]
        keys = [run.key_of(*call) for call in calls]
        with run.branch("uncond"):
            keys += [run.key_of(*call) for call in calls]
        assert len(set(keys)) == len(keys)


def test_the_same_call_of_the_next_step_has_the_same_key() -> None:
    with denoising(num_steps=3) as run:

        def keys_of_step() -> list[Any]:
            keys = [run.key_of("graph", 1), run.key_of("graph", 1)]
            with run.branch("uncond"):
                keys.append(run.key_of("graph", 1))
            run.step()
            return keys

        first = keys_of_step()
        assert keys_of_step() == first
        run.step(7)
        assert keys_of_step() == first
        run.key_of("graph", 1)
        run.reset()
        assert keys_of_step() == first


def test_branches_end_with_their_blocks() -> None:
    with denoising(num_steps=3) as run:
        plain = run.key_of("graph", 1)
        with run.branch("outer"):
            outer = run.key_of("graph", 1)
            with pytest.raises(KeyError), run.branch("inner"):
                raise KeyError
            run.step()
            assert run.key_of("graph", 1) == outer
        assert run.key_of("graph", 1) == plain


# A pipeline


def pipeline() -> Any:
    """What a diffusers pipeline has of it: a scheduler and a transformer."""
    transformer = SMALL_MODELS["flux"].build(num_layers=1)
    return SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return pipeline()


def _denoise(pipe: Any, num_steps: int, before_step: Callable[[], Any]) -> list[Any]:
    """A pipeline's loop; what `before_step` returns in each step."""
    pipe.scheduler.set_timesteps(num_steps)
    latents, found = torch.zeros(1, 4, 16), []
    for timestep in pipe.scheduler.timesteps:
        found.append(before_step())
        latents = pipe.scheduler.step(torch.ones(1, 4, 16), timestep, latents)[0]
    return found


def test_the_scheduler_tells_the_steps(pipe: Any) -> None:
    with denoising(pipe) as run:
        seen = _denoise(pipe, 4, lambda: (run.num_steps, run.current_step))
        assert seen == [(4, 0), (4, 1), (4, 2), (4, 3)]
        run.memories["key"] = object()  # type: ignore[assignment]
        again = _denoise(pipe, 3, lambda: (run.num_steps, run.current_step, len(run.memories)))
        assert again == [(3, 0, 0), (3, 1, 0), (3, 2, 0)]


def test_the_loop_says_nothing(pipe: Any, said: Callable[[str], int]) -> None:
    with denoising(pipe):
        for num_steps in (1, 2, 5):
            _denoise(pipe, num_steps, lambda: None)
    assert said("") == 0


def test_what_the_scheduler_returns_is_what_it_always_does(pipe: Any) -> None:
    plain = pipeline().scheduler
    plain.set_timesteps(3)
    expected = plain.step(torch.ones(2), plain.timesteps[0], torch.zeros(2))
    with denoising(pipe):
        assert pipe.scheduler.set_timesteps(3) is None
        assert torch.equal(pipe.scheduler.timesteps, plain.timesteps)
        found = pipe.scheduler.step(torch.ones(2), pipe.scheduler.timesteps[0], torch.zeros(2))
    assert torch.equal(found.prev_sample, expected.prev_sample)


def test_a_scheduler_that_fails_ends_no_step(pipe: Any) -> None:
    with denoising(pipe) as run:
        pipe.scheduler.set_timesteps(3)
        with pytest.raises(ValueError, match="integer indices"):
            pipe.scheduler.step(torch.ones(2), 0, torch.zeros(2))
        assert run.current_step == 0


def test_arguments_reach_the_scheduler(pipe: Any) -> None:
    sigmas = [1.0, 0.7, 0.3]
    with denoising(pipe) as run:
        pipe.scheduler.set_timesteps(sigmas=sigmas)
        assert run.num_steps == 3
        assert pipe.scheduler.sigmas[:3].tolist() == pytest.approx(sigmas)


def test_the_transformer_names_the_branches(pipe: Any) -> None:
    with denoising(pipe) as run:
        plain = run.key_of("graph", 1)
        with pipe.transformer.cache_context("cond"):
            cond = run.key_of("graph", 1)
        with pipe.transformer.cache_context("uncond"):
            uncond = run.key_of("graph", 1)
        run.step()
        assert run.key_of("graph", 1) == plain
        with pipe.transformer.cache_context("cond"):
            assert run.key_of("graph", 1) == cond
        assert len({plain, cond, uncond}) == 3


def test_a_compiled_transformer_names_the_branches_as_well(pipe: Any) -> None:
    compiled = SimpleNamespace(
        scheduler=pipe.scheduler, transformer=torch.compile(pipe.transformer, backend="eager")
    )
    with denoising(compiled) as run:
        plain = run.key_of("graph", 1)
        with compiled.transformer.cache_context("cond"):
            assert run.key_of("graph", 1) != plain
        assert run.owns([pipe.transformer.x_embedder.weight])


PATCHED = [("scheduler", "step"), ("scheduler", "set_timesteps"), ("transformer", "cache_context")]


@pytest.mark.parametrize(("owner", "name"), PATCHED)
def test_a_method_looks_the_same_inside_of_a_block(pipe: Any, owner: str, name: str) -> None:
    """Pipelines read from its signature what a scheduler takes."""
    before = inspect.signature(getattr(getattr(pipe, owner), name))
    with denoising(pipe):
        inside = getattr(getattr(pipe, owner), name)
        assert inspect.signature(inside) == before
        assert inside.__name__ == name


@pytest.mark.parametrize("fails", [True, False])
def test_everything_is_put_back(pipe: Any, fails: bool) -> None:
    before = {item: _own_names(getattr(pipe, item)) for item in ("scheduler", "transformer")}
    try:
        with denoising(pipe):
            assert _own_names(pipe.scheduler) != before["scheduler"]
            assert _own_names(pipe.transformer) != before["transformer"]
            if fails:
                raise KeyError("from the loop")
    except KeyError:
        assert fails
    for item, names in before.items():
        assert _own_names(getattr(pipe, item)) == names
    for owner, name in PATCHED:
        method = getattr(getattr(pipe, owner), name)
        assert method.__func__ is getattr(type(getattr(pipe, owner)), name)


def _own_names(item: Any) -> set[str]:
    """Of attributes that are not data, which a scheduler sets while it runs."""
    return {name for name, value in vars(item).items() if callable(value)}


def test_a_method_that_someone_else_replaced_is_put_back(pipe: Any) -> None:
    called = []

    def step(*args: Any, **kwargs: Any) -> Any:
        called.append(args)
        return type(pipe.scheduler).step(pipe.scheduler, *args, **kwargs)

    pipe.scheduler.step = step
    try:
        with denoising(pipe) as run:
            _denoise(pipe, 2, lambda: None)
            assert run.current_step == len(called) == 2
        assert pipe.scheduler.step is step
    finally:
        del pipe.scheduler.step


def test_nested_blocks_of_one_pipeline_are_put_back_one_by_one(pipe: Any) -> None:
    with denoising(pipe) as outer:
        with denoising(pipe) as inner:
            _denoise(pipe, 2, lambda: None)
            assert inner.current_step == 2
        _denoise(pipe, 3, lambda: None)
        assert outer.current_step == 3
    assert "step" not in vars(pipe.scheduler)


def test_only_calls_of_its_own_models_belong_to_a_pipeline(pipe: Any) -> None:
    with denoising(pipe) as run:
        weights = list(pipe.transformer.parameters())
        assert current_denoising([torch.ones(2), weights[3]]) is run
        assert current_denoising([torch.ones(2), nn.Parameter(torch.ones(2))]) is None
        assert current_denoising([]) is None


@pytest.mark.parametrize(
    "pipe",
    [SimpleNamespace(), SimpleNamespace(scheduler=None), SimpleNamespace(scheduler=object())],
)
def test_what_has_no_scheduler_is_refused_with_what_to_do(pipe: Any) -> None:
    words = r"no scheduler.*denoising\(num_steps=\.\.\.\)"
    with pytest.raises(UserError, match=words), denoising(pipe):
        pass
    assert not is_denoising()


# Calls of compiled graphs


@dataclass
class Compiled:
    """A selective call whose graph doubles its input; what was compiled, and what each call of it
    was given.
    """

    policy: Policy = field(default_factory=lambda: Fixed(CODED))
    budget_bytes: float | None = None
    num_memories: int = 2
    compiled: list[Travel | None] = field(default_factory=list)
    calls: list[tuple[Travel | None, list[Tensor]]] = field(default_factory=list)
    drift: float = 0.0

    def __post_init__(self) -> None:
        self.call = SelectiveCall(self._compile, self.policy, "0", (1,), self.budget_bytes)

    def _compile(self, travel: Travel | None) -> Variant:
        self.compiled.append(travel)
        count = 0 if travel is None else self.num_memories
        with FakeTensorMode():
            fakes = [torch.empty(4, dtype=torch.float16) for _ in range(count)]
            if count and self.policy.measures_drift:
                fakes.append(torch.empty(()))

        def run(args: list[Any]) -> Tensor:
            x, _, *memories = args
            args.clear()
            self.calls.append((travel, list(memories)))
            if memories and self.policy.measures_drift:
                memories[-1].fill_(self.drift)
            return 2 * x

        sent_bytes = 0 if travel is None else 10 + sum(travel.bits)
        return Variant(run, tuple(fakes), sent_bytes)

    def __call__(self, weight: Tensor | None = None) -> Travel | None:
        """What the call carried, checked for its value."""
        weight = WEIGHT if weight is None else weight
        assert torch.equal(self.call([torch.ones(2), weight]), torch.full((2,), 2.0))
        return self.calls[-1][0]


WEIGHT, OTHER = torch.ones(3), torch.zeros(3)


def kinds(compiled: Compiled, run: Denoising, count: int) -> list[Travel | None]:
    """What each of some steps carries, one call in each."""
    found = []
    for _ in range(count):
        found.append(compiled())
        run.step()
    return found


def test_the_first_step_is_in_full_and_later_ones_are_the_policys() -> None:
    compiled = Compiled(Fixed(CODED, warm_up=2, refresh=3))
    with denoising(num_steps=7) as run:
        assert kinds(compiled, run, 9) == [
            IN_FULL, IN_FULL, CODED, CODED, IN_FULL, CODED, CODED, IN_FULL, IN_FULL,
        ]  # fmt: skip


def test_each_kind_is_compiled_once_and_when_it_is_first_needed() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        assert compiled.compiled == []
        compiled()
        assert compiled.compiled == [IN_FULL]
        run.step()
        kinds(compiled, run, 5)
        assert compiled.compiled == [IN_FULL, CODED]
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 5)
    assert compiled.compiled == [IN_FULL, CODED]


def test_a_kind_that_was_added_is_not_compiled() -> None:
    compiled = Compiled()
    compiled.call.add_variant(IN_FULL, compiled._compile(IN_FULL))
    compiled.compiled.clear()
    with denoising(num_steps=9):
        assert compiled() == IN_FULL
    assert compiled.compiled == []


def test_memories_are_zeros_made_once_that_every_step_finds_again() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        compiled()
        (memories,) = (item for _, item in compiled.calls)
        assert [item.tolist() for item in memories] == [[0.0] * 4] * 2
        assert {item.dtype for item in memories} == {torch.float16}
        run.step()
        kinds(compiled, run, 3)
        for _, later in compiled.calls:
            assert all(mine is first for mine, first in zip(later, memories, strict=True))


@pytest.mark.parametrize("end", ["leave", "fail", "reset"])
def test_memories_are_freed_at_the_end_of_a_picture(end: str) -> None:
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


def test_a_new_picture_begins_in_full_with_memories_of_its_own() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 3)
        first = compiled.calls[0][1]
        run.reset()
        assert kinds(compiled, run, 2) == [IN_FULL, CODED]
        assert compiled.calls[-1][1][0] is not first[0]


def _memories_of_step(calls: Sequence[Callable[[], Any]], compiled: Compiled) -> list[int]:
    compiled.calls.clear()
    for call in calls:
        call()
    return [id(memories[0]) for _, memories in compiled.calls]


def test_branches_blocks_and_repeated_calls_remember_apart() -> None:
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
        assert {travel for travel, _ in compiled.calls} == {IN_FULL}
        for _ in range(2):
            run.step()
            assert _memories_of_step(calls, compiled) == first
            assert {travel for travel, _ in compiled.calls} == {CODED}


def test_graphs_remember_apart() -> None:
    one, two = Compiled(), Compiled()
    with denoising(num_steps=9):
        one()
        two()
        assert one.calls[0][1][0] is not two.calls[0][1][0]


def test_a_call_that_is_new_in_a_later_step_travels_in_full_once() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
        assert [compiled(), compiled(OTHER)] == [CODED, IN_FULL]
        run.step()
        assert [compiled(), compiled(OTHER)] == [CODED, CODED]


@pytest.mark.parametrize("index", [0, 1, 2, 4, 7])
def test_after_a_step_left_out_or_again_all_travels_in_full_once(index: int) -> None:
    """Also if it is the same step again."""
    compiled = Compiled()
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 2) == [IN_FULL, CODED]
        assert compiled() == CODED
        run.step(index)
        assert [compiled(), compiled()] == [IN_FULL, IN_FULL]
        run.step()
        assert compiled() == CODED


def test_nested_runs_do_not_mix() -> None:
    compiled = Compiled()
    with denoising(num_steps=9) as outer:
        assert kinds(compiled, outer, 2) == [IN_FULL, CODED]
        mine = compiled.calls[-1][1]
        with denoising(num_steps=9) as inner:
            assert kinds(compiled, inner, 2) == [IN_FULL, CODED]
            assert compiled.calls[-1][1][0] is not mine[0]
        assert compiled() == CODED
        assert compiled.calls[-1][1][0] is mine[0]


def test_outside_of_a_block_all_is_exact_and_that_is_said_once(said: Callable[[str], int]) -> None:
    compiled = Compiled()
    assert [compiled(), compiled()] == [None, None]
    assert compiled.compiled == [None]
    assert all(memories == [] for _, memories in compiled.calls)
    assert said("outside of `with cocodiff_compile.denoising") == 1
    with denoising(num_steps=2):
        assert compiled() == IN_FULL
    assert compiled() is None
    assert said("outside of `with cocodiff_compile.denoising") == 1


def test_a_call_of_another_model_is_outside_of_a_pipelines_block(pipe: Any) -> None:
    compiled = Compiled()
    with denoising(pipe):
        assert compiled(next(pipe.transformer.parameters())) == IN_FULL
        assert compiled(WEIGHT) is None


ONE_MEMORY_BYTES = 2 * 4 * 2
"""Of one call: two tensors of four elements of two bytes."""


def test_what_exceeds_the_budget_is_exact_and_that_is_said_once(said: Callable[[str], int]) -> None:
    compiled = Compiled(budget_bytes=2 * ONE_MEMORY_BYTES)
    with denoising(num_steps=9) as run:
        for kind in (IN_FULL, CODED, CODED):
            assert [compiled(), compiled(OTHER), compiled()] == [kind, kind, None]
            run.step()
        assert len(run.memories) == 2
    assert said("exceed the memory budget") == 1


def test_a_budget_that_is_just_enough_is_kept_quietly(said: Callable[[str], int]) -> None:
    compiled = Compiled(budget_bytes=ONE_MEMORY_BYTES)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 2) == [IN_FULL, CODED]
        run.reset()
        assert kinds(compiled, run, 2) == [IN_FULL, CODED]
    assert said("") == 0


def test_all_graphs_of_a_run_share_the_budget() -> None:
    one, two = (Compiled(budget_bytes=ONE_MEMORY_BYTES * 1.5) for _ in range(2))
    with denoising(num_steps=9):
        assert [one(), two()] == [IN_FULL, None]


def test_a_step_is_recorded_with_the_bytes_of_its_calls() -> None:
    """A rank sends 10 bytes in full here, and 26 coded."""
    compiled = Compiled(budget_bytes=2 * ONE_MEMORY_BYTES)
    with denoising(num_steps=9) as run:
        for _ in range(2):
            compiled()
            compiled(OTHER)
            compiled(OTHER)
            run.step()
        run.reset()
        compiled()
    sent = [(item.step, item.travel, item.calls, item.sent_bytes) for item in run.history]
    assert sent == [(0, "in full", 3, 30), (1, str(CODED), 3, 62), (0, "in full", 1, 10)]
    assert [item.full_bytes for item in run.history] == [30, 30, 10]
    used = [item.memory_bytes for item in run.history]
    assert used == [2 * ONE_MEMORY_BYTES, 2 * ONE_MEMORY_BYTES, ONE_MEMORY_BYTES]


# What the policy hears


@dataclass
class Listening:
    """A policy that keeps what it was told."""

    heard: list[StepFacts] = field(default_factory=list)
    measures_drift: bool = True
    usual: Travel = CODED
    travels: tuple[Travel, ...] = (IN_FULL, CODED)

    def choose(self, facts: StepFacts) -> Travel:
        self.heard.append(facts)
        return CODED


def test_the_policy_is_asked_once_per_step_and_told_the_last_drift() -> None:
    policy = Listening()
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        for step in range(3):
            compiled.drift = 0.5 + step
            compiled()
            compiled.drift = 1.5 + step
            compiled(OTHER)
            run.step()
    assert policy.heard == [
        StepFacts(1, 9, None, IN_FULL),  # in full, nothing was lost
        StepFacts(2, 9, 2.0, CODED),
    ]


def test_a_policy_that_measures_nothing_hears_of_no_drift() -> None:
    policy = Listening(measures_drift=False)
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
    assert [item.drift for item in policy.heard] == [None]


def test_the_drift_is_that_of_the_last_step_only() -> None:
    """A branch that is not called any more has lost nothing in it."""
    policy = Listening()
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        compiled.drift = 0.5
        with run.branch("only once"):
            compiled()
        for drift in (0.5, 4.0, 4.0):
            compiled.drift = drift
            compiled()
            run.step()
    assert [item.drift for item in policy.heard] == [None, 4.0]


@pytest.mark.parametrize(("drift", "bits"), [(1e-12, 1), (1.0, 8), (float("nan"), 8)])
def test_an_adaptive_call_takes_more_bits_the_more_is_lost(drift: float, bits: int) -> None:
    compiled = Compiled(Adaptive(40.0), drift=drift)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 3) == [IN_FULL, Adaptive(40.0).usual, Travel.all_in(bits)]


@pytest.mark.parametrize("policy", [Fixed(CODED), Adaptive(40.0)])
def test_a_graph_whose_exchanges_are_all_declined_runs_in_every_step(policy: Policy) -> None:
    """It remembers nothing, not even a drift."""
    compiled = Compiled(policy, num_memories=0)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 3)[0] == IN_FULL
    assert all(memories == [] for _, memories in compiled.calls)
