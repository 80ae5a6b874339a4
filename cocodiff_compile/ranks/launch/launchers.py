"""Which rank this process is, by whoever started it: torchrun, an mpiexec, or Slurm's srun.

The innermost one counts: torchrun started by srun leaves Slurm's variables in place, and an mpiexec
in a batch job those of the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import shown
from cocodiff_compile.ranks.launch.meeting_point import meeting_point

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""torchrun's words for what `Launch` holds."""


@dataclass(frozen=True)
class Launch:
    """One of `num_ranks`, and one of `ranks_here` on its node."""

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int
    ranks_here: int

    def variables(self) -> dict[str, str]:
        """In torchrun's words."""
        values = (self.rank, self.num_ranks, self.local_rank, self.ranks_here)
        return dict(zip(RANK_VARIABLES, map(str, values), strict=True))


@dataclass(frozen=True)
class _Words:
    """The names a launcher has for the same four things; `size` and `ranks_here` in order."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    ranks_here: tuple[str, ...]


_LAUNCHERS = (
    _Words("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    _Words(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # With --pmi=pmix PALS tells no rank how many there are: the job script sets WORLD_SIZE.
    _Words(
        "PALS", "PALS_RANKID", ("PMI_SIZE", "WORLD_SIZE"), "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)
    ),
    _Words(
        "MPICH or Intel MPI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)
    ),
    # Of a step: a batch script has the rank of a job that was not started yet.
    _Words(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS",),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
)


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """The first launcher that named this process's rank; None if none did."""
    for words in _LAUNCHERS:
        if words.rank in environment and words.local_rank in environment:
            launch = _launch(words, environment)
            if launch is not None:
                return launch
    return None


def _launch(words: _Words, environment: Mapping[str, str]) -> Launch | None:
    size = _first(environment, words.size)
    ranks_here = _first(environment, words.ranks_here)
    if size is None or ranks_here is None:
        _refuse_half(words, environment, words.size if size is None else words.ranks_here)
        return None
    return Launch(
        words.launcher,
        _number(environment, words.rank),
        _number(environment, size),
        _number(environment, words.local_rank),
        _ranks_here(environment, ranks_here),
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environment), None)


def _refuse_half(words: _Words, environment: Mapping[str, str], names: tuple[str, ...]) -> None:
    """PALS has named a rank, but not of how many; what others leave behind is no rank at all."""
    if words.launcher == "PALS":
        raise UserError(
            f"PALS started this process as rank {environment[words.rank]}, but says nothing of "
            f"{' or '.join(names)}: export {names[-1]} in the job script"
        )


def local_rank_of(environment: Mapping[str, str]) -> int:
    """What `LOCAL_RANK` says to a process that no launcher started, 0 if nothing."""
    return _number({"LOCAL_RANK": "0", **environment}, "LOCAL_RANK")


def _number(environment: Mapping[str, str], name: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", environment[name]) is None:
        raise UserError(f"environment variable {name}={shown(environment[name])} is no number")
    return int(environment[name])


def _ranks_here(environment: Mapping[str, str], name: str) -> int:
    """A number, or Slurm's list by node: 4(x2),3."""
    text = environment[name]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise UserError(
                f"environment variable {name}={shown(text)} is no number of ranks per node"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == 1:
        return counts[0]
    node = _number({"SLURM_NODEID": "0", **environment}, "SLURM_NODEID")
    return counts[node] if node < len(counts) else counts[-1]


def adopt_launcher(environment: MutableMapping[str, str]) -> Launch | None:
    """Sets torchrun's variables in `environment` if a launcher started this process as a rank, even
    as the only one; None, and nothing set, if none did. UserError if ranks could not meet.
    """
    launch = find_launch(environment)
    if launch is None:
        return None
    is_one_node = launch.num_ranks == launch.ranks_here
    found = meeting_point(environment, launch.launcher, is_one_node)
    environment.update({**launch.variables(), **found})
    return launch
