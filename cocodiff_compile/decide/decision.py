"""What was decided for one graph, as plain values: printed, compared between ranks, saved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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
    """Every choice between rewrites of one graph. None means that nothing was decided."""

    unfused_projections: bool = False
    head_chunks: tuple[int, ...] = ()
    """The number of head chunks of each attention."""
    token_chunks: int = 1
    token_chunked: tuple[int, ...] = ()
    """The attentions whose tokens are cut into `token_chunks`."""
    uncoded: tuple[str, ...] = ()
    """For each attention the reason why V-Major leaves it uncompressed; empty where it does not."""
    phases: tuple[ExchangePhases, ...] = ()
    order: tuple[int, ...] | None = None
    """The new order of matmuls, attentions, collectives and waits; None keeps the captured one."""

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """One line for each kind of choice."""
        heads = Counter(self.head_chunks)
        coded = sum(not reason for reason in self.uncoded)
        phases = Counter(format_phases(item.phases) for item in self.phases)
        return [
            f"projections: {'unfused' if self.unfused_projections else 'as captured'}",
            f"head chunks: {_counted(heads) or 'none'}",
            f"token chunks: {self.token_chunks}, in {len(self.token_chunked)} attentions",
            f"V-Major: {coded} of {len(self.uncoded)} attentions coded",
            f"phases: {_counted(phases) or 'flat'}",
            f"order: {'as captured' if self.order is None else 'new'}",
        ]


def _counted(counts: Counter[int] | Counter[str]) -> str:
    return ", ".join(f"{value} ({count} times)" for value, count in sorted(counts.items()))
