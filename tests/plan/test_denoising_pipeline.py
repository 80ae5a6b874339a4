# SPDX-License-Identifier: Apache-2.0
"""Blocks of denoising that follow a pipeline: its scheduler, its models, and who else does."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.v_major.denoising import (
    CallCache,
    Weights,
    current_denoising,
    denoising,
    is_denoising,
)

pytestmark = pytest.mark.usefixtures("said")


def pipeline() -> Any:
    """Returns what `denoising` uses of a diffusers pipeline: a scheduler and a transformer."""
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
        run.caches["key"] = object()  # type: ignore[assignment]
        again = _denoise(pipe, 3, lambda: (run.num_steps, run.current_step, len(run.caches)))
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


PATCHED = [
    ("scheduler", "step"),
    ("scheduler", "set_timesteps"),
    ("scheduler", "set_begin_index"),
    ("transformer", "cache_context"),
]


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
    """Returns the names of own callable attributes; a scheduler sets other ones while it runs."""
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


def test_blocks_of_one_pipeline_in_two_threads_are_apart_in_whatever_order_they_are_left(
    pipe: Any,
) -> None:
    """Each hears of what its own thread does, also after the other, which came first, is gone."""
    inside, done, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with denoising(pipe) as run:
            inside.set()
            assert done.wait(60)
            seen.append(run.current_step)
            _denoise(pipe, 2, lambda: None)
            seen.append(run.current_step)

    thread = threading.Thread(target=other)
    with denoising(pipe) as run:
        thread.start()
        assert inside.wait(60)
        _denoise(pipe, 3, lambda: None)
        with pipe.transformer.cache_context("cond"):
            assert run.key_of("graph", 1)[2] == "cond"  # type: ignore[index]
    done.set()
    thread.join()
    assert run.current_step == 0, "left, and begun anew"
    assert seen == [0, 2]
    assert "step" not in vars(pipe.scheduler)
    assert "cache_context" not in vars(pipe.transformer)


def test_what_someone_put_over_a_followed_method_stays(pipe: Any) -> None:
    """The replacement is also called: in this block, in one inside of it and in one after it."""
    called = []
    with denoising(pipe) as run:
        ours = pipe.scheduler.step

        @functools.wraps(ours)
        def theirs(*args: Any, **kwargs: Any) -> Any:
            called.append(args)
            return ours(*args, **kwargs)

        pipe.scheduler.step = theirs
        try:
            _denoise(pipe, 2, lambda: None)
            assert run.current_step == len(called) == 2
            with denoising(pipe) as inner:
                _denoise(pipe, 3, lambda: None)
                assert run.current_step == inner.current_step == 3
                assert len(called) == 5
        finally:
            assert pipe.scheduler.step is theirs
    with denoising(pipe) as run:
        _denoise(pipe, 2, lambda: None)
        assert run.current_step == 2
        assert len(called) == 7
    assert pipe.scheduler.step is theirs
    del pipe.scheduler.step


def test_a_model_that_a_pipeline_holds_twice_is_followed_once(pipe: Any) -> None:
    """A pipeline may hold one model as itself and compiled, or for two kinds of noise."""
    twice = SimpleNamespace(
        scheduler=pipe.scheduler,
        transformer=pipe.transformer,
        transformer_2=pipe.transformer,
        compiled=torch.compile(pipe.transformer, backend="eager"),
    )
    with denoising(twice) as run, pipe.transformer.cache_context("cond"):
        assert run.key_of("graph", 1)[2] == "cond"  # type: ignore[index]
    assert "cache_context" not in vars(pipe.transformer)


def test_threads_may_follow_and_leave_while_another_one_steps(pipe: Any) -> None:
    """Nobody misses a step, and nothing is left behind."""
    failures: list[BaseException] = []

    def follow_often() -> None:
        try:
            for _ in range(200):
                with denoising(pipe) as run:
                    with pipe.transformer.cache_context("cond"):
                        pass
                    assert run.current_step == 0, "what others do"
        except BaseException as failure:
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=follow_often) for _ in range(2)]
        with denoising(pipe) as run:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                _denoise(pipe, 20, lambda: None)
                assert run.current_step == 20
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert "step" not in vars(pipe.scheduler)
    assert "cache_context" not in vars(pipe.transformer)


def test_a_picture_may_begin_in_the_middle_of_the_steps(pipe: Any) -> None:
    """Image to image: the scheduler is told where, and only what is left counts."""
    with denoising(pipe) as run:
        pipe.scheduler.set_timesteps(8)
        pipe.scheduler.set_begin_index(5)
        assert (run.num_steps, run.current_step) == (3, 0)
        pipe.scheduler.set_timesteps(8)
        assert run.num_steps == 8
        pipe.scheduler.set_begin_index()
        assert run.num_steps == 8
        pipe.scheduler.timesteps = None
        pipe.scheduler.set_begin_index(2)
        assert run.num_steps == 8, "unknown before steps are set"
        pipe.scheduler.set_timesteps(8)


def test_nothing_is_cached_of_a_picture_that_is_done(pipe: Any) -> None:
    """Though the block goes on, for the next one."""
    with denoising(pipe) as run:

        def remember() -> int:
            run.caches.setdefault(
                run.current_step, CallCache([], None, Weights([]), run.steps_taken)
            )
            return len(run.caches)

        assert _denoise(pipe, 3, remember) == [1, 2, 3]
        assert not run.caches


def test_only_calls_of_its_own_models_belong_to_a_pipeline(pipe: Any) -> None:
    with denoising(pipe) as run:
        weights = list(pipe.transformer.parameters())
        assert current_denoising([torch.ones(2), weights[3]]) is run
        assert current_denoising([torch.ones(2), nn.Parameter(torch.ones(2))]) is None
        assert current_denoising([]) is None


def test_a_copied_scheduler_steps_itself_and_ends_no_step(pipe: Any) -> None:
    """Some pipelines step a second kind of latents by a copy."""

    def both(run: Any = None) -> tuple[torch.Tensor, torch.Tensor, Any]:
        pipe.scheduler.set_timesteps(4)
        copied = copy.deepcopy(pipe.scheduler)
        one = other = torch.zeros(1, 4, 16)
        for timestep in pipe.scheduler.timesteps:
            other = copied.step(torch.ones(1, 4, 16), timestep, other)[0]
            one = pipe.scheduler.step(torch.ones(1, 4, 16), timestep, one)[0]
        return one, other, run and run.current_step

    expected = both()
    with denoising(pipe) as run:
        one, other, steps = both(run)
    assert torch.equal(one, expected[0])
    assert torch.equal(other, expected[1])
    assert steps == 4


def test_steps_that_were_set_before_the_block_are_known(pipe: Any) -> None:
    pipe.scheduler.set_timesteps(6)
    with denoising(pipe) as run:
        assert run.num_steps == 6
    with denoising(pipe, num_steps=4) as run:
        assert run.num_steps == 4


def test_every_model_of_a_pipeline_is_its_own() -> None:
    prior = nn.Linear(2, 2)
    pipe = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler(), components={"prior": prior})
    with denoising(pipe) as run:
        assert current_denoising([prior.weight]) is run


def test_a_pipeline_without_a_model_is_refused() -> None:
    pipe = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler())
    words = r"no model; use denoising\(num_steps=\.\.\.\)"
    with pytest.raises(UserError, match=words), denoising(pipe):
        pass


@pytest.mark.parametrize(
    "pipe",
    [SimpleNamespace(), SimpleNamespace(scheduler=None), SimpleNamespace(scheduler=object())],
)
def test_what_has_no_scheduler_is_refused_with_what_to_do(pipe: Any) -> None:
    words = r"no scheduler.*denoising\(num_steps=\.\.\.\)"
    with pytest.raises(UserError, match=words), denoising(pipe):
        pass
    assert not is_denoising()
