# SPDX-License-Identifier: Apache-2.0
"""select-v-major in graphs: where memories lie, what other passes make of it, what is declined."""

from __future__ import annotations

import functools

import pytest
from torch.fx import Graph

from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.schedule.graph_tasks import is_anchor, is_write_back, node_order, reorder
from cocodiff_compile.v_major.delta_code import FULL
from cocodiff_compile.v_major.payload import UNCOMPRESSED, CachedRoles, Payload
from tests.support.captured import fake_ranks
from tests.support.lockstep import equal_on_every_rank
from tests.support.selective import (
    MIXED,
    NUM_RANKS,
    Captured,
    Selective,
    idiom,
    in_chunks,
    in_phases,
    kinds_of_models,
    model,
    outputs_of_steps,
    same,
    small_model,
)

INTRA = Payload.uniform(8, is_intra_coded=True)
EVERYTHING = CachedRoles.for_payloads([Payload.uniform(4)])

pytestmark = pytest.mark.usefixtures("without_gradients")

# Memories


def test_all_kinds_of_steps_cache_in_the_same_places() -> None:
    payloads = (UNCOMPRESSED, INTRA, Payload.uniform(2), MIXED, Payload((FULL,) * 4, 0.5))
    selective = Selective(model("flux"), *payloads, measures_drift=True)
    first, *others = ([(t.shape, t.dtype) for t in selective.cache_inputs(k)] for k in payloads)
    assert len(first) == 2 * len(selective.base.pieces) + 1
    assert all(other == first for other in others)


def test_what_no_kind_of_step_needs_is_not_cached() -> None:
    base = model("sd3")
    assert len(Selective(base, UNCOMPRESSED, MIXED).caches[0]) == 2 * 3
    assert len(Selective(base, INTRA, MIXED).caches[0]) == 2 * 3
    tokens = Selective(base, UNCOMPRESSED, Payload((FULL,) * 4, 0.5))
    assert len(tokens.caches[0]) == 1 + 3  # V as sent; Q, K and V as received


def test_where_nothing_is_to_be_cached_the_graph_stays_to_the_letter() -> None:
    base = model("sd3").copy()
    before = str(base.graph)
    with fake_ranks(NUM_RANKS):
        select = SelectVMajor(UNCOMPRESSED, CachedRoles.for_payloads([UNCOMPRESSED]))
        result = select.run(base.graph, base.found)
    assert not result.changed
    assert not result.declined
    assert str(base.graph) == before


# With other passes


@kinds_of_models(UNCOMPRESSED, INTRA, Payload.uniform(4), MIXED)
def test_phases_carry_the_same_bit_for_bit(name: str, payload: Payload) -> None:
    chunked = in_chunks(name)
    flat = Selective(chunked, UNCOMPRESSED, payload, MIXED)
    phased = Selective(chunked, UNCOMPRESSED, payload, MIXED, then=in_phases)
    steps = zip(outputs_of_steps(flat, payload), outputs_of_steps(phased, payload), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(flat.caches, phased.caches)


def _in_order_of_tasks(graph: Graph, recognition: Recognition) -> PassResult:
    """Orders a graph as a schedule does: light nodes where they are needed, copies early."""
    graph.eliminate_dead_code()
    anchors = [node for node in graph.nodes if is_anchor(node)]
    reorder(graph, node_order(graph, anchors, range(len(anchors))))
    return PassResult(True, recognition)


@pytest.mark.parametrize(
    "payload", [UNCOMPRESSED, INTRA, Payload.uniform(4), Payload((4, FULL, 2, 8), 0.5)]
)
@pytest.mark.parametrize("measures_drift", [True, False])
def test_an_order_of_tasks_changes_no_value_and_no_cache(
    payload: Payload, measures_drift: bool
) -> None:
    base, kinds = model("sd3"), (UNCOMPRESSED, payload, Payload.uniform(4))
    plain = Selective(base, *kinds, measures_drift=measures_drift)
    ordered = Selective(base, *kinds, measures_drift=measures_drift, then=_in_order_of_tasks)
    steps = zip(outputs_of_steps(plain, payload), outputs_of_steps(ordered, payload), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(plain.caches, ordered.caches)


@pytest.mark.parametrize("measures_drift", [True, False])
def test_what_was_sent_is_cached_before_the_attention(measures_drift: bool) -> None:
    """A later copy would keep what was sent in memory until the end of the graph."""
    payload = Payload.uniform(4)
    selective = Selective(
        model("sd3"), payload, measures_drift=measures_drift, then=_in_order_of_tasks
    )
    nodes = list(selective.variants[payload].graph.nodes)
    (attention,) = (place for place, node in enumerate(nodes) if is_attention(node.target))
    before = [node for node in nodes[:attention] if is_write_back(node)]
    assert len(before) == 6, "Q, K and V, as sent and as received"


# Declined


@pytest.mark.parametrize("payload", [UNCOMPRESSED, Payload.uniform(4)], ids=str)
@pytest.mark.parametrize("measures_drift", [True, False])
def test_symbolic_sizes_are_declined_and_the_graph_stays_to_the_letter(
    payload: Payload, measures_drift: bool
) -> None:
    _assert_declined(_dynamic(), payload, measures_drift, "symbolic sizes", "dynamic=False")


@functools.cache
def _dynamic() -> Captured:
    return idiom("dynamic")


@pytest.mark.parametrize("payload", [UNCOMPRESSED, Payload.uniform(4)], ids=str)
@pytest.mark.parametrize("measures_drift", [True, False])
def test_heads_that_8_do_not_divide_are_declined_and_the_graph_stays_to_the_letter(
    payload: Payload, measures_drift: bool
) -> None:
    _assert_declined(small_model("sd3", 12), payload, measures_drift, "heads of 12 elements", "8")


def _assert_declined(base: Captured, payload: Payload, measures_drift: bool, *words: str) -> None:
    assert base.pieces
    own = base.copy()
    before = str(own.graph)
    with fake_ranks(NUM_RANKS):
        select = SelectVMajor(payload, EVERYTHING, measures_drift=measures_drift)
        result = select.run(own.graph, own.found)
    assert not result.changed
    assert str(own.graph) == before
    assert len(result.declined) == len(own.pieces)
    assert all(word in item.reason for item in result.declined for word in words)


def test_an_exchange_that_is_declined_leaves_others_alone() -> None:
    """V of four elements per head, and O with it, stay as they are; Q and K are coded."""
    base = idiom("small values")
    payload = Payload.uniform(8)
    selective = Selective(base, UNCOMPRESSED, payload)
    (site,) = base.found.sites
    declined = selective.results[payload].declined
    assert len(declined) == 2
    assert all("heads of 4 elements" in item.reason for item in declined)
    assert len(selective.caches[0]) == 4
    for kind, inputs in zip((UNCOMPRESSED, payload), base.inputs(2), strict=True):
        step = selective.step(kind, inputs)
        exact = selective.with_packed(inputs, step).results
        places = [base.pieces.index(leg.exchange) for leg in site.legs]
        for place, is_coded in zip(places, (True, True, False, False), strict=True):
            is_same = same([step.results[place]], [exact[place]])
            assert is_same == (kind.is_uncompressed or not is_coded)
