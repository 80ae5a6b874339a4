# SPDX-License-Identifier: Apache-2.0
"""Compiles one graph that Dynamo captured.

Inductor does its pre-grad, AOT and joint-graph work, hands us the functional ATen graph of an
inference call, and takes back what the pipeline leaves for code generation. A training graph, and a
graph without a Ulysses attention, go to Inductor as they came.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule

from cocodiff_compile.compat import (
    compile_fx,
    copied_capture,
    freezes_weights,
    list_mode_options,
    optimization_hint,
    without_autograd_cache,
)
from cocodiff_compile.compiler.compilation import Compilation, Generate, NeedsNumbersError
from cocodiff_compile.compiler.dry_run import is_dry_run, stand_in
from cocodiff_compile.compiler.dumps import Dumps
from cocodiff_compile.compiler.enclosing_module import enclosing_module
from cocodiff_compile.compiler.exact_rows import rows_differ_on_any
from cocodiff_compile.compiler.find_machines import find_machines
from cocodiff_compile.compiler.finish_graph import FinishGraph
from cocodiff_compile.compiler.graph_rounds import graph_rounds
from cocodiff_compile.compiler.live_device import find_device
from cocodiff_compile.compiler.per_shape import PerShape, has_symbolic_sizes
from cocodiff_compile.compiler.selective_graph import select_pass, selective_call
from cocodiff_compile.compiler.shard_graph import captured_inputs, shard_deciding, sharded_graph
from cocodiff_compile.compiler.stages import (
    CUT,
    RECOGNIZE,
    SELECT,
    SHARD,
    Deciding,
    deciding_for_any_size,
    stages,
)
from cocodiff_compile.compiler.written_shares import refuse_written_shares
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.coded_attentions import choose_uncoded
from cocodiff_compile.decide.coding_worth import CodingWorth
from cocodiff_compile.decide.decision import Decision, refuse_misfit
from cocodiff_compile.decide.token_chunk_count import Differ
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.kind import DeviceKind
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import value_of
from cocodiff_compile.ir.fingerprint import fingerprint
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.pipeline.run_passes import Pipeline, PipelineReport
from cocodiff_compile.ranks.agreement.watch import reports_failures
from cocodiff_compile.ranks.agreement.world import ranks_are_real
from cocodiff_compile.report.collect import is_collecting
from cocodiff_compile.report.page_data import describe_captured
from cocodiff_compile.say_once import say_once
from cocodiff_compile.shard.token_share import TokenShare
from cocodiff_compile.v_major.payload import EXACT, Payload

log = logging.getLogger(__name__)

_TAKES_NO_SHARES = (
    "option 'shard': a compiled block reads a tensor of which each rank holds a share in an op "
    "that takes no shares, such as torch.cond ({why}); compile the whole model, or write "
    "the block without that op"
)


def compile_for_dynamo(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
    generate: Generate,
) -> Any:
    """Compiles what Dynamo captured. If that fails, the other ranks are told."""
    with reports_failures():
        config = CompileConfig.from_options(options)
        if is_dry_run():
            return compile_graph(gm, example_inputs, config, stand_in, mode, dry_run=True)
        return compile_graph(gm, example_inputs, config, generate, mode)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: CompileConfig,
    generate: Generate,
    mode: str | None = None,
    dry_run: bool = False,
    device: Device | None = None,
) -> Any:
    """Captures `gm` down to ATen, runs the pipeline, and lets `generate` make it callable."""
    refuse_written_shares(gm, example_inputs)
    settings = _mode_settings(mode)
    compilation = Compilation(config, generate, dry_run, device, settings or {})
    compiling = functools.partial(_compile_captured, compilation=compilation, settings=settings)
    if config.shard is None or not has_symbolic_sizes(gm):
        return compiling(gm, example_inputs)
    if enclosing_module() is None and config.selective is None:
        attempt = replace(compilation, for_any_size=True)
        with suppress(NeedsNumbersError):
            return compiling(copied_capture(gm), example_inputs, compilation=attempt)
    return PerShape(gm, compiling)


def _compile_captured(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    settings: dict[str, Any] | None,
) -> Any:
    inner = functools.partial(_compile_inner, compilation=compilation)
    try:
        with without_autograd_cache():
            return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=settings)
    except NotImplementedError as error:
        if any(isinstance(value, TokenShare) for value in example_inputs):
            raise UserError(_TAKES_NO_SHARES.format(why=str(error).partition("\n")[0])) from error
        raise


def _mode_settings(mode: str | None) -> dict[str, Any] | None:
    if mode is None:
        return None
    try:
        settings: dict[str, Any] = list_mode_options(mode)
    except RuntimeError as error:
        raise UserError(f"mode={mode!r}: {error}") from None
    return settings


def _compile_inner(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    compilation: Compilation,
    **inductor_options: Any,
) -> Any:
    if not inductor_options.get("is_inference", False):
        say_once(
            log,
            logging.WARNING,
            "gradients are on: this is a training graph, Inductor compiles it unchanged; call the "
            "model under torch.no_grad() or torch.inference_mode()",
        )
        return compilation.generate(gm, example_inputs, **inductor_options)
    compilation = replace(compilation, inductor_options=inductor_options)
    config, dry_run = compilation.config, compilation.dry_run
    captured = captured_inputs(gm, inductor_options)
    deciding = _shard_deciding(gm.graph, compilation)
    dumps = Dumps.of(config, dry_run)
    first = (*stages(SHARD, deciding), *stages(RECOGNIZE, deciding))
    report = Pipeline(first, dumps.observers).run(gm)
    sharded = sharded_graph(gm.graph, len(example_inputs), captured, deciding)
    if sharded is not None:
        inputs = [*example_inputs, sharded.rank]
        compiled = _compile_recognized(gm, inputs, compilation, report, dumps)
        compare = "" if dry_run or config.shard is None else config.shard.compare
        return sharded.callable_as_before(compiled, compare)
    return _compile_recognized(gm, example_inputs, compilation, report, dumps)


def _shard_deciding(graph: Graph, compilation: Compilation) -> Deciding:
    """Returns what the stages up to recognition decide by. Raises NeedsNumbersError if a graph with
    symbolic sizes had better be compiled for each set of sizes.
    """
    deciding = shard_deciding(graph, compilation.config, compilation.dry_run, compilation.device)
    if not compilation.for_any_size:
        return deciding
    found = deciding_for_any_size(graph, deciding)
    if found is None:
        raise NeedsNumbersError
    return found


def _compile_recognized(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    report: PipelineReport,
    dumps: Dumps,
) -> Any:
    config, dry_run = compilation.config, compilation.dry_run
    if report.recognition.sites and _is_fingerprint_read(config):
        report = replace(report, fingerprint=fingerprint(gm.graph))
    given = config.decision.kinds_of(report.fingerprint) if config.decision else {}
    with graph_rounds(gm.graph, report.recognition, config, dry_run, given=given.keys()) as rounds:
        alone = rounds.rounds is None
        differ = _rows_differ(report.recognition, dry_run, alone)
        plan = _plan(report.recognition, compilation, differ, given, alone)
        _describe_captured(dumps, gm.graph, report.recognition, plan.cutting.costs)
        cutting = stages(CUT, plan.cutting)
        if not plan.selects:
            cutting += stages(SELECT, plan.cutting)  # says why it does nothing
        report = Pipeline(cutting if report.recognition.sites else (), dumps.observers).run(
            gm, report
        )
        sites = report.recognition.sites
        settings = _kind_of_device(report.recognition).inductor_settings if sites else {}
        finish = FinishGraph(compilation, plan.ordering_of, settings)
        if plan.selects:
            return selective_call(gm, example_inputs, report, finish, dumps, rounds)
        return finish.run(gm, example_inputs, report, dumps, rounds)


def _describe_captured(
    dumps: Dumps, graph: Graph, recognition: Recognition, costs: Costs | None
) -> None:
    """Keeps the estimated step as captured, if a page is to show it."""
    if dumps.history is not None and costs is not None:
        costs = replace(costs, sent_share=1.0)
        dumps.history.step = describe_captured(graph, recognition, costs)


def _is_fingerprint_read(config: CompileConfig) -> bool:
    """Returns whether decisions are given, or reports may be saved: with V-Major, later too."""
    return config.decision is not None or is_collecting() or config.selective is not None


@dataclass(frozen=True)
class _Plan:
    """Holds what cuts are decided by and, for each kind of step, what the rest is decided by."""

    cutting: Deciding
    ordering_of: Callable[[str], Deciding]
    selects: bool = False
    """Whether V-Major finds any exchange to change: each kind of step is then compiled for itself.
    """


def _plan(
    recognition: Recognition,
    compilation: Compilation,
    differ: Differ,
    given: Mapping[str, Decision],
    alone: bool,
) -> _Plan:
    """Returns how a graph is compiled: as an earlier compile decided, if that is given for it."""
    config, dry_run = compilation.config, compilation.dry_run
    if not recognition.sites:
        return _Plan(Deciding(config), lambda _kind: Deciding(config))
    if config.decision is None:
        return _new_plan(recognition, compilation, differ)
    config.decision.refuse_other(config.made_with(dry_run))
    if given:
        return _given_plan(recognition, compilation, given)
    if alone and not dry_run and ranks_are_real():
        _say_not_given("a graph with these shapes")
        return _Plan(Deciding(config), lambda _kind: Deciding(config))  # nobody to measure with
    say_once(
        log,
        logging.WARNING,
        "option 'decision': the file holds no decision for a graph of this model, with these "
        "shapes: it is decided now; save the decisions again to include it",
    )
    return _new_plan(recognition, compilation, differ)


def _say_not_given(what: str) -> None:
    say_once(
        log,
        logging.WARNING,
        f"option 'decision': the file holds no decision for {what}: its exchanges stay flat and in "
        "the captured order; save the decisions again to include it",
    )


def _new_plan(recognition: Recognition, compilation: Compilation, differ: Differ) -> _Plan:
    """Returns a plan whose choices are still to be made. The machine, and what things cost on it,
    are looked for only if something is to be decided by them.
    """
    config, dry_run = compilation.config, compilation.dry_run
    is_ordering = _is_ordering(recognition, config)
    is_placed = config.tapa_mode != "off" or is_ordering
    machines = find_machines(recognition, config.topology, dry_run) if is_placed else {}
    costs = None
    if is_ordering:
        device = compilation.device or find_device(recognition, dry_run)
        costs = Costs(device, machines, config.tapa_mode)
    deciding = _with_v_major(Deciding(config, costs, machines, differ))
    select = deciding.select
    if select is None:
        return _Plan(deciding, lambda _kind: deciding)
    uncoded = choose_uncoded(select, recognition, deciding.budget_bytes, deciding.worth)
    if not replace(select, uncoded=uncoded).rewrites_any(recognition):
        return _Plan(deciding, lambda _kind: deciding)
    usual = replace(costs, sent_share=_sent_share(recognition, select.payload)) if costs else None
    cutting = replace(deciding, costs=usual, keeps_whole=bool(select.payload.skipped_share))
    return _Plan(cutting, lambda _kind: deciding, selects=True)


def _given_plan(
    recognition: Recognition, compilation: Compilation, given: Mapping[str, Decision]
) -> _Plan:
    """Returns the plan of an earlier compile. A kind of step that is not given is cut and coded as
    the others are, and otherwise left as captured: nothing is measured.
    """
    config = compilation.config
    refuse_misfit(given, recognition)
    first = next(iter(given.values()))
    uncoded = next((item.uncoded for kind, item in given.items() if kind != EXACT), first.uncoded)
    phased = [item for item in given.values() if item.is_phased]
    machines = (
        find_machines(recognition, phased[0].topologies, compilation.dry_run) if phased else {}
    )
    other = replace(first, uncoded=uncoded, phases=(), topologies=(), order=None)
    deciding = _with_v_major(Deciding(config, machines=machines, given=other))
    select = deciding.select
    selects = select is not None and replace(select, uncoded=uncoded).rewrites_any(recognition)

    def ordering_of(kind: str) -> Deciding:
        if kind not in given:
            _say_not_given(f"steps of the kind {kind!r}")
        return replace(deciding, given=given.get(kind, other))

    return _Plan(deciding, ordering_of, selects)


def _with_v_major(deciding: Deciding) -> Deciding:
    """Adds the pass that exchanges less, for the usual kind of step, if that was asked for."""
    options = deciding.config.selective
    if options is None or not _tells_calls_apart():
        return deciding
    select, costs, budget = select_pass(options), deciding.costs, options.budget_bytes
    return replace(
        deciding,
        select=select,
        worth=CodingWorth(costs, select.payload) if costs and options.only_if_faster else None,
        budget_bytes=None if budget is None else budget / options.guidance_passes,
    )


def _tells_calls_apart() -> bool:
    """Returns whether weights are inputs of a graph, by which selective calls find their caches."""
    if is_frozen := freezes_weights():
        say_once(
            log,
            logging.WARNING,
            "v_major is on, but Inductor's freezing makes constants of weights, by which calls are "
            "told apart: everything is sent uncompressed; turn torch._inductor.config.freezing off",
        )
    return not is_frozen


def _sent_share(recognition: Recognition, usual: Payload) -> float:
    """Returns the part of the exchanged bytes that is sent in most steps."""
    query = recognition.sites[0].q
    element_bits = 8 * value_of(query.exchange.start).element_size()
    return usual.sent_share(element_bits, optimization_hint(query.head_size))


def _rows_differ(recognition: Recognition, dry_run: bool, alone: bool) -> Differ:
    """Returns the trial of rows on the device. A dry run takes all rows for exact."""
    if not recognition.sites or dry_run or not ranks_are_real():
        return lambda _: ""
    group = recognition.sites[0].q.exchange.group
    return functools.partial(rows_differ_on_any, group=group, alone=alone)


def _kind_of_device(recognition: Recognition) -> DeviceKind:
    """Returns the kind of device that computes the attentions."""
    return device_kind(value_of(recognition.sites[0].q.exchange.start).device.type)


def _is_ordering(recognition: Recognition, config: CompileConfig) -> bool:
    """Returns whether exchanges are to hide behind computation, and can."""
    if not config.v_first or "schedule-v-first" in config.disable:
        return False
    if reason := _kind_of_device(recognition).why_no_overlap():
        say_once(log, logging.WARNING, reason)
    return not reason
