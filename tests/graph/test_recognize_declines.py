# SPDX-License-Identifier: Apache-2.0
"""recognize-ulysses: near misses are declined with their reason, bystanders are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import pad

from cocodiff_compile import explain
from cocodiff_compile.ir.aten import ALL_TO_ALL, WAIT, emit
from cocodiff_compile.ir.records import Declined
from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import HEAD_SIZE, HEADS, WIDTH, Block, fused
from tests.support.hand_written_declined import (
    BYSTANDERS,
    NEAR_MISSES,
    NUM_RANKS,
    Broken,
    Experts,
    NearMiss,
)
from tests.support.hand_written_more import Gated
from tests.support.hand_written_more_declined import MORE_NEAR_MISSES, linear_attention

every_miss = pytest.mark.parametrize("miss", [*NEAR_MISSES, *MORE_NEAR_MISSES], ids=str)


def _text(gm: GraphModule) -> str:
    gm.recompile()
    return f"{gm.code}\n{gm.graph}"


def _check_reasons(declined: tuple[Declined, ...], miss: NearMiss) -> None:
    reasons = [item.reason for item in declined]
    assert len(reasons) == miss.count, reasons
    for reason in reasons:
        for part in miss.reason:
            assert part in reason


@every_miss
def test_near_miss_is_declined_and_untouched(miss: NearMiss) -> None:
    with fake_ranks(miss.num_ranks):
        (gm,) = capture(miss.build(), *miss.arguments())
        before = _text(gm)
        recognition = recognize(gm.graph)
    assert (recognition.sites, recognition.unrelated) == ((), ())
    _check_reasons(recognition.declined, miss)
    assert all(item.node.graph is gm.graph for item in recognition.declined)
    assert _text(gm) == before


@every_miss
def test_explain_tells_why_a_near_miss_is_declined(miss: NearMiss) -> None:
    torch._dynamo.reset()
    with fake_ranks(miss.num_ranks):
        explanation = explain(miss.build(), *miss.arguments())
    assert explanation.sites == ()
    _check_reasons(explanation.declined, miss)
    for item in explanation.declined:
        assert item.reason in str(explanation)


def test_graph_break_between_exchange_and_attention_is_told() -> None:
    torch._dynamo.reset()
    with fake_ranks(NUM_RANKS):
        explanation = explain(Broken(), torch.ones(2, 5, WIDTH))
    assert len(explanation.graphs) == 2
    assert explanation.sites == ()
    first, second = (graph.report.declined for graph in explanation.graphs)
    assert len(first) == 3
    assert all("graph break" in item.reason for item in first)
    (item,) = second
    assert "the query of this attention comes from no all-to-all" in item.reason


def _captured_block() -> GraphModule:
    (gm,) = capture(Block(), torch.ones(2, 5, WIDTH))
    return gm


def test_group_that_this_process_does_not_know_is_declined() -> None:
    with fake_ranks(NUM_RANKS):
        gm = _captured_block()
        for start in gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL):
            start.update_arg(3, "elsewhere")
        recognition = recognize(gm.graph)
    (item,) = recognition.declined
    assert "process group 'elsewhere' is not known to this process" in item.reason


def test_splits_that_do_not_fit_the_group_are_declined() -> None:
    with fake_ranks(NUM_RANKS):
        pair = torch.distributed.new_group([0, 1])
        gm = _captured_block()
        for start in gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL):
            start.update_arg(3, pair.group_name)
        recognition = recognize(gm.graph)
    (item,) = recognition.declined
    assert "4 splits for the 2 ranks" in item.reason


def test_process_without_groups_declines() -> None:
    with fake_ranks(NUM_RANKS):
        gm = _captured_block()
    (item,) = recognize(gm.graph).declined
    assert "process group '0' is not known" in item.reason


def test_one_bad_attention_does_not_hide_the_good_ones() -> None:
    miss = next(item for item in NEAR_MISSES if item.name == "round-robin heads")
    with fake_ranks(NUM_RANKS):
        model = nn.Sequential(Block(), miss.build(), Block())
        (gm,) = capture(model, *miss.arguments())
        recognition = recognize(gm.graph)
    assert [site.index for site in recognition.sites] == [0, 1]
    assert recognition.sites[0].q.exchange.start < recognition.sites[1].q.exchange.start
    _check_reasons(recognition.declined, miss)


def test_gate_on_the_way_out_has_a_reason_of_its_own() -> None:
    with fake_ranks(NUM_RANKS):
        (gm,) = capture(Gated(), torch.ones(2, 5, WIDTH))
        recognition = recognize(gm.graph)
    (site,) = recognition.sites
    (item,) = recognition.declined
    assert item.node not in [exchange.start for exchange in site.exchanges]
    assert "joins the result of an attention before its output exchange" in item.reason
    assert "aten.mul" in item.reason
    assert recognition.unrelated == ()


def test_experts_behind_an_unknown_attention_stay_unrelated() -> None:
    with fake_ranks(NUM_RANKS):
        model = nn.Sequential(Block(attend=linear_attention), Experts())
        (gm,) = capture(model, torch.ones(2, 5, WIDTH))
        recognition = recognize(gm.graph)
    starts = gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    assert [item.node for item in recognition.declined] == starts[:3]
    assert list(recognition.unrelated) == starts[4:]


def _padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head sizes as a kernel wants them, half as large again, made behind the exchange."""
    return fused(*(pad(x, (0, HEAD_SIZE // 2)) for x in (q, k, v)))[..., :HEAD_SIZE]


def test_heads_padded_late_are_counted_or_declined() -> None:
    with fake_ranks(NUM_RANKS):
        (gm,) = capture(Block(attend=_padded), torch.ones(2, 5, WIDTH))
        recognition = recognize(gm.graph)
    assert len(recognition.sites) + len(recognition.declined) == 1
    for site in recognition.sites:
        assert [leg.num_heads for leg in site.legs] == [HEADS] * 4


def test_an_exchange_that_is_waited_for_twice_is_the_same_exchange() -> None:
    with fake_ranks(NUM_RANKS):
        gm = _captured_block()
        again = []
        for wait in gm.graph.find_nodes(op="call_function", target=WAIT):
            with gm.graph.inserting_after(wait):
                again.append(emit(gm.graph, WAIT, wait, like=wait))
            wait.replace_all_uses_with(again[-1], lambda user: user is not again[-1])
        recognition = recognize(gm.graph)
    assert (recognition.declined, recognition.unrelated) == ((), ())
    (site,) = recognition.sites
    assert [exchange.wait for exchange in site.exchanges] == again


@pytest.mark.parametrize("case", BYSTANDERS, ids=[case[0] for case in BYSTANDERS])
def test_bystanders_are_left_alone(case: tuple[str, type, int, int]) -> None:
    _, build, num_sites, num_unrelated = case
    with fake_ranks(NUM_RANKS):
        (gm,) = capture(build(), torch.ones(2, 5, WIDTH))
        before = _text(gm)
        recognition = recognize(gm.graph)
    assert [item.reason for item in recognition.declined] == []
    assert (len(recognition.sites), len(recognition.unrelated)) == (num_sites, num_unrelated)
    assert all(node.target is ALL_TO_ALL for node in recognition.unrelated)
    assert _text(gm) == before
