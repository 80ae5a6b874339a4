"""From calls of ATen ops to a program: which kernels run, and how long each takes.

    matmul       FLOPs of torch.utils.flop_counter at the device's rate, or its bytes at the
                 memory's if that takes longer
    attention    the same, at the rate of attention
    view         free
    collective   a `Start`, and a `Wait` where the graph waits
    all else     memory traffic: what is read and written, once

In a compiled graph everything of the last kind that is connected, and has nothing of the other
kinds between it in program order, is one kernel: it reads what comes from outside and writes what
is used outside. Operations outside compiled graphs are kernels of their own, as they are when run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from cocodiff_compile.devices.device import Device
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.aten import (
    ALL_GATHER,
    ALL_TO_ALL,
    ATTENTION,
    WAIT,
    base_of,
    is_alias_op,
    readers_of,
)
from cocodiff_compile.lab.simulate.program import Compute, Program, Start, Step, Wait
from cocodiff_compile.topology.axes import Topology


@dataclass(frozen=True)
class Call:
    """One call of an op, with fake tensors for values."""

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def is_view(self) -> bool:
        """Nothing is computed: the result shares memory, or is no tensor."""
        return is_alias_op(self.target)

    @property
    def is_attention(self) -> bool:
        return self.target in ATTENTION

    @property
    def is_matmul(self) -> bool:
        return getattr(self.target, "overloadpacket", None) in flop_registry

    @property
    def is_collective(self) -> bool:
        return getattr(self.target, "namespace", "") == ALL_TO_ALL.namespace

    @property
    def flops(self) -> float:
        if self.is_attention:
            shapes = [tensor.shape for tensor in self.args[:3]]
            return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
        count = flop_registry[self.target.overloadpacket]
        return float(count(*self.args, **self.kwargs, out_val=self.result))

    @property
    def touched_bytes(self) -> float:
        return num_bytes((self.args, self.kwargs)) + num_bytes(self.result)


def num_bytes(values: Any) -> float:
    """Bytes of all tensors in `values`."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


@dataclass
class ProgramBuilder:
    """Puts a program together call by call."""

    device: Device
    topology: Topology
    steps: list[Step] = field(default_factory=list)
    tickets: dict[Any, int] = field(default_factory=dict)

    def program(self) -> Program:
        return tuple(self.steps)

    def memory(self, name: str, size_bytes: float) -> None:
        self._kernel(name, "memory", 0.0, size_bytes)

    def call(self, call: Call, name: str, result_key: Any, wait_key: Any) -> None:
        """One call that is not fused. Keys tell which wait belongs to which collective."""
        if call.target is WAIT:
            if wait_key in self.tickets:  # waiting again for what was waited for is free
                self.steps.append(Wait(self.tickets.pop(wait_key)))
        elif call.is_collective:
            self.tickets[result_key] = self._start(call, name)
        elif call.is_attention:
            seconds = self.device.attention_seconds(call.flops)
            self._kernel(name, "attention", seconds, call.touched_bytes)
        elif call.is_matmul:
            seconds = self.device.matmul_seconds(call.flops)
            self._kernel(name, "matmul", seconds, call.touched_bytes)
        elif not call.is_view:
            self.memory(name, call.touched_bytes)

    def _kernel(self, name: str, kind: Any, arithmetic_s: float, size_bytes: float) -> None:
        seconds = self.device.kernel_seconds(arithmetic_s, size_bytes)
        self.steps.append(Compute(name, kind, seconds))

    def _start(self, call: Call, name: str) -> int:
        ticket = sum(isinstance(step, Start) for step in self.steps)
        size_bytes = num_bytes(call.args[0])
        if call.target is ALL_GATHER:
            size_bytes *= call.args[1]
        elif call.target is not ALL_TO_ALL:
            raise InvariantError(f"simulate: {name} is {call.target}, which it has no cost for")
        axes = self._axes(str(call.args[-1]))
        self.steps.append(Start(name, ticket, axes, size_bytes, call.target is ALL_TO_ALL))
        return ticket

    def _axes(self, group: str) -> tuple[str, ...]:
        """Groups made for phases are named by their axes; any other is the whole Ulysses group."""
        names, wanted = self.topology.axis_names, group.split("+")
        return tuple(name for name in names if name in wanted) or names


def graph_program(graph: Graph, device: Device, topology: Topology) -> Program:
    """The program of one compiled graph, in the order of its nodes."""
    builder = ProgramBuilder(device, topology)
    run: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        call = _call_of(node)
        if call.is_view:
            continue
        if not (call.is_collective or call.is_attention or call.is_matmul):
            run.append(node)
            continue
        _emit_fused(builder, run)
        run = []
        waits_for = node.args[0] if call.target is WAIT else None
        builder.call(call, node.name, result_key=node, wait_key=waits_for)
    _emit_fused(builder, run)
    return builder.program()


def _call_of(node: Node) -> Call:
    args, kwargs = pytree.tree_map_only(
        Node, lambda item: item.meta.get("val"), (node.args, node.kwargs)
    )
    return Call(node.target, args, kwargs, node.meta.get("val"))


def _emit_fused(builder: ProgramBuilder, run: list[Node]) -> None:
    for kernel in _connected(run):
        written = [node for node in kernel if _is_used_outside(node, kernel)]
        size_bytes = _read_bytes(kernel) + sum(num_bytes(node.meta["val"]) for node in written)
        name = written[-1].name if written else next(iter(kernel)).name
        builder.memory(f"fused {len(kernel)}: {name}" if len(kernel) > 1 else name, size_bytes)


def _connected(run: list[Node]) -> list[dict[Node, None]]:
    """The nodes of `run` in sets that feed each other, views between them aside."""
    kernels: dict[Node, dict[Node, None]] = {}
    for node in run:
        merged = {node: None}
        for source in node.all_input_nodes:
            merged = {**kernels.get(base_of(source), {}), **merged}
        for member in merged:
            kernels[member] = merged
    return list({id(kernel): kernel for kernel in kernels.values()}.values())


def _read_bytes(kernel: Mapping[Node, None]) -> float:
    """Of each tensor from outside what is looked at, and never more than it holds."""
    looked_at: dict[Node, dict[Node, None]] = {}
    for node in kernel:
        for source in node.all_input_nodes:
            if (base := base_of(source)) not in kernel:
                looked_at.setdefault(base, {})[source] = None
    return sum(
        min(num_bytes(base.meta["val"]), sum(num_bytes(view.meta["val"]) for view in views))
        for base, views in looked_at.items()
    )


def _is_used_outside(node: Node, kernel: Mapping[Node, None]) -> bool:
    return any(user not in kernel for user in readers_of(node))
