# SPDX-License-Identifier: Apache-2.0
"""A short text that tells captured graphs apart, the same on every rank and in every process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint


def fingerprint(graph: Graph) -> str:
    """Returns a hash of the ops of a graph, of what each reads, and of the shapes, strides, types
    and kinds of device of their values. Other arguments do not count: names of process groups,
    indices of devices and the place of a rank's shard differ between ranks. Symbolic sizes count as
    first compiled.
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        reads = [numbers[source] for source in node.all_input_nodes]
        digest.update(f"{node.op} {_op(node)} {reads} {_value(node.meta.get('val'))}\n".encode())
    return digest.hexdigest()[:32]


def _op(node: Node) -> str:
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OperatorBase):
        return str(node.target)
    return getattr(node.target, "__qualname__", type(node.target).__name__)


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = [optimization_hint(size) for size in value.shape]
    strides = [optimization_hint(stride) for stride in value.stride()]
    return f"{shape} {strides} {value.dtype} {value.device.type}"
