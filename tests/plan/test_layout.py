# SPDX-License-Identifier: Apache-2.0
"""layout: what it predicts is where real torch ops put every element."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.ir import layout
from cocodiff_compile.ir.layout import BROADCAST, RANK, Dims, Factor, LayoutUnknown

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 720)
few = settings(max_examples=150, deadline=None)


def _places(dims: Dims, source: int) -> Tensor:
    """Returns the place of every element along the root's dim `source`."""
    place = torch.zeros([math.prod(f.size for f in factors) for factors in dims], dtype=torch.long)
    for dim, factors in enumerate(dims):
        along = torch.zeros(1, dtype=torch.long)
        for factor in factors:
            steps = factor.start + torch.arange(factor.size) * factor.stride
            steps = steps * (factor.source == source)
            along = (along[:, None] + steps).flatten()
        place += along.view([-1 if other == dim else 1 for other in range(len(dims))])
    return place


def _check(dims: Dims, values: Tensor, root: list[int], exact: bool) -> None:
    """`values` hold, for every element, its index in the root; not exact is up to a constant."""
    assert _places(dims, RANK).shape == values.shape
    for source, actual in enumerate(torch.unravel_index(values, root)):
        difference = actual - _places(dims, source)
        assert difference.unique().numel() == 1
        assert not exact or not difference.any()


Step = tuple[Dims, Tensor]


def _reshaped(data: st.DataObject, step: Step) -> Step:
    shape = list(step[1].shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    if data.draw(st.booleans()) and len(shape) > 1:
        dim = min(dim, len(shape) - 2)
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    else:
        divisors = [part for part in range(1, shape[dim] + 1) if shape[dim] % part == 0]
        outer = data.draw(st.sampled_from(divisors))
        shape[dim : dim + 1] = [outer, shape[dim] // outer]
    return layout.reshape(step[0], shape), step[1].reshape(shape)


def _permuted(data: st.DataObject, step: Step) -> Step:
    order = data.draw(st.permutations(range(step[1].dim())))
    return layout.permute(step[0], order), step[1].permute(order)


def _narrowed(data: st.DataObject, step: Step, least: int = 2) -> Step:
    dim = data.draw(st.integers(0, step[1].dim() - 1))
    whole = step[1].shape[dim]
    size = data.draw(st.integers(min(least, whole), whole))
    start = data.draw(st.integers(0, whole - size))
    return layout.narrow(step[0], dim, start, size), step[1].narrow(dim, start, size)


def _selected(data: st.DataObject, step: Step) -> Step:
    """May leave one element, whose place a layout does not keep."""
    return _narrowed(data, step, least=1)


def _chain(
    data: st.DataObject, root: list[int], kinds: list[Callable[[st.DataObject, Step], Step]]
) -> Step:
    step = layout.root_dims(root), torch.arange(math.prod(root)).view(root)
    for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=6)):
        try:
            step = kind(data, step)
        except LayoutUnknown:
            return step
    return step


@few
@given(st.data(), shapes)
def test_reshapes_and_permutes_are_followed_exactly(data: st.DataObject, root: list[int]) -> None:
    dims, values = _chain(data, root, [_reshaped, _permuted])
    _check(dims, values, root, exact=True)


@few
@given(st.data(), shapes)
def test_slices_are_followed_exactly(data: st.DataObject, root: list[int]) -> None:
    dims, values = _chain(data, root, [_reshaped, _permuted, _narrowed])
    _check(dims, values, root, exact=True)


@few
@given(st.data(), shapes)
def test_single_places_are_followed_but_for_which_they_are(
    data: st.DataObject, root: list[int]
) -> None:
    dims, values = _chain(data, root, [_reshaped, _permuted, _selected])
    _check(dims, values, root, exact=False)


@few
@given(st.data(), shapes)
def test_any_reshape_is_right_or_refused(data: st.DataObject, root: list[int]) -> None:
    dims, values = _chain(data, root, [_permuted])
    shape = list(data.draw(st.permutations([*root, 1])))
    place = data.draw(st.integers(1, len(shape) - 1))
    shape[place - 1 : place + 1] = [shape[place - 1] * shape[place]]
    try:
        dims = layout.reshape(dims, shape)
    except LayoutUnknown:
        return
    _check(dims, values.reshape(shape), root, exact=True)


@few
@given(st.data(), shapes)
def test_reshape_of_another_number_of_elements_is_refused(
    data: st.DataObject, root: list[int]
) -> None:
    shape = data.draw(shapes.filter(lambda drawn: math.prod(drawn) != math.prod(root)))
    with pytest.raises(LayoutUnknown):
        layout.reshape(layout.root_dims(root), shape)


