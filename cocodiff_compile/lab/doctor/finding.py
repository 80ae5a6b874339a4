"""Defines one line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A finding with status `problem` keeps ranks from running; a `warning` costs speed, or breaks
    something else.
    """

    what: str
    status: Status
    text: str
