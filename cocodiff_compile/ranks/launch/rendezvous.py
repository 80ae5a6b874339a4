# SPDX-License-Identifier: Apache-2.0
"""Finds where ranks meet: MASTER_ADDR and MASTER_PORT, as given or derived.

Ranks of one node meet on it. Ranks of several nodes need the address of the first node, the same on
all of them: Slurm names it, other launchers leave it to the job script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cocodiff_compile.errors import UserError

DEFAULT_PORT = "29500"
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def rendezvous(environment: Mapping[str, str], launcher: str, is_one_node: bool) -> dict[str, str]:
    """Returns both variables. Raises UserError if the first of several nodes is unknown."""
    address = environment.get("MASTER_ADDR") or _address(environment, launcher, is_one_node)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or DEFAULT_PORT,
    }


def _address(environment: Mapping[str, str], launcher: str, is_one_node: bool) -> str:
    if is_one_node:
        return "127.0.0.1"
    for name in _NODE_LISTS if launcher == "Slurm" else ():
        if first := first_node(environment.get(name, "")):
            return first
    raise UserError(
        f"{launcher} started ranks on several nodes: set MASTER_ADDR to the address of the first "
        "node, on all of them"
    )


def first_node(node_list: str) -> str:
    """Returns the first node of a list like `nid[001-004,7],login1`; empty if unreadable."""
    match = re.match(r"([\w.-]+?)(?:\[(\d+)[^\[\]]*\])?(?:,|$)", node_list)
    return f"{match[1]}{match[2] or ''}" if match else ""
