# SPDX-License-Identifier: Apache-2.0
"""Runs a step without its network: collectives become local copies, and their traffic is recorded.

The same compiled code runs; only the process groups behind the names it calls are replaced, for the
duration of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from cocodiff_compile.compat import groups_by_name, replaced_groups, work_of_future


@dataclass(frozen=True)
class Collective:
    """Records one collective: `sent_bytes[i]` go to `ranks[i]`, of which one is this rank."""

    ranks: tuple[int, ...]
    sent_bytes: tuple[int, ...]


@dataclass(frozen=True)
class NodeTraffic:
    """Counts what leaves a node, or one rank for other nodes, in a step."""

    size_bytes: int
    messages: int


def traffic_between(
    collectives: Iterable[Collective], rank: int, node_of: Callable[[int], int]
) -> NodeTraffic:
    """Returns what `rank` sends to other nodes. A collective is one message per receiver."""
    sizes = [
        size
        for item in collectives
        for receiver, size in zip(item.ranks, item.sent_bytes, strict=True)
        if node_of(receiver) != node_of(rank)
    ]
    return NodeTraffic(sum(sizes), len(sizes))


@contextmanager
def local_groups() -> Iterator[list[Collective]]:
    """Makes collectives of the block that look up their group by name, as functional ones do, copy
    their input to their output. Yields what they would have sent, in order.
    """
    sent: list[Collective] = []
    stand_ins = {
        name: _LocalGroup(group, sent)
        for name, group in groups_by_name().items()
        if dist.get_rank(group) >= 0
    }
    with replaced_groups(stand_ins):
        yield sent


class _LocalGroup(dist.ProcessGroup):
    """A process group with as many ranks as `group`, all of them in this process."""

    def __init__(self, group: dist.ProcessGroup, sent: list[Collective]) -> None:
        super().__init__(dist.get_rank(group), group.size())  # type: ignore[call-arg]
        self._name = group.group_name
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._sent = sent

    @property
    def group_name(self) -> Any:
        return self._name

    def alltoall_base(  # type: ignore[override]
        self, out: Tensor, source: Tensor, _out_splits: Any, splits: list[int], _options: Any
    ) -> Any:
        rows = splits or [len(source) // len(self._ranks)] * len(self._ranks)
        row_bytes = source[:1].numel() * source.element_size()
        self._sent.append(Collective(self._ranks, tuple(count * row_bytes for count in rows)))
        common = min(len(out), len(source))
        out[:common].copy_(source[:common])
        return _done(out)

    def allgather_into_tensor_coalesced(
        self, outs: list[Tensor], sources: list[Tensor], _options: Any = None
    ) -> Any:
        for out, source in zip(outs, sources, strict=True):
            size_bytes = source.numel() * source.element_size()
            self._sent.append(Collective(self._ranks, (size_bytes,) * len(self._ranks)))
            out.view(len(self._ranks), *source.shape).copy_(source)
        return _done(outs)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return work_of_future(future)
