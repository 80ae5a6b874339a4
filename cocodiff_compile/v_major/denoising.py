# SPDX-License-Identifier: Apache-2.0
"""Tells V-Major to which step of which picture a call of the model belongs: `with
denoising(pipe):`.

A `Denoising` owns all caches of one picture. They are freed when the block is left, by an exception
too, and when a new picture begins.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from types import MethodType
from typing import Any

from torch import Tensor, nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.say_once import say_once
from cocodiff_compile.v_major.payload import Payload

log = logging.getLogger(__name__)

_MANY_CALLS = 8
"""The number of calls of one model in one step and branch from which on calls are sent
uncompressed. Guidance needs two or three.
"""
_KEPT_STEPS = 3
"""A cache without a call in this many steps is freed: a model may have handed over to another."""

_following = Lock()
"""Held while a method is wrapped or unwrapped, because threads may share the object."""
_current: ContextVar[Denoising | None] = ContextVar("cocodiff_denoising", default=None)


@dataclass
class Choice:
    """The payload that the calls of one compiled graph have in one step."""

    steps_taken: int
    payload: Payload
    record: StepRecord


@dataclass
class StepRecord:
    """Records what one compiled graph sent in one step, over all its calls. Bytes are those that
    this rank sent to others, and those that uncompressed exchanges would have sent.
    """

    step: int
    kinds: Counter[str] = field(default_factory=Counter)
    """The number of calls per payload."""
    sent_bytes: int = 0
    full_bytes: int = 0
    cache_bytes: int = 0
    losses: tuple[float, ...] = ()
    """The part of its energy that what each attention sent has lost, the mean over its exchanges
    and calls; empty where nothing was measured.
    """

    @property
    def payload(self) -> str:
        """The payloads of its calls, as text."""
        return " / ".join(self.kinds)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(item.nbytes for item in tensors)


class Weights:
    """Watches whether the weights of a call still exist: new tensors may reuse identities."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.exist = True
        self._refs = [weakref.ref(item, self._end) for item in tensors]

    def _end(self, _ref: object) -> None:
        self.exist = False


@dataclass
class CallCache:
    """Holds what one call of a compiled graph caches from step to step."""

    tensors: list[Tensor]
    drift: Tensor | None
    weights: Weights
    steps_taken: int = 0
    """The `Denoising.steps_taken` of the last call."""
    last_payload: Payload | None = None
    """The payload of the last call."""

    @functools.cached_property
    def size_bytes(self) -> int:
        return bytes_of(self.tensors)


