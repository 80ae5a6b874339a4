"""Tests where padding lies, by tokens that carry their own number, and which masks fit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.parallel.mask_order import interleave_ranks
from cocodiff_compile.parallel.token_padding import (
    IMAGE,
    TEXT,
    TokenPadding,
    keep_rows,
    missing,
    pad_end,
)
from cocodiff_compile.parallel.uneven_attention import UlyssesConfig, fit_mask

PAD = 0


def _gathered(streams: list[torch.Tensor], degree: int) -> torch.Tensor:
    """Returns what an exchange gathers: each rank's shares of all streams, rank by rank."""
    shards = [pad_end(x, 0, missing(len(x), degree)).chunk(degree) for x in streams]
    return torch.cat([shard[rank] for rank in range(degree) for shard in shards])


def _numbered(sizes: list[int]) -> list[torch.Tensor]:
    """Tokens 1, 2, 3, ... over all streams."""
    return list(torch.arange(1, 1 + sum(sizes)).split(sizes))


def _padding(sizes: list[int], degree: int) -> TokenPadding:
    padding = TokenPadding(degree, [str(place) for place in range(len(sizes))])
    for stream, size in zip(padding.streams, sizes, strict=True):
        padding.set(stream, size)
    return padding


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    degree=st.integers(2, 13),
)
def test_real_rows_are_all_tokens_and_no_padding(sizes: list[int], degree: int) -> None:
    padding, streams = _padding(sizes, degree), _numbered(sizes)
    gathered = _gathered(streams, degree)
    if not padding.is_padded(padding.streams):
        assert PAD not in gathered
        return
    spans = padding.real_rows(padding.streams, len(gathered) // degree)
    kept = keep_rows(gathered, 0, spans)
    assert sorted(kept.tolist()) == torch.cat(streams).tolist()
    assert kept.tolist() == [token for token in gathered.tolist() if token != PAD]
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


@given(num_tokens=st.integers(0, 10_000), degree=st.integers(1, 96))
def test_missing_is_what_the_next_multiple_needs(num_tokens: int, degree: int) -> None:
    assert missing(num_tokens, degree) == -num_tokens % degree


@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    degree=st.integers(2, 7),
)
def test_a_joint_mask_goes_the_way_of_its_tokens(sizes: tuple[int, int], degree: int) -> None:
    padding, streams = _padding(list(sizes), degree), _numbered(list(sizes))
    gathered = _gathered(streams, degree)
    pads = (padding.pad_of("0"), padding.pad_of("1"))
    shares = [(size + pad) // degree for size, pad in zip(sizes, pads, strict=True)]
    # A mask whose columns carry the numbers of their tokens.
    mask = torch.cat(streams).expand(2, 1, 1, -1)
    ordered = interleave_ranks(mask, *shares, degree, pads)
    real = gathered != PAD
    assert torch.equal(ordered[0, 0, 0, real], gathered[real])
    if padding.is_padded(padding.streams):
        spans = padding.real_rows(padding.streams, sum(shares))
        fitted = fit_mask(ordered, spans, 1, len(gathered))
        assert torch.equal(fitted[1, 0, 0], gathered[real])


def test_a_stream_that_was_padded_before_is_not_any_more() -> None:
    padding = _padding([5], 4)
    assert (padding.pad_of("0"), padding.is_padded("0")) == (3, True)
    padding.set("0", 8)
    assert (padding.pad_of("0"), padding.is_padded("0")) == (0, False)
    padding.set("0", 5)
    padding.set("0", None)
    assert not padding.is_padded("0")


@pytest.mark.parametrize(("sizes", "num_local"), [([5, 7], 5), ([5, 8], 2), ([5], 3)])
def test_keys_of_something_else_are_refused(sizes: list[int], num_local: int) -> None:
    padding = _padding(sizes, 4)
    with pytest.raises(ValueError, match=rf"{num_local} keys on this rank.*multiple of 4"):
        padding.real_rows(padding.streams, num_local)


def test_keys_that_nobody_named_are_refused_where_tokens_are_padded() -> None:
    context: Any = None
    padding = _padding([8], 4)
    config = UlyssesConfig(context, padding=padding, key_streams=None)
    assert not config.has_padded_keys()
    padding.set("0", 5)
    with pytest.raises(ValueError, match=r"not known to be made of \['0'\] alone"):
        config.has_padded_keys()


class TestFitMask:
    spans = ((0, 3), (4, 7))

    def test_a_row_per_query_keeps_its_rows(self) -> None:
        mask = torch.arange(64).view(1, 1, 8, 8)
        fitted = fit_mask(mask, self.spans, 8, 8)
        assert torch.equal(fitted, mask[..., [0, 1, 2, 4, 5, 6]])

    def test_one_over_the_real_keys_fits_where_they_are_in_order(self) -> None:
        mask = torch.ones(2, 1, 1, 7)
        assert fit_mask(mask, [(0, 7)], 8, 8) is mask
        with pytest.raises(ValueError, match="mask of 6 keys does not fit 8"):
            fit_mask(mask[..., :6], self.spans, 8, 8)

    def test_nothing_is_dropped_where_heads_alone_are_padded(self) -> None:
        mask = torch.ones(2, 1, 1, 8)
        assert fit_mask(mask, (), 8, 8) is mask

    @pytest.mark.parametrize("shape", [(2, 1, 1, 2), (2, 4)])
    def test_a_share_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="over the whole sequence"):
            fit_mask(torch.ones(shape), self.spans, 8, 8)

    def test_queries_and_keys_may_differ_in_number(self) -> None:
        mask = torch.ones(1, 1, 12, 8)
        assert fit_mask(mask, self.spans, 12, 8).shape == (1, 1, 12, 6)

    def test_a_row_per_real_query_is_refused(self) -> None:
        with pytest.raises(ValueError, match="mask of 6 rows does not fit 8 queries"):
            fit_mask(torch.ones(1, 1, 6, 8), self.spans, 8, 8)


@pytest.mark.parametrize(
    ("num_tokens", "real"), [(7, [2, 2, 2, 1]), (5, [2, 2, 1, 0]), (8, [2] * 4)]
)
def test_a_rank_knows_how_many_of_its_rows_are_tokens(num_tokens: int, real: list[int]) -> None:
    padding = TokenPadding(4, [TEXT, IMAGE])
    padding.set(IMAGE, num_tokens)
    padding.set(TEXT, 3)
    assert [padding.real_share(IMAGE, 2, rank) for rank in range(4)] == real


def test_rows_that_are_no_share_are_refused_where_some_may_be_padding() -> None:
    padding = TokenPadding(4, [TEXT, IMAGE])
    assert padding.real_share("another", 9, 3) == 9
    padding.set(IMAGE, 7)
    for stream, rows in ((IMAGE, 3), ("another", 2)):
        with pytest.raises(ValueError, match=r"cache.*multiple of 4"):
            padding.real_share(stream, rows, 0)
