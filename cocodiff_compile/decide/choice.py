# SPDX-License-Identifier: Apache-2.0
"""A choice between rewrites, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from cocodiff_compile.ir.records import Declined

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The value that was chosen, the estimates behind it, and what cannot be rewritten."""

    value: T
    notes: tuple[str, ...] = ()
    declined: tuple[Declined, ...] = ()
