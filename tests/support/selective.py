# SPDX-License-Identifier: Apache-2.0
"""Selective exchanges of all ranks in one process: one graph per kind of step, memories per rank.

And what the contract says about them, in arithmetic of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.ir.aten import ALL_GATHER, bound
from cocodiff_compile.ir.collectives import parse_all_to_all
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Exchange, Recognition, copied
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.pipeline.run_passes import broken_rule
from cocodiff_compile.v_major.delta_code import EXTRAPOLATION, FULL
from cocodiff_compile.v_major.payload import UNCOMPRESSED, CachedRoles, Payload
from tests.support import decided
from tests.support.captured import INPUT_NAMES, capture_call, fake_ranks
from tests.support.idioms import IDIOMS
from tests.support.lockstep import captured_model, machine, machine_groups, per_rank

NUM_RANKS = 6
GRID = machine(2, 3)
GROUPS = machine_groups("0", GRID)
MODELS = {"flux": 8, "sd3": 16}
"""Size of a head of each model."""
MIXED = Payload((4, 2, 8, FULL))

every_model = pytest.mark.parametrize("name", MODELS)

PerRank = Sequence[Any]
Pass = Callable[[Graph, Recognition], PassResult]


def kinds_of_models(*payloads: Payload) -> Any:
    """All of them of one model, the last of each."""
    cases = [("flux", payloads[-1]), *(("sd3", payload) for payload in payloads)]
    return pytest.mark.parametrize(("name", "payload"), cases, ids=str)


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured graph, and what was found in it."""

    graph: Graph
    found: Recognition
    values: Sequence[Any] = ()
    names: Sequence[str] = ()

    def copy(self) -> Captured:
        return Captured(*copied(self.graph, self.found), self.values, self.names)

    def after(self, run: Pass) -> Captured:
        """A copy that a pass has worked on."""
        graph, found = copied(self.graph, self.found)
        result = run(graph, found)
        assert result.changed
        assert result.recognition is not None
        graph.eliminate_dead_code()
        assert broken_rule(graph) == ""
        return Captured(graph, result.recognition, self.values, self.names)

    @property
    def pieces(self) -> list[Exchange]:
        return [piece for site in self.found.sites for piece in site.pieces]

    def groups(self) -> list[int]:
        """Elements of a head, for each piece."""
        sizes = {leg.exchange.start: leg.head_size for s in self.found.sites for leg in s.legs}
        return [
            int(sizes[exchange.start])
            for site in self.found.sites
            for exchange in site.exchanges
            for _ in exchange.pieces
        ]

    def inputs(self, count: int, change: float = 0.1) -> Iterator[list[list[Any]]]:
        """Yields inputs of every rank for `count` steps: fixed weights, slightly changing data."""
        for step in range(count):
            noise = torch.Generator().manual_seed(1000 + step)
            yield [
                [self._changed(*item, noise, change) for item in zip(self.names, mine, strict=True)]
                for mine in per_rank(self.values, self.names, NUM_RANKS)
            ]

    @staticmethod
    def _changed(name: str, value: Any, noise: torch.Generator, change: float) -> Any:
        if not is_data(name, value):
            return value
        return value + change * torch.randn(value.shape, generator=noise).to(value.dtype)


def is_data(name: str, value: Any) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and "_parameters_" not in name and "_buffers_" not in name


def captured_of(gm: GraphModule, values: Sequence[Any]) -> Captured:
    return Captured(gm.graph, recognize(gm.graph), values, gm.meta[INPUT_NAMES])


@functools.cache
def small_model(name: str, head_size: int = 8) -> Captured:
    """A public model on ranks of the grid; captured once for all tests, which work on copies."""
    with fake_ranks(NUM_RANKS):
        gm, values, num_sites = captured_model(name, head_size=head_size)
        found = captured_of(gm, values)
    assert len(found.found.sites) == num_sites
    return found


def model(name: str) -> Captured:
    return small_model(name, MODELS[name])


