"""Ranks that somebody else started."""

import pytest

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.launchers import adopt_launcher

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_a_plain_process_is_no_rank_and_stays_as_it_is() -> None:
    environment = {"PATH": "/bin", "RANK": "1"}
    assert not adopt_launcher(environment)
    assert environment == {"PATH": "/bin", "RANK": "1"}


def test_torchrun_is_taken_as_it_is() -> None:
    environment = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "7")
    environment |= OPEN_MPI
    assert adopt_launcher(environment)
    assert environment["RANK"] == "7"


@pytest.mark.parametrize(
    "variables",
    [
        tuple(OPEN_MPI),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ],
)
def test_every_launcher_is_put_into_torchruns_words(variables: tuple[str, ...]) -> None:
    environment = dict(zip(variables, ("3", "4", "1", "2"), strict=True))
    environment["MASTER_ADDR"] = "10.0.0.1"
    assert adopt_launcher(environment)
    assert [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "4", "1"]
    assert environment["LOCAL_WORLD_SIZE"] == "2"
    assert environment["MASTER_ADDR"] == "10.0.0.1"
    assert environment["MASTER_PORT"] == "29500"


def test_ranks_of_one_node_meet_on_it() -> None:
    environment = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert adopt_launcher(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_ranks_of_several_nodes_must_be_told_where_to_meet() -> None:
    environment = dict(OPEN_MPI)
    with pytest.raises(UserError, match="Open MPI started ranks on several nodes: set MASTER_ADDR"):
        adopt_launcher(environment)
    assert environment == OPEN_MPI
