"""`torch.compile(model, backend="cocodiff")`.

Inductor does its pre-grad, AOT and joint-graph work, hands us the functional ATen graph of an
inference call, and takes back what the pipeline leaves for code generation. A training graph, and a
graph without a Ulysses attention, go to Inductor as they came.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from cocodiff_compile.agreement.compile_facts import (
    captured_facts,
    collective_groups,
    planned_facts,
)
from cocodiff_compile.agreement.compile_rounds import CompileRounds, compile_rounds
from cocodiff_compile.agreement.failures import failures_told
from cocodiff_compile.agreement.world import ranks_are_real
from cocodiff_compile.compat import (
    compile_fx,
    compile_fx_inner,
    list_mode_options,
    without_autograd_cache,
)
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.errors import UserError
from cocodiff_compile.graph.pipeline import GraphPass, Pipeline, PipelineReport
from cocodiff_compile.graph.records import Recognition
from cocodiff_compile.graph.row_cut import RowPlan
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.chunk_tokens import AUTO_COUNT, ChunkTokens
from cocodiff_compile.passes.recognize_ulysses import RecognizeUlysses
from cocodiff_compile.passes.schedule_v_first import ScheduleVFirst
from cocodiff_compile.passes.split_projections import SplitProjections
from cocodiff_compile.passes.split_tapa_phases import SplitTapaPhases
from cocodiff_compile.report.collect import GraphReport, publish
from cocodiff_compile.report.describe import describe_report, format_graph
from cocodiff_compile.report.dumps import FolderDump, TraceDump
from cocodiff_compile.say_once import say_once
from cocodiff_compile.schedule.costs import Costs
from cocodiff_compile.schedule.device import Device
from cocodiff_compile.schedule.exact_rows import rows_differ_on_any
from cocodiff_compile.schedule.generated_order import graph_kinds, keeps_order
from cocodiff_compile.schedule.live_device import find_device
from cocodiff_compile.schedule.no_overlap import why_no_overlap
from cocodiff_compile.schedule.pin_order import pinned
from cocodiff_compile.topology.find_machines import find_machines

log = logging.getLogger(__name__)

InnerCompile = Callable[..., Any]

_graph_numbers = itertools.count()


def cocodiff(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """The backend that Dynamo calls, once per graph. `mode` means what it means to Inductor."""
    with failures_told():
        config = CompileConfig.from_options(options)
        return compile_graph(gm, example_inputs, config, compile_fx_inner, mode)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: CompileConfig,
    generate: InnerCompile,
    mode: str | None = None,
    live: bool = True,
    device: Device | None = None,
) -> Any:
    """Captures `gm` down to ATen, runs the pipeline, and lets `generate` make it callable.

    `live`: all ranks compile this graph now, to run it. They agree on it and make the process
    groups it needs, and what was declined or not found is logged. Else this rank only looks.
    `device`: what ranks compute with, if it is not to be found out.
    """
    inner = functools.partial(
        _compile_inner, config=config, generate=generate, live=live, device=device
    )
    with without_autograd_cache():
        return compile_fx(
            gm, example_inputs, inner_compile=inner, config_patches=_mode_patches(mode)
        )


def _mode_patches(mode: str | None) -> dict[str, Any] | None:
    if mode is None:
        return None
    try:
        patches: dict[str, Any] = list_mode_options(mode)
    except RuntimeError as error:
        raise UserError(f"mode={mode!r}: {error}") from None
    return patches


def _compile_inner(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: CompileConfig,
    generate: InnerCompile,
    live: bool,
    device: Device | None,
    **inductor_options: Any,
) -> Any:
    if not inductor_options.get("is_inference", False):
        say_once(
            log,
            logging.WARNING,
            "gradients are on: this is a training graph, Inductor compiles it unchanged; call the "
            "model under torch.no_grad() or torch.inference_mode()",
        )
        return generate(gm, example_inputs, **inductor_options)
    dumps = _Dumps.of(config)
    report = Pipeline(_enabled(config, RecognizeUlysses()), dumps.observers).run(gm)
    with _agreement(gm.graph, report.recognition, config, live) as rounds:
        differ = _rows_differ(report.recognition, live, alone=rounds is None)
        passes = _rewriting(report.recognition, config, live, device, differ)
        report = Pipeline(passes, dumps.observers).run(gm, report)
        _publish(gm.graph, report, config, dumps, live)
        if rounds is not None:
            rounds.compare("planned", planned_facts(gm.graph, report.recognition))
        if not report.is_ordered:
            return generate(gm, example_inputs, **inductor_options)
        kinds = graph_kinds(gm.graph)
        with pinned():
            compiled = generate(gm, example_inputs, **inductor_options)
        if keeps_order(getattr(compiled, "source_code", ""), kinds) is False:
            say_once(log, logging.WARNING, _LOST_ORDER)
        return compiled


_LOST_ORDER = (
    "Inductor did not keep the order of schedule-v-first: exchanges may be exposed, results are "
    "the same; options={'v_first': False} leaves the order to Inductor"
)


def _enabled(config: CompileConfig, *passes: GraphPass) -> tuple[GraphPass, ...]:
    return tuple(item for item in passes if item.name not in config.disable)


def _rewriting(
    found: Recognition,
    config: CompileConfig,
    live: bool,
    device: Device | None,
    differ: Callable[[RowPlan], str],
) -> tuple[GraphPass, ...]:
    """The passes that change the graph. The machine, and what things cost on it, are looked for
    only if something is to be decided by them.
    """
    if not found.sites:
        return ()
    tapa = "off" if "split-tapa-phases" in config.disable else config.tapa
    ordering = _is_ordering(config)
    machines = find_machines(found, config.topology, live) if tapa != "off" or ordering else {}
    costs = Costs(device or find_device(found, live), machines, tapa) if ordering else None
    heads = costs if config.head_chunks == "auto" else config.head_chunks
    token_chunks = 1 if "chunk-tokens" in config.disable else config.token_chunks
    tokens = costs if token_chunks == "auto" else token_chunks
    token_counts = (1, AUTO_COUNT) if isinstance(tokens, Costs) else (tokens or 1,)
    passes: list[GraphPass | None] = [
        SplitProjections(costs) if costs else None,
        ChunkHeads(heads, token_counts) if heads not in (None, 1) else None,
        ChunkTokens(tokens, differ) if tokens not in (None, 1) else None,
        SplitTapaPhases(machines, tapa) if tapa != "off" else None,
        ScheduleVFirst(costs) if costs else None,
    ]
    return _enabled(config, *filter(None, passes))


def _rows_differ(found: Recognition, live: bool, alone: bool) -> Callable[[RowPlan], str]:
    """Tried on live ranks, taken for exact by one that only looks."""
    if not (found.sites and live and ranks_are_real()):
        return lambda _: ""
    group = found.sites[0].q.exchange.group
    return functools.partial(rows_differ_on_any, group=group, alone=alone)


def _is_ordering(config: CompileConfig) -> bool:
    """Whether exchanges are to hide behind computation, and can."""
    if not config.v_first or "schedule-v-first" in config.disable:
        return False
    if reason := why_no_overlap():
        say_once(log, logging.WARNING, reason)
    return not reason


def _agreement(
    graph: Graph, found: Recognition, config: CompileConfig, live: bool
) -> AbstractContextManager[CompileRounds | None]:
    """The rounds with the other ranks; none without any, and for a rank that only looks."""
    groups = collective_groups(graph) if live and ranks_are_real() else {}
    if not groups:
        return nullcontext()
    facts = {name: captured_facts(graph, found, name, config) for name in groups}
    return compile_rounds(groups, facts)


@dataclass(frozen=True)
class _Dumps:
    """Where one graph is written to while passes run."""

    number: int
    rank: int
    observers: tuple[FolderDump | TraceDump, ...]

    @classmethod
    def of(cls, config: CompileConfig) -> _Dumps:
        number, rank = next(_graph_numbers), _rank()
        observers: list[FolderDump | TraceDump] = [TraceDump()]
        if config.debug_dir is not None:
            folder = config.debug_dir / f"rank_{rank:03d}" / f"graph_{number:03d}"
            observers.append(FolderDump(folder, rank, number))
        return cls(number, rank, tuple(observers))


def _publish(
    graph: Graph, report: PipelineReport, config: CompileConfig, dumps: _Dumps, live: bool
) -> None:
    summary = describe_report(report)
    found = GraphReport(dumps.number, dumps.rank, config, report, summary, len(graph.nodes))
    for dump in dumps.observers:
        dump.finished(found.summary)
    if live:
        _say_what_was_found(found)
    publish(found)


def _say_what_was_found(found: GraphReport) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("graph %d:\n%s", found.number, format_graph(found.summary))
    report = found.report
    for item in report.declined:
        where = item.module_path or item.node.name
        say_once(log, logging.WARNING, f"declined {where}: {item.reason}")
    if report.refused:
        say_once(log, logging.WARNING, f"{report.refused}; Inductor compiles it unchanged")
    elif "recognize-ulysses" in found.config.disable:
        say_once(log, logging.WARNING, "recognize-ulysses is disabled: Inductor compiles unchanged")
    elif not report.recognition.sites:
        say_once(log, logging.WARNING, _no_site_message())


def _no_site_message() -> str:
    message = "a graph holds no Ulysses attention, Inductor compiles it unchanged"
    if not torch.distributed.is_initialized():
        return (
            f"{message}: no process group is initialised, call torch.distributed.init_process_group"
        )
    return (
        f"{message}; if no graph of the model holds one, turn Ulysses on before compiling, for "
        "example with cocodiff_compile.parallel.parallelize(model)"
    )


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