@functools.cache
def in_chunks(name: str) -> Captured:
    whole = model(name)
    with fake_ranks(NUM_RANKS):
        return whole.after(ChunkHeads(2).run)


def idiom(name: str, num_ranks: int = NUM_RANKS) -> Captured:
    (found,) = (item for item in IDIOMS if item.name == name)
    found = replace(found, num_ranks=num_ranks)
    with fake_ranks(num_ranks):
        gm, values = capture_call(found.model(), *found.arguments(), dynamic=found.dynamic)
        return captured_of(gm, values)


def in_phases(graph: Graph, recognition: Recognition) -> PassResult:
    result = decided.in_phases({"0": GRID}, "on")(graph, recognition)
    assert result.changed
    assert result.recognition is not None
    pieces = [piece for site in result.recognition.sites for piece in site.pieces]
    assert all(len(piece.phases) == 2 for piece in pieces)
    return result


@dataclass(frozen=True)
class Step:
    """The results of one step: outputs by rank; what was packed, if it is computed for all tokens,
    and what results from each exchange, by piece and rank.
    """

    outputs: list[tuple[Any, ...]]
    packed: list[list[Tensor]]
    results: list[list[Tensor]]


@dataclass(frozen=True)
class _Variant:
    graph: Graph
    packed: Sequence[Node]
    results: Sequence[Node]

    def run(self, inputs: Sequence[PerRank], instead: Mapping[Node, PerRank] | None = None) -> Step:
        graph, copies = self._recording
        swapped = {copies[node]: value for node, value in (instead or {}).items()}
        given = run_lockstep(graph, inputs, GROUPS, swapped)
        recorded = len(self.packed) + len(self.results)
        own = [mine[: len(mine) - recorded] for mine in given]
        extra = [[mine[i - recorded] for mine in given] for i in range(recorded)]
        return Step(own, extra[: len(self.packed)], extra[len(self.packed) :])

    def copied_graph(self) -> Graph:
        copy = Graph()
        copy.output(copy.graph_copy(self.graph, {}))
        return copy

    @functools.cached_property
    def _recording(self) -> tuple[Graph, dict[Node, Node]]:
        """A copy that returns what is recorded as well; the copy of each node."""
        copies: dict[Node, Node] = {}
        graph = Graph()
        results = graph.graph_copy(self.graph, copies)
        listed = results if isinstance(results, (list, tuple)) else (results,)
        graph.output((*listed, *(copies[node] for node in (*self.packed, *self.results))))
        return graph, copies


@functools.cache
def _built(base: Captured, select: SelectVMajor, then: Pass | None) -> tuple[_Variant, PassResult]:
    """Returns the graph of one kind of step, which runs do not change, and the pass's result."""
    own = base.copy()
    packed = [bound(piece.start)["input"] for piece in own.pieces]
    with fake_ranks(NUM_RANKS):
        result = select.run(own.graph, own.found)
        assert broken_rule(own.graph) == ""
        last = then(own.graph, result.recognition or own.found) if then else result
        assert broken_rule(own.graph) == ""
    recognition = last.recognition
    assert recognition is not None
    results = [piece.result for site in recognition.sites for piece in site.pieces]
    is_whole = set(packed) <= set(own.graph.nodes)
    return _Variant(own.graph, packed if is_whole else (), results), result


