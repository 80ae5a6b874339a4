# SPDX-License-Identifier: Apache-2.0
"""chunk-tokens: what is computed by chunks of tokens is the whole, for all spellings of Ulysses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional

from cocodiff_compile.compat import inductor_settings
from cocodiff_compile.compiler import exact_rows
from cocodiff_compile.compiler.exact_rows import rows_differ, rows_differ_on_any, trials
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cut.cut import Cut, CutPlan, Step
from cocodiff_compile.decide.token_chunk_count import token_chunk_tasks
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.aten import ALL_TO_ALL, PROJECTION
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.passes.chunk_heads import chunk_heads
from cocodiff_compile.passes.chunk_tokens import ChunkTokens, plan_tokens
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.pipeline.run_passes import broken_rule
from cocodiff_compile.schedule.graph_tasks import graph_tasks
from tests.support.captured import capture_call, fake_ranks
from tests.support.decided import in_token_chunks
from tests.support.hand_written import WIDTH, Block
from tests.support.idioms import IDIOMS, Idiom
from tests.support.lockstep import captured_model, equal_on_every_rank, machine, run_both

NOT_ONE_OP = "not one op"
DYNAMIC = "symbolic size"
DECLINED = {
    "blocks in lists": "takes rows of several blocks",
    "replicated text": "takes rows of several blocks",
    "mask": "a mask with a row per query",
    "causal": "depends on its place (causal)",
    "batched matmuls with a bias": NOT_ONE_OP,
    "batched matmuls with a bias, in place": NOT_ONE_OP,
    "batched matmuls with a bias, head first": NOT_ONE_OP,
    "einsums": NOT_ONE_OP,
    "einsums, one sample": NOT_ONE_OP,
    "einsums, one head per rank": NOT_ONE_OP,
    "einsums, packed by stack": NOT_ONE_OP,
    "heads scaled, einsums": NOT_ONE_OP,
    "reversed late, einsums": NOT_ONE_OP,
    "rows dropped, einsums": NOT_ONE_OP,
    "matmuls with scale and mask": NOT_ONE_OP,
    "matmuls with scale and shift": NOT_ONE_OP,
    "small values": NOT_ONE_OP,
    "dynamic": DYNAMIC,
    "dynamic, head first": DYNAMIC,
    "dynamic, in place": DYNAMIC,
    "dynamic, stack": DYNAMIC,
    "dynamic, joint": DYNAMIC,
    "dynamic, einsums": NOT_ONE_OP,
    "rows dropped of the query too": "moves what is cut",
    "rows dropped of the query too, put back by cat": "takes rows of several blocks",
}
"""Idioms that are left whole, and a part of the reason."""

SLOW_LINKS = Device("fast next to the links", 1e12, 1e12, 1.0, 1.0, 1.0, 1e-7)
FAST_LINKS = Device("slow next to the links", 1e6, 1e6, 1.0, 1.0, 1.0, 1e-7)
ENOUGH = {"image_tokens": 192, "text_tokens": 48}
"""Tokens of which six ranks have enough to cut."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs each test in one thread, as ranks do: more would let MKL cut small matmuls by rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Twice(nn.Module):
    """A layer after itself, so that what it makes of chunks is exchanged again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        once = self.layer(x, *rest)
        once = once if isinstance(once, tuple) else (once,)
        return self.layer(*once, *rest[len(once) - 1 :])


def _is_long(idiom: Idiom) -> bool:
    """Symbolic sizes take several times as long to capture: one attention has them in most runs."""
    return bool(idiom.dynamic) and idiom.name != "dynamic"


def chunked(gm: GraphModule, count: int) -> tuple[GraphModule, PassResult]:
    ours = GraphModule(gm, copy.deepcopy(gm.graph))
    result = in_token_chunks(count, rows_differ)(ours.graph, recognize(ours.graph))
    assert broken_rule(ours.graph) == ""
    return ours, result


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(idiom.name, marks=[pytest.mark.slow] if _is_long(idiom) else [])
        for idiom in IDIOMS
    ],
)
def test_idiom_in_chunks_is_whole_bit_for_bit(name: str) -> None:
    (idiom,) = (idiom for idiom in IDIOMS if idiom.name == name)
    idiom = replace(
        idiom,
        tokens=4 * idiom.tokens,
        text_tokens=4 * idiom.text_tokens,
        padded_tokens=4 * idiom.padded_tokens,
    )
    with fake_ranks(idiom.num_ranks):
        model = Twice(idiom.model())
        gm, values = capture_call(model, *idiom.arguments(), dynamic=idiom.dynamic)
        before = str(gm.graph)
        ours, result = chunked(gm, 2)
    if name in DECLINED:
        assert len(result.declined) == 2
        assert all(DECLINED[name] in item.reason for item in result.declined)
        assert not result.changed
        assert str(ours.graph) == before
        return
    assert result.changed
    assert not result.declined
    assert result.recognition is not None
    for site in result.recognition.sites:
        assert len(site.o.exchange.chunks) == 2
    starts = ours.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    pieces = [item for site in result.recognition.sites for item in site.pieces]
    assert {item.start for item in pieces} == set(starts)
    on = machine(idiom.num_ranks)
    in_chunks, whole = run_both(ours, gm, values, on)
    assert equal_on_every_rank(in_chunks, whole)
    assert not torch.equal(whole[0][0], whole[1][0])


@pytest.mark.parametrize(("tokens", "count"), [(5, 4), (7, 3), (4, 4)])
def test_tokens_are_spread_evenly_over_the_chunks(tokens: int, count: int) -> None:
    with fake_ranks(4):
        gm, values = capture_call(Twice(Block().eval()), torch.randn(1, tokens, WIDTH))
        ours = GraphModule(gm, copy.deepcopy(gm.graph))
        result = ChunkTokens(count).run(ours.graph, recognize(ours.graph))
    assert result.recognition is not None
    (first, *_) = result.recognition.sites
    sizes = [int(piece.size_bytes) for piece in first.o.exchange.chunks]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= sum(sizes) // tokens, "at most one token more"
    in_chunks, whole = run_both(ours, gm, values, machine(4))
    torch.testing.assert_close(in_chunks, whole)  # so few rows may be rounded differently


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "rows moved by padding": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "features padded and cut": lambda x: functional.pad(x, (1, -1)),
    "halves of all rows swapped": lambda x: torch.cat(x.flatten(0, 1).chunk(2, 0)[::-1]).view_as(x),
    "one row for all": lambda x: x + x[:, :1][:, 0].unsqueeze(1),
    "rows one by one": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "more rows than there are": lambda x: x[:, -100:] * 2,
    "no row": lambda x: torch.cat([x[:, :0], x], 1) * 2,
    "a mantissa": lambda x: torch.frexp(x).mantissa,
    "tied": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
}
"""What may stand between two attentions."""


class Between(nn.Module):
    def __init__(self, layer: nn.Module, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.between(self.layer(x)))


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_attentions_keeps_its_values(name: str) -> None:
    idiom: Idiom = replace(IDIOMS[0], tokens=16)
    with fake_ranks(idiom.num_ranks):
        model = Between(idiom.model(), BETWEEN[name])
        gm, values = capture_call(model, *idiom.arguments())
        ours, result = chunked(gm, 2)
    assert result.changed
    assert equal_on_every_rank(*run_both(ours, gm, values, machine(idiom.num_ranks)))


def test_a_rank_that_compiles_again_alone_asks_nobody() -> None:
    """Its plan was tried by all ranks before, or is tried by this one."""
    with fake_ranks(6):
        gm, _ = _flux()
        recognition = recognize(gm.graph)
        plan = plan_tokens(gm.graph, recognition.sites, 2)
        group = recognition.sites[0].q.exchange.group
        assert rows_differ_on_any(plan, group, alone=True) == ""


def test_a_verdict_is_that_of_the_ops_that_were_tried() -> None:
    """Another backend of attention, or quantised weights, exchange the same chunks."""

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        roles = (item.transpose(1, 2) for item in (q, k, v))
        return functional.scaled_dot_product_attention(*roles, scale=0.5).transpose(1, 2)

    plans = []
    with fake_ranks(4):
        for block in (Block(), Block(attend=scaled)):
            gm, _ = capture_call(Twice(block.eval()), torch.randn(1, 16, WIDTH))
            plans.append(plan_tokens(gm.graph, recognize(gm.graph).sites, 2))
    first, second = plans
    assert [step.cut for step in first.steps.values()] == [
        step.cut for step in second.steps.values()
    ]
    assert trials(first) == trials(first) != trials(second)


def test_an_op_that_reads_lengths_is_not_tried_with_made_up_ones() -> None:
    graph = torch.fx.Graph()
    rows, numbers = graph.placeholder("rows"), graph.placeholder("numbers")
    product = graph.call_function(torch.ops.aten.mm.default, (rows, numbers))
    rows.meta["val"], numbers.meta["val"] = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.int64)
    product.meta["val"] = torch.ones(4, 4)
    plan = CutPlan({product: Step(Cut(0, 1, (2, 2)), (rows,))}, 2, {})
    assert "reads numbers that a trial cannot make up" in rows_differ(plan)


def test_a_trial_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise MemoryError("no memory")

    monkeypatch.setattr(exact_rows, "_call", fail)
    with fake_ranks(6):
        gm, _ = _flux()
        plan = plan_tokens(gm.graph, recognize(gm.graph).sites, 2)
        assert "no memory" in rows_differ_on_any(plan, "0", alone=True)


def _flux() -> tuple[GraphModule, list[Any]]:
    gm, values, _ = captured_model("flux", **ENOUGH)
    return gm, values


def test_as_many_bytes_are_sent_and_as_many_rows_are_computed() -> None:
    with fake_ranks(6):
        gm, _ = _flux()
        recognition = recognize(gm.graph)
        _, result = chunked(gm, 3)
    assert result.recognition is not None
    for before, after in zip(recognition.sites, result.recognition.sites, strict=True):
        assert sum(int(item.size_bytes) for item in after.pieces) == sum(
            int(item.size_bytes) for item in before.pieces
        )
        for old, new in zip(before.legs, after.legs, strict=True):
            assert sum(item.rows for item in new.projections) == sum(
                item.rows for item in old.projections
            )


def test_only_what_mixes_rows_reads_them_joined() -> None:
    """Attentions and the gather at the end are all that mixes rows in FLUX."""
    with fake_ranks(6):
        gm, _ = _flux()
        plan = plan_tokens(gm.graph, recognize(gm.graph).sites, 2)
    (gather,) = plan.stopped
    assert "all_gather" in str(gather.target)
    projections = [node for node in gm.graph.nodes if node.target in PROJECTION]
    first = min(node for node in plan.steps if is_attention(node.target))
    behind = [node for node in projections if node > first and _rows(node) > 1]
    assert behind
    assert set(behind) <= set(plan.steps)


def _rows(node: Node) -> int:
    rows: int = node.meta["val"].shape[0]
    return rows


def test_a_wrong_chunk_is_caught() -> None:
    """The comparison can fail: with one chunk of an output exchange sent twice, results differ."""
    with fake_ranks(6):
        gm, values = _flux()
        ours, result = chunked(gm, 2)
    assert result.recognition is not None
    first, second = result.recognition.sites[0].o.exchange.chunks
    source = second.start.all_input_nodes[0]
    second.start.replace_input_with(source, first.start.all_input_nodes[0])
    assert not equal_on_every_rank(*run_both(ours, gm, values, machine(2, 3)))


def test_rows_that_a_library_computes_otherwise_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = exact_rows._call

    def by_rows(node: Node, samples: Any) -> Tensor:
        result = call(node, samples)
        return result * (1 + 1e-6 * result.shape[0]) if node.target in PROJECTION else result

    with fake_ranks(6):
        gm, _ = _flux()
        assert rows_differ(plan_tokens(gm.graph, recognize(gm.graph).sites, 2)) == ""
        monkeypatch.setattr(exact_rows, "_call", by_rows)
        before = str(gm.graph)
        ours, result = chunked(gm, 2)
    assert not result.changed
    assert "gives other bits in chunks of" in result.notes[0]
    assert "MKL_CBWR" not in result.notes[0]  # it is set already
    assert str(ours.graph) == before


def test_what_mkl_computes_otherwise_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setattr(exact_rows, "_is_exact", lambda node, _step: node.target not in PROJECTION)
    with fake_ranks(6):
        gm, _ = _flux()
        reason = rows_differ(plan_tokens(gm.graph, recognize(gm.graph).sites, 2))
    assert reason.endswith("with MKL_CBWR=AUTO,STRICT in the environment MKL computes rows alike")


def test_rows_stay_whole_where_kernels_are_tuned_by_shape() -> None:
    with inductor_settings({"max_autotune": True}):
        assert "max_autotune" in rows_differ(CutPlan({}, 2, {}))


@pytest.mark.parametrize(("device", "is_cut"), [(SLOW_LINKS, True), (FAST_LINKS, False)])
def test_chunks_are_made_where_they_are_estimated_to_pay(device: Device, is_cut: bool) -> None:
    on = machine(2, 3)
    with fake_ranks(6):
        gm, _ = _flux()
        recognition = recognize(gm.graph)
        costs = Costs(device, {recognition.sites[0].q.exchange.group: on}, "off")
        result = in_token_chunks(costs, rows_differ)(gm.graph, recognition)
    assert result.changed == is_cut
    assert "estimated" in result.notes[-1]


@pytest.mark.parametrize("name", ["flux", "sd3", "flux2", "wan"])
@pytest.mark.parametrize("head_chunks", [1, 2])
def test_what_is_estimated_is_what_is_made(name: str, head_chunks: int) -> None:
    """The tasks of a sketch are those of the graph in chunks, in every field but their names."""
    with fake_ranks(6):
        gm, _, _ = captured_model(name, **ENOUGH)
        recognition = recognize(gm.graph)
        costs = Costs(SLOW_LINKS, {recognition.sites[0].q.exchange.group: machine(2, 3)}, "off")
        counts = dict.fromkeys(range(len(recognition.sites)), head_chunks)
        recognition = chunk_heads(gm.graph, recognition, counts).recognition or recognition
        before = str(gm.graph)
        estimated = token_chunk_tasks(gm.graph, recognition, costs, 2)
        assert str(gm.graph) == before
        result = in_token_chunks(2)(gm.graph, recognition)
    assert result.changed
    assert result.recognition is not None
    made = graph_tasks(gm.graph, result.recognition, costs).tasks
    assert [replace(task, name="") for task in estimated] == [
        replace(task, name="") for task in made
    ]


def test_a_layer_of_an_idiom_alone_is_cut_behind_its_attention() -> None:
    """The chunks are joined at the end of the graph, as no other attention follows."""
    (idiom, *_) = IDIOMS
    idiom: Idiom = replace(idiom, tokens=16)
    with fake_ranks(idiom.num_ranks):
        gm, values = capture_call(idiom.model(), *idiom.arguments())
        ours, result = chunked(gm, 2)
    assert result.recognition is not None
    (site,) = result.recognition.sites
    assert [len(item.pieces) for item in site.exchanges] == [1, 1, 1, 2]
    assert equal_on_every_rank(*run_both(ours, gm, values, machine(idiom.num_ranks)))
