# SPDX-License-Identifier: Apache-2.0
"""Flat, phased and chosen exchanges over local gloo ranks, interleaved in one run.

    make bench-tapa

Each row is one size on one number of ranks. `flat` is one all-to-all, `on` the cheapest phases,
`auto` what `tapa="auto"` takes from a fresh measurement of the live group. The graphs are those the
pass leaves, run without code generation: every copy counts, also those that Inductor would fuse.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.fx import GraphModule

from cocodiff_compile.cost.phase_plan import plan_phases
from cocodiff_compile.lab.local_ranks import run_local_ranks, tell_parent
from cocodiff_compile.lab.one_exchange import exchange_graph, split_only_exchange
from cocodiff_compile.ranks.agreement.all_ranks import largest
from cocodiff_compile.ranks.groups import make_machine
from cocodiff_compile.ranks.live_topology import live_topology
from cocodiff_compile.report.tables import format_table
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import Phases

RANKS = (4, 8, 12, 24)
SIZES_MB = (0.02, 0.1, 0.5, 2.0, 8.0)
MIN_REPEATS, MAX_REPEATS = 15, 150
SECONDS_PER_ROW = 10.0


@dataclass(frozen=True)
class Row:
    """Times are those of the slowest rank of each repeat."""

    num_ranks: int
    size_mb: float
    on_plan: str
    auto_plan: str
    repeats: int
    median_ms: dict[str, float]
    auto_to_flat: float
    """Median over the repeats of the ratio within one repeat: what slows both cancels out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--json", type=Path, help="write all rows there")
    parsed = parser.parse_args()
    rows: list[Row] = []
    for num_ranks in parsed.ranks:
        with tempfile.TemporaryDirectory() as cache:
            found = run_local_ranks(
                _measure,
                num_ranks,
                cache,
                timeout_s=900,
                on_message=lambda _rank, text: print(text, flush=True),
            )
        rows += found[0]
    if parsed.json:
        parsed.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo\n")
    print(_table(rows))
    print(_verdict(rows))


def _table(rows: Sequence[Row]) -> str:
    headers = (
        "ranks",
        "MB per rank",
        "flat ms",
        "phases",
        "on ms",
        "auto takes",
        "auto ms",
        "auto / flat",
        "repeats",
    )
    return format_table(
        headers,
        [
            (
                row.num_ranks,
                f"{row.size_mb:g}",
                f"{row.median_ms['flat']:.2f}",
                row.on_plan,
                f"{row.median_ms['on']:.2f}",
                row.auto_plan,
                f"{row.median_ms['auto']:.2f}",
                f"{row.auto_to_flat:.2f}",
                row.repeats,
            )
            for row in rows
        ],
    )


def _verdict(rows: Sequence[Row]) -> str:
    phased = [row.auto_to_flat for row in rows if row.auto_plan != "flat"]
    same = [row.auto_to_flat for row in rows if row.auto_plan == "flat"]
    lines = []
    if phased:
        lines.append(
            f"phases taken in {len(phased)} rows: auto / flat {min(phased):.2f} to "
            f"{max(phased):.2f}, median {statistics.median(phased):.2f}"
        )
    if same:
        lines.append(
            f"flat taken in {len(same)} rows, the same code twice: {min(same):.2f} to "
            f"{max(same):.2f} is the noise of this machine"
        )
    return "\n" + "\n".join(lines)


def _measure(rank: int, num_ranks: int, cache: str) -> list[Row]:
    os.environ["XDG_CACHE_HOME"] = cache
    live = live_topology(torch.device("cpu"))
    machine = make_machine(tuple(range(num_ranks)), live.topology)
    if rank == 0:
        axes = " x ".join(f"{axis.size} {axis.name}" for axis in live.topology.axes)
        tell_parent(f"{num_ranks} ranks = {axes}; {live.notes[-1].split(',')[0]}")
    return [_row(rank, num_ranks, size_mb, machine) for size_mb in SIZES_MB]


def _row(rank: int, num_ranks: int, size_mb: float, machine: Machine) -> Row:
    count = round(size_mb * 1e6 / 4 / num_ranks) * num_ranks
    x = torch.arange(float(count)) + rank
    on = plan_phases(machine.topology, count * 4, "on")
    auto = plan_phases(machine.topology, count * 4, "auto")
    variants = {
        "flat": _exchange(x, machine, None),
        "on": _exchange(x, machine, on.phases),
        "auto": _exchange(x, machine, None if auto.is_flat else auto.phases),
    }
    expected = variants["flat"](x)
    for name, variant in variants.items():
        assert torch.equal(variant(x), expected), name
    taken = _interleaved(variants, x)
    if rank == 0:
        tell_parent(f"  {size_mb:g} MB per rank: {len(taken['flat'])} repeats")
    return Row(
        num_ranks,
        size_mb,
        str(on),
        str(auto),
        len(taken["flat"]),
        {name: statistics.median(all_) * 1e3 for name, all_ in taken.items()},
        statistics.median(
            auto / flat for auto, flat in zip(taken["auto"], taken["flat"], strict=True)
        ),
    )


def _exchange(x: Tensor, machine: Machine, phases: Phases | None) -> Callable[[Tensor], Tensor]:
    num_ranks = machine.topology.num_ranks
    world = dist.group.WORLD
    assert world is not None
    graph = exchange_graph(num_ranks, (len(x) // num_ranks,), world.group_name)
    if phases is not None:
        split_only_exchange(graph, machine, phases)
    return GraphModule(nn.Module(), graph)


def _interleaved(
    variants: dict[str, Callable[[Tensor], Tensor]], x: Tensor
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, per repeat. All ranks stop after the same repeat."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    begin = time.monotonic()
    names = list(variants)
    while len(taken["flat"]) < MAX_REPEATS:
        names = names[1:] + names[:1]  # each goes first as often as the others
        for name in names:
            dist.barrier()
            start = time.monotonic()
            variants[name](x)
            taken[name].append(largest(time.monotonic() - start))
        used = largest(time.monotonic() - begin)
        if used > SECONDS_PER_ROW and len(taken["flat"]) >= MIN_REPEATS:
            break
    return taken


if __name__ == "__main__":
    main()
