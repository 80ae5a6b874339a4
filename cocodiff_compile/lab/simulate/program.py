"""What one rank does in one step, in program order: the language between graphs and the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = 'Literal["matmul", "attention", "memory"]'


@dataclass(frozen=True)
class Compute:
    """One kernel on the compute stream."""

    name: str
    kind: Kind
    seconds: float


@dataclass(frozen=True)
class Start:
    """Issues a collective along `axes` of the machine and goes on; `size_bytes` is what one rank
    hands over, its own part included. `ticket` is what a `Wait` refers to.
    """

    name: str
    ticket: int
    axes: tuple[str, ...]
    size_bytes: float
    is_exchange: bool = True
    """An all-to-all; False for the gathering of the result."""


@dataclass(frozen=True)
class Wait:
    """Blocks the compute stream until the collective is done."""

    ticket: int


Step: TypeAlias = "Compute | Start | Wait"
Program: TypeAlias = "tuple[Step, ...]"


def joined(pieces: list[Program]) -> Program:
    """The pieces one after the other; tickets of one piece never meet those of another."""
    steps: list[Step] = []
    offset = 0
    for piece in pieces:
        steps += [step if isinstance(step, Compute) else _moved(step, offset) for step in piece]
        offset += 1 + max((step.ticket for step in piece if isinstance(step, Start)), default=-1)
    return tuple(steps)


def _moved(step: Start | Wait, offset: int) -> Start | Wait:
    return replace(step, ticket=step.ticket + offset)
