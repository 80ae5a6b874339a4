"""Makes a model check itself before every call.

A hook would come too late: by then torch has already looked up the `forward` that it is going to
run.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cocodiff_compile.compat import skip_frame_of
from cocodiff_compile.parallel.preparation import Preparation

_PREPARATION = "_cocodiff_preparation"


def check_calls(model: nn.Module, preparation: Preparation) -> None:
    """Gives `model` a subclass of its own class that overrides only `__call__`."""
    base = type(model)

    @skip_frame_of
    def checked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        preparation: Preparation = self.__dict__[_PREPARATION]
        preparation.renew()
        preparation.is_current = True
        try:
            return base.__call__(self, *args, **kwargs)
        finally:
            preparation.is_current = False

    members = {
        "__call__": checked_call,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    model.__dict__[_PREPARATION] = preparation
    model.__class__ = type(base.__name__, (base,), members)