@few
@given(st.data(), shapes)
def test_expanded_dims_come_from_nowhere(data: st.DataObject, root: list[int]) -> None:
    dims, values = _chain(data, root, [_reshaped, _permuted])
    times = data.draw(st.integers(2, 4))
    shape = [times, *(times if size == 1 else size for size in values.shape)]
    expanded = layout.expand(dims, shape)
    assert expanded[0] == (Factor(BROADCAST, times),)
    _check(expanded, values.expand(shape), root, exact=True)


@few
@given(st.data(), shapes)
def test_concatenation_is_followed_where_the_operand_stands(
    data: st.DataObject, root: list[int]
) -> None:
    dim = data.draw(st.integers(0, len(root) - 1))
    before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    size = before + root[dim] + after
    dims = layout.concatenate(layout.root_dims(root), dim, size)
    values = torch.arange(math.prod(root)).view(root)
    for source, actual in enumerate(torch.unravel_index(values, root)):
        if root[dim] > 1 or source != dim:
            place = _places(dims, source).narrow(dim, before, root[dim])
            assert (actual - place).unique().numel() == 1


@few
@given(st.data(), shapes, st.integers(2, 4), st.booleans())
def test_exchange_is_an_all_to_all(
    data: st.DataObject, root: list[int], num_ranks: int, flat: bool
) -> None:
    """Every element received on every rank is where, and from whom, the layout says."""
    root = [root[0] * num_ranks, *root[1:]]
    dims, values = _chain(data, root, [_reshaped, _permuted])
    if flat:
        dims, values = layout.reshape(dims, [values.numel()]), values.flatten()
    assume(values.shape[0] % num_ranks == 0)
    try:
        scattered, received = layout.exchange(dims, num_ranks)
    except LayoutUnknown:
        return
    sent = [values + 10_000 * rank for rank in range(num_ranks)]
    for rank in range(num_ranks):
        got = torch.cat([other.chunk(num_ranks)[rank] for other in sent])
        sender = _places(received, RANK)
        assert torch.equal(got // 10_000, sender)
        for source, actual in enumerate(torch.unravel_index(got % 10_000, root)):
            offset = rank * scattered.stride if source == scattered.source else 0
            assert torch.equal(actual, _places(received, source) + offset)


# B, S, P, h, D of the two ways, all different
BATCH, TOKENS, RANKS, HEADS, SIZE = 2, 5, 4, 3, 7


def test_way_in_of_diffusers() -> None:
    dims = layout.root_dims([BATCH, TOKENS, RANKS * HEADS, SIZE])
    dims = layout.reshape(dims, [BATCH, TOKENS, RANKS, HEADS, SIZE])
    dims = layout.permute(dims, [2, 1, 0, 3, 4])
    dims = layout.reshape(dims, [BATCH * TOKENS * RANKS * HEADS * SIZE])
    scattered, dims = layout.exchange(dims, RANKS)
    assert scattered == Factor(2, RANKS, HEADS)
    dims = layout.reshape(dims, [RANKS * TOKENS, BATCH, HEADS, SIZE])
    assert dims[0] == (Factor(RANK, RANKS), Factor(1, TOKENS))
    assert [layout.dim_of(dims, source) for source in (RANK, 0, 1, 2, 3)] == [0, 1, 0, 2, 3]


def test_dims_of_one_hold_nothing() -> None:
    assert layout.root_dims([1, 3, 1]) == ((), (Factor(1, 3),), ())
    assert layout.dim_of(layout.root_dims([1, 3, 1]), 0) is None


REFUSED = [
    ("scalar", lambda: layout.exchange((), 2), "nothing to scatter"),
    ("one block", lambda: layout.exchange(layout.root_dims([1, 4]), 2), "nothing to scatter"),
    ("across", lambda: layout.exchange(layout.root_dims([6]), 4), "4 blocks cut across"),
    ("cut", lambda: layout.reshape(layout.root_dims([2, 3]), [3, 2]), "cuts across"),
    ("short", lambda: layout.reshape(layout.root_dims([2]), [4]), "no elements left"),
    ("long", lambda: layout.reshape(layout.root_dims([4]), [2]), "does not hold"),
    (
        "slice of joined dims",
        lambda: layout.narrow(layout.reshape(layout.root_dims([2, 3]), [6]), 0, 0, 4),
        "cuts across",
    ),
]


@pytest.mark.parametrize(
    ("call", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_cannot_be_followed_is_said(call: Callable[[], object], words: str) -> None:
    with pytest.raises(LayoutUnknown, match=words):
        call()
