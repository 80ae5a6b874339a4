# SPDX-License-Identifier: Apache-2.0
"""`simulate(settings)`: captures each case once and estimates every variant of its exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cocodiff_compile.cost.exchanges import traffic
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.devices.cuda import H100
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.xpu import AURORA_TILE
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.show_topology import find_topology
from cocodiff_compile.lab.simulate.capture import SimulatedCase, capture_step, padded_to
from cocodiff_compile.lab.simulate.program import Program, Sent
from cocodiff_compile.lab.simulate.public_shapes import PublicShape, check_resolution, find_shape
from cocodiff_compile.lab.simulate.published import published_figure
from cocodiff_compile.lab.simulate.variants import FLAT, variants_for
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import format_phases
from cocodiff_compile.topology.presets import PRESETS, ranks_per_node

DEVICES = {device.name: device for device in (AURORA_TILE, H100)}
LARGEST_DEFAULT_DEGREE = 48
"""The largest degree of the paper, which runs 12, 24, 48 and 48 on 1, 2, 4 and 8 nodes."""


@dataclass(frozen=True)
class SimulateSettings:
    """Says what to simulate. `degree` defaults to all ranks, `LARGEST_DEFAULT_DEGREE` at most."""

    topology: str
    nodes: tuple[int, ...]
    model: str
    resolution: int
    degree: int | None = None
    max_layers: int | None = None
    device: str | None = None
    all_plans: bool = False


@dataclass(frozen=True)
class LinkUse:
    """One link class in one step: bytes that one rank sends, messages of the Ulysses group."""

    link: str
    rank_bytes: float
    messages: int


@dataclass(frozen=True)
class Row:
    """One case in one variant."""

    nodes: int
    num_ranks: int
    degree: int
    variant: str
    phases: str
    num_exchanges: int
    messages_per_exchange: float
    links: tuple[LinkUse, ...]
    timeline: Timeline
    speedup: float
    published: str


@dataclass(frozen=True)
class Simulation:
    """Holds all rows, and what was assumed for them."""

    settings: SimulateSettings
    shape: PublicShape
    device: Device
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def simulate(
    settings: SimulateSettings, say: Callable[[str], None] = lambda _line: None
) -> Simulation:
    """Returns every number of nodes in every variant. `say` hears of progress. Raises UserError for
    bad settings before anything is captured. Drops what torch.compile has compiled in this process.
    """
    shape = find_shape(settings.model)
    device = _device(settings)
    cases = [_case(settings, shape, nodes) for nodes in settings.nodes]
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        which = f"[{number}/{len(cases)}]"
        say(f"{which} nodes: {case.nodes}, ranks: {case.num_ranks}: capturing ...")
        began = time.perf_counter()
        variants = variants_for(case.topology, settings.topology, settings.all_plans)
        step = capture_step(case, variants, device)
        programs = {variant: step.program(variant, device, case.topology) for variant in variants}
        say(
            f"{which} {step.num_blocks} blocks from {len(step.graphs)} graphs in "
            f"{time.perf_counter() - began:.0f} s, {len(programs)} variants"
        )
        rows += _rows(settings, case, programs)
    notes = tuple(note for case in cases for note in _notes(case))
    return Simulation(settings, shape, device, tuple(rows), tuple(dict.fromkeys(notes)))


def _device(settings: SimulateSettings) -> Device:
    if settings.device is None:
        return AURORA_TILE if settings.topology == "aurora" else H100
    if settings.device not in DEVICES:
        raise UserError(f"unknown device {settings.device!r}; known: {', '.join(DEVICES)}")
    return DEVICES[settings.device]


def _case(settings: SimulateSettings, shape: PublicShape, nodes: int) -> SimulatedCase:
    num_ranks = nodes * _ranks_per_node(settings.topology)
    degree = settings.degree or min(num_ranks, LARGEST_DEFAULT_DEGREE)
    if num_ranks < 2:
        raise UserError(
            f"--nodes {nodes} of {settings.topology!r} is a single rank, which exchanges nothing; "
            "take more nodes"
        )
    if degree < 2 or num_ranks % degree:
        raise UserError(
            f"a Ulysses degree of {degree} does not divide {num_ranks} ranks ({nodes} nodes of "
            f"{settings.topology!r}); choose --ulysses-degree from "
            f"{[d for d in range(2, num_ranks + 1) if num_ranks % d == 0]}, or other nodes"
        )
    check_resolution(shape, settings.resolution, degree)
    topology = find_topology(settings.topology, degree)
    sizes = settings.resolution, settings.max_layers
    return SimulatedCase(shape, *sizes, nodes, num_ranks, degree, topology)


def _ranks_per_node(source: str) -> int:
    """Returns the ranks of a node; in a file, those below its outermost axis."""
    if source in PRESETS:
        return ranks_per_node(source)
    topology = find_topology(source, None)
    return topology.num_ranks // topology.axes[-1].size


def _rows(
    settings: SimulateSettings, case: SimulatedCase, programs: dict[str, Program]
) -> list[Row]:
    topology, nodes = case.topology, case.nodes
    published = partial(published_figure, settings.model, settings.resolution, nodes)
    is_papers = settings.topology == "aurora" and settings.max_layers is None
    timelines = {variant: program.timeline() for variant, program in programs.items()}
    num_exchanges = sum(sent.is_all_to_all for sent in programs[FLAT].sent)
    rows = []
    for variant, program in programs.items():
        exchanges = [sent for sent in program.sent if sent.is_all_to_all]
        messages = sum(use.messages for use in link_use(topology, exchanges))
        rows.append(
            Row(
                nodes,
                case.num_ranks,
                case.degree,
                variant,
                _phases(exchanges, topology),
                num_exchanges,
                messages / num_exchanges if num_exchanges else 0.0,
                tuple(link_use(topology, program.sent)),
                timelines[variant],
                timelines[FLAT].step_s / timelines[variant].step_s,
                published(variant) if is_papers else "",
            )
        )
    return rows


def link_use(topology: Topology, collectives: Sequence[Sent]) -> list[LinkUse]:
    """Returns bytes and messages per link class, innermost first."""
    size_bytes = dict.fromkeys((axis.link.name for axis in topology.axes), 0.0)
    messages = dict.fromkeys(size_bytes, 0)
    for sent in collectives:
        for flow in traffic(topology, sent.axes, sent.size_bytes):
            size_bytes[flow.link.name] += flow.size_bytes
            messages[flow.link.name] += flow.messages * topology.num_ranks
    return [LinkUse(name, size_bytes[name], messages[name]) for name in size_bytes]


def _phases(exchanges: Sequence[Sent], topology: Topology) -> str:
    """Returns the phases that occur, each once, in the order in which they do."""
    phases = list(dict.fromkeys(sent.axes for sent in exchanges))
    return "one phase" if phases == [topology.axis_names] else format_phases(phases)


def _notes(case: SimulatedCase) -> list[str]:
    shape, degree = case.shape, case.degree
    notes = []
    heads = padded_to(shape.heads, degree)
    if heads != shape.heads:
        notes.append(
            f"degree {degree}: {shape.heads} heads do not divide; assumed padded to {heads} with "
            "zeros in attention and its exchanges"
        )
    text = shape.text_tokens_for(degree)
    if text != shape.text_tokens:
        notes.append(f"degree {degree}: {shape.text_tokens} text tokens padded to {text}")
    if case.num_ranks != degree:
        notes.append(
            f"{case.num_ranks} ranks = {case.num_ranks // degree} Ulysses groups of {degree}, each "
            "with an image of its own (data parallel; the paper runs Ring between them): times are "
            "those of one group"
        )
    return notes
