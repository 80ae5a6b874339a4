# SPDX-License-Identifier: Apache-2.0
"""The table of attention ops: it fits torch's schemas, and every reader takes an op from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import sdpa_flop_count

from cocodiff_compile.compiler.generated_order import code_kinds
from cocodiff_compile.cost.ops import heavy_seconds
from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.ir.aten import parse_fused_attention
from cocodiff_compile.ir.attention_ops import AttentionOp, attention_flops, attention_op

aten = torch.ops.aten
SDPA = (
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
ON_CPU = [op for op in SDPA if "math" in str(op) or "cpu" in str(op)]
each_op = pytest.mark.parametrize("target", SDPA, ids=str)


def _entry(target: Any) -> AttentionOp:
    entry = attention_op(target)
    assert entry is not None
    return entry


@each_op
def test_roles_are_arguments_of_the_op(target: Any) -> None:
    """A mask that the table forgot would be a mask that a cut does not see."""
    op, arguments = _entry(target), target._schema.arguments
    names = [argument.name for argument in arguments]
    assert [op.query, op.key, op.value] == names[:3]
    assert {op.causal, op.dropout} <= set(names)
    optional = [item.name for item in arguments if str(item.type) == "Optional[Tensor]"]
    assert [name for name in optional if name != "dropout_mask"] == ([op.mask] if op.mask else [])


@pytest.mark.parametrize(
    "target",
    [aten._flash_attention_forward.default, aten._efficient_attention_forward.default],
    ids=str,
)
def test_kernels_behind_them_are_known_too(target: Any) -> None:
    entry = _entry(target)
    assert entry.layout == "BSHD"
    assert entry.why_misfit(target) == ""


def test_packed_sequences_have_the_layout_and_the_cost_of_packed_sequences() -> None:
    """torch packs them as [1, S, H, D] for this kernel; sequences do not see each other."""
    target = aten._efficient_attention_forward.default
    graph = torch.fx.Graph()
    names = ("query", "key", "value", "lengths")
    nodes = [graph.placeholder(name) for name in names]
    operand = torch.empty(1, 12288, 8, 64, device="meta")
    for node in nodes[:3]:
        node.meta["val"] = operand
    nodes[3].meta["val"] = torch.empty(4, dtype=torch.int32)
    rest = (None, nodes[3], nodes[3], 4, 4, 0.0, 0)
    whole = graph.call_function(target, (*nodes[:3], None, None, None, 4, 4, 0.0, 0))
    packed = graph.call_function(target, (*nodes[:3], *rest))
    for node in (whole, packed):
        node.meta["val"] = (operand,)
    assert parse_fused_attention(packed).op.layout == "BSHD"
    assert parse_fused_attention(packed).num_sequences == 3
    times = [heavy_seconds(node, CPU.guess) for node in (packed, whole)]
    assert times[0] == pytest.approx(times[1] / 3, rel=0.01)


@each_op
def test_generated_code_shows_the_op(target: Any) -> None:
    assert attention_op(target)
    assert code_kinds(f"def call(args):\n  buf0 = torch.ops.{target}(x)\n") == ["attention"]


@pytest.mark.parametrize("target", ON_CPU, ids=str)
def test_the_output_is_the_result_the_table_says(target: Any) -> None:
    op = _entry(target)
    query, key, value = (torch.randn(2, 3, tokens, 8) for tokens in (5, 7, 7))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(target(query, key, value)[op.output], expected, atol=1e-5)
    assert expected.dim() == op.num_dims
    sizes = [expected.shape[dim] for dim in (op.head_dim, op.token_dim, op.size_dim)]
    assert sizes == [3, 5, 8]


def test_flops_are_those_of_torch() -> None:
    shapes = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16))
    assert attention_flops(*shapes) == sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
