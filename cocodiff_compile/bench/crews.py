"""Processes for the ways that must not share one: every rank starts one child per further crew.

The children of a crew form a world of their own on the same links. Ranks take turns: while one crew
runs a step the others wait for their next order, so all ways can be measured interleaved.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

from cocodiff_compile.bench.cases import Workload, rank_device
from cocodiff_compile.bench.worker import Worker
from cocodiff_compile.lab.local_ranks import end_with_parent

_TIMEOUT = timedelta(minutes=10)


class Crew:
    """A `Worker` in a child process; calls of its methods wait for the child's answer."""

    def __init__(self, name: str, workload: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._end, theirs = context.Pipe()
        address = f"tcp://{os.environ['MASTER_ADDR']}:{_agree_on_port()}"
        place = (address, dist.get_rank(), dist.get_world_size())
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid(), place, workload), daemon=False
        )
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        try:
            self._end.send((method, args))
            failure, result = self._end.recv()
        except (EOFError, ConnectionError):
            self._process.join(timeout=5)
            status = self._process.exitcode
            raise RuntimeError(f"crew {self._name!r} died with status {status}") from None
        if failure:
            raise RuntimeError(f"crew {self._name!r}:\n{failure}")
        return result

    def close(self) -> None:
        self._end.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Crews:
    """The worker of this process, and the crews beside it, by name."""

    def __init__(self, workload: Workload, others: list[str]) -> None:
        self._others = {name: Crew(name, workload) for name in others}
        self._main = Worker(workload)

    def call(self, crew: str, method: str, *args: Any) -> Any:
        """`method` of the crew's worker."""
        if crew == "main":
            return getattr(self._main, method)(*args)
        return self._others[crew].call(method, *args)

    def close(self) -> None:
        for crew in self._others.values():
            crew.close()


@contextmanager
def crews(workload: Workload, others: list[str]) -> Iterator[Crews]:
    """They end with the block."""
    made = Crews(workload, others)
    try:
        yield made
    finally:
        made.close()


def _agree_on_port() -> int:
    """A port that is free on the first rank."""
    port = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port[0] = probe.getsockname()[1]
    dist.broadcast(port, 0)
    return int(port.item())


def join_world(address: str | None = None, rank: int = -1, num_ranks: int = -1) -> None:
    """The process group of all ranks: torchrun's, or the one that meets at `address`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = rank_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else None,
        init_method=address,
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
    )


def _serve(end: Connection, parent: int, place: tuple[str, int, int], workload: Workload) -> None:
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    # torchrun's store belongs to its own ranks; this world meets elsewhere.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    join_world(*place)
    worker = Worker(workload)
    while True:
        try:
            method, args = end.recv()
        except EOFError:
            return
        try:
            end.send(("", getattr(worker, method)(*args)))
        except Exception:
            end.send((traceback.format_exc(), None))
