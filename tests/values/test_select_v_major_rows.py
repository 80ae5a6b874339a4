# SPDX-License-Identifier: Apache-2.0
"""select-v-major without some tokens: what is not computed of them, whose output is reused, and how
many are skipped of each stream and of each attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, aten, parse_fused_attention
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.records import UlyssesSite
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.v_major.delta_code import FULL
from cocodiff_compile.v_major.payload import UNCOMPRESSED, CachedRoles, Payload
from tests.support.lockstep import equal_on_every_rank
from tests.support.selective import (
    NUM_RANKS,
    PerRank,
    Selective,
    every_model,
    exchanged,
    idiom,
    model,
    same,
    small_model,
    with_broken_element,
)

pytestmark = pytest.mark.usefixtures("without_gradients")

HALF = Payload((FULL,) * 4, 0.5)
HALF_AND_OUTPUT = Payload((FULL,) * 4, 0.5, reuses_output=True)
STEPS = 3


def streams_of(site: UlyssesSite, text_first: bool) -> list[int]:
    """Tokens of a rank by projection of V, as they lie; the picture is projected first."""
    tokens = int(site.v.tokens_per_rank)
    rows = [int(item.rows) for item in site.v.projections]
    sizes = [size * tokens // sum(rows) for size in rows]
    return sizes[::-1] if text_first else sizes


class RowsByContract:
    """Whole networks of all ranks, attention by attention, as they were captured, but for what
    results from exchanges.
    """

    def __init__(
        self, selective: Selective, payload: Payload, apart: bool = False, text_first: bool = False
    ) -> None:
        self.selective, self.apart, self.text_first = selective, apart, text_first
        self.reuses, self.share = payload.reuses_output, payload.skipped_share
        self.held: dict[Node, list[Tensor]] = {}

    def step(self, inputs: Sequence[PerRank], is_first: bool) -> list[tuple[Any, ...]]:
        """Outputs by rank."""
        instead: dict[Node, PerRank] = {}
        for site in self.selective.base.found.sites:
            value = site.v.exchange
            exact = self._results(inputs, instead)
            mask = None if is_first else self._mask(site, exact[value.result])
            for leg in (site.v, site.k) if self.reuses else (site.v, site.k, site.q):
                found = exact[leg.exchange.result]
                instead[leg.exchange.result] = self._merged(
                    leg.exchange.result, found, leg.exchange.gather_dim, mask
                )
            if self.reuses:
                result = site.o.exchange.result
                found = self._results(inputs, instead)[result]
                own = None if mask is None else mask.view(NUM_RANKS, -1)
                dim = list(found[0].shape).index(int(site.v.tokens_per_rank))
                instead[result] = self._merged(result, found, dim, own)
        return self.selective.exact(inputs, instead).outputs

    def _results(
        self, inputs: Sequence[PerRank], instead: dict[Node, PerRank]
    ) -> dict[Node, list[Tensor]]:
        step = self.selective.exact(inputs, dict(instead))
        pieces = self.selective.base.pieces
        return {piece.result: mine for piece, mine in zip(pieces, step.results, strict=True)}

    def _mask(self, site: UlyssesSite, value: Sequence[Tensor]) -> Tensor:
        """Returns which tokens of all ranks are sent, as a mask [P * S]."""
        dim = site.v.exchange.gather_dim
        held = self.held[site.v.exchange.result]
        changes = [
            (new.double() - old.double()).abs().movedim(dim, 0).flatten(1).sum(1)
            for new, old in zip(value, held, strict=True)
        ]
        by_rank = torch.stack(changes).sum(0).view(NUM_RANKS, -1)
        mask = torch.zeros_like(by_rank, dtype=torch.bool)
        begin = 0
        for size in streams_of(site, self.text_first) if self.apart else [by_rank.shape[1]]:
            count = max(1, size - int(self.share * size))
            chosen = by_rank[:, begin : begin + size].topk(count, 1).indices + begin
            mask.scatter_(1, chosen, True)
            begin += size
        return mask.flatten()

    def _merged(
        self, key: Node, found: Sequence[Tensor], dim: int, mask: Tensor | None
    ) -> list[Tensor]:
        merged = list(found)
        if mask is not None:
            shape = [1] * found[0].dim()
            shape[dim] = -1
            by_rank = mask if mask.dim() == 2 else mask.expand(NUM_RANKS, -1)
            merged = [
                torch.where(own.view(shape), new, old)
                for own, new, old in zip(by_rank, found, self.held[key], strict=True)
            ]
        self.held[key] = merged
        return merged


def num_rows(graph: Graph) -> int:
    """Returns the number of rows of all matmuls that project."""
    targets = (aten.mm.default, aten.addmm.default)
    found = (graph.find_nodes(op="call_function", target=target) for target in targets)
    return sum(node.meta["val"].shape[0] for nodes in found for node in nodes)


def num_queries(graph: Graph) -> list[int]:
    nodes = [node for node in graph.nodes if is_attention(node.target)]
    return [parse_fused_attention(node).query.meta["val"].shape[2] for node in nodes]


def cases(*names: str) -> Any:
    """(model, whether output is reused, whether streams are apart)"""
    found = [(name, True, True) for name in names]
    found += [("sd3", True, False), ("sd3", False, True), ("sd3", False, False)]
    return pytest.mark.parametrize(("name", "reuses", "apart"), found)


@cases("flux", "sd3")
def test_tokens_that_are_not_sent_stand_as_they_last_arrived(
    name: str, reuses: bool, apart: bool
) -> None:
    payload = HALF_AND_OUTPUT if reuses else HALF
    selective = Selective(
        model(name), UNCOMPRESSED, payload, selects_per_stream=apart, skips_unsent=True
    )
    assert not selective.results[payload].declined
    reference = RowsByContract(selective, payload, apart, text_first=name == "flux")
    for number, inputs in enumerate(selective.base.inputs(STEPS)):
        ours = selective.step(payload if number else UNCOMPRESSED, inputs).outputs
        theirs = reference.step(inputs, is_first=not number)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    exact = selective.exact(inputs).outputs
    assert not torch.allclose(ours[0][0], exact[0][0], rtol=1e-3, atol=1e-4)


@every_model
def test_q_and_k_of_tokens_that_are_not_sent_are_not_computed(name: str) -> None:
    base = model(name)
    graphs = []
    for skips in (False, True):
        selective = Selective(base, UNCOMPRESSED, HALF, selects_per_stream=True, skips_unsent=skips)
        graph = selective.variants[HALF].copied_graph()
        graph.eliminate_dead_code()
        graphs.append(graph)
    left_out = 0
    for site in base.found.sites:
        for leg in (site.q, site.k):
            for item in leg.projections:
                batch = sum(int(one.rows) for one in leg.projections) // int(leg.tokens_per_rank)
                left_out += batch * (int(item.rows) // batch // 2)
    assert num_rows(graphs[0]) - num_rows(graphs[1]) == left_out > 0


def test_where_streams_are_together_their_tokens_are_all_computed() -> None:
    """The number of tokens that each stream sends is unknown then; single streams skip tokens."""
    whole, skipped = (
        Selective(model("flux"), UNCOMPRESSED, HALF, skips_unsent=skips)
        .variants[HALF]
        .copied_graph()
        for skips in (False, True)
    )
    whole.eliminate_dead_code()
    skipped.eliminate_dead_code()
    single = [site for site in model("flux").found.sites if len(site.q.projections) == 1]
    rows = sum(int(site.q.projections[0].rows) // 2 for site in single)
    assert num_rows(whole) - num_rows(skipped) == 2 * rows > 0


@every_model
def test_where_output_is_reused_attention_and_output_exchange_are_of_sent_tokens(name: str) -> None:
    base = model(name)
    selective = Selective(base, UNCOMPRESSED, HALF, HALF_AND_OUTPUT)
    recognition = selective.results[HALF_AND_OUTPUT].recognition
    assert recognition is not None
    tokens = [int(site.q.tokens_per_rank) for site in base.found.sites]
    sent = [NUM_RANKS * (count - count // 2) for count in tokens]
    assert num_queries(selective.variants[HALF_AND_OUTPUT].graph) == sent
    assert num_queries(selective.variants[HALF].graph) == [NUM_RANKS * count for count in tokens]
    for count, before, after in zip(tokens, base.found.sites, recognition.sites, strict=True):
        for old, new in zip(before.legs, after.legs, strict=True):
            whole = int(old.exchange.size_bytes)
            assert new.exchange.size_bytes == whole * (count - count // 2) // count
        assert set(after.attention.nodes) <= set(selective.variants[HALF_AND_OUTPUT].graph.nodes)


@pytest.mark.slow
def test_what_is_projected_together_is_computed_of_all_tokens() -> None:
    """One GEMM makes Q, K, V and more of FLUX.2's single-stream blocks."""
    base = small_model("flux2")
    fused = [site for site in base.found.sites if site.q.projections[0].is_fused]
    assert fused
    selective = Selective(
        base, UNCOMPRESSED, HALF_AND_OUTPUT, selects_per_stream=True, skips_unsent=True
    )
    assert not selective.results[HALF_AND_OUTPUT].declined
    nodes = set(selective.variants[HALF_AND_OUTPUT].graph.nodes)
    recognition = selective.results[HALF_AND_OUTPUT].recognition
    assert recognition is not None
    for site in recognition.sites:
        assert {item.node for leg in site.legs for item in leg.projections} <= nodes
    reference = RowsByContract(selective, HALF_AND_OUTPUT, apart=True, text_first=True)
    for number, inputs in enumerate(base.inputs(2)):
        ours = selective.step(HALF_AND_OUTPUT if number else UNCOMPRESSED, inputs).outputs
        theirs = reference.step(inputs, is_first=not number)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)


