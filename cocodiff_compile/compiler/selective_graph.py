# SPDX-License-Identifier: Apache-2.0
"""Compiles one captured graph once per kind of denoising step, when that is first needed.

Attentions are cut the same way for all kinds, so that all remember the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.compat import (
    compiling_later,
    inductor_settings,
    lazy_module,
    optimization_hint,
)
from cocodiff_compile.compiler.compile_facts import collective_groups
from cocodiff_compile.compiler.dumps import Dumps
from cocodiff_compile.compiler.finish_graph import FinishGraph
from cocodiff_compile.compiler.graph_rounds import GraphRounds, checked, graph_rounds
from cocodiff_compile.compiler.stages import SELECT, stages
from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, bound, size_bytes, value_of
from cocodiff_compile.ir.collectives import collectives_by_group
from cocodiff_compile.ir.records import Recognition, copied
from cocodiff_compile.passes.select_v_major import LOSS_SITES, SelectVMajor, num_losses
from cocodiff_compile.pipeline.run_passes import Pipeline, PipelineReport
from cocodiff_compile.ranks.agreement.watch import reports_failures
from cocodiff_compile.report.step_records import describe_steps
from cocodiff_compile.v_major.denoising import StepRecord, is_denoising
from cocodiff_compile.v_major.options import VMajorOptions
from cocodiff_compile.v_major.payload import EXACT, CachedRoles, Payload
from cocodiff_compile.v_major.selective_call import SelectiveCall, Variant


def select_pass(options: VMajorOptions) -> SelectVMajor:
    """Returns the pass for steps of the usual kind."""
    policy = options.make_policy()
    return SelectVMajor(
        policy.usual,
        CachedRoles.for_payloads(policy.payloads),
        options.compare,
        selects_per_stream=options.select_per_stream,
        skips_unsent=not options.compute_unsent,
        layers=options.layers,
        measures_drift=policy.measures_drift,
    )


def selective_call(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    report: PipelineReport,
    finish: FinishGraph,
    dumps: Dumps,
    rounds: GraphRounds,
) -> Any:
    """Returns the callable for a graph, with the kind of step that the first call needs compiled. A
    dry run reports the usual kind of step, and gets the graph as captured.
    """
    compilation = finish.compilation
    options = compilation.config.selective
    assert options is not None
    policy = options.make_policy()
    graph = _SelectiveGraph(gm, tuple(example_inputs), report, finish, dumps, policy.measures_drift)
    if compilation.dry_run:
        graph.compile(policy.usual, rounds)
        return compilation.generate(gm, example_inputs, **compilation.inductor_options)
    call = SelectiveCall(
        graph.compile_later,
        policy,
        tuple(collective_groups(gm.graph)),
        value_of(report.recognition.sites[0].q.exchange.start).device,
        tuple(compilation.inductor_options.get("static_input_idxs", ())),
        _sent_bytes(gm.graph),
        options.budget_bytes,
        num_losses(report.recognition),
        graph.show_records if dumps.rank_folder is not None else None,
    )
    first = policy.first if is_denoising() else None
    plans = rounds.plans(gm.graph, report.recognition)
    call.add_variant(first, graph.compile(first, rounds))
    return checked(call, plans)


@dataclass(frozen=True)
class _SelectiveGraph:
    gm: GraphModule
    example_inputs: tuple[Any, ...]
    report: PipelineReport
    finish: FinishGraph
    dumps: Dumps
    measures_drift: bool

    def compile_later(self, payload: Payload | None) -> Variant:
        """Compiles another kind of step between calls, outside of Dynamo."""
        recognition, compilation = self.report.recognition, self.finish.compilation
        kind = str(payload or EXACT)
        with (
            reports_failures(),
            compiling_later(self.example_inputs),
            inductor_settings(compilation.inductor_settings),
            graph_rounds(
                self.gm.graph, recognition, compilation.config, compilation.dry_run, kind
            ) as rounds,
        ):
            return self.compile(payload, rounds)

    def compile(self, payload: Payload | None, rounds: GraphRounds) -> Variant:
        kind = str(payload or EXACT)
        gm, report = self._copy(kind)
        dumps = self.dumps.of_kind(kind)
        for observer in dumps.observers:
            observer.captured(gm)
        inputs, loss_sites = list(self.example_inputs), ()
        if payload is not None:
            deciding = self.finish.deciding_of(kind)
            assert deciding.select is not None
            deciding = replace(deciding, select=replace(deciding.select, payload=payload))
            report = Pipeline(stages(SELECT, deciding), dumps.observers).run(gm, report)
            places = list(gm.graph.find_nodes(op="placeholder"))[len(inputs) :]
            inputs += [node.meta["val"] for node in places]
        caches = tuple(inputs[len(self.example_inputs) :])
        if caches and self.measures_drift:
            caches = caches[:-1]  # the drift, some numbers
            loss_sites = places[-1].meta[LOSS_SITES]
        sent_bytes, by_site = _sent_bytes(gm.graph), _sent_by_site(report.recognition)
        compiled = self.finish.run(gm, inputs, report, dumps, rounds.within_a_call)
        return Variant(compiled, caches, sent_bytes, by_site, loss_sites)

    def show_records(self, steps: Sequence[StepRecord], variants: Mapping[str, Variant]) -> None:
        """Shows on the page of this rank what was sent and lost in the steps that ran."""
        sites = self.report.recognition.sites
        sent = {kind: variant.sent_by_site for kind, variant in variants.items()}
        full = _sent_by_site(self.report.recognition)
        layers = [site.module_path for site in sites]
        self.dumps.show_run(describe_steps(steps, layers, sent, full))

    def _copy(self, kind: str) -> tuple[GraphModule, PipelineReport]:
        graph, recognition = copied(self.gm.graph, self.report.recognition)
        gm = lazy_module(self.gm, graph)
        gm.meta = dict(self.gm.meta)
        last = self.report.passes[-1]
        record = replace(last, result=replace(last.result, recognition=recognition))
        passes = (*self.report.passes[:-1], record)
        return gm, replace(self.report, passes=passes, kind=kind)


def _sent_bytes(graph: Graph) -> int:
    """Returns the bytes that a rank sends to others in all collectives of a graph."""
    groups = collectives_by_group(graph).values()
    return sum(_sent_by(start) for starts in groups for start in starts)


def _sent_by_site(recognition: Recognition) -> tuple[int, ...]:
    """Returns the bytes that a rank sends to others in the exchanges of each attention."""
    return tuple(sum(_sent_by(item.start) for item in site.pieces) for site in recognition.sites)


def _sent_by(start: Node) -> int:
    size = optimization_hint(size_bytes(start.all_input_nodes[0]))
    if start.target is ALL_TO_ALL:
        num_ranks = len(bound(start)["input_split_sizes"])
        return size // num_ranks * (num_ranks - 1)
    return size * (int(bound(start)["group_size"]) - 1) if start.target is ALL_GATHER else 0
