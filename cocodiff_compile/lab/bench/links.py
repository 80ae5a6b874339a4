# SPDX-License-Identifier: Apache-2.0
"""Controls links of a running benchmark: sets rates, streams over them, reads counters."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import distributed as dist

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.cluster import CLUSTER_VARIABLE, NodeLink, find_cluster, set_link
from cocodiff_compile.ranks.agreement.all_ranks import gathered, largest
from cocodiff_compile.ranks.launch.init_distributed import rank_device

LINKS_VARIABLE = "COCODIFF_BENCH_LINKS"
_HEADER_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 32 with timestamps. A packet without payload is an acknowledgement."""

_STREAMS, _STREAM_S = 2, 0.7
_CONNECT_S = 30.0


@dataclass(frozen=True)
class RankPosition:
    """Holds the rank of this process and the layout of ranks on nodes."""

    rank: int
    num_ranks: int
    ranks_per_node: int

    @classmethod
    def here(cls) -> RankPosition:
        """Returns the position of this rank. Raises UserError on every rank unless all nodes hold
        equally many ranks, in order. All ranks must call this.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        local, per_node = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        everyone = gathered((local, per_node))
        if everyone != [(other % per_node, per_node) for other in range(num_ranks)]:
            raise UserError(
                "ranks must fill one node after the other, with equally many on each; launch them "
                f"so. The (local rank, ranks of the node) are {everyone}"
            )
        return cls(rank, num_ranks, per_node)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


def links_are_ours() -> bool:
    """Returns whether this runs on an emulated cluster of its own, whose rates it may set."""
    return LINKS_VARIABLE in os.environ


def set_rate(rate_mbit: float | None) -> None:
    """Sets the rate of every node's interface in the emulated cluster. All ranks must call this."""
    dist.barrier()
    if dist.get_rank() == 0:
        set_link(find_cluster(os.environ[CLUSTER_VARIABLE]), NodeLink(rate_mbit))
    dist.barrier()


def streams_bytes_per_s(position: RankPosition) -> list[float]:
    """Returns what the slowest node sends per second while every node streams to the next, a few
    times; nothing on one node, or on accelerators, whose network is not TCP. All ranks must call.
    """
    if position.num_nodes == 1 or rank_device().type != "cpu":
        return []
    return [_stream_once(position) for _ in range(_STREAMS)]


def _stream_once(position: RankPosition) -> float:
    is_first = position.rank % position.ranks_per_node == 0  # on its node
    with socket.create_server((_own_address(), 0)) if is_first else nullcontext() as server:
        addresses = gathered(server.getsockname() if server else ("", 0))
        following = addresses[(position.rank + position.ranks_per_node) % position.num_ranks]
        received = _stream(server, following) if server else float("inf")
        return -largest(-received)


def _stream(server: socket.socket, following: tuple[str, int]) -> float:
    """Sends to the next node; returns the bytes per second that arrive from the one before."""
    with socket.create_connection(following, timeout=_CONNECT_S) as out:
        incoming, _ = server.accept()
        sender = threading.Thread(target=_send_for, args=(out, _STREAM_S))
        sender.start()
        size_bytes, begin = 0, time.monotonic()
        with incoming:
            while chunk := incoming.recv(1 << 20):
                size_bytes += len(chunk)
        seconds = time.monotonic() - begin
        sender.join()
    return size_bytes / seconds


def _own_address() -> str:
    """Returns the address of the interface that leads to the first rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address: str = probe.getsockname()[0]
    return address


def _send_for(out: socket.socket, seconds: float) -> None:
    chunk = bytes(1 << 16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        out.sendall(chunk)
    out.shutdown(socket.SHUT_WR)


def sent_while(run: Callable[[], object]) -> dict[str, int] | None:
    """Runs something; returns the payload and packets that the busiest node's interface sent
    meanwhile, or None if it does not count. All ranks must call this.
    """
    before = _interface_counters()
    run()
    after = _interface_counters()
    if before is None or after is None:
        return None
    packets = after[1] - before[1]
    payload_bytes = after[0] - before[0] - _HEADER_BYTES * packets
    return {"payload_bytes": int(largest(payload_bytes)), "packets": int(largest(packets))}


def _interface_counters() -> tuple[int, int] | None:
    """Returns the bytes and packets that the interface of gloo has sent since it was created."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == wanted:
            fields = numbers.split()
            return int(fields[8]), int(fields[9])
    return None
