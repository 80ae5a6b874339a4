# SPDX-License-Identifier: Apache-2.0
"""Values that nobody should give as an option or write into a file, and hypothesis of them."""

from __future__ import annotations

import decimal
import fractions
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

HUGE = 10**400
ENDLESS = 1 << 100_000
"""Python refuses to print it: 30,103 digits."""


class Hostile:
    """Raises at whatever it is asked."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise TypeError("not shown")

    __str__ = __repr__

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")

    def __fspath__(self) -> str:
        raise TypeError("no path")


def nested(depth: int) -> list[Any]:
    """A list in a list in a list ..."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def odd_values() -> list[Any]:
    """New ones, since some can be changed."""
    return [
        np.arange(3),
        np.ones((2, 2)),
        np.array(2),
        np.array("auto"),
        np.array(["auto", "on"]),
        np.int64(-3),
        np.float64("nan"),
        torch.arange(3),
        torch.tensor(2),
        torch.tensor([]),
        float("nan"),
        float("inf"),
        -float("inf"),
        -1,
        0,
        HUGE,
        -HUGE,
        ENDLESS,
        True,
        None,
        decimal.Decimal(4),
        decimal.Decimal("sNaN"),
        fractions.Fraction(1, 3),
        1j,
        b"auto",
        bytearray(b"on"),
        "",
        "\0",
        "\ud800",
        "x" * 5_000,
        "/".join(["x" * 200] * 100),
        "~no-such-user-at-all/folder",
        "٣",
        range(3),
        [],
        [1, 2],
        ["auto"],
        [np.arange(2)],
        [Hostile()],
        (),
        {},
        {1: 2},
        {"a": np.arange(2)},
        {Hostile(): 1},
        {"auto"},
        nested(100_000),
        nested(3),
        ["x"] * 100_000,
        lambda: None,
        int,
        object(),
        Hostile(),
    ]


def plain_values() -> st.SearchStrategy[Any]:
    """Returns a strategy for what JSON and YAML files can hold, numbers without bounds included."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(10**400), 10**400),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["pcie", "tile", "node", "0-3", "0-99999999999", "1e10", "auto", "full"]),
    )
    return st.recursive(
        scalars,
        lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=8), parts),
        max_leaves=8,
    )
