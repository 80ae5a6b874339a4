"""The computation of a step alone: the graph Inductor would compile, its exchanges local copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.compat import compile_fx, compile_fx_inner, without_autograd_cache
from cocodiff_compile.graph.aten import WAIT, is_collective, value_of
from cocodiff_compile.report.traffic import Collective, collectives_of


@torch.library.custom_op("cocodiff_bench::copy", mutates_args=())
def _copy(value: Tensor, repeats: int) -> Tensor:
    """Opaque to Inductor, which would fuse a clone into its neighbours: the bytes are moved."""
    return value.repeat(repeats, *[1] * (value.dim() - 1))


@_copy.register_fake
def _(value: Tensor, repeats: int) -> Tensor:
    return value.repeat(repeats, *[1] * (value.dim() - 1))


class ComputeOnly:
    """A backend for torch.compile; remembers the collectives it took out, per compile."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        with without_autograd_cache():
            return compile_fx(gm, example_inputs, inner_compile=self._inner)

    def _inner(self, gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        self.collectives += collectives_of(gm.graph)
        copy_instead(gm.graph)
        gm.recompile()
        return compile_fx_inner(gm, example_inputs, **options)


def copy_instead(graph: Graph) -> None:
    """Replaces every collective by a local copy of what it would return, and drops its wait."""
    for node in list(graph.nodes):
        if node.target is WAIT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif is_collective(node):
            _copy_one(graph, node)
    graph.lint()


def _copy_one(graph: Graph, node: Node) -> None:
    (source_node,) = node.all_input_nodes
    source, result = value_of(source_node), value_of(node)
    repeats, rest = divmod(result.shape[0], source.shape[0])
    if rest or tuple(result.shape[1:]) != tuple(source.shape[1:]):
        raise ValueError(f"{node.name} makes {tuple(result.shape)} of {tuple(source.shape)}")
    with graph.inserting_before(node):
        copied = graph.call_function(torch.ops.cocodiff_bench.copy.default, (source_node, repeats))
    copied.meta["val"] = result
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
