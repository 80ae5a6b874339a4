"""One captured graph, compiled once per kind of denoising step, each kind when it is first needed.

Attentions are cut the same way for all kinds, so that all remember the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule

from cocodiff_compile.compat import compiling_later, inductor_settings, optimization_hint
from cocodiff_compile.compiler.compile_facts import collective_groups
from cocodiff_compile.compiler.finish_graph import Dumps, FinishGraph
from cocodiff_compile.compiler.graph_rounds import GraphRounds, checked, graph_rounds
from cocodiff_compile.compiler.stages import SELECT, stages
from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, bound, size_bytes, value_of
from cocodiff_compile.ir.collectives import collectives_by_group
from cocodiff_compile.ir.records import copied
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.pipeline.run_passes import Pipeline, PipelineReport
from cocodiff_compile.ranks.agreement.attempts import failures_told
from cocodiff_compile.v_major.denoising import is_denoising
from cocodiff_compile.v_major.options import VMajorOptions
from cocodiff_compile.v_major.selective_call import SelectiveCall, Variant
from cocodiff_compile.v_major.travel import Remembered, Travel


def select_pass(options: VMajorOptions) -> SelectVMajor:
    """For steps of the usual kind."""
    policy = options.make_policy()
    return SelectVMajor(
        policy.usual,
        Remembered.for_all(policy.travels),
        options.compare,
        streams_apart=options.streams == "apart",
        skips_unsent=options.unsent == "skipped",
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
    """What stands for the compiled graph. The kind that the first call needs is compiled here. A
    dry run is shown what most steps carry, and gets the graph without it.
    """
    compilation = finish.compilation
    options = compilation.config.selective
    assert options is not None
    policy = options.make_policy()
    graph = _SelectiveGraph(gm, tuple(example_inputs), report, finish, dumps)
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

    @property
    def select(self) -> SelectVMajor:
        """The pass, for the usual kind of step."""
        select = self.finish.deciding.select
        assert select is not None
        return select

    def compile_later(self, travel: Travel | None) -> Variant:
        """Between calls, outside of Dynamo."""
        found, compilation = self.report.recognition, self.finish.compilation
        kind = str(travel or "exact")
        with (
            failures_told(),
            compiling_later(self.example_inputs),
            inductor_settings(compilation.inductor_settings),
            graph_rounds(
                self.gm.graph, found, compilation.config, compilation.dry_run, kind
            ) as rounds,
        ):
            return self.compile(travel, rounds)

    def compile(self, travel: Travel | None, rounds: GraphRounds) -> Variant:
        gm, report = self._copy()
        dumps = self.dumps.of_kind(str(travel or "exact"))
        for observer in dumps.observers:
            observer.captured(gm)
        inputs = list(self.example_inputs)
        if travel is not None:
            deciding = replace(self.finish.deciding, select=replace(self.select, travel=travel))
            report = Pipeline(stages(SELECT, deciding), dumps.observers).run(gm, report)
            places = list(gm.graph.find_nodes(op="placeholder"))[len(inputs) :]
            inputs += [node.meta["val"] for node in places]
        memories = tuple(inputs[len(self.example_inputs) :])
        if memories and self.select.measures_drift:
            memories = memories[:-1]  # the drift, a number
        sent_bytes = _sent_bytes(gm.graph)
        compiled = self.finish.run(gm, inputs, report, dumps, rounds.within_a_call)
        return Variant(compiled, memories, sent_bytes)

    def _copy(self) -> tuple[GraphModule, PipelineReport]:
        graph, found = copied(self.gm.graph, self.report.recognition)
        gm = GraphModule(self.gm, graph)
        gm.meta = dict(self.gm.meta)
        last = self.report.passes[-1]
        record = replace(last, result=replace(last.result, recognition=found))
        return gm, replace(self.report, passes=(*self.report.passes[:-1], record))


def _sent_bytes(graph: Graph) -> int:
    """That a rank sends to others in all exchanges of a graph, and to tell them its tokens."""
    total = 0
    for starts in collectives_by_group(graph).values():
        for start in starts:
            size = optimization_hint(size_bytes(start.all_input_nodes[0]))
            if start.target is ALL_TO_ALL:
                num_ranks = len(bound(start)["input_split_sizes"])
                total += size // num_ranks * (num_ranks - 1)
            elif start.target is ALL_GATHER:
                total += size * (int(bound(start)["group_size"]) - 1)
    return total
