# SPDX-License-Identifier: Apache-2.0
"""Some tokens of what is exchanged: which ones, taken out and put back."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.v_major.token_rows import changed_most, put_tokens, take_tokens

NUM_RANKS, BEFORE, TOKENS, BEHIND = 3, 2, 7, 4
SHAPE = (NUM_RANKS, BEFORE, TOKENS, BEHIND)

tokens_of_a_rank = st.sets(st.integers(0, TOKENS - 1), min_size=1).map(sorted)


def origins() -> Tensor:
    """Every element another one."""
    return torch.arange(NUM_RANKS * BEFORE * TOKENS * BEHIND).view(SHAPE).float()


def test_the_tokens_that_changed_most_come_in_order() -> None:
    compared = origins()
    values = compared.clone()
    values[2, 1, 5, 3] += 10
    values[0, 0, 1, 0] -= 20
    values[:, :, 3] += 0.1
    values[1, 0, 6] += 2
    assert changed_most(values, compared, ((TOKENS, 1),)).tolist() == [[1]]
    assert changed_most(values, compared, ((TOKENS, 3),)).tolist() == [[1, 5, 6]]
    assert changed_most(values, compared, ((TOKENS, 4),)).tolist() == [[1, 3, 5, 6]]


def test_changes_are_summed_over_samples_heads_and_elements_by_their_size() -> None:
    """Many small ones of both signs count more than a large one."""
    values, compared = torch.zeros(SHAPE), torch.zeros(SHAPE)
    values[:, :, 2] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    values[0, 0, 4, 0] = 23.0
    assert changed_most(values, compared, ((TOKENS, 1),)).tolist() == [[2]]
    values[0, 0, 4, 0] = 25.0
    assert changed_most(values, compared, ((TOKENS, 1),)).tolist() == [[4]]


def test_what_is_not_finite_changed_most() -> None:
    compared = torch.zeros(SHAPE)
    values = torch.full(SHAPE, 1e30)
    values[0, 0, 2, 0] = float("nan")
    values[2, 1, 5, 3] = float("-inf")
    assert changed_most(values, compared, ((TOKENS, 2),)).tolist() == [[2, 5]]


def test_small_changes_of_half_precision_are_told_apart() -> None:
    compared = torch.full(SHAPE, 300.0, dtype=torch.float16)
    values = compared.clone()
    values[:, :, 1] += 200
    values[:, :, 4] += 201
    assert changed_most(values * 100, compared * 100, ((TOKENS, 1),)).tolist() == [[4]]


def test_all_tokens_are_all_tokens() -> None:
    assert changed_most(origins(), origins(), ((TOKENS, TOKENS),)).tolist() == [list(range(TOKENS))]


def test_what_changed_counts_alike_whatever_rank_it_is_for() -> None:
    values, compared = torch.zeros(SHAPE), torch.zeros(SHAPE)
    values[:, 0, 3, 0] = torch.tensor([1.0, -1.0, 1.0])
    for rank in range(NUM_RANKS):
        large = values.clone()
        large[rank, 1, 6, 2] = 2.5
        assert changed_most(large, compared, ((TOKENS, 1),)).tolist() == [[3]]
        large[rank, 1, 6, 2] = -3.5
        assert changed_most(large, compared, ((TOKENS, 1),)).tolist() == [[6]]


@given(tokens_of_a_rank)
def test_tokens_that_are_the_same_for_all_ranks_are_taken_and_put_back(chosen: list[int]) -> None:
    values, tokens = origins(), torch.tensor([chosen])
    rows = take_tokens(values, tokens)
    assert torch.equal(rows, values[:, :, chosen])
    changed = put_tokens(values, tokens, rows + 0.5)
    for token in range(TOKENS):
        expected = values[:, :, token] + (0.5 if token in chosen else 0)
        assert torch.equal(changed[:, :, token], expected)
    assert torch.equal(values, origins()), "nothing is changed in place"


@given(st.integers(1, TOKENS), st.randoms(use_true_random=False))
def test_tokens_of_each_rank_are_taken_and_put_back(count: int, rng: random.Random) -> None:
    chosen = [sorted(rng.sample(range(TOKENS), count)) for _ in range(NUM_RANKS)]
    values, tokens = origins(), torch.tensor(chosen)
    rows = take_tokens(values, tokens)
    for rank, mine in enumerate(chosen):
        assert torch.equal(rows[rank], values[rank][:, mine])
    changed = put_tokens(values, tokens, rows + 0.5)
    for rank, mine in enumerate(chosen):
        is_chosen = torch.tensor([token in mine for token in range(TOKENS)]).view(1, -1, 1)
        assert torch.equal(changed[rank], torch.where(is_chosen, values[rank] + 0.5, values[rank]))
    assert torch.equal(values, origins()), "nothing is changed in place"
