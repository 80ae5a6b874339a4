"""Which rank this process is, by whoever started it: torchrun, or an mpiexec, whose variables are
put into torchrun's names.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from cocodiff_compile.errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "Intel MPI and MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
DEFAULT_PORT = "29500"


def adopt_launcher(environment: MutableMapping[str, str]) -> bool:
    """Sets torchrun's variables in `environment` if a launcher started this process as one of
    several ranks; False, and nothing set, if none did. UserError if ranks could not meet.
    """
    if all(name in environment for name in _NAMES):
        return True
    for launcher, variables in _LAUNCHERS.items():
        if all(name in environment for name in variables):
            found = dict(zip(_NAMES, (environment[name] for name in variables), strict=True))
            _meeting_point(launcher, found, environment)
            environment.update(found)
            return True
    return False


def _meeting_point(
    launcher: str, found: dict[str, str], environment: MutableMapping[str, str]
) -> None:
    if "MASTER_ADDR" not in environment:
        if found["WORLD_SIZE"] != found["LOCAL_WORLD_SIZE"]:
            raise UserError(
                f"{launcher} started ranks on several nodes: set MASTER_ADDR to the first one's "
                "address, the same on all of them"
            )
        environment["MASTER_ADDR"] = "127.0.0.1"
    environment.setdefault("MASTER_PORT", DEFAULT_PORT)