class Selective:
    """One graph with a kind of code for each kind of step, and what every rank remembers. `then` is
    run on the graph of each kind. `how`: other fields of the pass.
    """

    def __init__(
        self,
        base: Captured,
        *payloads: Payload,
        compare: Literal["sent", "seen"] = "sent",
        measures_drift: bool = False,
        then: Pass | None = None,
        **how: Any,
    ) -> None:
        self.base = base
        cached_roles = CachedRoles.for_payloads(payloads)
        self.variants: dict[Payload, _Variant] = {}
        self.results: dict[Payload, PassResult] = {}
        for payload in payloads:
            select = SelectVMajor(
                payload, cached_roles, compare, measures_drift=measures_drift, **how
            )
            self.variants[payload], self.results[payload] = _built(base, select, then)
        self.caches = [
            [torch.zeros(fake.shape, dtype=fake.dtype) for fake in self.cache_inputs(payloads[0])]
            for _ in range(NUM_RANKS)
        ]

    def cache_inputs(self, payload: Payload) -> list[Tensor]:
        """Fake tensors of the inputs behind those that the captured graph has."""
        nodes = self.variants[payload].graph.find_nodes(op="placeholder")
        captured = self.base.graph.find_nodes(op="placeholder")
        assert [node.name for node in nodes][: len(captured)] == [node.name for node in captured]
        return [node.meta["val"] for node in nodes[len(captured) :]]

    def step(self, payload: Payload, inputs: Sequence[PerRank]) -> Step:
        given = [[*mine, *own] for mine, own in zip(inputs, self.caches, strict=True)]
        return self.variants[payload].run(given)

    def pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Returns what was sent and what is held, by piece and rank. Exchanges must cache both."""
        count = len(self.base.pieces)
        return [
            [(mine[2 * piece], mine[2 * piece + 1]) for mine in self.caches]
            for piece in range(count)
        ]

    def exact(
        self, inputs: Sequence[PerRank], instead: Mapping[Node, PerRank] | None = None
    ) -> Step:
        """Runs the captured graph; nodes in `instead` have the given values."""
        return self._captured.run(inputs, instead)

    @functools.cached_property
    def _captured(self) -> _Variant:
        pieces = self.base.pieces
        packed = [bound(piece.start)["input"] for piece in pieces]
        return _Variant(self.base.graph, packed, [piece.result for piece in pieces])

    def with_messages(self, inputs: Sequence[PerRank], messages: Sequence[list[Tensor]]) -> Step:
        """Runs the captured graph, but each exchange carries the given messages of its ranks."""
        instead: dict[Node, PerRank] = {}
        for piece, mine in zip(self.base.pieces, messages, strict=True):
            flat = parse_all_to_all(piece.start)
            assert flat is not None
            instead[flat.wait] = exchanged(mine)
        return self.exact(inputs, instead)

    def with_packed(self, inputs: Sequence[PerRank], step: Step) -> Step:
        """Returns the result as captured, but with what was packed sent whole."""
        packed = [bound(piece.start)["input"] for piece in self.base.pieces]
        return self.exact(inputs, dict(zip(packed, step.packed, strict=True)))

    def with_results(self, inputs: Sequence[PerRank], results: Sequence[list[Tensor]]) -> Step:
        """Runs the captured graph, but each exchange has the given results."""
        pieces = self.base.pieces
        return self.exact(
            inputs, {piece.result: mine for piece, mine in zip(pieces, results, strict=True)}
        )


def outputs_of_steps(selective: Selective, payload: Payload) -> list[list[tuple[Any, ...]]]:
    """Returns the outputs of three steps, of which the first one is uncompressed."""
    kinds, inputs = (UNCOMPRESSED, payload, payload), selective.base.inputs(3)
    return [selective.step(kind, item).outputs for kind, item in zip(kinds, inputs, strict=True)]


def with_broken_element(
    inputs: Sequence[PerRank], names: Sequence[str], value: float
) -> list[list[Any]]:
    """Returns a copy of `inputs` where one element of the share of rank 2 is `value`: of the tokens
    of a sequence, or of a picture, about 5 twelfths lie before it.
    """
    found = [list(mine) for mine in inputs]
    place = next(i for i, name in enumerate(names) if "hidden_states" in name)
    assert is_data(names[place], found[2][place])
    broken = found[2][place] = found[2][place].clone()
    if broken.dim() == 3:
        broken[0, broken.shape[1] * 5 // 12, 7] = value
    else:
        broken[0, 0, broken.shape[2] * 5 // 12, broken.shape[3] // 2] = value
    return found


def num_gathers(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=ALL_GATHER))


def same(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(mine, other)
        for own, others in zip(ours, theirs, strict=True)
        for mine, other in zip(own, others, strict=True)
    )


def exchanged(messages: Sequence[Tensor]) -> list[Tensor]:
    """An all-to-all by its definition: block r of rank s becomes block s of rank r."""
    blocks = [message.chunk(len(messages)) for message in messages]
    return [torch.cat([mine[rank] for mine in blocks]) for rank in range(len(messages))]


# The code, by its contract


STEP_OVER_RMS = {1: 1.6, 2: 1.0, 3: 0.586, 4: 0.335}
"""Uniform steps with the least loss of normally distributed elements, as published."""


def code_by_contract(
    values: Tensor, reference: Tensor, bits: int, group: int, is_intra_coded: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns what is remembered of coded values from now on, and what arrives: [P, n, group] each.
    Both are computed in float64 and never packed. Intra-coded values are coded as for a receiver
    that remembers nothing, and are not extrapolated.
    """
    shape = (NUM_RANKS, -1, group)
    old = (torch.zeros_like(reference) if is_intra_coded else reference).reshape(shape)
    whole = values.reshape(shape).float() - old.float()
    difference, is_finite = whole.double(), whole.isfinite().all(-1, keepdim=True)
    spread = _spread(torch.where(is_finite, difference, 0.0))
    half = 2 ** (bits - 1)
    even, shaped = _wanted_step(difference, bits), _wanted_step(difference / spread, bits)
    is_plain = shaped > 4 * even
    step = _next_step(torch.where(is_plain, even, shaped))
    spread = torch.where(is_plain, 1.0, spread)
    number = torch.floor((whole * (1 / spread).float()).double() / step)
    coded = (number.clamp(-half, half - 1) + 0.5) * step * spread
    coded = torch.where((difference == 0).all(-1, keepdim=True), 0.0, coded)
    extrapolation = 0.0 if is_intra_coded else EXTRAPOLATION
    expected = (old.double() + (1 + extrapolation) * coded).float().to(reference.dtype)
    arrived = (old.double() + coded).float().to(reference.dtype)
    return torch.where(is_finite, expected, old), torch.where(is_finite, arrived, float("nan"))


