# SPDX-License-Identifier: Apache-2.0
"""Captures one step of a published model as our backend would run it, for several variants of
exchanging.

The model exists in shapes only: fake tensors and a fake process group. Its repeated blocks are
compiled one by one, as `compile_repeated_blocks` does, so that one graph serves many blocks; what
runs between them runs eagerly, and is recorded call by call, as a graph too. Each compiled graph is
the one that the backend would generate code from, behind every pass.
"""

from __future__ import annotations

import copy
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from cocodiff_compile.compat import FakeTensorMode, TorchDispatchMode, make_boxed_func
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.config import CompileConfig, ShardOptions
from cocodiff_compile.devices.device import Device
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.simulate.program import (
    Program,
    eager_program,
    graph_program,
    joined,
    simulated_costs,
)
from cocodiff_compile.lab.simulate.public_shapes import PublicShape
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.shard.token_share import TokenShare
from cocodiff_compile.shard.whole_of_shares import WHOLE, gathered_rows
from cocodiff_compile.topology.axes import Topology

Piece: TypeAlias = "_EagerCalls | _Compiled"


@dataclass(frozen=True)
class SimulatedCase:
    """A model at a size on `nodes`, in Ulysses groups of `degree` ranks, each on a `topology`."""

    shape: PublicShape
    resolution: int
    max_layers: int | None
    nodes: int
    num_ranks: int
    degree: int
    topology: Topology


@dataclass(frozen=True, eq=False)
class _Compiled:
    """One graph of a repeated block, for each variant of the exchanges."""

    graphs: Mapping[str, Graph]


@dataclass(eq=False)
class _EagerCalls:
    """Calls between two compiled blocks, as a graph; tensors from outside are placeholders."""

    graph: Graph = field(default_factory=Graph)
    _nodes: dict[int, Node] = field(default_factory=dict)
    """Nodes by the `id` of their tensor, which the node keeps alive."""

    def add(self, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._node_of, (args, kwargs))
        node = self._keep(self.graph.call_function(target, args, kwargs), result)
        if isinstance(result, (tuple, list)):
            for place, part in enumerate(result):
                self._keep(self.graph.call_function(operator.getitem, (node, place)), part)

    def _node_of(self, tensor: torch.Tensor) -> Node:
        known = self._nodes.get(id(tensor))
        return self._keep(self.graph.placeholder("input"), tensor) if known is None else known

    def _keep(self, node: Node, value: Any) -> Node:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
        return node


