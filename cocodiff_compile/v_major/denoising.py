"""`with denoising(pipe):` tells selective exchanges which step of which picture a call belongs to.

A `Denoising` owns all that is remembered for one picture. It goes when the block is left, however
that happens, and starts anew with a new picture.
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
from threading import Lock
from types import MethodType
from typing import Any

from torch import Tensor, nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.say_once import say_once
from cocodiff_compile.v_major.travel import Travel

log = logging.getLogger(__name__)

_MANY_CALLS = 8
"""Of the same model in one step and branch; passes of guidance are two or three."""
_KEPT_STEPS = 3
"""What no call came for in so many steps is forgotten: a model may have handed over to another."""

_following = Lock()
"""Held while what stands for a method is put in its place or taken away: threads may share one."""
_current: ContextVar[Denoising | None] = ContextVar("cocodiff_denoising", default=None)


@dataclass
class Choice:
    """What the calls of one compiled graph carry in one step."""

    turn: int
    travel: Travel
    record: StepRecord


@dataclass
class StepRecord:
    """What one compiled graph did in one step, over all its calls; bytes are those that this rank
    sent to others, and would have sent in full.
    """

    step: int
    kinds: Counter[str] = field(default_factory=Counter)
    """Calls, by what they carried."""
    sent_bytes: int = 0
    full_bytes: int = 0
    memory_bytes: int = 0

    @property
    def travel(self) -> str:
        """What its calls carried."""
        return " / ".join(self.kinds)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(item.numel() * item.element_size() for item in tensors)


class Weights:
    """Those of a call, while they exist: others may come to have their identities later."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.exist = True
        self._refs = [weakref.ref(item, self._end) for item in tensors]

    def _end(self, _ref: object) -> None:
        self.exist = False


@dataclass
class Memory:
    """What one call of a compiled graph remembers from step to step."""

    tensors: list[Tensor]
    drift: Tensor | None
    weights: Weights
    turn: int = 0
    """Of the last call."""
    carried: Travel | None = None
    """What the last call did."""

    @functools.cached_property
    def size_bytes(self) -> int:
        return bytes_of(self.tensors)


