"""Compiles one graph that Dynamo captured.

Inductor does its pre-grad, AOT and joint-graph work, hands us the functional ATen graph of an
inference call, and takes back what the pipeline leaves for code generation. A training graph, and a
graph without a Ulysses attention, go to Inductor as they came.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
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
from cocodiff_compile.compiler.exact_rows import rows_differ_on_any
from cocodiff_compile.compiler.find_machines import find_machines
from cocodiff_compile.compiler.finish_graph import Dumps, FinishGraph, InnerCompile
from cocodiff_compile.compiler.graph_rounds import graph_rounds
from cocodiff_compile.compiler.live_device import find_device
from cocodiff_compile.compiler.selective_graph import select_pass, selective_call
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cut.row_cut import RowPlan
from cocodiff_compile.devices.choose import device_backend
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.kind import DeviceBackend
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import value_of
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.chunk_tokens import AUTO_COUNT, ChunkTokens
from cocodiff_compile.passes.recognize_ulysses import RecognizeUlysses
from cocodiff_compile.passes.schedule_v_first import ScheduleVFirst
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.passes.split_projections import SplitProjections
from cocodiff_compile.passes.split_tapa_phases import SplitTapaPhases
from cocodiff_compile.pipeline.graph_pass import GraphPass
from cocodiff_compile.pipeline.run_passes import Pipeline
from cocodiff_compile.ranks.agreement.attempts import failures_told
from cocodiff_compile.ranks.agreement.world import ranks_are_real
from cocodiff_compile.say_once import say_once
from cocodiff_compile.v_major.travel import Travel

log = logging.getLogger(__name__)


def compile_for_dynamo(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
    generate: InnerCompile,
) -> Any:
    """What Dynamo calls for, whoever makes the code; other ranks are told if it fails."""
    with failures_told():
        config = CompileConfig.from_options(options)
        return compile_graph(gm, example_inputs, config, generate, mode)


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
    patches = _mode_patches(mode)
    inner = functools.partial(
        _compile_inner,
        config=config,
        generate=generate,
        live=live,
        device=device,
        patches=patches or {},
    )
    with without_autograd_cache():
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)


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
    patches: Mapping[str, Any],
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
    dumps = Dumps.of(config)
    report = Pipeline(_enabled(config, RecognizeUlysses()), dumps.observers).run(gm)
    with graph_rounds(gm.graph, report.recognition, config, live) as rounds:
        differ = _rows_differ(report.recognition, live, alone=rounds.rounds is None)
        plan = _plan(report.recognition, config, live, device, differ)
        report = Pipeline(plan.cutting, dumps.observers).run(gm, report)
        sites = report.recognition.sites
        told = _backend_of(report.recognition).inductor_settings if sites else {}
        finish = FinishGraph(config, generate, live, plan.ordering, inductor_options, patches, told)
        if plan.select is not None:
            return selective_call(gm, example_inputs, report, finish, dumps, rounds, plan.select)
        return finish.run(gm, example_inputs, report, dumps, rounds)


def _enabled(config: CompileConfig, *passes: GraphPass) -> tuple[GraphPass, ...]:
    return tuple(item for item in passes if item.name not in config.disable)


@dataclass(frozen=True)
class _Plan:
    """The passes that cut attentions, the one that exchanges less in some steps if it finds any
    exchange to change, and those that come after all cuts.
    """

    cutting: tuple[GraphPass, ...] = ()
    select: SelectVMajor | None = None
    ordering: tuple[GraphPass, ...] = ()


def _plan(
    found: Recognition,
    config: CompileConfig,
    live: bool,
    device: Device | None,
    differ: Callable[[RowPlan], str],
) -> _Plan:
    """The machine, and what things cost on it, are looked for only if something is to be decided by
    them.
    """
    if not found.sites:
        return _Plan()
    tapa = "off" if "split-tapa-phases" in config.disable else config.tapa
    is_ordering = _is_ordering(found, config)
    machines = find_machines(found, config.topology, live) if tapa != "off" or is_ordering else {}
    costs = Costs(device or find_device(found, live), machines, tapa) if is_ordering else None
    after: list[GraphPass | None] = [
        SplitTapaPhases(machines, tapa) if tapa != "off" else None,
        ScheduleVFirst(costs) if costs else None,
    ]
    ordering = _enabled(config, *filter(None, after))
    select = None
    if config.selective and _tells_calls_apart():
        select = select_pass(config.selective, costs)
    if select is None or not select.rewrites_any(found):
        cutting = _cutting(config, costs, differ)
        saying_why = (select,) if select else ()
        return _Plan((*_enabled(config, *cutting), *saying_why), None, ordering)
    usual = replace(costs, sent_share=_sent_share(found, select.travel)) if costs else None
    # Which tokens are left out is decided for all heads at once, and for all tokens.
    cutting = _cutting(config, usual, differ, is_whole=bool(select.travel.omitted))
    return _Plan(_enabled(config, *cutting), select, ordering)


def _tells_calls_apart() -> bool:
    """Whether weights are inputs of a graph, by which selective calls know what they remember."""
    if is_frozen := freezes_weights():
        say_once(
            log,
            logging.WARNING,
            "v_major is on, but Inductor's freezing makes constants of weights, by which calls are "
            "told apart: all travels in full; turn torch._inductor.config.freezing off",
        )
    return not is_frozen


def _cutting(
    config: CompileConfig,
    costs: Costs | None,
    differ: Callable[[RowPlan], str],
    is_whole: bool = False,
) -> list[GraphPass]:
    """`is_whole`: attentions stay in one piece."""
    heads = 1 if is_whole else costs if config.head_chunks == "auto" else config.head_chunks
    is_in_one_run = is_whole or "chunk-tokens" in config.disable
    token_chunks = 1 if is_in_one_run else config.token_chunks
    tokens = costs if token_chunks == "auto" else token_chunks
    token_counts = (1, AUTO_COUNT) if isinstance(tokens, Costs) else (tokens or 1,)
    passes: list[GraphPass | None] = [
        SplitProjections(costs) if costs else None,
        ChunkHeads(heads, token_counts) if heads not in (None, 1) else None,
        ChunkTokens(tokens, differ) if tokens not in (None, 1) else None,
    ]
    return list(filter(None, passes))


def _sent_share(found: Recognition, usual: Travel) -> float:
    """How much of what exchanges carry is sent in most steps."""
    query = found.sites[0].q
    element_bits = 8 * value_of(query.exchange.start).element_size()
    return usual.sent_share(element_bits, optimization_hint(query.head_size))


def _rows_differ(found: Recognition, live: bool, alone: bool) -> Callable[[RowPlan], str]:
    """Tried on live ranks, taken for exact by one that only looks."""
    if not (found.sites and live and ranks_are_real()):
        return lambda _: ""
    group = found.sites[0].q.exchange.group
    return functools.partial(rows_differ_on_any, group=group, alone=alone)


def _backend_of(found: Recognition) -> DeviceBackend:
    """Of the device that computes the attentions."""
    return device_backend(value_of(found.sites[0].q.exchange.start).device.type)


def _is_ordering(found: Recognition, config: CompileConfig) -> bool:
    """Whether exchanges are to hide behind computation, and can."""
    if not config.v_first or "schedule-v-first" in config.disable:
        return False
    if reason := _backend_of(found).why_no_overlap():
        say_once(log, logging.WARNING, reason)
    return not reason
