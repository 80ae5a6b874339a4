# SPDX-License-Identifier: Apache-2.0
"""Blocks of denoising: which step and which call it is."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.errors import UserError
from cocodiff_compile.v_major.denoising import (
    CallCache,
    Denoising,
    Weights,
    current_denoising,
    denoising,
    is_denoising,
)

pytestmark = pytest.mark.usefixtures("said")


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
def test_a_step_skipped_or_again_is_out_of_order_until_the_next(
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


def _cache(*tensors: torch.Tensor) -> CallCache:
    return CallCache(list(tensors), None, Weights([]))


def test_a_reset_begins_a_new_picture() -> None:
    with denoising(num_steps=3) as run:
        run.caches["key"] = _cache()
        run.step(2)
        run.reset()
        assert (run.num_steps, run.current_step, run.is_out_of_order) == (3, 0, False)
        assert not run.caches
        run.reset(num_steps=7)
        assert run.num_steps == 7


def test_a_run_tells_how_much_it_caches() -> None:
    """The bytes of all calls count, but none of a picture that is over."""
    with denoising(num_steps=3) as run:
        assert run.cache_bytes == 0
        run.caches["one"] = _cache(torch.zeros(5, dtype=torch.float16), torch.zeros(()))
        run.caches["other"] = _cache(torch.zeros(2, 3, dtype=torch.uint8))
        assert [item.size_bytes for item in run.caches.values()] == [5 * 2 + 4, 6]
        assert run.cache_bytes == 20
        run.reset()
        assert run.cache_bytes == 0


def test_what_outlives_a_block_in_its_context_is_outside_of_it() -> None:
    """The situation arises with a task that was started inside of a block and outlives it."""
    with denoising(num_steps=3) as outer:
        with denoising(num_steps=3):
            task = contextvars.copy_context()
        assert task.run(lambda: current_denoising([])) is outer
    assert task.run(lambda: current_denoising([])) is None
    assert not task.run(is_denoising)
    assert not task.run(lambda: outer.is_current)


def test_a_block_may_be_left_in_another_context() -> None:
    """Some frameworks run each half of a generator in a context of its own."""
    block = denoising(num_steps=3)
    run = contextvars.copy_context().run(block.__enter__)
    run.caches["key"] = _cache()
    contextvars.copy_context().run(block.__exit__, None, None, None)
    assert not run.caches


def test_blocks_of_generators_may_be_left_in_any_order() -> None:
    def generator() -> Iterator[Denoising]:
        with denoising(num_steps=3) as run:
            yield run

    first, second = generator(), generator()
    next(first)
    next(second)
    first.close()
    second.close()
    assert not is_denoising()


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
def test_however_a_block_is_left_nothing_is_cached(fails: bool) -> None:
    cache = torch.zeros(3)
    gone = weakref.ref(cache)
    try:
        with denoising(num_steps=3) as run:
            run.caches["key"] = cache  # type: ignore[assignment]
            del cache
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
