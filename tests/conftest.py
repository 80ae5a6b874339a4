# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, and what several of them start from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from xdist.scheduler import LoadScopeScheduling

from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles
from cocodiff_compile.say_once import forget_what_was_said

avoid_broken_tiles()
# MKL then sums a row alike whatever rows stand beside it, so that passes act on every machine.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# So does OpenBLAS or oneDNN with one thread, here and in the processes that tests start.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
settings.register_profile("untimed", deadline=None)  # a busy machine must not fail a test
settings.register_profile("unshrunk", deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("untimed")


SHARE_CAPTURES = ("test_chunk_heads.py", "test_split_tapa_phases.py")
"""Files that start from the same captured graphs: they run in one worker."""


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Runs all tests of a file in one worker, so that what they share is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", maxsplit=1)[0]
        return "captures" if file.endswith(SHARE_CAPTURES) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first: those that start ranks or compile."""
    first = ("ranks", "compile", "values")
    items.sort(key=lambda item: item.path.parent.name not in first)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], int]]:
    """Yields a function that counts the messages so far that contain the given words."""
    forget_what_was_said()
    with caplog.at_level(logging.WARNING, logger="cocodiff_compile"):
        yield lambda words: sum(words in message for message in caplog.messages)
    forget_what_was_said()


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
