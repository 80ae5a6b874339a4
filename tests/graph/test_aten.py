# SPDX-License-Identifier: Apache-2.0
"""aten: which part a slice takes, what is a join of all parts, and what masks a softmax."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cocodiff_compile.ir.aten import slice_of
from cocodiff_compile.ir.parts import rejoined
from cocodiff_compile.recognize.attention_cores import find_attention_cores
from cocodiff_compile.recognize.walk import walk_back
from tests.support.traced import inputs, result, traced

WHOLE = (4, 4)


REJOINED: list[tuple[str, Callable[[Tensor, Tensor], Tensor], int | None]] = [
    ("unbind", lambda x, _y: torch.cat(x.unbind(0), 0), 0),
    ("stack of unbind", lambda x, _y: torch.stack(x.unbind(1), 0), 1),
    ("chunks", lambda x, _y: torch.cat(x.chunk(2, 1), 0), 1),
    ("selects", lambda x, _y: torch.stack([x[0], x[1], x[2], x[3]]), 0),
    ("slices", lambda x, _y: torch.cat([x[:, :1], x[:, 1:4]], 1), 1),
    ("unequal splits", lambda x, _y: torch.cat(x.split([1, 3], 0), 0), 0),
    ("all but the first select", lambda x, _y: torch.stack([x[1], x[2], x[3]]), None),
    ("all but the last chunk", lambda x, _y: torch.cat(x.chunk(4, 1)[:3], 0), None),
    ("all but the first chunk", lambda x, _y: torch.cat(x.chunk(4, 1)[1:], 0), None),
    ("out of order", lambda x, _y: torch.cat(x.chunk(2, 1)[::-1], 0), None),
    ("one part twice", lambda x, _y: torch.cat([x[:2], x[:2]], 0), None),
    ("two tensors", lambda x, y: torch.cat([x.chunk(2, 1)[0], y.chunk(2, 1)[1]], 0), None),
    ("two dims", lambda x, _y: torch.stack([x[0], x[1], x[:, 2], x[:, 3]]), None),
    ("every second row", lambda x, _y: torch.cat([x[0:4:2], x[2:4]], 0), None),
    ("a part and something else", lambda x, _y: torch.cat([x[:2], x[2:] + 1], 0), None),
    ("no join", lambda x, _y: x[:2] + x[2:], None),
]


@pytest.mark.parametrize(
    ("join", "dim"), [item[1:] for item in REJOINED], ids=[item[0] for item in REJOINED]
)
def test_rejoined_is_all_parts_of_one_tensor_in_order(
    join: Callable[[Tensor, Tensor], Tensor], dim: int | None
) -> None:
    graph = traced(join, torch.ones(WHOLE), torch.ones(WHOLE))
    assert rejoined(result(graph)) == (None if dim is None else (inputs(graph)[0], dim))


SLICES: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, int, int] | None]] = [
    ("slice", lambda x: x[:, 1:3], (1, 1, 2)),
    ("slice to the end", lambda x: x[1:], (0, 1, 3)),
    ("slice from the end", lambda x: x[:, -3:], (1, 1, 3)),
    ("slice before the end", lambda x: x[:, -3:-1], (1, 1, 2)),
    ("slice with a step", lambda x: x[1::2], None),
    ("select", lambda x: x[2], (0, 2, 1)),
    ("select from the end", lambda x: x[:, -1], (1, 3, 1)),
    ("unbind", lambda x: x.unbind(1)[3], (1, 3, 1)),
    ("chunk", lambda x: x.chunk(2, -1)[1], (1, 2, 2)),
    ("split", lambda x: x.split([1, 2, 1], 0)[2], (0, 3, 1)),
]


@pytest.mark.parametrize(
    ("cut", "part"), [item[1:] for item in SLICES], ids=[item[0] for item in SLICES]
)
def test_slices_are_consecutive_parts_counted_from_the_front(
    cut: Callable[[Tensor], Tensor], part: tuple[int, int, int] | None
) -> None:
    node = result(traced(cut, torch.ones(WHOLE)))
    getitem = node if node.target is operator.getitem else None
    assert slice_of(node if getitem is None else node.all_input_nodes[0], getitem) == part


Scores = Callable[[Tensor, Tensor, Tensor], Tensor]

MASKS: list[tuple[str, Scores, tuple[int, ...], bool]] = [
    ("nothing", lambda q, k, _m: torch.bmm(q, k), (2, 4, 5), False),
    ("a scale", lambda q, k, _m: torch.bmm(q, k) * 0.3, (2, 4, 5), False),
    ("a number", lambda q, k, _m: torch.bmm(q, k) + 0.3, (2, 4, 5), False),
    ("a tensor of one number", lambda q, k, m: torch.bmm(q, k) + m, (), False),
    ("a scale per score", lambda q, k, m: torch.bmm(q, k) * m, (2, 4, 5), False),
    ("a sum", lambda q, k, m: torch.bmm(q, k) * 0.3 + m, (2, 4, 5), True),
    ("a sum over keys", lambda q, k, m: torch.bmm(q, k) + m, (5,), True),
    ("where", lambda q, k, m: torch.where(m > 0, torch.bmm(q, k), -1e9), (2, 4, 5), True),
    ("masked_fill", lambda q, k, m: torch.bmm(q, k).masked_fill(m > 0, -1e9), (2, 4, 5), True),
    ("baddbmm", lambda q, k, m: torch.baddbmm(m, q, k), (2, 4, 5), True),
    ("baddbmm of nothing", lambda q, k, m: torch.baddbmm(m, q, k, beta=0), (2, 4, 5), False),
]


@pytest.mark.parametrize(
    ("scores", "shape", "is_mask"), [item[1:] for item in MASKS], ids=[item[0] for item in MASKS]
)
def test_mask_of_a_decomposed_attention(
    scores: Scores, shape: tuple[int, ...], is_mask: bool
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.bmm(scores(q, k, mask).softmax(-1), v)

    operands = (torch.ones(2, 4, 8), torch.ones(2, 8, 5), torch.ones(2, 5, 8), torch.ones(shape))
    graph = traced(attend, *operands)
    (core,) = find_attention_cores(graph)
    assert core.form == "decomposed"
    assert [core.q.node, core.k.node, core.v.node] == inputs(graph)[:3]
    if is_mask:
        assert core.mask is not None
        assert inputs(graph)[3] in [route.barrier for route in walk_back(core.mask)]
    else:
        assert core.mask is None
