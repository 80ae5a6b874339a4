"""Records what was decided for one graph, as plain values to print, compare and save."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import Phases, format_phases


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
            ("order", "as captured" if self.order is None else f"new ({_short_hash(self.order)})"),
        ]


def _short_hash(order: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(order).encode()).hexdigest()[:8]


def _counted(counts: Counter[int] | Counter[str], what: str) -> str:
    return ", ".join(f"{value} (for {what}: {count})" for value, count in sorted(counts.items()))
