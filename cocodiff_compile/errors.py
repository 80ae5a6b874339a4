"""Errors a user sees, and how they get through torch.compile undisguised.

Dynamo wraps whatever a backend raises into ``BackendCompilerFailed``, which hides the type. It lets
its own ``ShortenTraceback`` family through, so our errors belong to both families.
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
    """Something the user can fix; the message says how. Reaches torch.compile's caller as is."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class InvariantError(ShortenTraceback, AssertionError):
    """A pass left a graph that breaks the rules of the house; names the pass and the node."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class PeerError(UserError):
    """What this rank raises because of another one: it failed, died, or wants something else."""


def need_package(name: str, extra: str) -> None:
    """Asked for before long work; `extra` of this project brings the package."""
    try:
        importlib.import_module(name)
    except ImportError:
        raise UserError(f"needs {name}: pip install 'cocodiff-compile[{extra}]'") from None


def refuse_unknown(given: Iterable[object], allowed: Iterable[Field[Any]], message: str) -> None:
    """A key that is no field's name is an error; `message` has a place for the key."""
    names = [field.name for field in allowed]
    for key in given:
        if not is_one_of(key, names):
            close = difflib.get_close_matches(shown(key)[:80], names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UserError(f"{message.format(shown(key))}{hint}; allowed: {', '.join(names)}")
