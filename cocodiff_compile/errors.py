"""Errors a user sees, and how they get through torch.compile undisguised.

Dynamo wraps whatever a backend raises into ``BackendCompilerFailed``, which hides the type. It lets
its own ``ShortenTraceback`` family through, so our errors belong to both families.
"""

from __future__ import annotations

from cocodiff_compile.compat import ShortenTraceback


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
