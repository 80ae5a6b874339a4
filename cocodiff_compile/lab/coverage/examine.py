# SPDX-License-Identifier: Apache-2.0
"""Shares one tiny model out over simulated ranks and compares what they compute with the model.

Every graph that Dynamo captures is rewritten by shard-tokens. All ranks of it then run in one
process, and the model goes on with what they computed.
"""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.decide.shared_nodes import ShareCosts, Sharing, choose_sharing, why_not_shared
from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.ir.aten import ALL_GATHER
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.lab.distances import largest_relative_error
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.shard_tokens import ShardTokens
from cocodiff_compile.ranks.fake_ranks import fake_ranks

COSTS = ShareCosts(CPU.guess, lambda size_bytes: 1e-6 + size_bytes / 1e9)
"""Links that are fast for models as small as these: what can be shared out, is."""
LARGEST_ERROR = 1e-4


@dataclass
class Examined:
    """Holds what became of one class."""

    name: str
    modes: Counter[str] = field(default_factory=Counter)
    """How attentions are computed that are shared out."""
    num_attentions: int = 0
    num_sites: int = 0
    """How many Ulysses attentions were recognised behind shard-tokens."""
    num_gathers: int = 0
    num_graphs: int = 0
    error: float = 0.0
    """The largest difference to the model in one process, relative to its largest value."""
    reason: str = ""
    """Why it is not shared out; empty if it is."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_shared(self) -> bool:
        return not self.reason


def examine(name: str, model: nn.Module, inputs: dict[str, Any], num_ranks: int) -> Examined:
    """Returns what becomes of a model that is shared out over so many simulated ranks."""
    found = Examined(name)
    begin = time.monotonic()
    with torch.no_grad():
        expected = _tensors(model(**_copied(inputs)))
        try:
            with fake_ranks(num_ranks):
                torch._dynamo.reset()
                compiled = torch.compile(model, backend=_backend(found, num_ranks), dynamic=False)
                actual = _tensors(compiled(**_copied(inputs)))
        except Exception as error:  # whatever stops the capture is the result
            found.reason = f"not captured: {_first_line(error)}"
    found.seconds = time.monotonic() - begin
    if found.reason:
        return found
    found.error = largest_relative_error(actual, expected) if expected or actual else 0.0
    if not sum(found.modes.values()):
        found.reason = "; ".join(dict.fromkeys(found.notes)) or "no attention in it"
    return found


def sharded_copy(gm: GraphModule, num_ranks: int) -> tuple[GraphModule, Sharing]:
    """Returns a copy of a captured graph whose tokens are shared out over the group "0"."""
    sharing = choose_sharing(gm.graph, "0", num_ranks, COSTS)
    ours = GraphModule(gm, copy.deepcopy(gm.graph))
    of = dict(zip(gm.graph.nodes, ours.graph.nodes, strict=True))
    steps = {
        of[node]: replace(step, needs={of[item]: cut for item, cut in step.needs.items()})
        for node, step in sharing.steps.items()
    }
    ShardTokens(steps, "0").run(ours.graph, Recognition())
    ours.graph.eliminate_dead_code()
    ours.graph.lint()
    return ours, sharing


def _backend(found: Examined, num_ranks: int) -> Any:
    config = CompileConfig.from_options({"disable": ["recognize-ulysses"]})

    def shard(gm: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        found.num_graphs += 1
        found.num_attentions += sum(is_attention(node.target) for node in gm.graph.nodes)
        if reason := why_not_shared(gm.graph):
            if any(is_attention(node.target) for node in gm.graph.nodes):
                found.notes.append(reason)
            return make_boxed_func(gm.forward)
        ours, sharing = sharded_copy(gm, num_ranks)
        modes = [step.mode.value for step in sharing.steps.values() if step.mode]
        found.modes.update(modes)
        found.num_sites += len(recognize(ours.graph).sites)
        found.num_gathers += sum(node.target is ALL_GATHER for node in ours.graph.nodes)
        if not modes:
            reasons = [text for node, text in sharing.refused.items() if is_attention(node.target)]
            found.notes.append("; ".join(dict.fromkeys(reasons)) or "sharing it out gains nothing")

        def call(*values: Any) -> Any:
            ranks = range(num_ranks)
            if not sharing.steps:
                return gm.forward(*values)
            given = [[*values, torch.tensor([rank])] for rank in ranks]
            first, *others = run_lockstep(ours.graph, given, {"0": lambda _rank: ranks})
            for other in others:
                assert all(map(_is_alike, first, other)), "ranks have different results"
            return first

        return make_boxed_func(call)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, example_inputs, config, shard)

    return backend


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
    return copied


def _tensors(output: Any) -> list[torch.Tensor]:
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [item for item in pytree.tree_leaves(values) if isinstance(item, torch.Tensor)]


def _is_alike(first: Any, other: Any) -> bool:
    if not isinstance(first, torch.Tensor):
        return bool(first == other)
    return torch.allclose(first, other, rtol=0, atol=0, equal_nan=True)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s+", " ", lines[0])[:200] if lines else type(error).__name__
