# SPDX-License-Identifier: Apache-2.0
"""Starts processes for variants that must not share one: every rank has one child per further
worker group.

The children of a worker group form a process group of their own on the same links. Groups compile
side by side; afterwards only one group runs a step at a time, so that all variants can be measured
interleaved.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

from cocodiff_compile.lab.bench.variants import MAIN_GROUP
from cocodiff_compile.lab.bench.worker import Worker
from cocodiff_compile.lab.local_ranks import end_with_parent
from cocodiff_compile.ranks.agreement.all_ranks import from_first_rank
from cocodiff_compile.ranks.launch.init_distributed import join_ranks, take_device

_TIMEOUT = timedelta(minutes=10)

_END = "end"


class WorkerGroups:
    """Holds the worker of this process and those of the other worker groups, by name."""

    def __init__(self, others: Sequence[str]) -> None:
        self._others = {name: _Child(name) for name in others}
        self._main = _Server()

    def join_worlds(self) -> None:
        """Joins the process group of each worker group."""
        self._main.call("join")
        for child in self._others.values():
            with socket.create_server(("", 0)) as probe:  # a free port of the first rank
                port = from_first_rank(probe.getsockname()[1])
            address = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
            child.begin("join", address, dist.get_rank(), dist.get_world_size())
        for child in self._others.values():
            child.finish()

    def call(self, worker_group: str, method: str, *args: Any) -> Any:
        """Calls `method` of the group's `Worker`."""
        ((_, result),) = self.call_each(method, {worker_group: args})
        return result

    def call_all(self, method: str, *args: Any) -> None:
        """Calls `method` of the workers of all groups at the same time."""
        list(self.call_each(method, dict.fromkeys((MAIN_GROUP, *self._others), args)))

    def call_each(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, Any]]:
        """Calls `method` of these groups' workers at the same time, each with its own arguments.
        Yields groups and results in the order in which they are waited for.
        """
        others = {name: self._others[name] for name in arguments if name != MAIN_GROUP}
        for worker_group, child in others.items():
            child.begin(method, *arguments[worker_group])
        if MAIN_GROUP in arguments:
            yield MAIN_GROUP, self._main.call(method, *arguments[MAIN_GROUP])
        for worker_group, child in others.items():
            yield worker_group, child.finish()

    def close(self) -> None:
        for child in self._others.values():
            child.close()


@contextmanager
def worker_groups(others: Sequence[str]) -> Iterator[WorkerGroups]:
    """Starts one process group per worker group; they end with the block. The ranks that enter must
    not belong to a process group yet, since the children are forks of them.
    """
    made = WorkerGroups(others)
    try:
        made.join_worlds()
        yield made
        dist.barrier()
    finally:
        made.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Child:
    """Runs a `_Server` in a fork of this process."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("fork")
        self._name = name
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=False)
        self._process.start()
        theirs.close()

    def begin(self, method: str, *args: Any) -> None:
        try:
            self._end.send((method, args))
        except ConnectionError:
            self._died()

    def finish(self) -> Any:
        try:
            failure, result = self._end.recv()
        except (EOFError, ConnectionError):
            self._died()
        if failure:
            raise RuntimeError(f"worker group {self._name!r}:\n{failure}")
        return result

    def _died(self) -> None:
        self._process.join(timeout=5)
        status = self._process.exitcode
        raise RuntimeError(f"worker group {self._name!r} died with status {status}") from None

    def close(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._end.send((_END, ()))
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class _Server:
    """Answers calls: joins a process group, starts a worker, and forwards other calls to it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def call(self, method: str, *args: Any) -> Any:
        if method == "join":
            return _join_world(*args)
        if method == "start":
            self._worker = None  # frees its memory before the next one is built
            self._worker = Worker(*args)
            return None
        return getattr(self._worker, method)(*args)


def _serve(end: Connection, parent: int) -> None:
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    # torchrun's store belongs to its own ranks; this process group uses another address.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    server = _Server()
    while True:
        method, args = end.recv()
        if method == _END:
            return
        try:
            end.send(("", server.call(method, *args)))
        except Exception:
            end.send((traceback.format_exc(), None))


def _join_world(address: str | None = None, rank: int = -1, num_ranks: int = -1) -> None:
    """Joins the process group of all ranks: torchrun's, or the one that meets at `address`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    take_device()
    join_ranks(timeout=_TIMEOUT, init_method=address, rank=rank, num_ranks=num_ranks)
