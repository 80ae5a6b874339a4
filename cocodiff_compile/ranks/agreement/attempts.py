"""Wraps attempts to compile, which other ranks may wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cocodiff_compile.ranks.agreement.failures import begin_attempt, end_attempt
from cocodiff_compile.ranks.agreement.watch import begin_watch
from cocodiff_compile.ranks.agreement.world import ranks_are_real


@contextmanager
def reports_failures() -> Iterator[None]:
    """Wraps one attempt to compile. If it raises, the ranks that wait for this one raise too."""
    if not ranks_are_real():
        yield
        return
    begin_watch()
    begin_attempt()
    try:
        yield
    except BaseException as error:
        end_attempt(error)
        raise
