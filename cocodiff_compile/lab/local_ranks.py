# SPDX-License-Identifier: Apache-2.0
"""Runs real gloo ranks on this machine, one process each, arranged as emulated nodes."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

Worker = Callable[..., Any]


class RankFailedError(RuntimeError):
    """Is raised if a rank raised, died or did not finish; the message holds its traceback."""


_parent: Connection | None = None


def tell_parent(message: Any) -> None:
    """Sends `message` from inside a worker to the `on_message` of the process that started it."""
    if _parent is not None:
        _parent.send_bytes(pickle.dumps(("message", message)))


def run_local_ranks(
    worker: Worker,
    num_ranks: int,
    *args: Any,
    timeout_s: float,
    ranks_per_node: int | None = None,
    on_message: Callable[[int, Any], None] = lambda _rank, _message: None,
) -> list[Any]:
    """Calls `worker(rank, num_ranks, *args)` on every rank; returns the results by rank.

    `worker` is a module-level function; its arguments and result must be picklable. It runs inside
    of a gloo group over loopback, with torchrun's variables set as if `ranks_per_node` ranks shared
    a node. The first rank that fails, or the timeout, ends all of them.
    """
    context = multiprocessing.get_context("spawn")
    per_node = ranks_per_node or num_ranks
    ends: list[Connection] = []
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{Path(directory) / 'store'}"
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                variables = _rank_variables(rank, num_ranks, per_node)
                arguments = (theirs, os.getpid(), store, variables, worker, args)
                process = context.Process(target=_run_rank, args=arguments, daemon=False)
                process.start()
                theirs.close()
                ends.append(ours)
                processes.append(process)
            return _collect(ends, processes, time.monotonic() + timeout_s, on_message)
        finally:
            _end(processes)


def _rank_variables(rank: int, num_ranks: int, per_node: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _run_rank(
    end: Connection,
    parent: int,
    store: str,
    variables: dict[str, str],
    worker: Worker,
    args: tuple[Any, ...],
) -> None:
    global _parent  # noqa: PLW0603  (one worker per process)
    _parent = end
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    os.environ.update(variables)
    rank, num_ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        dist.barrier()  # a rank that ends at once would cut off those that still connect
        # Pickled here: a Connection would pass tensors on as shared memory of a process that ends.
        result = pickle.dumps(("result", worker(rank, num_ranks, *args)))
        dist.destroy_process_group()
    except BaseException:
        result = pickle.dumps(("failure", traceback.format_exc()))
    end.send_bytes(result)


def end_with_parent(parent: int) -> None:
    """Ends this process with its parent, without which it would wait in a collective for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _collect(
    ends: list[Connection],
    processes: list[BaseProcess],
    deadline: float,
    on_message: Callable[[int, Any], None],
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [ends.index(end) for end in waiting]
            raise RankFailedError(f"ranks {missing} did not finish in time")
        for rank in (number for number, end in enumerate(ends) if end in ready):
            kind, payload = _receive(rank, ends[rank], processes[rank])
            if kind == "message":
                on_message(rank, payload)
            else:
                results[rank] = payload
    return [results[rank] for rank in range(len(ends))]


def _receive(rank: int, end: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        kind, payload = pickle.loads(end.recv_bytes())
    except EOFError:
        process.join(timeout=5)
        raise RankFailedError(f"rank {rank} died with exit code {process.exitcode}") from None
    if kind == "failure":
        raise RankFailedError(f"rank {rank} failed:\n{payload}")
    return kind, payload


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(timeout=0.5)
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
