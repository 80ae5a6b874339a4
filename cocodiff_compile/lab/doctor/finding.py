"""One line of what the doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A `problem` keeps ranks from running; a `warning` costs speed, or breaks something
    else."""

    what: str
    status: Status
    text: str
