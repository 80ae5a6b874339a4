"""select-v-major without some tokens: which ones are left out, and what stands for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from cocodiff_compile.ir.records import Leg
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.v_major.delta_code import FULL, SCALE_BITS, num_words
from cocodiff_compile.v_major.travel import IN_FULL, Remembered, Travel
from tests.lockstep import equal_on_every_rank
from tests.selective import (
    NUM_RANKS,
    Captured,
    Selective,
    code_by_contract,
    differing_share,
    every_model,
    exchanged,
    idiom,
    in_chunks,
    in_phases,
    model,
    num_gathers,
    outputs_of_steps,
    same,
    with_broken_element,
)

pytestmark = pytest.mark.usefixtures("without_gradients")


class TokensByContract:
    """What is held of each exchange's result, where only the tokens whose V changed most are sent.

    Results have the tokens of rank 0, of rank 1, .. in their `gather_dim`, on the rank of some
    heads: what changed of a token is summed over these ranks.
    """

    def __init__(self, base: Captured, compare: str) -> None:
        self.compare = compare
        self.sites = [[leg.exchange for leg in site.legs] for site in base.found.sites]
        self.places = {piece.start: place for place, piece in enumerate(base.pieces)}
        self.held: dict[int, list[Tensor]] = {}
        self.seen: dict[int, list[Tensor]] = {}

    def step(self, exact: Sequence[list[Tensor]], count: int | None) -> list[list[Tensor]]:
        """What results from each exchange; `count` tokens of every rank are sent, None: all."""
        found = list(exact)
        for legs in self.sites:
            places = [self.places[item.start] for item in legs[:3]]
            tokens = None if count is None else self._changed_most(legs, exact, count)
            for place, leg in zip(places, legs, strict=False):
                if tokens is not None:
                    found[place] = [
                        self._merged(old, new, leg.gather_dim, tokens)
                        for old, new in zip(self.held[place], exact[place], strict=True)
                    ]
                self.held[place], self.seen[place] = found[place], exact[place]
        return found

    def _changed_most(
        self, legs: Sequence[Any], exact: Sequence[list[Tensor]], count: int
    ) -> Tensor:
        """A mask of tokens: [P * S]."""
        place, dim = self.places[legs[2].start], legs[2].gather_dim
        compared = (self.held if self.compare == "sent" else self.seen)[place]
        change = sum(
            (new.double() - old.double()).abs().movedim(dim, 0).flatten(1).sum(1)
            for new, old in zip(exact[place], compared, strict=True)
        )
        assert isinstance(change, Tensor)
        by_rank = change.view(NUM_RANKS, -1)
        chosen = by_rank.topk(count, 1).indices
        return torch.zeros_like(by_rank, dtype=torch.bool).scatter(1, chosen, True).flatten()

    @staticmethod
    def _merged(old: Tensor, new: Tensor, dim: int, tokens: Tensor) -> Tensor:
        shape = [1] * new.dim()
        shape[dim] = -1
        return torch.where(tokens.view(shape), new, old)


@pytest.mark.parametrize("compare", ["sent", "seen"])
@pytest.mark.parametrize(
    ("name", "omitted"),
    [("flux", 0.5), ("flux", 1.0), ("sd3", 0.25), ("sd3", 0.5), ("sd3", 1.0)],
)
def test_tokens_whose_v_changed_least_are_taken_from_memory(
    name: str, compare: Literal["sent", "seen"], omitted: float
) -> None:
    travel = Travel((FULL,) * 4, omitted)
    selective = Selective(model(name), IN_FULL, travel, compare=compare)
    reference = TokensByContract(selective.base, compare)
    tokens = int(selective.base.found.sites[0].v.tokens_per_rank)
    sent = max(1, tokens - int(omitted * tokens))
    assert 1 <= sent < tokens
    for number, inputs in enumerate(selective.base.inputs(4)):
        step = selective.step(travel if number else IN_FULL, inputs)
        exact = selective.with_packed(inputs, step).results
        assert same(step.results, reference.step(exact, sent if number else None))
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
    assert not same(step.results, exact)


@every_model
def test_of_some_tokens_as_many_bytes_travel_as_they_have(name: str) -> None:
    base, travel = model(name), Travel((FULL, 4, FULL, 8), 0.5)
    selective = Selective(base, IN_FULL, travel)
    graph = selective.variants[travel].graph
    found = selective.results[travel].recognition
    assert found is not None
    assert num_gathers(graph) == num_gathers(base.graph) + len(base.found.sites)
    for before, after in zip(base.found.sites, found.sites, strict=True):
        tokens = int(before.v.tokens_per_rank)
        for old, new in zip(before.legs, after.legs, strict=True):
            bits = travel.bits_of()[old.role]
            share = 1 if old.role == "o" else (tokens - tokens // 2) / tokens
            group, whole = int(old.head_size), int(old.exchange.size_bytes)
            rows = int(share * (whole // (4 * group * NUM_RANKS)))
            words = rows * group * bits // 32 + num_words(rows, SCALE_BITS)
            coded = NUM_RANKS * (4 * words + group)
            assert new.exchange.size_bytes == (share * whole if bits == FULL else coded)


@every_model
def test_of_sent_tokens_the_code_is_remembered_that_the_contract_says(name: str) -> None:
    """Rows of the tokens whose V changed most, each head of them a group; the rest stay."""
    some = Travel((4, 2, 8, 4), 0.5)
    selective = Selective(model(name), IN_FULL, some)
    first, *later = selective.base.inputs(3)
    selective.step(IN_FULL, first)
    places = {piece.start: place for place, piece in enumerate(selective.base.pieces)}
    for inputs in later:
        before = [[sent.clone() for sent, _ in mine] for mine in selective.pairs()]
        step = selective.step(some, inputs)
        for site in selective.base.found.sites:
            value = places[site.v.exchange.start]
            for leg, rank in itertools.product((site.q, site.k, site.v), range(NUM_RANKS)):
                place = places[leg.exchange.start]
                chosen = _chosen(step.packed[value][rank], before[value][rank], site.v)
                bits = some.bits_of()[leg.role]
                expected = _remembered(
                    step.packed[place][rank], before[place][rank], leg, bits, chosen
                )
                ours, _ = selective.pairs()[place][rank]
                assert differing_share([ours.view(expected.shape)], [expected]) < 0.002


def _by_token(values: Tensor, leg: Leg) -> Tensor:
    assert leg.exchange.token_rows is not None
    return values.reshape(NUM_RANKS, *leg.exchange.token_rows, -1)


def _chosen(packed: Tensor, sent: Tensor, value: Leg) -> Tensor:
    """Half of a rank's tokens, as numbers in order."""
    change = (_by_token(packed, value).double() - _by_token(sent, value).double()).abs()
    by_token = change.sum((0, 1, 3))
    return by_token.topk(len(by_token) - len(by_token) // 2).indices.sort().values


def _remembered(packed: Tensor, sent: Tensor, leg: Leg, bits: int, chosen: Tensor) -> Tensor:
    """By the sender: [P, before, tokens, behind]."""
    result = _by_token(sent, leg).clone()
    rows, old = _by_token(packed, leg)[:, :, chosen], result[:, :, chosen]
    expected, _ = code_by_contract(rows, old, bits, int(leg.head_size))
    result[:, :, chosen] = expected.view(rows.shape)
    return result


@pytest.mark.parametrize("first", [IN_FULL, Travel.all_in(8, is_anew=True)], ids=str)
def test_some_tokens_coded_are_remembered_the_same_by_both_sides(first: Travel) -> None:
    some = Travel((4, 4, 4, 4), 0.5)
    selective = Selective(model("sd3"), first, some)
    for kind, inputs in zip((first, some, some), selective.base.inputs(3), strict=True):
        before = [[held.clone() for _, held in mine] for mine in selective.pairs()]
        step = selective.step(kind, inputs)
        for pairs in selective.pairs():
            expected = exchanged([sent for sent, _ in pairs])
            held = [item for _, item in pairs]
            assert same([held], [expected])
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
    for place, old in enumerate(before):
        kept = [
            (ours == theirs).float().mean()
            for ours, theirs in zip(
                (held for _, held in selective.pairs()[place]), old, strict=True
            )
        ]
        way_out = place % 4 == 3
        assert max(kept) < 0.1 if way_out else 0.5 <= min(kept) <= max(kept) < 0.6


@pytest.mark.parametrize("compare", ["sent", "seen"])
def test_some_tokens_in_phases_are_the_same_bit_for_bit(compare: Literal["sent", "seen"]) -> None:
    base, travel = model("flux"), Travel((FULL, 4, FULL, 8), 0.5)
    flat = Selective(base, IN_FULL, travel, compare=compare)
    phased = Selective(base, IN_FULL, travel, compare=compare, then=in_phases)
    steps = zip(outputs_of_steps(flat, travel), outputs_of_steps(phased, travel), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(flat.memories, phased.memories)


def test_a_token_that_is_not_finite_is_sent_and_not_remembered() -> None:
    travel = Travel((FULL,) * 4, 0.5)
    selective = Selective(model("sd3"), IN_FULL, travel)
    first, second, third = selective.base.inputs(3)
    selective.step(IN_FULL, first)
    step = selective.step(travel, with_broken_element(second, selective.base.names, float("nan")))
    assert all(item[0].isnan().any() for item in step.outputs)
    assert all(memory.isfinite().all() for mine in selective.memories for memory in mine)
    after = selective.step(travel, third)
    assert all(item[0].isfinite().all() for item in after.outputs)


def test_tokens_are_left_out_of_whole_exchanges_only() -> None:
    some = Travel((FULL,) * 4, 0.5)
    coded = Travel((4, 4, 4, 4), 0.5)
    for travel, plain in ((some, IN_FULL), (coded, Travel.all_in(4))):
        selective = Selective(in_chunks("sd3"), IN_FULL, travel)
        (declined,) = selective.results[travel].declined
        assert "chunks" in declined.reason
        expected = Selective(in_chunks("sd3"), IN_FULL, plain, Travel.all_in(4))
        for kind, inputs in zip((IN_FULL, plain), selective.base.inputs(2), strict=True):
            ours = selective.step(kind if kind == IN_FULL else travel, inputs)
            assert equal_on_every_rank(ours.outputs, expected.step(kind, inputs).outputs)


def test_tokens_of_roles_that_travel_together_are_not_left_out() -> None:
    base = idiom("packed by stack")
    travel = Travel((FULL,) * 4, 0.5)
    selective = Selective(base, IN_FULL, travel)
    (declined,) = selective.results[travel].declined
    assert "travel together" in declined.reason
    assert not selective.memories[0], "nothing would ever read it"
    for kind in (IN_FULL, travel):
        select = SelectVMajor(kind, Remembered.for_all([travel]))
        assert not select.rewrites_any(base.found)
        assert not selective.results[kind].changed


@pytest.mark.parametrize(
    "travel", [Travel((FULL,) * 4, 0.5), Travel((FULL, 4, 4, 4), 0.5)], ids=str
)
def test_a_first_step_anew_is_remembered_where_other_steps_need_it(travel: Travel) -> None:
    """Q in full is held and not remembered as sent; O in full is neither, and stays in full."""
    first = Travel.all_in(8, is_anew=True)
    selective = Selective(model("sd3"), first, travel)
    for kind, inputs in zip((first, travel), selective.base.inputs(2), strict=True):
        step = selective.step(kind, inputs)
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
        assert all(memory.isfinite().all() for mine in selective.memories for memory in mine)
    held = selective.step(first, inputs)
    assert not same(held.results, step.results)
