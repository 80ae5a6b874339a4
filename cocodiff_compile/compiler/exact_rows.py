# SPDX-License-Identifier: Apache-2.0
"""Tries, op by op, whether a device computes a row alike whatever rows stand beside it.

Libraries choose kernels by shape, and another kernel may sum in another order: MKL multiplies few
rows in a way of its own, unless it is told to be strict. So every matmul and attention that would
run on some of its rows is called once on all of them and once chunk by chunk, with random data. So
is every one that reads rows which are joined again: the joined tensor lies closer together in
memory than a slice of a larger one did.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from cocodiff_compile.compat import autotunes_matmuls, find_group, group_ranks, outside_the_compiler
from cocodiff_compile.cut.cut import Cut, CutPlan, Step, stretch
from cocodiff_compile.cut.joining import dense_strides
from cocodiff_compile.ir.aten import (
    PROJECTION,
    QUANTISED_MATMUL,
    aten,
    is_heavy,
    is_tensor,
    is_view,
    parse_fused_attention,
    value_of,
)
from cocodiff_compile.ir.attention_ops import attention_op
from cocodiff_compile.ir.collectives import is_collective
from cocodiff_compile.ranks.agreement.all_ranks import gathered
from cocodiff_compile.ranks.agreement.watch import watched
from cocodiff_compile.ranks.agreement.world import PerWorld

_verdicts: PerWorld[dict[Hashable, str]] = PerWorld(dict)

_MAX_KEYS = 2048
"""Keys and values that a trial attention reads: it goes through them block by block."""


def rows_differ(plan: CutPlan) -> str:
    """Names the first op whose rows differ when they are computed in chunks; empty if none do."""
    if autotunes_matmuls():
        return "max_autotune chooses other kernels for other numbers of rows"
    tried: set[Hashable] = set()
    with outside_the_compiler(), torch.no_grad():
        heavy = [node for node in plan.steps if is_heavy(node)]
        for node in (*heavy, *(node for node, _ in _readers_of_joined(plan))):
            if any(map(_holds_numbers, node.all_input_nodes)):
                return f"{node.target} ({node.name}) reads numbers that a trial cannot make up"
        for node, step in plan.steps.items():
            if not is_heavy(node) or (key := _key(node, step)) in tried:
                continue
            tried.add(key)
            if not _is_exact(node, step):
                chunks = "+".join(map(str, step.cut.lengths))
                what = f"{node.target} ({node.name}) gives other bits in chunks of {chunks} rows"
                return what + _remedy(node)
        for node, joined in _readers_of_joined(plan):
            if not _reads_alike(node, joined):
                return (
                    f"{node.target} ({node.name}) gives other bits for rows that are joined again"
                )
    return ""


_Path = tuple[Node, ...]
"""The views from what is joined to what a node reads."""


def _readers_of_joined(plan: CutPlan) -> Iterator[tuple[Node, dict[Node, _Path]]]:
    """Yields the matmuls and attentions that read, behind views, what is joined to other strides
    than it had, with the path to each such operand.
    """
    graph = next((node.graph for node in plan.steps), None)
    for node in graph.nodes if graph is not None else ():
        if not is_heavy(node):
            continue
        by_chunk = plan.steps[node].by_chunk if node in plan.steps else ()
        paths = {item: _path_from_cut(item, plan) for item in node.all_input_nodes}
        joined = {
            item: path
            for item, path in paths.items()
            if item not in by_chunk and path and _is_moved(path[0])
        }
        if joined:
            yield node, joined


def _is_moved(node: Node) -> bool:
    """Returns whether a node has other strides once it is joined."""
    return value_of(node).stride() != dense_strides(node)


def _path_from_cut(node: Node, plan: CutPlan) -> _Path:
    """Returns the views from what is cut to `node`; nothing if what lies behind them is not cut."""
    path = [node]
    while path[-1] not in plan.steps:
        if not (is_view(path[-1]) or path[-1].target is aten.slice.Tensor):
            return ()
        path.append(path[-1].all_input_nodes[0])
    return tuple(reversed(path))


def _reads_alike(node: Node, joined: Mapping[Node, _Path]) -> bool:
    captured = {item: _sample(item) for item in node.all_input_nodes}
    closer = dict(captured)
    for item, path in joined.items():
        sample = _sample(path[0])
        dense = sample.new_empty_strided(sample.shape, dense_strides(path[0])).copy_(sample)
        captured[item], closer[item] = _viewed(sample, path), _viewed(dense, path)
    return torch.equal(
        _call(node, _shortened(node, captured)), _call(node, _shortened(node, closer))
    )


def _viewed(tensor: Tensor, path: _Path) -> Tensor:
    for before, node in itertools.pairwise(path):
        tensor = _call(node, {before: tensor})
    return tensor


def _remedy(node: Node) -> str:
    if node.target not in PROJECTION:
        return ""
    value = value_of(node)
    is_mkl = value.device.type == "cpu" and value.dtype is torch.float32
    is_mkl = is_mkl and node.target not in QUANTISED_MATMUL
    if not is_mkl or "STRICT" in os.environ.get("MKL_CBWR", ""):
        return ""
    return "; with MKL_CBWR=AUTO,STRICT in the environment MKL computes rows alike"


def rows_differ_on_any(plan: CutPlan, group: str, alone: bool) -> str:
    """Returns on every rank of a group, each of which calls this, why rows differ on one of them,
    or that the ranks would exchange different chunks. A rank that compiles again, `alone`, recalls
    the earlier answer.
    """
    exchanges = [step.cut for node, step in plan.steps.items() if is_collective(node)]
    known, key = _verdicts.get(), (group, tuple(exchanges), trials(plan))
    if alone:
        return known[key] if key in known else _tried(plan)
    own = _tried(plan), exchanges
    with outside_the_compiler(), watched(group_ranks(group) or ()):
        found = gathered(own, find_group(group))
    known[key] = next(filter(None, (reason for reason, _ in found)), "")
    if any(theirs != exchanges for _, theirs in found):
        known[key] = "ranks would exchange different chunks of tokens"
    return known[key]


def _tried(plan: CutPlan) -> str:
    """Turns a failure into a reason: it must not leave other ranks waiting."""
    try:
        return rows_differ(plan)
    except Exception as error:
        return f"a trial failed: {error}"


def trials(plan: CutPlan) -> frozenset[Hashable]:
    """Returns all that is tried for a plan."""
    steps = {_key(node, step) for node, step in plan.steps.items() if is_heavy(node)}
    readers = {_call_key(node) for node, _ in _readers_of_joined(plan)}
    return frozenset(steps | readers)


def _key(node: Node, step: Step) -> Hashable:
    return _call_key(node), step.cut


def _call_key(node: Node) -> Hashable:
    tensors = [value_of(item) for item in node.all_input_nodes if is_tensor(item)]
    layouts = tuple((item.dtype, tuple(item.shape), item.stride()) for item in tensors)
    others = torch.fx.node.map_arg((node.args, node.kwargs), lambda _: None)
    return node.target, layouts, repr(others)


def _is_exact(node: Node, step: Step) -> bool:
    samples = _samples(node)
    whole = _call(node, samples)
    for number, length in enumerate(step.cut.lengths):
        if length:
            rows = {item: _rows(samples[item], node, step.cut, number) for item in step.by_chunk}
            part = _call(node, samples | rows)
            if not torch.equal(part, _rows(whole, node, step.cut, number)):
                return False
    return True


def _call(node: Node, samples: Mapping[Node, Any]) -> Tensor:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), samples.__getitem__)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    op = attention_op(node.target)
    output: Tensor = result[op.output if op else 0] if isinstance(result, (tuple, list)) else result
    return output


def _rows(tensor: Tensor, node: Node, cut: Cut, number: int) -> Tensor:
    begin, end = stretch(cut, number, node)
    blocks: Tensor = tensor.unflatten(cut.dim, (cut.outer, cut.inner))  # type: ignore[no-untyped-call]
    return blocks.narrow(cut.dim + 1, begin, end - begin).flatten(cut.dim, cut.dim + 1)


def _samples(node: Node) -> dict[Node, Any]:
    """Returns random data for each input, of its shape and in its order in memory."""
    return _shortened(node, {item: _sample(item) for item in node.all_input_nodes})


def _shortened(node: Node, samples: dict[Node, Any]) -> dict[Node, Any]:
    """Keeps one head and some of the keys of an attention in float32 on CPU."""
    value = value_of(node.all_input_nodes[0])
    # Elsewhere kernels are chosen by the number of heads and keys too.
    is_plain = value.device.type == "cpu" and value.dtype is torch.float32
    op = attention_op(node.target)
    is_sdpa = op is not None and op.name.startswith("aten::") and op.layout == "BHSD"
    if is_plain and is_sdpa:
        attention = parse_fused_attention(node)
        samples = {item: sample[:1, :1] for item, sample in samples.items()}
        for item in (attention.key, attention.value):
            samples[item] = samples[item][..., :_MAX_KEYS, :]
        if attention.mask is not None:
            samples[attention.mask] = samples[attention.mask][..., :_MAX_KEYS]
    return samples


def _holds_numbers(source: Node) -> bool:
    """Returns whether a tensor holds whole numbers that mean something: lengths, places."""
    dtype = value_of(source).dtype if is_tensor(source) else torch.bool
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return is_whole and dtype not in (torch.bool, torch.int8, torch.uint8)


def _sample(source: Node) -> Any:
    like = value_of(source)
    extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    memory = torch.ones(extent, dtype=like.dtype, device=like.device)
    if like.dtype.is_floating_point:
        memory = torch.randn(extent, device=like.device).to(like.dtype)
    elif like.dtype in (torch.int8, torch.uint8):
        memory.random_(100)
    return memory.as_strided(like.shape, like.stride())
