# SPDX-License-Identifier: Apache-2.0
"""Records what was decided for one graph, as plain values to print, compare and save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import Phases, all_phases, format_phases


@dataclass(frozen=True)
class ExchangePhases:
    """The phases of every exchange of one size in one group."""

    group: int
    """The place of the group among those of the graph, in the order of their first exchange."""
    size_bytes: int
    phases: Phases

    def __str__(self) -> str:
        return f"{format_phases(self.phases)} for {self.size_bytes} bytes in group {self.group}"


@dataclass(frozen=True)
class Decision:
    """Holds every choice between rewrites that was made for one graph."""

    unfused_projections: bool = False
    head_chunks: tuple[int, ...] = ()
    """The number of head chunks of each attention."""
    token_chunks: int = 1
    token_chunked: tuple[int, ...] = ()
    """The attentions whose tokens are cut into `token_chunks`."""
    uncoded: tuple[str, ...] = ()
    """The reason why V-Major leaves each attention uncompressed; empty where it does not."""
    phases: tuple[ExchangePhases, ...] = ()
    topologies: tuple[Topology, ...] = ()
    """The topology under each group that has phases, by the place of the group."""
    order: tuple[int, ...] | None = None
    """The new order of matmuls, attentions, collectives and waits; None keeps the captured one."""

    @property
    def is_phased(self) -> bool:
        """Returns whether any exchange runs in more than one phase."""
        return any(len(item.phases) > 1 for item in self.phases)

    def __str__(self) -> str:
        return "\n".join(f"{what}: {value}" for what, value in self.lines)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Returns each kind of choice with what was chosen, in words."""
        heads = Counter(self.head_chunks)
        coded = sum(not reason for reason in self.uncoded)
        phases = Counter(format_phases(item.phases) for item in self.phases)
        return [
            ("projections", "unfused" if self.unfused_projections else "as captured"),
            ("head chunks", _counted(heads, "attentions") or "none"),
            ("token chunks", f"{self.token_chunks}, in {len(self.token_chunked)} attentions"),
            ("V-Major", f"{coded} of {len(self.uncoded)} attentions coded"),
            ("phases", _counted(phases, "sizes of exchanges") or "flat"),
            ("order", "as captured" if self.order is None else "new"),
        ]


def _counted(counts: Counter[int] | Counter[str], what: str) -> str:
    return ", ".join(f"{value} (for {what}: {count})" for value, count in sorted(counts.items()))


def refuse_misfit(given: Mapping[str, Decision], recognition: Recognition) -> None:
    """Raises a UserError if decisions for the kinds of step of one graph do not fit it, or each
    other: head and token chunks, topologies, and what is coded are the same for all kinds.
    """
    num_sites = len(recognition.sites)
    groups = dict.fromkeys(item.group for site in recognition.sites for item in site.exchanges)
    for item in given.values():
        numbers = {len(item.head_chunks), len(item.uncoded)} - {0, num_sites}
        if numbers or any(place >= num_sites for place in item.token_chunked):
            raise _misfit(f"a graph has {num_sites} attentions")
        if item.topologies and len(item.topologies) != len(groups):
            raise _misfit(f"a graph has {len(groups)} Ulysses groups")
        for own in item.phases:
            if own.group >= len(item.topologies) or own.phases not in all_phases(
                item.topologies[own.group]
            ):
                raise _misfit(f"there are no phases {format_phases(own.phases)} on its machine")
    for common in ("unfused_projections", "head_chunks", "token_chunks", "token_chunked"):
        if len({getattr(item, common) for item in given.values()}) > 1:
            raise _misfit(f"{common} differs between kinds of step")
    for common in ("topologies", "uncoded"):
        if len({getattr(item, common) for item in given.values()} - {()}) > 1:
            raise _misfit(f"{common} differs between kinds of step")


def _misfit(reason: str) -> UserError:
    return UserError(
        f"option 'decision': the file does not fit ({reason}); compile without it and save the "
        "decisions again"
    )
