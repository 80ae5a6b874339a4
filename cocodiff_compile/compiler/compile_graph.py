"""Compiles one graph that Dynamo captured.

Inductor does its pre-grad, AOT and joint-graph work, hands us the functional ATen graph of an
inference call, and takes back what the pipeline leaves for code generation. A training graph, and a
graph without a Ulysses attention, go to Inductor as they came.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from cocodiff_compile.compat import (
    compile_fx,
    freezes_weights,
    list_mode_options,
    optimization_hint,
    without_autograd_cache,
)
from cocodiff_compile.compiler.compilation import Compilation, Generate
from cocodiff_compile.compiler.exact_rows import rows_differ_on_any
from cocodiff_compile.compiler.find_machines import find_machines
from cocodiff_compile.compiler.finish_graph import Dumps, FinishGraph
from cocodiff_compile.compiler.graph_rounds import graph_rounds
from cocodiff_compile.compiler.live_device import find_device
from cocodiff_compile.compiler.selective_graph import select_pass, selective_call
from cocodiff_compile.compiler.stages import CUT, RECOGNIZE, SELECT, Deciding, stages
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.coded_attentions import choose_uncoded
from cocodiff_compile.decide.coding_worth import CodingWorth
from cocodiff_compile.decide.token_chunk_count import Differ
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.kind import DeviceKind
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import value_of
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.pipeline.run_passes import Pipeline
from cocodiff_compile.ranks.agreement.attempts import reports_failures
from cocodiff_compile.ranks.agreement.world import ranks_are_real
from cocodiff_compile.say_once import say_once
from cocodiff_compile.v_major.payload import Payload

log = logging.getLogger(__name__)


def compile_for_dynamo(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
    generate: Generate,
) -> Any:
    """Compiles what Dynamo captured, with `generate` for the code. If that fails, the other ranks
    are told.
    """
    with reports_failures():
        config = CompileConfig.from_options(options)
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
    settings = _mode_settings(mode)
    compilation = Compilation(config, generate, dry_run, device, settings or {})
    inner = functools.partial(_compile_inner, compilation=compilation)
    with without_autograd_cache():
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=settings)


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
    dumps = Dumps.of(config)
    report = Pipeline(stages(RECOGNIZE, Deciding(config)), dumps.observers).run(gm)
    with graph_rounds(gm.graph, report.recognition, config, dry_run) as rounds:
        differ = _rows_differ(report.recognition, dry_run, alone=rounds.rounds is None)
        plan = _plan(report.recognition, compilation, differ)
        cutting = stages(CUT, plan.cutting)
        if not plan.selects:
            cutting += stages(SELECT, plan.cutting)  # says why it does nothing
        report = Pipeline(cutting if report.recognition.sites else (), dumps.observers).run(
            gm, report
        )
        sites = report.recognition.sites
        settings = _kind_of_device(report.recognition).inductor_settings if sites else {}
        finish = FinishGraph(compilation, plan.ordering, settings)
        if plan.selects:
            return selective_call(gm, example_inputs, report, finish, dumps, rounds)
        return finish.run(gm, example_inputs, report, dumps, rounds)


@dataclass(frozen=True)
class _Plan:
    """What attentions are cut by, and what the rest is decided by."""

    cutting: Deciding
    ordering: Deciding
    selects: bool = False
    """Whether V-Major finds any exchange to change: each kind of step is then compiled for itself.
    """


def _plan(found: Recognition, compilation: Compilation, differ: Differ) -> _Plan:
    """The machine, and what things cost on it, are looked for only if something is to be decided by
    them.
    """
    config, dry_run = compilation.config, compilation.dry_run
    if not found.sites:
        return _Plan(Deciding(config), Deciding(config))
    is_ordering = _is_ordering(found, config)
    is_placed = config.tapa_mode != "off" or is_ordering
    machines = find_machines(found, config.topology, dry_run) if is_placed else {}
    costs = None
    if is_ordering:
        device = compilation.device or find_device(found, dry_run)
        costs = Costs(device, machines, config.tapa_mode)
    deciding = Deciding(config, costs, machines, differ)
    if not config.selective or not _tells_calls_apart():
        return _Plan(deciding, deciding)
    deciding = _with_v_major(deciding)
    select = deciding.select
    assert select is not None
    uncoded = choose_uncoded(select, found, deciding.budget_bytes, deciding.worth)
    if not replace(select, uncoded=uncoded).rewrites_any(found):
        return _Plan(deciding, deciding)
    usual = replace(costs, sent_share=_sent_share(found, select.payload)) if costs else None
    cutting = replace(deciding, costs=usual, keeps_whole=bool(select.payload.skipped_share))
    return _Plan(cutting, deciding, selects=True)


def _with_v_major(deciding: Deciding) -> Deciding:
    """With the pass that exchanges less, for the usual kind of step."""
    options = deciding.config.selective
    assert options is not None
    select, costs, budget = select_pass(options), deciding.costs, options.budget_bytes
    return replace(
        deciding,
        select=select,
        worth=CodingWorth(costs, select.payload) if costs and options.only_if_faster else None,
        budget_bytes=None if budget is None else budget / options.guidance_passes,
    )


def _tells_calls_apart() -> bool:
    """Whether weights are inputs of a graph, by which selective calls know what they remember."""
    if is_frozen := freezes_weights():
        say_once(
            log,
            logging.WARNING,
            "v_major is on, but Inductor's freezing makes constants of weights, by which calls are "
            "told apart: everything is sent uncompressed; turn torch._inductor.config.freezing off",
        )
    return not is_frozen


def _sent_share(found: Recognition, usual: Payload) -> float:
    """How much of what exchanges carry is sent in most steps."""
    query = found.sites[0].q
    element_bits = 8 * value_of(query.exchange.start).element_size()
    return usual.sent_share(element_bits, optimization_hint(query.head_size))


def _rows_differ(found: Recognition, dry_run: bool, alone: bool) -> Differ:
    """A trial on the device where all ranks compile; a dry run takes all rows for exact."""
    if not found.sites or dry_run or not ranks_are_real():
        return lambda _: ""
    group = found.sites[0].q.exchange.group
    return functools.partial(rows_differ_on_any, group=group, alone=alone)


def _kind_of_device(found: Recognition) -> DeviceKind:
    """The kind of device that computes the attentions."""
    return device_kind(value_of(found.sites[0].q.exchange.start).device.type)


def _is_ordering(found: Recognition, config: CompileConfig) -> bool:
    """Whether exchanges are to hide behind computation, and can."""
    if not config.v_first or "schedule-v-first" in config.disable:
        return False
    if reason := _kind_of_device(found).why_no_overlap():
        say_once(log, logging.WARNING, reason)
    return not reason
