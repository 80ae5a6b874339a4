# SPDX-License-Identifier: Apache-2.0
"""select-v-major without some tokens: which ones are skipped, and what stands for them."""

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
from cocodiff_compile.v_major.payload import UNCOMPRESSED, CachedRoles, Payload
from tests.support.lockstep import equal_on_every_rank
from tests.support.selective import (
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
    """The results of exchanges as ranks hold them if only the tokens whose V changed most are sent.

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
        """Returns the result of each exchange; every rank sends `count` tokens, or all if None."""
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
    ("name", "skipped_share"),
    [("flux", 0.5), ("flux", 1.0), ("sd3", 0.25), ("sd3", 0.5), ("sd3", 1.0)],
)
def test_tokens_whose_v_changed_least_are_taken_from_the_cache(
    name: str, compare: Literal["sent", "seen"], skipped_share: float
) -> None:
    payload = Payload((FULL,) * 4, skipped_share)
    selective = Selective(model(name), UNCOMPRESSED, payload, compare=compare)
    reference = TokensByContract(selective.base, compare)
    tokens = int(selective.base.found.sites[0].v.tokens_per_rank)
    sent = max(1, tokens - int(skipped_share * tokens))
    assert 1 <= sent < tokens
    for number, inputs in enumerate(selective.base.inputs(4)):
        step = selective.step(payload if number else UNCOMPRESSED, inputs)
        exact = selective.with_packed(inputs, step).results
        assert same(step.results, reference.step(exact, sent if number else None))
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
    assert not same(step.results, exact)


@every_model
def test_of_some_tokens_as_many_bytes_are_sent_as_they_have(name: str) -> None:
    base, payload = model(name), Payload((FULL, 4, FULL, 8), 0.5)
    selective = Selective(base, UNCOMPRESSED, payload)
    graph = selective.variants[payload].graph
    recognition = selective.results[payload].recognition
    assert recognition is not None
    assert num_gathers(graph) == num_gathers(base.graph) + len(base.found.sites)
    for before, after in zip(base.found.sites, recognition.sites, strict=True):
        tokens = int(before.v.tokens_per_rank)
        for old, new in zip(before.legs, after.legs, strict=True):
            bits = payload.bits_of()[old.role]
            share = 1 if old.role == "o" else (tokens - tokens // 2) / tokens
            group, whole = int(old.head_size), int(old.exchange.size_bytes)
            rows = int(share * (whole // (4 * group * NUM_RANKS)))
            words = rows * group * bits // 32 + num_words(rows, SCALE_BITS)
            coded = NUM_RANKS * (4 * words + group)
            assert new.exchange.size_bytes == (share * whole if bits == FULL else coded)


@every_model
def test_of_sent_tokens_the_code_is_cached_that_the_contract_says(name: str) -> None:
    """Rows of the tokens whose V changed most, each head of them a group; the rest stay."""
    some = Payload((4, 2, 8, 4), 0.5)
    selective = Selective(model(name), UNCOMPRESSED, some)
    first, *later = selective.base.inputs(3)
    selective.step(UNCOMPRESSED, first)
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
                expected = _cached(step.packed[place][rank], before[place][rank], leg, bits, chosen)
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


def _cached(packed: Tensor, sent: Tensor, leg: Leg, bits: int, chosen: Tensor) -> Tensor:
    """Returns what the sender caches: [P, before, tokens, behind]."""
    result = _by_token(sent, leg).clone()
    rows, old = _by_token(packed, leg)[:, :, chosen], result[:, :, chosen]
    expected, _ = code_by_contract(rows, old, bits, int(leg.head_size))
    result[:, :, chosen] = expected.view(rows.shape)
    return result


@pytest.mark.parametrize("first", [UNCOMPRESSED, Payload.uniform(8, is_intra_coded=True)], ids=str)
def test_some_tokens_coded_are_cached_the_same_by_both_sides(first: Payload) -> None:
    some = Payload((4, 4, 4, 4), 0.5)
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
    base, payload = model("flux"), Payload((FULL, 4, FULL, 8), 0.5)
    flat = Selective(base, UNCOMPRESSED, payload, compare=compare)
    phased = Selective(base, UNCOMPRESSED, payload, compare=compare, then=in_phases)
    steps = zip(outputs_of_steps(flat, payload), outputs_of_steps(phased, payload), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(flat.caches, phased.caches)


def test_a_token_that_is_not_finite_is_sent_and_not_cached() -> None:
    payload = Payload((FULL,) * 4, 0.5)
    selective = Selective(model("sd3"), UNCOMPRESSED, payload)
    first, second, third = selective.base.inputs(3)
    selective.step(UNCOMPRESSED, first)
    step = selective.step(payload, with_broken_element(second, selective.base.names, float("nan")))
    assert all(item[0].isnan().any() for item in step.outputs)
    assert all(cache.isfinite().all() for mine in selective.caches for cache in mine)
    after = selective.step(payload, third)
    assert all(item[0].isfinite().all() for item in after.outputs)


def test_tokens_are_skipped_of_whole_exchanges_only() -> None:
    some = Payload((FULL,) * 4, 0.5)
    coded = Payload((4, 4, 4, 4), 0.5)
    for payload, plain in ((some, UNCOMPRESSED), (coded, Payload.uniform(4))):
        selective = Selective(in_chunks("sd3"), UNCOMPRESSED, payload)
        (declined,) = selective.results[payload].declined
        assert "chunks" in declined.reason
        expected = Selective(in_chunks("sd3"), UNCOMPRESSED, plain, Payload.uniform(4))
        for kind, inputs in zip((UNCOMPRESSED, plain), selective.base.inputs(2), strict=True):
            ours = selective.step(kind if kind == UNCOMPRESSED else payload, inputs)
            assert equal_on_every_rank(ours.outputs, expected.step(kind, inputs).outputs)


def test_tokens_of_roles_that_share_an_exchange_are_not_skipped() -> None:
    base = idiom("packed by stack")
    payload = Payload((FULL,) * 4, 0.5)
    selective = Selective(base, UNCOMPRESSED, payload)
    (declined,) = selective.results[payload].declined
    assert "share one exchange" in declined.reason
    assert not selective.caches[0], "nothing would ever read it"
    for kind in (UNCOMPRESSED, payload):
        select = SelectVMajor(kind, CachedRoles.for_payloads([payload]))
        assert not select.rewrites_any(base.found)
        assert not selective.results[kind].changed


@pytest.mark.parametrize(
    "payload", [Payload((FULL,) * 4, 0.5), Payload((FULL, 4, 4, 4), 0.5)], ids=str
)
def test_an_intra_coded_first_step_is_cached_where_other_steps_need_it(payload: Payload) -> None:
    """Q in full is held and not remembered as sent; O in full is neither, and stays in full."""
    first = Payload.uniform(8, is_intra_coded=True)
    selective = Selective(model("sd3"), first, payload)
    for kind, inputs in zip((first, payload), selective.base.inputs(2), strict=True):
        step = selective.step(kind, inputs)
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
        assert all(cache.isfinite().all() for mine in selective.caches for cache in mine)
    held = selective.step(first, inputs)
    assert not same(held.results, step.results)
