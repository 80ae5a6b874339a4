# SPDX-License-Identifier: Apache-2.0
"""Defines the errors that a user sees, such that they pass through torch.compile unwrapped.

Dynamo wraps what a backend raises into ``BackendCompilerFailed``, which hides the type. It does not
wrap its own ``ShortenTraceback`` family, so that these errors belong to both families.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import Field
from typing import Any

from cocodiff_compile.compat import ShortenTraceback
from cocodiff_compile.given_values import is_one_of, shown


class UserError(ShortenTraceback, ValueError):
    """Reports something the user can fix, and how. It passes through torch.compile unwrapped."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class InvariantError(ShortenTraceback, AssertionError):
    """Reports that a pass broke an invariant of a graph; the message names pass and node."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class PeerError(UserError):
    """Is raised on this rank because of another one, which failed, died, or runs something else."""


def need_package(name: str, extra: str) -> None:
    """Raises UserError, before long work begins, if a package that `extra` installs is missing."""
    try:
        importlib.import_module(name)
    except ImportError:
        raise UserError(f"needs {name}: pip install 'cocodiff-compile[{extra}]'") from None


def refuse_unknown(given: Iterable[object], allowed: Iterable[Field[Any]], message: str) -> None:
    """Raises UserError for a key that is no name of a field; `message` has a `{}` for the key."""
    names = [field.name for field in allowed]
    for key in given:
        if not is_one_of(key, names):
            close = difflib.get_close_matches(shown(key)[:80], names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UserError(f"{message.format(shown(key))}{hint}; allowed: {', '.join(names)}")
