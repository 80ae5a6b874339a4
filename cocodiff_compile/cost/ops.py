# SPDX-License-Identifier: Apache-2.0
"""Estimates what one node of a graph computes and moves, and how long that takes: the only file
that counts FLOPs and bytes of ops, those of attentions by `ir/attention_ops.py`. Symbolic
sizes count as first compiled.
"""

from __future__ import annotations

import math
import operator

from torch.fx import Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.aten import (
    aten,
    attention_operands,
    base_of,
    bound,
    is_alias,
    is_heavy,
    is_tensor,
    matmul_operands,
    parse_fused_attention,
    readers_of,
    shape_of,
    value_of,
)
from cocodiff_compile.ir.attention_ops import is_attention


def hinted_shape(node: Node) -> tuple[int, ...]:
    return tuple(optimization_hint(size) for size in shape_of(node))


def hinted_bytes(node: Node) -> int:
    """Returns the bytes of the tensor a node stands for, 0 if it stands for none."""
    if not is_tensor(node):
        return 0
    return math.prod(hinted_shape(node)) * value_of(node).element_size()


def heavy_seconds(node: Node, device: Device) -> float:
    """Returns the time of a matmul, a convolution or an attention, by arithmetic or memory."""
    if is_attention(node.target):
        attention = parse_fused_attention(node)
        op = attention.op
        shapes = (op.as_bhsd(hinted_shape(item)) for item in attention_operands(node))
        # Tokens of a sequence do not see those of the others.
        arithmetic_s = device.attention_seconds(op.flops(*shapes) / attention.num_sequences)
    else:
        arithmetic_s = device.matmul_seconds(_matmul_flops(node))
    moved = sum(map(hinted_bytes, (*node.all_input_nodes, node)))
    return device.kernel_seconds(arithmetic_s, moved)


def _matmul_flops(node: Node) -> float:
    if node.target is aten.convolution.default:
        weight = hinted_shape(bound(node)["weight"])
        return 2.0 * math.prod(hinted_shape(node)) * math.prod(weight[1:])
    left, _ = matmul_operands(node)
    return 2.0 * math.prod(hinted_shape(left)) * hinted_shape(node)[-1]


def eager_seconds(node: Node, device: Device) -> float:
    """Returns the time of a node that runs as a kernel of its own, outside compiled graphs."""
    if is_alias(node):
        return 0.0
    if is_heavy(node):
        return heavy_seconds(node, device)
    results = [user for user in node.users if user.target is operator.getitem]
    moved = sum(map(hinted_bytes, (*node.all_input_nodes, node, *results)))
    return device.kernel_seconds(0.0, moved)


def light_seconds(node: Node, device: Device) -> float:
    """Returns the time that a node fused with its neighbours takes to read and write memory."""
    if is_alias(node) or not is_tensor(node):
        return 0.0
    read = sum(_read_bytes(source) for source in node.all_input_nodes)
    written = hinted_bytes(node) if is_kept(node) else 0
    return device.memory_seconds(read + written)


def _read_bytes(view: Node) -> int:
    """Returns how much of a tensor is read from memory, which is never more than it holds."""
    base = base_of(view)
    return min(hinted_bytes(view), hinted_bytes(base)) if is_kept(base) else 0


def is_kept(node: Node) -> bool:
    """Returns whether a value goes through memory: it comes from outside, or something heavy or a
    collective reads or makes it.
    """
    return not _is_light(node) or any(not _is_light(user) for user in readers_of(node))


def _is_light(node: Node) -> bool:
    if node.op != "call_function" or is_heavy(node):
        return False
    return getattr(node.target, "namespace", "") != "_c10d_functional"
