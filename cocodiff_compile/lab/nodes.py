# SPDX-License-Identifier: Apache-2.0
"""Runs one torchrun per node of an emulated cluster."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from cocodiff_compile.lab.cluster import CLUSTER_VARIABLE, INTERFACE, Cluster
from cocodiff_compile.lab.local_ranks import RankFailedError

Agent: TypeAlias = "subprocess.Popen[str]"
Lines: TypeAlias = "queue.Queue[tuple[int, str | None]]"
"""Holds nodes and their lines; None is the end."""
OnLine: TypeAlias = Callable[[int, str], None]

MASTER_PORT = 29500
_LAST_LINES = 80
"""The number of output lines kept per node. torchrun prints some thirty after a rank has failed."""
_END_S = 35.0
"""The time until a torchrun is killed; it gives its ranks 30 s."""


def run_on_nodes(
    cluster: Cluster,
    ranks_per_node: int,
    command: Sequence[str],
    *,
    on_line: OnLine,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs `torchrun ... command` on every node; returns when all are done.

    `on_line(node, line)` receives their output, in this thread. The first node that fails, or the
    timeout, ends all of them and raises RankFailedError with its last lines. They end with this
    process, however it ends.
    """
    lines: Lines = queue.Queue()
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        **(environment or {}),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        CLUSTER_VARIABLE: cluster.name,
    }
    nodes = range(cluster.num_nodes)
    agents = [_start(cluster, node, ranks_per_node, command, variables) for node in nodes]
    try:
        for node, agent in enumerate(agents):
            threading.Thread(target=_read, args=(node, agent, lines), daemon=True).start()
        _follow(agents, lines, on_line, time.monotonic() + timeout_s)
    finally:
        _end(agents)


def _start(
    cluster: Cluster,
    node: int,
    ranks_per_node: int,
    command: Sequence[str],
    variables: Mapping[str, str],
) -> Agent:
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(cluster.num_nodes), "--node-rank", str(node)),
        *("--nproc-per-node", str(ranks_per_node)),
        *("--master-addr", cluster.address(0), "--master-port", str(MASTER_PORT)),
        *command,
    ]
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *cluster.enter(node), *torchrun],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _read(node: int, agent: Agent, lines: Lines) -> None:
    assert agent.stdout is not None
    for line in agent.stdout:
        lines.put((node, line.rstrip("\n")))
    lines.put((node, None))


def _follow(agents: Sequence[Agent], lines: Lines, on_line: OnLine, deadline: float) -> None:
    last: list[deque[str]] = [deque(maxlen=_LAST_LINES) for _ in agents]
    open_nodes = set(range(len(agents)))
    while open_nodes:
        try:
            node, line = lines.get(timeout=1.0)
        except queue.Empty:
            # A torchrun that was killed leaves its output open in the hands of its ranks.
            for node in sorted(open_nodes):
                if status := agents[node].poll():
                    raise RankFailedError(f"node {node} ended with status {status}") from None
            if time.monotonic() < deadline:
                continue
            raise RankFailedError(f"nodes {sorted(open_nodes)} did not finish in time") from None
        if line is not None:
            last[node].append(line)
            on_line(node, line)
            continue
        open_nodes.discard(node)
        if status := agents[node].wait():
            text = "\n".join(last[node])
            raise RankFailedError(f"node {node} ended with status {status}:\n{text}")


def _end(agents: Sequence[Agent]) -> None:
    """Asks every torchrun to end its ranks, and kills those that do not."""
    for agent in agents:
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    for agent in agents:
        try:
            agent.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
