# SPDX-License-Identifier: Apache-2.0
"""Runs every pass on a random model, with all ranks in one process, and compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from cocodiff_compile.compiler.exact_rows import rows_differ
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.passes.split_projections import split_projections
from cocodiff_compile.pipeline.run_passes import broken_rule
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.v_major.payload import UNCOMPRESSED, CachedRoles, Payload
from tests.support.captured import INPUT_NAMES, capture_call, fake_ranks
from tests.support.decided import in_phases, in_token_chunks, in_v_first_order
from tests.support.lockstep import (
    equal_on_every_rank,
    machine,
    machine_groups,
    per_rank,
)
from tests.support.random_dits import RandomDit

GRIDS = {4: (2, 2), 6: (2, 3)}
FAST = Device("fast next to the links", 1e12, 1e12, 1.0, 1.0, 1.0, 1e-7)
Run = Callable[[Graph, Recognition, Machine], PassResult]


def _split_projections(graph: Graph, recognition: Recognition, _on: Machine) -> PassResult:
    number = split_projections(graph, recognition)
    graph.eliminate_dead_code()
    return PassResult(bool(number), recognize(graph))


def _chunk_heads(graph: Graph, recognition: Recognition, _on: Machine) -> PassResult:
    return ChunkHeads(2).run(graph, recognition)


def _chunk_tokens(graph: Graph, recognition: Recognition, _on: Machine) -> PassResult:
    return in_token_chunks(2, rows_differ)(graph, recognition)


def _split_phases(graph: Graph, recognition: Recognition, on: Machine) -> PassResult:
    return in_phases({"0": on}, "on")(graph, recognition)


def _order(graph: Graph, recognition: Recognition, on: Machine) -> PassResult:
    return in_v_first_order(Costs(FAST, {"0": on}, "on"))(graph, recognition)


def _send_uncompressed(graph: Graph, recognition: Recognition, _on: Machine) -> PassResult:
    """V-Major's graph for a denoising step in which everything is sent as it is."""
    cached_roles = CachedRoles.for_payloads((UNCOMPRESSED, Payload.uniform(4)))
    return SelectVMajor(UNCOMPRESSED, cached_roles, "sent").run(graph, recognition)


PASSES: Mapping[str, Run] = {
    "split-projections": _split_projections,
    "chunk-heads": _chunk_heads,
    "chunk-tokens": _chunk_tokens,
    "split-tapa-phases": _split_phases,
    "schedule-v-first": _order,
}


def _all(graph: Graph, recognition: Recognition, on: Machine) -> PassResult:
    """One pass after the other, as in a compile."""
    changed = False
    for run in PASSES.values():
        result = run(graph, recognition, on)
        recognition, changed = result.recognition or recognition, changed or result.changed
        graph.eliminate_dead_code()
    return PassResult(changed, recognition)


RUNS: Mapping[str, Run] = {**PASSES, "all": _all, "select-v-major": _send_uncompressed}


@dataclass(frozen=True)
class Trial:
    """The outcome of one model by pass: "rewritten", "declined", "left" where there was nothing to
    rewrite, or what went wrong.
    """

    seed: int
    description: str
    sites: int
    attentions: int
    outcomes: Mapping[str, str]

    @classmethod
    def crashed(cls, seed: int, error: Exception) -> Trial:
        """A model that could not be captured or compared."""
        what = f"{type(error).__name__}: {error}"
        return cls(seed, RandomDit(seed).description, 0, 0, {"capture": what})

    @property
    def failures(self) -> dict[str, str]:
        fine = ("rewritten", "declined", "left")
        return {name: what for name, what in self.outcomes.items() if what not in fine}


def try_seed(seed: int) -> Trial:
    """Captures the model of a seed and runs each pass on a copy of its graph, then all of them."""
    model = RandomDit(seed).eval()
    chosen = model.chosen
    sites, outcomes = try_passes(model, model.arguments(), chosen.ranks)
    return Trial(seed, model.description, sites, chosen.layers, outcomes)


def try_passes(
    model: nn.Module, arguments: Sequence[Any], ranks: int
) -> tuple[int, dict[str, str]]:
    """Runs each pass on a copy of the graph of a model, then all of them. Returns how many sites
    were found, and the outcome by pass.
    """
    on = machine(*GRIDS[ranks])
    with fake_ranks(ranks):
        gm, values = capture_call(model, *arguments)
        num_sites = len(recognize(gm.graph).sites)
        rewritten = {name: _run(gm, run, on) for name, run in RUNS.items()}
    outcomes = {}
    for name, (ours, outcome) in rewritten.items():
        if outcome == "rewritten":
            outcomes[name] = outcome if _is_equal(ours, gm, values, on) else "other values"
        else:
            outcomes[name] = outcome
    return num_sites, outcomes


def _is_equal(ours: GraphModule, gm: GraphModule, values: Sequence[Any], on: Machine) -> bool:
    """Returns whether outputs are equal on every rank, where inputs that a pass added are zeros."""
    inputs = per_rank(values, gm.meta[INPUT_NAMES], on.topology.num_ranks)
    added = ours.graph.find_nodes(op="placeholder")[len(values) :]
    filled = [
        [*mine, *(torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in added)]
        for mine in inputs
    ]
    groups = machine_groups("0", on)
    expected = run_lockstep(gm.graph, inputs, groups)
    found = run_lockstep(ours.graph, filled, groups)
    return equal_on_every_rank([mine[: len(expected[0])] for mine in found], expected)


def _run(gm: GraphModule, run: Run, on: Machine) -> tuple[GraphModule, str]:
    ours = GraphModule(gm, copy.deepcopy(gm.graph))
    ours.graph.eliminate_dead_code()
    before = str(ours.graph)
    try:
        recognition = recognize(ours.graph)
        result = run(ours.graph, recognition, on)
    except Exception as error:
        return ours, f"{type(error).__name__}: {error}"
    ours.graph.eliminate_dead_code()
    if broken := broken_rule(ours.graph):
        return ours, f"broke the graph: {broken}"
    if result.changed:
        return ours, "rewritten"
    if str(ours.graph) != before:
        return ours, "changed a graph that it says it left"
    return ours, "declined" if result.declined or recognition.declined or result.notes else "left"