@dataclass(eq=False)
class Denoising:
    """One picture at a time: `step()` ends a step, `branch(name)` names a pass of guidance."""

    num_steps: int | None = None
    owners: dict[int, weakref.ref[Tensor]] | None = None
    """The parameters of the models it is for, by identity; None: any model."""
    current_step: int = 0
    turn: int = 0
    """Counts steps as they come, also where one comes again."""
    memories: dict[Hashable, Memory] = field(default_factory=dict)
    choices: dict[Hashable, Choice] = field(default_factory=dict)
    """By compiled graph."""
    history: list[StepRecord] = field(default_factory=list)
    """Of all pictures of the block."""
    is_out_of_order: bool = False
    """Whether this step does not follow the last one."""
    outer: Denoising | None = None
    """That of the block around this one."""
    is_over: bool = False
    """Whether the block was left: what still runs in its context does not belong to it."""
    _branch: str = ""
    _calls: dict[Hashable, int] = field(default_factory=dict)

    def step(self, index: int | None = None) -> None:
        """Ends the step; `index` is that of the next one, if it is not the following one. After a
        step that was left out or comes again, all is sent once like in a first one.
        """
        following = self.current_step + 1
        if index is not None and not _is_count(index, 0):
            raise UserError(f"denoising step {index!r}: steps are whole numbers, counted from 0")
        self.is_out_of_order = index is not None and index != following
        for key, memory in list(self.memories.items()):
            if self.turn - memory.turn >= _KEPT_STEPS or not memory.weights.exist:
                del self.memories[key]
        self.turn += 1
        self.current_step = following if index is None else index
        self._calls.clear()
        if self.num_steps is not None and self.current_step >= self.num_steps:
            self.memories.clear()  # the picture is done

    def reset(self, num_steps: int | None = None) -> None:
        """Begins a new picture: nothing of the last one is remembered."""
        self.num_steps = num_steps if num_steps is not None else self.num_steps
        self.current_step = 0
        self.is_out_of_order = False
        self.turn += 1
        self._calls.clear()
        self.memories.clear()
        self.choices.clear()

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Calls in the block belong to the pass of guidance of this name."""
        before, self._branch = self._branch, name
        try:
            yield
        finally:
            self._branch = before

    def key_of(self, graph: Hashable, block: Hashable) -> Hashable | None:
        """Which of all calls of a step this one is: by graph, weights and branch, and counted where
        these are the same. None: one of too many to remember.
        """
        if self.num_steps is not None and self.current_step >= self.num_steps:
            say_once(
                log,
                logging.WARNING,
                f"more denoising steps than the {self.num_steps} announced: those beyond them "
                "are sent like a first one",
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
            "of which remembers for itself: the others travel exactly; is .step() called after "
            "each step?",
        )
        return None

    @property
    def memory_bytes(self) -> int:
        return sum(item.size_bytes for item in self.memories.values())

    @property
    def is_current(self) -> bool:
        """Whether this is inside of its block, or of one in that: not so in other threads."""
        return any(run is self for run in _blocks())

    def owns(self, args: Sequence[Any]) -> bool:
        """Whether a call with these arguments is one of the models it is for."""
        owners = self.owners
        if owners is None:
            return True
        return any(id(item) in owners and owners[id(item)]() is item for item in args)


def _blocks() -> Iterator[Denoising]:
    """Those around this, the innermost first."""
    found = _current.get()
    while found is not None:
        if not found.is_over:
            yield found
        found = found.outer


def is_denoising() -> bool:
    """Whether this is inside of a block."""
    return any(True for _ in _blocks())


def current_denoising(args: Sequence[Any]) -> Denoising | None:
    """That of the innermost block to which a call with these arguments belongs."""
    return next((run for run in _blocks() if run.owns(args)), None)


@contextmanager
def denoising(pipe: Any = None, *, num_steps: int | None = None) -> Iterator[Denoising]:
    """Calls in the block belong to pictures that are denoised step by step.

    `pipe`: a diffusers pipeline, whose scheduler tells the steps and whose transformer names the
    passes of guidance. Without one the loop calls `.step()` itself, and `.reset()` between
    pictures. Nested blocks, and blocks in other threads, remember apart.
    """
    if pipe is None and num_steps is None:
        raise UserError("denoising() needs a pipeline, or num_steps= and .step() after each step")
    if num_steps is not None and not _is_count(num_steps, 1):
        raise UserError(f"denoising(num_steps={num_steps!r}): a whole number from 1")
    run = Denoising(num_steps, outer=next(_blocks(), None))
    token = _current.set(run)
    try:
        with ExitStack() as stack:
            if pipe is not None:
                _follow(pipe, run, stack)
            yield run
    finally:
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
            f"denoising({type(pipe).__name__}): it has no scheduler with step and set_timesteps; "
            "use denoising(num_steps=...) and call .step() after each step"
        )

    def begin(*_args: Any, **_kwargs: Any) -> None:
        run.reset(len(scheduler.timesteps))

    def begin_at(begin_index: int = 0) -> None:
        """In the middle of the steps: image to image."""
        if scheduler.timesteps is not None:
            run.num_steps = run.current_step + len(scheduler.timesteps) - begin_index

    def end_step(*_args: Any, **_kwargs: Any) -> None:
        run.step()

    for name, then in (
        ("set_timesteps", begin),
        ("set_begin_index", begin_at),
        ("step", end_step),
    ):
        if hasattr(scheduler, name):
            _follow_method(_Followed, scheduler, name, run, then, stack)
    if run.num_steps is None and getattr(scheduler, "num_inference_steps", None):
        run.num_steps = len(scheduler.timesteps)
    modules = list(dict.fromkeys(map(_original, _modules(pipe))))
    if not modules:
        raise UserError(
            f"denoising({type(pipe).__name__}): it has no model; use denoising(num_steps=...) and "
            "call .step() after each step"
        )
    tensors = (item for module in modules for item in _own_tensors(module))
    run.owners = {id(item): weakref.ref(item) for item in tensors}
    for module in modules:
        if hasattr(module, "cache_context"):
            _follow_method(_Branching, module, "cache_context", run, run.branch, stack)


def _modules(pipe: Any) -> list[nn.Module]:
    """All models of a pipeline; only those that are compiled selectively ever ask."""
    components = getattr(pipe, "components", None) or vars(pipe)
    return [item for item in components.values() if isinstance(item, nn.Module)]


def _original(module: nn.Module) -> nn.Module:
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class _Followed:
    """Stands for a method of one object while blocks follow it, whichever of them is left first.
    What each block does is called after it, if the call is made inside of that block. A copy of the
    object has the method alone: some pipelines copy their scheduler for a second kind of latents.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._method = owner, getattr(owner, name)
        functools.update_wrapper(self, self._method, updated=())
        self.replaced = vars(owner).get(name)
        """What the object itself had in this place, if anything."""
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
    """The same of a method that gives a context, in which what blocks do lasts as long."""

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
    """Until the stack is left; then the object has its own method again, unless others follow it
    still or someone replaced it meanwhile.
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
