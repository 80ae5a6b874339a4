# SPDX-License-Identifier: Apache-2.0
"""Writes a graph as a Python file that runs: its readable code, inputs of the right shapes, and a
fake process group in which its collectives return at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.compat import group_ranks, optimization_hint
from cocodiff_compile.ir.aten import bound
from cocodiff_compile.ir.collectives import collectives_by_group

_TEMPLATE = '''"""{title}

Run it with `python FILE`: inputs are random, the process group is fake (its collectives return at
once, with meaningless values), so that the graph can be stepped through on any machine.
"""

import operator
from math import inf, nan
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch import device

GROUPS = {groups}


{code}

def example_inputs():
    torch.manual_seed(0)
    return [
{inputs}    ]


def join_fake_groups():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size={world_size})
    for name, ranks in GROUPS.items():
        try:
            torch._C._distributed_c10d._resolve_process_group(name)
        except RuntimeError:
            torch._C._distributed_c10d._register_process_group(name, dist.new_group(list(ranks)))


if __name__ == "__main__":
    if GROUPS:
        join_fake_groups()
    graph = {class_name}()
    constants = Path(__file__).with_name("constants.pt")
    if constants.exists():
        for name, value in torch.load(constants).items():
            setattr(graph, name, value)
    with torch.no_grad():
        results = graph(*example_inputs())
    for result in results:
        print(tuple(result.shape) if isinstance(result, torch.Tensor) else result)
'''

CLASS_NAME = "CapturedGraph"


def runnable_code(module: GraphModule, title: str, rank: int) -> str:
    """Returns the text of the file."""
    code = module.print_readable(print_output=False)
    _, rest = code.split("\n", 1)
    groups = _groups(module.graph, rank)
    members = [member for ranks in groups.values() for member in ranks]
    return _TEMPLATE.format(
        title=title,
        groups=groups,
        code=f"class {CLASS_NAME}(torch.nn.Module):\n{rest}",
        inputs="".join(
            f"        {_input(node)},\n" for node in module.graph.find_nodes(op="placeholder")
        ),
        rank=rank,
        world_size=max([rank, *members]) + 1,
        class_name=CLASS_NAME,
    )


def constants(module: GraphModule) -> dict[str, torch.Tensor]:
    """Returns the tensors that the graph reads from its module instead of from its inputs."""
    names = sorted({str(node.target) for node in module.graph.find_nodes(op="get_attr")})
    values = {name: getattr(module, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def op_counts(graph: Graph) -> dict[str, int]:
    """Returns how often each op is called, most frequent first."""
    counts = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _groups(graph: Graph, rank: int) -> dict[str, tuple[int, ...]]:
    return {
        name: group_ranks(name) or _as_many_ranks(nodes[0], rank)
        for name, nodes in collectives_by_group(graph).items()
    }


def _as_many_ranks(node: Node, rank: int) -> tuple[int, ...]:
    """Returns some ranks, `rank` among them, for a group that was planned but never created."""
    num_ranks = len(bound(node).get("input_split_sizes", ()))
    return tuple(range(rank, rank + num_ranks))


def _input(node: Node) -> str:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return repr(optimization_hint(value)) if isinstance(value, (int, torch.SymInt)) else "None"
    shape = [optimization_hint(size) for size in value.shape]
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return f"torch.randn({shape}, dtype={value.dtype}, device={value.device.type!r})"
    return f"torch.zeros({shape}, dtype={value.dtype}, device={value.device.type!r})"
