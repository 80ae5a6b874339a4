# SPDX-License-Identifier: Apache-2.0
"""Reads values that a user gives, in options or files, as plain numbers and text, and shows them in
error messages.

An option may be any object, such as a NumPy array or a tensor, whose comparisons do not return a
truth value. The type is therefore checked first, and only built-in numbers and text are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from reprlib import Repr
from typing import Any, TypeGuard

_MAX_CHARACTERS = 300
_MAX_BITS = 256
_MAX_KEYS = 20


class _BoundedRepr(Repr):
    """Returns a `repr` that is cut where it is long or deep, and that never raises."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_CHARACTERS
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = _MAX_KEYS

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        if x.bit_length() > _MAX_BITS:  # Python refuses to print numbers of 4,300 digits
            return f"<a whole number of {x.bit_length()} bits>"
        return repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Keeps the order of the keys, which `Repr` would sort."""
        if level <= 0:
            return "{...}"
        shown_pairs = (
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}"
            for key, item in islice(x.items(), self.maxdict)
        )
        more = ["..."] if len(x) > self.maxdict else []
        return f"{{{', '.join([*shown_pairs, *more])}}}"


def shown(value: object) -> str:
    """Returns `repr(value)` for an error message, of bounded length whatever the value is."""
    try:
        text = _BoundedRepr().repr(value)
    except Exception:  # an object's own __repr__, or that of its parts, may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 4 * _MAX_CHARACTERS else f"{text[: 4 * _MAX_CHARACTERS]}..."


def shown_keys(keys: Iterable[object]) -> str:
    """Returns the first keys of a mapping, joined by commas, text without quotation marks."""
    first = list(islice(keys, _MAX_KEYS + 1))
    named = [shown(key)[1:-1] if isinstance(key, str) else shown(key) for key in first[:_MAX_KEYS]]
    return ", ".join(named) + (", ..." if len(first) > _MAX_KEYS else "")


def whole_number(value: object) -> int | None:
    """Returns the value as an `int`; None for anything else, including True and False."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return int.__int__(value)


def number(value: object) -> float | None:
    """Returns the value as a finite `float`; None for whatever is or becomes anything else."""
    whole = whole_number(value)
    if whole is None and not isinstance(value, float):
        return None
    try:
        converted = float.__float__(value) if isinstance(value, float) else float(whole or 0)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def is_one_of(value: object, words: Iterable[str]) -> TypeGuard[str]:
    """Returns whether the value is text and one of these words."""
    return isinstance(value, str) and str.__str__(value) in tuple(words)


def has_text_keys(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether the value is a mapping with text keys."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