def test_queries_whose_output_is_reused_are_not_cached() -> None:
    names = {}
    for payload in (HALF, HALF_AND_OUTPUT):
        graph = Selective(model("sd3"), UNCOMPRESSED, payload).variants[payload].graph
        names[payload] = {node.name for node in graph.find_nodes(op="placeholder")}
    for site in model("sd3").found.sites:
        query, output = (f"held_{leg.exchange.start.name}" for leg in (site.q, site.o))
        assert {query, output} & names[HALF] == {query}
        assert {query, output} & names[HALF_AND_OUTPUT] == {output}


def test_coded_tokens_whose_output_is_reused_are_cached_the_same_by_both_sides() -> None:
    payload = Payload((4, 4, 4, 4), 0.5, reuses_output=True)
    selective = Selective(
        model("sd3"), UNCOMPRESSED, payload, selects_per_stream=True, skips_unsent=True
    )
    inputs = list(selective.base.inputs(STEPS))
    outputs = selective.step(UNCOMPRESSED, inputs[0]).outputs
    exact = selective.exact(inputs[0]).outputs
    assert equal_on_every_rank(outputs, exact)
    for given in inputs[1:]:
        selective.step(payload, given)
        for pairs in selective.pairs():
            expected = exchanged([sent for sent, _ in pairs])
            assert same([[held for _, held in pairs]], [expected])