@dataclass
class CapturedStep:
    """One forward: eager calls and calls of compiled blocks, in order."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def eager(self) -> _EagerCalls:
        """Returns the eager calls since the last compiled block, to which more may be added."""
        last = self.pieces[-1] if self.pieces else None
        if not isinstance(last, _EagerCalls):
            self.pieces.append(last := _EagerCalls())
        return last

    @property
    def graphs(self) -> list[_Compiled]:
        """Returns each compiled graph once."""
        compiled = (piece for piece in self.pieces if isinstance(piece, _Compiled))
        return list(dict.fromkeys(compiled))

    @property
    def num_blocks(self) -> int:
        return sum(isinstance(piece, _Compiled) for piece in self.pieces)

    def program(self, variant: str, device: Device, topology: Topology) -> Program:
        """Returns what one rank does with the exchanges made in one of the variants."""
        pieces = list(dict.fromkeys(self.pieces))
        compiled = {
            piece: piece.graphs[variant] for piece in pieces if isinstance(piece, _Compiled)
        }
        eager = {piece: piece.graph for piece in pieces if isinstance(piece, _EagerCalls)}
        costs = simulated_costs(device, topology, (*compiled.values(), *eager.values()))
        programs: dict[Piece, Program] = {
            **{piece: graph_program(graph, costs) for piece, graph in compiled.items()},
            **{piece: eager_program(graph, costs) for piece, graph in eager.items()},
        }
        return joined(programs[piece] for piece in self.pieces)


def capture_step(
    case: SimulatedCase, variants: Mapping[str, CompileConfig], device: Device
) -> CapturedStep:
    """Captures `case` once; the backend decides as it would on `device`. Needs no cluster, no
    accelerator and no weights; leaves no process group behind.
    """
    if torch.distributed.is_initialized():
        raise UserError("a process group is initialised; simulate needs a process of its own")
    shape, degree = case.shape, case.degree
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), _Recorder()
    with fake_ranks(case.num_ranks), _quiet(), torch.no_grad():
        with mode:
            model = shape.build(case.max_layers)
            inputs = shape.inputs(model, case.resolution, degree)
        _compile_blocks(model, _backend(_shared(variants, degree), device, recorder), recorder)
        with mode, recorder, _padded_heads(shape.heads, degree):
            model(**inputs)
            recorder.step = CapturedStep()  # from its second call on, blocks hand on shares
            model(**inputs)
    return recorder.step


def _shared(variants: Mapping[str, CompileConfig], degree: int) -> dict[str, CompileConfig]:
    shard = ShardOptions(degree=degree, min_gain=0)
    return {name: replace(config, shard=shard) for name, config in variants.items()}


def padded_to(heads: int, degree: int) -> int:
    """Returns the next number of heads that `degree` ranks can share."""
    return -(-heads // degree) * degree


@contextmanager
def _padded_heads(heads: int, degree: int) -> Iterator[None]:
    """Adds heads of zeros to self-attentions that have fewer than ranks, which shard-tokens leaves
    whole. That somebody would do so is an assumption, which the report states.
    """
    plain = functional.scaled_dot_product_attention
    missing = padded_to(heads, degree) - heads

    def padded(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if key.shape != query.shape:
            return plain(query, key, value, **options)
        pads = (0, 0, 0, 0, 0, missing)
        query, key, value = (functional.pad(item, pads) for item in (query, key, value))
        return plain(query, key, value, **options)[:, :heads]

    if heads >= degree:
        yield
        return
    with mock.patch.object(functional, "scaled_dot_product_attention", padded):
        yield


_CHATTY_LOGGERS = ("diffusers", "diffusers.models.modeling_utils")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences diffusers and torch about calls that whoever simulates cannot change."""
    loggers = [logging.getLogger(name) for name in _CHATTY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every call of an op, and steps aside for compiled blocks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = CapturedStep()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if TokenShare in types:
            return NotImplemented  # it calls ops on what one rank holds
        if func is WHOLE:
            with self:
                return gathered_rows(*args)
        result = func(*args, **(kwargs or {}))
        self.step.eager.add(func, args, kwargs or {}, result)
        return result

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Dynamo compiles nothing under a mode that sees every call."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]


def _compile_blocks(model: nn.Module, backend: Callable[..., Any], recorder: _Recorder) -> None:
    """Compiles each repeated block in its place; Dynamo lets blocks of a kind share a graph."""
    torch.compiler.reset()  # graphs of another case count towards Dynamo's limit
    for blocks in model.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                compiled = torch.compile(
                    block._call_impl, backend=backend, dynamic=False, fullgraph=True
                )
                block._compiled_call_impl = recorder.aside()(compiled)


def _backend(
    variants: Mapping[str, CompileConfig], device: Device, recorder: _Recorder
) -> Callable[..., Any]:
    def compile_all(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs: dict[str, Graph] = {}
        for name, config in variants.items():

            def keep(
                final: GraphModule, _inputs: Any, *, variant: str = name, **_options: Any
            ) -> Any:
                graphs[variant] = final.graph
                return _stand_in(final.graph)

            call = compile_graph(
                copy.deepcopy(gm), example_inputs, config, keep, dry_run=True, device=device
            )
        compiled = _Compiled(graphs)

        def run(*args: Any) -> Any:
            recorder.step.pieces.append(compiled)
            return call(*args)

        return run

    return compile_all


def _stand_in(graph: Graph) -> Any:
    """Returns a callable whose results are like those of `graph`, which runs none of its nodes."""
    outputs = graph.output_node().args[0]

    def empty(node: Node) -> torch.Tensor:
        like = node.meta["val"]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    return make_boxed_func(lambda *_args: pytree.tree_map_only(Node, empty, outputs))
