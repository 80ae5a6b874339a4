# SPDX-License-Identifier: Apache-2.0
"""Ranks that somebody else started."""

from __future__ import annotations

import pytest

from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.launch.init_distributed import init_distributed
from cocodiff_compile.ranks.launch.launchers import (
    RANK_VARIABLES,
    Launch,
    adopt_launcher,
    find_launch,
)
from cocodiff_compile.ranks.launch.rendezvous import first_node

TORCHRUN = dict(zip(RANK_VARIABLES, ("3", "4", "1", "2"), strict=True))
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
}
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
HERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (MPICH, "MPICH or Intel MPI"),
        (PALS | {"PMI_SIZE": "4"}, "PALS"),
        (PALS | {"WORLD_SIZE": "4", "PMIX_RANK": "3"}, "PALS"),
        (SLURM, "Slurm"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "7,2"}, "Slurm"),
        # One inside the other: who started this process asks first.
        (TORCHRUN | {**SLURM, "SLURM_PROCID": "9"}, "torchrun"),
        (TORCHRUN | dict.fromkeys(OPEN_MPI, "9"), "torchrun"),
        (MPICH | {**SLURM, "SLURM_PROCID": "9"}, "MPICH or Intel MPI"),
        (MPICH | BATCH, "MPICH or Intel MPI"),
        (PALS | {**MPICH, "PMI_RANK": "9"}, "PALS"),
        ({"PMI_RANK": "9", "PMI_SIZE": "9", "PMI_FD": "5"} | SLURM, "Slurm"),
    ],
)
def test_every_launcher_is_put_into_torchruns_words(
    environment: dict[str, str], launcher: str
) -> None:
    assert find_launch(environment) == Launch(launcher, 3, 4, 1, 2)
    found = environment | HERE
    assert adopt_launcher(found) == Launch(launcher, 3, 4, 1, 2)
    assert {name: found[name] for name in RANK_VARIABLES} == TORCHRUN
    assert {name: found[name] for name in HERE} == HERE


@pytest.mark.parametrize(
    "environment",
    [{"PATH": "/bin"}, {"RANK": "1"}, {"WORLD_SIZE": "4"}, BATCH, {"PMIX_RANK": "0"}],
)
def test_a_process_that_nobody_started_as_a_rank_stays_as_it_is(
    environment: dict[str, str],
) -> None:
    found = dict(environment)
    assert adopt_launcher(found) is None
    assert found == environment


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        (MPICH | {"MPI_LOCALNRANKS": "4"}, "127.0.0.1"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "127.0.0.1"),
        (SLURM | {"SLURM_JOB_NODELIST": "nid[004-007]"}, "nid004"),
        (SLURM | {"SLURM_NODELIST": "a1,a2"}, "a1"),
        (SLURM | {"SLURM_STEP_NODELIST": "b7", "SLURM_JOB_NODELIST": "b[1-9]"}, "b7"),
    ],
)
def test_where_ranks_meet(environment: dict[str, str], address: str) -> None:
    found = dict(environment)
    assert adopt_launcher(found)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (address, "29500")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (OPEN_MPI, "Open MPI started ranks on several nodes: set MASTER_ADDR"),
        (MPICH, "MPICH or Intel MPI started ranks on several nodes: set MASTER_ADDR"),
        (MPICH | BATCH, "MPICH or Intel MPI started ranks on several nodes: set MASTER_ADDR"),
        (PALS | {"PMI_SIZE": "4"}, "PALS started ranks on several nodes: set MASTER_ADDR"),
        (SLURM, "Slurm started ranks on several nodes: set MASTER_ADDR"),
        (SLURM | {"SLURM_NODELIST": "r[1-2]n[1-2]"}, "Slurm started ranks on several nodes: set"),
        # Where srun was called is no place where a rank is.
        (SLURM | {"SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}, "Slurm started ranks on several nodes"),
        (PALS, "rank 3, but sets neither PMI_SIZE nor WORLD_SIZE: export WORLD_SIZE"),
        (MPICH | {"PMI_RANK": "x"}, "PMI_RANK='x' is not a number"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "is not a number of ranks per node"),
    ],
)
def test_what_is_missing_is_asked_for(environment: dict[str, str], words: str) -> None:
    found = dict(environment)
    with pytest.raises(UserError) as raised:
        adopt_launcher(found)
    assert words in str(raised.value)
    assert found == environment


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("nid001", "nid001"),
        ("nid[001-004,7],login1", "nid001"),
        ("a-1.cluster,a-2.cluster", "a-1.cluster"),
        ("x1000c0s0b0n[0,3]", "x1000c0s0b0n0"),
        ("n[1-2]-ib", ""),
        ("n[1-2]m[1-2]", ""),
        ("", ""),
    ],
)
def test_the_first_of_slurms_nodes(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


def test_no_launcher_is_an_error_that_names_three(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, *OPEN_MPI, *MPICH, *PALS, *SLURM):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"torchrun.*mpiexec.*srun"):
        init_distributed()