def _wanted_step(difference: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return difference.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    return difference.square().mean(-1, keepdim=True).sqrt() * STEP_OVER_RMS[bits]


def _spread(difference: Tensor) -> Tensor:
    """Returns the size of each place of a group, over all groups to one rank, relative to the size
    of all places. A group with more energy than is usual counts as if it had the usual energy.
    """
    square = difference.square()
    energy = square.mean(-1, keepdim=True)
    usual = torch.stack([usual_energy(mine[mine > 0]) for mine in energy]).view(-1, 1, 1)
    square = (square * (usual / energy).clamp(max=1).nan_to_num(0.0)).mean(1, keepdim=True)
    spread = (square / square.mean(-1, keepdim=True).clamp(min=1e-60)).sqrt()
    return _next_step(spread).clamp(2.0**-20, 2.0**11 * 1.875)


def usual_energy(energies: Tensor) -> Tensor:
    """Their geometric mean, of which those far from it are brought closer to it, twice."""
    logs = energies.double().log()
    mean = logs.mean() if len(logs) else torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        most = float((logs - mean).abs().mean()) if len(logs) else 0.0
        mean = (mean + (logs - mean).clamp(-most, most)).mean() if len(logs) else mean
    return mean.exp()


def _next_step(wanted: Tensor) -> Tensor:
    """2**e * (1 + m/8), m rounded up."""
    mantissa, exponent = torch.frexp(wanted.double())
    eighths = torch.ceil(mantissa * 16) / 16
    return torch.ldexp(eighths, exponent).nan_to_num(1.0)


def differing_share(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Returns the share of elements that differ by more than float error."""
    apart = [
        ~torch.isclose(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return float(torch.cat([item.flatten() for item in apart]).float().mean())
