# SPDX-License-Identifier: Apache-2.0
"""Stages of the compiler on one graph: what is decided there, applied at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.fx import Graph

from cocodiff_compile.compiler.stages import STAGES, Deciding
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.token_chunk_count import Differ
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.pipeline.run_passes import apply_choice
from cocodiff_compile.topology.machine import Machine

Run = Callable[[Graph, Recognition], PassResult]


def decided(name: str, options: Mapping[str, Any], **known: Any) -> Run:
    """The stage `name` under these options; `known` are fields of what it decides by."""
    deciding = Deciding(CompileConfig.from_options(options), **known)

    def run(graph: Graph, recognition: Recognition) -> PassResult:
        chosen = dict(STAGES)[name](deciding, graph, recognition)
        return (
            PassResult(changed=False)
            if chosen is None
            else apply_choice(chosen, graph, recognition)
        )

    return run


def unfused(costs: Costs) -> Run:
    return decided("split-projections", {}, costs=costs)


def in_token_chunks(chunks: int | Costs, differ: Differ = lambda _: "") -> Run:
    if isinstance(chunks, Costs):
        return decided("chunk-tokens", {"token_chunks": "auto"}, costs=chunks, differ=differ)
    return decided("chunk-tokens", {"token_chunks": chunks}, differ=differ)


def in_phases(machines: Mapping[str, Machine], tapa: Literal["auto", "on", "off"]) -> Run:
    return decided("split-tapa-phases", {"tapa": tapa}, machines=machines)


def in_v_first_order(costs: Costs, **known: Any) -> Run:
    return decided("schedule-v-first", {}, costs=costs, **known)
