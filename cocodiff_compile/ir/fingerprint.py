"""A short text that tells captured graphs apart, the same in every process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.ir.collectives import collectives_by_group


def fingerprint(graph: Graph) -> str:
    """Returns a hash of the ops of a graph, their arguments, and the shapes, types and devices of
    their values. Names of nodes and of process groups, which differ between runs, do not count;
    symbolic sizes count as first compiled.
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    groups = {name: f"group {place}" for place, name in enumerate(collectives_by_group(graph))}
    digest = hashlib.sha256()
    for node in graph.nodes:
        digest.update(_line(node, numbers, groups).encode())
    return digest.hexdigest()[:32]


def _line(node: Node, numbers: dict[Node, int], groups: dict[str, str]) -> str:
    def plain(argument: Any) -> Any:
        if isinstance(argument, Node):
            return f"%{numbers[argument]}"
        if isinstance(argument, (list, tuple)):
            return [plain(item) for item in argument]
        if isinstance(argument, dict):
            return {str(key): plain(item) for key, item in argument.items()}
        return groups.get(argument, argument) if isinstance(argument, str) else argument

    target = "" if node.op in ("placeholder", "output", "get_attr") else str(node.target)
    arguments = [] if node.op == "output" else [plain(node.args), plain(node.kwargs)]
    return f"{node.op} {target} {arguments} {_value(node.meta.get('val'))}\n"


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = [optimization_hint(size) for size in value.shape]
    return f"{shape} {value.dtype} {value.device.type}"