@dataclass(eq=False)
class Denoising:
    """Follows one picture at a time. `step()` ends a step, `branch(name)` names a guidance pass."""

    num_steps: int | None = None
    owners: dict[int, weakref.ref[Tensor]] | None = None
    """The parameters of the models that this block applies to, by identity; None: any model."""
    current_step: int = 0
    steps_taken: int = 0
    """The number of steps so far, repeated ones included."""
    caches: dict[Hashable, CallCache] = field(default_factory=dict)
    choices: dict[Hashable, Choice] = field(default_factory=dict)
    """The choice of each compiled graph."""
    history: list[StepRecord] = field(default_factory=list)
    """The records of all steps of all pictures of the block."""
    at_end: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    """What is called when the block is left, by the compiled graph that asked for it."""
    is_out_of_order: bool = False
    """Whether this step does not follow the last one."""
    outer: Denoising | None = None
    """The `Denoising` of the enclosing block."""
    is_over: bool = False
    """Whether the block was left. Code that still runs in its context no longer belongs to it."""
    _branch: str = ""
    _calls: dict[Hashable, int] = field(default_factory=dict)

    def step(self, index: int | None = None) -> None:
        """Ends the step. `index` is the next step if it is not the following one; a step after a
        skipped or repeated one is a keyframe.
        """
        following = self.current_step + 1
        if index is not None and not _is_count(index, 0):
            raise UserError(f"denoising step {index!r}: steps are whole numbers, counted from 0")
        self.is_out_of_order = index is not None and index != following
        for key, cache in list(self.caches.items()):
            if self.steps_taken - cache.steps_taken >= _KEPT_STEPS or not cache.weights.exist:
                del self.caches[key]
        self.steps_taken += 1
        self.current_step = following if index is None else index
        self._calls.clear()
        if self.num_steps is not None and self.current_step >= self.num_steps:
            self.caches.clear()  # the picture is done

    def reset(self, num_steps: int | None = None) -> None:
        """Begins a new picture and frees all caches of the last one."""
        self.num_steps = num_steps if num_steps is not None else self.num_steps
        self.current_step = 0
        self.is_out_of_order = False
        self.steps_taken += 1
        self._calls.clear()
        self.caches.clear()
        self.choices.clear()

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Assigns calls inside of the block to the guidance pass of this name."""
        before, self._branch = self._branch, name
        try:
            yield
        finally:
            self._branch = before

    def key_of(self, graph: Hashable, block: Hashable) -> Hashable | None:
        """Returns the key of a call within a step: its graph, weights and branch, and its number
        among calls that share these. Returns None for a call beyond the limit.
        """
        if self.num_steps is not None and self.current_step >= self.num_steps:
            say_once(
                log,
                logging.WARNING,
                f"more denoising steps than the {self.num_steps} announced: every further step is "
                "sent as a keyframe; announce the right number with num_steps=",
            )
        call = (graph, block, self._branch)
        number = self._calls.get(call, 0)
        self._calls[call] = number + 1
        if number < _MANY_CALLS:
            return (*call, number)
        say_once(
            log,
            logging.WARNING,
            f"more than {_MANY_CALLS} calls of a model in denoising step {self.current_step}, each "
            "of which needs a cache: further calls are sent uncompressed; call .step() after each "
            "step",
        )
        return None

    @property
    def cache_bytes(self) -> int:
        return sum(item.size_bytes for item in self.caches.values())

    @property
    def is_current(self) -> bool:
        """Returns whether the caller, of this thread, is inside of this block or a nested one."""
        return any(run is self for run in _blocks())

    def owns(self, args: Sequence[Any]) -> bool:
        """Returns whether a call with these arguments is of a model this block applies to."""
        owners = self.owners
        if owners is None:
            return True
        return any(id(item) in owners and owners[id(item)]() is item for item in args)


def _blocks() -> Iterator[Denoising]:
    """Yields the blocks around the caller, the innermost first."""
    block = _current.get()
    while block is not None:
        if not block.is_over:
            yield block
        block = block.outer


def is_denoising() -> bool:
    """Returns whether the caller runs inside of a block."""
    return any(True for _ in _blocks())


def current_denoising(args: Sequence[Any]) -> Denoising | None:
    """Returns the `Denoising` of the innermost block that a call with these arguments is in."""
    return next((run for run in _blocks() if run.owns(args)), None)


@contextmanager
def denoising(pipe: Any = None, *, num_steps: int | None = None) -> Iterator[Denoising]:
    """Assigns calls inside of the block to pictures that are denoised step by step.

    `pipe` is a diffusers pipeline, whose scheduler announces the steps and whose transformer names
    the guidance passes. Without one the caller's loop must call `.step()` after each step, and
    `.reset()` between pictures. Nested blocks, and blocks in other threads, have caches of their
    own.
    """
    if pipe is None and num_steps is None:
        raise UserError("denoising() needs a pipeline, or num_steps= and .step() after each step")
    if num_steps is not None and not _is_count(num_steps, 1):
        raise UserError(
            f"denoising(num_steps={num_steps!r}): num_steps must be a whole number from 1"
        )
    run = Denoising(num_steps, outer=next(_blocks(), None))
    token = _current.set(run)
    try:
        with ExitStack() as stack:
            if pipe is not None:
                _follow(pipe, run, stack)
            yield run
    finally:
        for tell in run.at_end.values():
            tell()
        run.reset()
        run.is_over = True
        with suppress(ValueError):  # left in another context than it was entered in
            _current.reset(token)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _follow(pipe: Any, run: Denoising, stack: ExitStack) -> None:
    scheduler: Any = getattr(pipe, "scheduler", None)
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "set_timesteps")):
        raise UserError(
            f"denoising({type(pipe).__name__}): the pipeline has no scheduler with step and "
            "set_timesteps; use denoising(num_steps=...) and call .step() after each step"
        )

    def begin(*_args: Any, **_kwargs: Any) -> None:
        run.reset(len(scheduler.timesteps))

    def begin_at(begin_index: int = 0) -> None:
        """Adjusts the number of steps where a picture begins in mid-schedule (image to image)."""
        if scheduler.timesteps is not None:
            run.num_steps = run.current_step + len(scheduler.timesteps) - begin_index

    def end_step(*_args: Any, **_kwargs: Any) -> None:
        run.step()

    for name, then in (("set_timesteps", begin), ("set_begin_index", begin_at), ("step", end_step)):
        if hasattr(scheduler, name):
            _follow_method(_Followed, scheduler, name, run, then, stack)
    if run.num_steps is None and getattr(scheduler, "num_inference_steps", None):
        run.num_steps = len(scheduler.timesteps)
    modules = _modules(pipe)
    if not modules:
        raise UserError(
            f"denoising({type(pipe).__name__}): the pipeline has no model; use "
            "denoising(num_steps=...) and call .step() after each step"
        )
    tensors = (t for module in modules for t in chain(module.parameters(), module.buffers()))
    run.owners = {id(item): weakref.ref(item) for item in tensors}
    for module in modules:
        if hasattr(module, "cache_context"):
            _follow_method(_Branching, module, "cache_context", run, run.branch, stack)


def _modules(pipe: Any) -> list[nn.Module]:
    """Returns all models of a pipeline. Only those that are compiled with v_major use the block."""
    components = getattr(pipe, "components", None) or vars(pipe)
    modules = [item for item in components.values() if isinstance(item, nn.Module)]
    return list(dict.fromkeys(getattr(module, "_orig_mod", module) for module in modules))


class _Followed:
    """Wraps a method of one object while blocks follow it, in whatever order the blocks are left.
    After the method it calls the callback of each block in which the call is made. A deep copy of
    the object gets the plain method: some pipelines copy their scheduler for a second kind of
    latents.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._method = owner, getattr(owner, name)
        functools.update_wrapper(self, self._method, updated=())
        self.replaced = vars(owner).get(name)
        """The attribute that the object itself had before, if any."""
        self.followers: dict[Denoising, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method(*args, **kwargs)
        for then in self._current():
            then(*args, **kwargs)
        return result

    def __deepcopy__(self, copies: dict[int, Any]) -> Any:
        copied = copies.get(id(self._owner))
        if copied is None or not isinstance(self._method, MethodType):
            return self._method
        return MethodType(self._method.__func__, copied)

    def _current(self) -> list[Callable[..., Any]]:
        return [then for run, then in list(self.followers.items()) if run.is_current]


class _Branching(_Followed):
    """Wraps a method that returns a context manager; the blocks' contexts last as long."""

    @contextmanager
    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with self._method(name, *args, **kwargs) as value, ExitStack() as stack:
            for branch in self._current():
                stack.enter_context(branch(name))
            yield value


def _follow_method(
    kind: type[_Followed],
    owner: Any,
    name: str,
    run: Denoising,
    then: Callable[..., Any],
    stack: ExitStack,
) -> None:
    """Wraps a method until the stack is left. The object then has its own method again, unless
    other blocks still follow it or someone replaced it meanwhile.
    """
    own = vars(owner)
    with _following:
        if not isinstance(own.get(name), kind):
            own[name] = kind(owner, name)
        followed: _Followed = own[name]
        followed.followers[run] = then

    def put_back() -> None:
        with _following:
            del followed.followers[run]
            if followed.followers or own.get(name) is not followed:
                return
            if followed.replaced is None:
                del own[name]
            else:
                own[name] = followed.replaced

    stack.callback(put_back)
