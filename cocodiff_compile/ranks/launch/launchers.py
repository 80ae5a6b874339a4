# SPDX-License-Identifier: Apache-2.0
"""Finds the rank of this process from the variables of its launcher: torchrun, an mpiexec, or
Slurm's srun.

The innermost launcher counts: torchrun started by srun leaves Slurm's variables in place, and an
mpiexec in a batch job those of the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import shown
from cocodiff_compile.ranks.launch.rendezvous import rendezvous

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""torchrun's variables for the fields of `Launch`."""


@dataclass(frozen=True)
class Launch:
    """Identifies a process as one of `num_ranks`, and as one of `ranks_here` on its node."""

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int
    ranks_here: int

    def variables(self) -> dict[str, str]:
        """Returns the values as torchrun's variables."""
        values = (self.rank, self.num_ranks, self.local_rank, self.ranks_here)
        return dict(zip(RANK_VARIABLES, map(str, values), strict=True))


@dataclass(frozen=True)
class _VariableNames:
    """Names a launcher's variables; `size` and `ranks_here` list alternatives in order."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    ranks_here: tuple[str, ...]


_LAUNCHERS = (
    _VariableNames("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    _VariableNames(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # With --pmi=pmix PALS does not set the number of ranks: the job script sets WORLD_SIZE.
    _VariableNames(
        "PALS", "PALS_RANKID", ("PMI_SIZE", "WORLD_SIZE"), "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)
    ),
    _VariableNames(
        "MPICH or Intel MPI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)
    ),
    # The variables of a step: those of a job are also set in a batch script, which is no rank.
    _VariableNames(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS",),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
)


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Returns the rank that the first launcher names; None if none does."""
    for names in _LAUNCHERS:
        if names.rank in environment and names.local_rank in environment:
            launch = _launch(names, environment)
            if launch is not None:
                return launch
    return None


def _launch(names: _VariableNames, environment: Mapping[str, str]) -> Launch | None:
    size = _first(environment, names.size)
    ranks_here = _first(environment, names.ranks_here)
    if size is None or ranks_here is None:
        _refuse_incomplete(names, environment, names.size if size is None else names.ranks_here)
        return None
    return Launch(
        names.launcher,
        _number(environment, names.rank),
        _number(environment, size),
        _number(environment, names.local_rank),
        _ranks_here(environment, ranks_here),
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environment), None)


def _refuse_incomplete(
    names: _VariableNames, environment: Mapping[str, str], missing: tuple[str, ...]
) -> None:
    """Raises UserError if PALS names a rank without their number. Incomplete variables of other
    launchers are leftovers and mean nothing.
    """
    if names.launcher == "PALS":
        raise UserError(
            f"PALS started this process as rank {environment[names.rank]}, but sets neither "
            f"{' nor '.join(missing)}: export {missing[-1]} in the job script"
        )


def local_rank_of(environment: Mapping[str, str]) -> int:
    """Returns `LOCAL_RANK` of a process that no launcher started, 0 if it is not set."""
    return _number({"LOCAL_RANK": "0", **environment}, "LOCAL_RANK")


def _number(environment: Mapping[str, str], name: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", environment[name]) is None:
        raise UserError(f"environment variable {name}={shown(environment[name])} is not a number")
    return int(environment[name])


def _ranks_here(environment: Mapping[str, str], name: str) -> int:
    """Reads a number, or Slurm's list by node: 4(x2),3."""
    text = environment[name]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise UserError(
                f"environment variable {name}={shown(text)} is not a number of ranks per node"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == 1:
        return counts[0]
    node = _number({"SLURM_NODEID": "0", **environment}, "SLURM_NODEID")
    return counts[node] if node < len(counts) else counts[-1]


def adopt_launcher(environment: MutableMapping[str, str]) -> Launch | None:
    """Sets torchrun's variables in `environment` if a launcher started this process as a rank, even
    as the only one. Returns None, and sets nothing, if none did. Raises UserError if there is no
    rendezvous.
    """
    launch = find_launch(environment)
    if launch is None:
        return None
    is_one_node = launch.num_ranks == launch.ranks_here
    address = rendezvous(environment, launch.launcher, is_one_node)
    environment.update({**launch.variables(), **address})
    return launch
