# SPDX-License-Identifier: Apache-2.0
"""Closes process groups from another thread, so that a collective that can never end raises.

gloo's `abort` does nothing. But a receive that times out makes gloo close all connections of its
group, and every rank that waits in one of its collectives raises at once. This module therefore
starts a receive that nobody answers.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.compat import group_ranks, groups_by_name

log = logging.getLogger(__name__)

_UNANSWERED_TAG = 4242
_AT_ONCE = timedelta(milliseconds=1)


def close_groups(ranks: tuple[int, ...]) -> None:
    """Closes every process group of this process all of whose members are among `ranks`."""
    for name, group in groups_by_name().items():
        members = group_ranks(name) or ()
        if len(members) > 1 and set(members) <= set(ranks):
            _close(name, group)


def _close(name: str, group: Any) -> None:
    if dist.get_backend(group) != "gloo":
        group.abort()
        return
    own = dist.get_rank(group)
    # For a connection that is already closed gloo raises at once, and closes no other.
    for other in (rank for rank in range(dist.get_world_size(group)) if rank != own):
        try:
            group.recv([torch.empty(1)], other, _UNANSWERED_TAG).wait(_AT_ONCE)
        except RuntimeError as error:  # nothing came, as intended
            log.debug("closed group %s: %s", name, error)
