# SPDX-License-Identifier: Apache-2.0
"""States the facts of a compile that must be the same on every rank of a group, for comparison."""

from __future__ import annotations

from torch.fx import Graph, Node

from cocodiff_compile.compat import group_ranks
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.ir.aten import bound, value_of
from cocodiff_compile.ir.attention_ops import registry_text
from cocodiff_compile.ir.collectives import collectives_by_group
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.ranks.agreement.rank_state import Facts
from cocodiff_compile.ranks.agreement.run_plans import SizeTexts
from cocodiff_compile.topology.phases import format_phases


def captured_facts(
    graph: Graph, recognition: Recognition, group: str, config: CompileConfig, sizes: SizeTexts
) -> Facts:
    """Returns the settings, and the collectives over one group as captured.

    A recognised exchange has the same shape on every rank; what else a graph holds may not.
    """
    exchanges = {item.start for site in recognition.sites for item in site.exchanges}
    nodes = collectives_by_group(graph)[group]
    lines = [_line(node, sizes if node in exchanges else None) for node in nodes]
    kinds = dict.fromkeys(value_of(node.all_input_nodes[0]).device.type for node in nodes)
    reasons = {kind: device_kind(kind).why_no_overlap() or "nothing" for kind in kinds}
    overlap = ", ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    return [
        *config.settings.items(),
        ("option 'decision'", repr(config.decision)),
        ("registered attention ops", registry_text()),
        ("what keeps exchanges from overlapping", overlap),
        *_numbered("collective", lines),
    ]


def planned_facts(graph: Graph, recognition: Recognition, sizes: SizeTexts) -> dict[str, Facts]:
    """Returns, by the group they were captured over, every exchange with its chunks and phases, and
    all collectives in the order of the graph.
    """
    lines: dict[str, list[str]] = {}
    group_of: dict[Node, str] = {}
    for item in (item for site in recognition.sites for item in site.exchanges):
        piece = item.pieces[0]
        plan = format_phases([phase.axes for phase in piece.phases])
        chunks = f", in {len(item.chunks)} chunks" if item.chunks else ""
        lines.setdefault(item.group, []).append(f"the phases {plan}{chunks}")
        starts = (phase.start for piece in item.pieces for phase in piece.phases)
        group_of.update(dict.fromkeys((*starts, *(p.start for p in item.pieces)), item.group))
    facts = {group: _numbered("exchange", plans) for group, plans in lines.items()}
    ordered: dict[str, list[str]] = {}
    names = {node: name for name, nodes in collectives_by_group(graph).items() for node in nodes}
    for node in sorted(names):  # in the order of the graph
        own = sizes if node in group_of else None
        ordered.setdefault(group_of.get(node, names[node]), []).append(_line(node, own))
    for group, started in ordered.items():
        facts.setdefault(group, []).extend(_numbered("started collective", started))
    return facts


def collective_groups(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Returns the name and ranks of every group that a graph communicates over, in order of use."""
    found = {name: group_ranks(name) for name in collectives_by_group(graph)}
    return {name: ranks for name, ranks in found.items() if ranks is not None}


def _line(node: Node, sizes: SizeTexts | None) -> str:
    """Describes a collective in words; with its shape if `sizes` can write that."""
    ranks = group_ranks(str(bound(node).get("group_name"))) or ()
    name = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    value = value_of(node.all_input_nodes[0])
    shape = f"{'x'.join(map(sizes.text, value.shape))} " if sizes else ""
    return f"{name} of {shape}{value.dtype} over {len(ranks)} ranks"


def _numbered(what: str, lines: list[str]) -> Facts:
    count = (f"the number of {what}s", str(len(lines)))
    return [*((f"{what} {number}", line) for number, line in enumerate(lines)), count]
