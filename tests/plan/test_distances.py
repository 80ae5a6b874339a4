# SPDX-License-Identifier: Apache-2.0
"""Results that cannot be compared are infinitely far from what is expected."""

from __future__ import annotations

import math

import pytest
import torch

from cocodiff_compile.lab.distances import largest, largest_error, largest_relative_error

ONE, TWO = torch.ones(3), torch.full((3,), 2.0)


def test_the_largest_error_is_found() -> None:
    assert largest_error([ONE, TWO], [ONE, ONE]) == 1.0
    assert largest_relative_error([ONE, ONE], [ONE, TWO]) == 0.5
    with pytest.raises(ValueError, match="empty"):
        largest([])


@pytest.mark.parametrize("measure", [largest_error, largest_relative_error])
def test_what_is_no_number_or_has_another_shape_is_infinitely_far(measure: object) -> None:
    assert callable(measure)
    for wrong in (ONE * math.nan, ONE[:2]):
        assert math.isinf(measure([ONE, wrong], [ONE, ONE]))
    assert math.isinf(largest([0.0, math.nan, 1.0]))


def test_a_missing_result_is_noticed() -> None:
    with pytest.raises(AssertionError, match="1 results, where 2 are expected"):
        largest_error([ONE], [ONE, ONE])
