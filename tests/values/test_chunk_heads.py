# SPDX-License-Identifier: Apache-2.0
"""chunk-heads: an attention per group of heads is the whole one, for every spelling of Ulysses."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from cocodiff_compile.compiler.exact_rows import rows_differ
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.aten import ALL_TO_ALL
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.pipeline.run_passes import broken_rule
from cocodiff_compile.topology.machine import Machine
from tests.support.captured import capture_call, captured_idiom, fake_ranks
from tests.support.decided import in_phases, in_token_chunks, in_v_first_order
from tests.support.hand_written import HEADS
from tests.support.idioms import IDIOMS, Idiom
from tests.support.lockstep import GRIDS, captured_model, equal_on_every_rank, machine, run_both

DECLINED = {
    "blocks in lists": "split takes some heads",
    "one head per rank": "a rank has 1 heads of Q",
    "one head per rank, head first, one sample": "a rank has 1 heads of Q",
    "einsums, one head per rank": "a rank has 1 heads of Q",
    "fused projection exchanged at once": "cuts through them",
    "replicated text": "sends what was exchanged elsewhere",
    "grouped queries, one kv head per rank": "a rank has 3 heads of Q",
    "result read twice": "has several readers",
    "reversed late": "may mix chunks",
    "reversed late, einsums": "may mix chunks",
}
"""Idioms that are left whole, and a part of the reason."""

FAST = Device("fast next to the links", 1e12, 1e12, 1.0, 1.0, 1.0, 1e-7)


def chunk_all(gm: GraphModule, count: int) -> tuple[GraphModule, PassResult]:
    chunked = GraphModule(gm, copy.deepcopy(gm.graph))
    recognition = recognize(chunked.graph)
    result = ChunkHeads(count).run(chunked.graph, recognition)
    chunked.graph.lint()
    assert broken_rule(chunked.graph) == ""
    return chunked, result


def _grid(idiom: Idiom) -> tuple[int, int]:
    """Returns a grid of ranks that have two heads each or more, if the idiom has enough of them."""
    return (2, 3) if idiom.heads == idiom.kv_heads == HEADS else (2, idiom.num_ranks // 2)


@pytest.mark.parametrize("name", [idiom.name for idiom in IDIOMS])
def test_idiom_in_chunks_is_whole_bit_for_bit(name: str) -> None:
    (idiom,) = (idiom for idiom in IDIOMS if idiom.name == name)
    sizes = _grid(idiom)
    gm, values = captured_idiom(name, math.prod(sizes))
    with fake_ranks(math.prod(sizes)):
        before = str(gm.graph)
        chunked, result = chunk_all(gm, 2)
    if name in DECLINED:
        (declined,) = result.declined
        assert DECLINED[name] in declined.reason
        assert not result.changed
        assert str(chunked.graph) == before
        return
    assert result.changed
    assert not result.declined
    assert result.recognition is not None
    (site,) = result.recognition.sites
    assert all(len(item.chunks) == 2 for item in site.exchanges)
    starts = chunked.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    assert {item.start for item in site.pieces} == set(starts)
    ours, whole = run_both(chunked, gm, values, machine(*sizes))
    assert equal_on_every_rank(ours, whole)
    assert not torch.equal(whole[0][0], whole[1][0])


def test_as_many_bytes_are_sent_in_chunks() -> None:
    with fake_ranks(2):
        gm, *_ = captured_model("flux")
        recognition = recognize(gm.graph)
        _, result = chunk_all(gm, 3)
    assert result.recognition is not None
    for before, after in zip(recognition.sites, result.recognition.sites, strict=True):
        assert len(after.pieces) == 3 * len(before.pieces)
        assert sum(int(item.size_bytes) for item in after.pieces) == sum(
            int(item.size_bytes) for item in before.pieces
        )


def test_one_chunk_and_no_site_leave_the_graph_to_the_letter() -> None:
    (idiom, *_) = IDIOMS
    with fake_ranks(idiom.num_ranks):
        gm, _ = capture_call(idiom.model(), *idiom.arguments())
        before = str(gm.graph)
        chunked, result = chunk_all(gm, 1)
    assert not result.changed
    assert str(chunked.graph) == before


def test_a_wrong_chunk_is_caught() -> None:
    """The comparison can fail: with two chunks swapped before they are sent, results differ."""
    (idiom, *_) = IDIOMS
    idiom = replace(idiom, num_ranks=6)
    with fake_ranks(6):
        gm, values = capture_call(idiom.model(), *idiom.arguments())
        chunked, result = chunk_all(gm, 2)
    assert result.recognition is not None
    first, second = result.recognition.sites[0].o.exchange.chunks
    source = second.start.all_input_nodes[0]
    second.start.replace_input_with(source, first.start.all_input_nodes[0])
    assert not equal_on_every_rank(*run_both(chunked, gm, values, machine(2, 3)))


def _all_passes(gm: GraphModule, on: Machine, count: int) -> tuple[GraphModule, PassResult]:
    """Chunks of heads and of tokens, phases and the new order."""
    both, chunked = chunk_all(gm, count)
    assert chunked.recognition is not None
    both.graph.eliminate_dead_code()
    in_runs = in_token_chunks(2, rows_differ)(both.graph, chunked.recognition)
    assert in_runs.changed
    assert in_runs.recognition is not None
    (group,) = {item.group for site in in_runs.recognition.sites for item in site.pieces}
    phased = in_phases({group: on}, "on")(both.graph, in_runs.recognition)
    assert phased.recognition is not None
    both.graph.eliminate_dead_code()
    costs = Costs(FAST, {group: on}, "on")
    ordered = in_v_first_order(costs)(both.graph, phased.recognition)
    both.graph.lint()
    assert broken_rule(both.graph) == ""
    assert ordered.changed
    return both, phased


MODELS = ("flux", "sd3", "qwen-image", "wan", "flux2")


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, "2x3") for name in MODELS),
        ("sd3", "2x6"),
        *(pytest.param(name, "2x6", marks=pytest.mark.slow) for name in MODELS if name != "sd3"),
    ],
)
def test_a_whole_model_with_all_passes_is_captured_bit_for_bit(name: str, grid: str) -> None:
    on, num_ranks = machine(*GRIDS[grid]), math.prod(GRIDS[grid])
    with fake_ranks(num_ranks):
        tokens = {"image_tokens": 32 * num_ranks, "text_tokens": 8 * num_ranks}
        gm, values, expected_sites = captured_model(name, **tokens)
        ours, result = _all_passes(gm, on, 2)
    assert result.recognition is not None
    assert len(result.recognition.sites) == expected_sites
    assert all(len(item.phases) == 2 for site in result.recognition.sites for item in site.pieces)
    assert equal_on_every_rank(*run_both(ours, gm, values, on))