def test_a_token_that_is_not_finite_is_sent_and_its_output_not_cached() -> None:
    selective = Selective(model("sd3"), UNCOMPRESSED, HALF_AND_OUTPUT, skips_unsent=True)
    first, second, third = selective.base.inputs(3)
    selective.step(UNCOMPRESSED, first)
    broken = with_broken_element(second, selective.base.names, float("nan"))
    step = selective.step(HALF_AND_OUTPUT, broken)
    assert all(item[0].isnan().any() for item in step.outputs)
    assert all(cache.isfinite().all() for mine in selective.caches for cache in mine)
    after = selective.step(HALF_AND_OUTPUT, third)
    assert all(item[0].isfinite().all() for item in after.outputs)


def test_each_attention_skips_its_own_share() -> None:
    base = model("flux")
    assert len(base.found.sites) == 2
    selective = Selective(base, UNCOMPRESSED, HALF_AND_OUTPUT, layers=(0.0, 0.5))
    recognition = selective.results[HALF_AND_OUTPUT].recognition
    assert recognition is not None
    for before, after, share in zip(base.found.sites, recognition.sites, (0.0, 0.25), strict=True):
        tokens = int(before.q.tokens_per_rank)
        for old, new in zip(before.legs, after.legs, strict=True):
            sent = tokens - int(share * tokens)
            assert new.exchange.size_bytes == int(old.exchange.size_bytes) * sent // tokens
    for kind, inputs in zip((UNCOMPRESSED, HALF_AND_OUTPUT), base.inputs(2), strict=True):
        step = selective.step(kind, inputs)
    assert all(item[0].isfinite().all() for item in step.outputs)
    whole = Selective(base, UNCOMPRESSED, HALF_AND_OUTPUT)
    assert 0 < 2 * len(selective.caches[0]) == len(whole.caches[0])  # none for the first


def test_an_attention_that_skips_nothing_caches_what_is_coded_all_the_same() -> None:
    base, coded = model("flux"), replace(HALF, bits=(FULL, FULL, 4, FULL))
    selective = Selective(base, UNCOMPRESSED, coded, layers=(0.0, 1.0))
    in_first = Selective(base, UNCOMPRESSED, replace(coded, skipped_share=0.0))
    whole = Selective(base, UNCOMPRESSED, coded)
    first, second = (len(item.caches[0]) // 2 for item in (in_first, whole))
    assert (first, second) == (2, 4)
    assert len(selective.caches[0]) == first + second


def test_layers_must_be_as_many_as_attentions() -> None:
    with pytest.raises(UserError, match="'layers' has 3 numbers, and a graph has 2 attentions"):
        Selective(model("flux"), UNCOMPRESSED, HALF, layers=(1.0, 1.0, 1.0))
    select = SelectVMajor(HALF, CachedRoles.for_payloads([HALF]), layers=(1.0,))
    with pytest.raises(UserError, match="'layers' has 1 numbers"):
        select.rewrites_any(model("flux").found)


UNCLEAR = {
    "packed by stack": "Q, K and V share one exchange",
    "norm and RoPE late": "by their position",
    "matmuls with scale and mask": "by their position",
    "mask": "has a mask with a row per query",
    "replicated text": "joins rows of several blocks",
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_where_rows_cannot_be_told_apart_all_tokens_are_sent(name: str) -> None:
    payload = HALF_AND_OUTPUT
    base = idiom(name)
    selective = Selective(base, UNCOMPRESSED, payload, skips_unsent=True)
    (declined,) = selective.results[payload].declined
    assert declined.reason.startswith("no tokens are skipped: ")
    assert UNCLEAR[name] in declined.reason
    graph = selective.variants[payload].graph
    for target in (ALL_TO_ALL, ALL_GATHER):
        before, after = (
            len(item.find_nodes(op="call_function", target=target)) for item in (base.graph, graph)
        )
        assert before == after
    for kind, inputs in zip((UNCOMPRESSED, payload), selective.base.inputs(2), strict=True):
        ours = selective.step(kind, inputs).outputs
        assert equal_on_every_rank(ours, selective.exact(inputs).outputs)
