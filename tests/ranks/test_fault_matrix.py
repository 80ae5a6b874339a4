# SPDX-License-Identifier: Apache-2.0
"""Tests what every rank does and says when one of them goes wrong, on real ranks.

No rank waits longer than the timeout of the process group, and where a cause can be known every
rank names it within 30 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.fault_matrix import MOUNTS, Ending, run_row, run_rows, table
from tests.support.fault_rank import NUM_RANKS, ROWS, TIMEOUT_S, VICTIM

pytestmark = pytest.mark.gloo

BUSY_S = 15.0
"""What ranks need beside waiting, on a busy machine."""
KNOWN_S = 30.0 + BUSY_S
UNKNOWN_S = TIMEOUT_S + 2 * BUSY_S
SURVIVED_S = 120.0


@dataclass(frozen=True)
class Expected:
    """The words of the ranks that the fault spares, and the end of the one that it hits."""

    words: str
    victim: str = "raised"
    victim_words: str = ""
    within_s: float = KNOWN_S
    victim_rank: int = VICTIM


def _same(words: str) -> Expected:
    return Expected(words, victim_words=words)


_CHUNKS = "ranks disagree about option 'head_chunks': rank 0 has 1, rank 1 has 2"
_LARGER = "ranks disagree about collective 0: rank 0 has all_to_all_single of {} torch.float32"
_REGISTERS = "RuntimeError: out of registers"
_LOST = "ranks [1] ended, were killed or hang"
_KILLED = "ranks [1] were killed or hang"

ENDS = {
    "other_options": _same(_CHUNKS),
    "other_plan_agreed_on_before": _same(_CHUNKS),
    "other_plans_agreed_on_before": _same(_CHUNKS),
    "other_code_called": _same(_CHUNKS),
    "new_code_on_one_rank": _same(_CHUNKS),
    "other_shape_of_dynamic_code": _same(_LARGER.format(384)),
    "models_in_another_order": _same(_LARGER.format(192)),
    "fails_in_compile": Expected(f"rank 1 failed to compile: {_REGISTERS}"),
    "fails_while_others_measure": Expected(f"rank 1 failed to compile: {_REGISTERS}"),
    "fails_in_recompile": Expected(f"rank 1 failed to compile: {_REGISTERS}"),
    "interrupted_in_recompile": Expected(
        "rank 1 failed to compile: KeyboardInterrupt", "died of signal 2", "KeyboardInterrupt"
    ),
    "exits_in_compile": Expected("rank 1 failed to compile: SystemExit: 3"),
    "fails_in_forward": Expected(f"rank 1 failed while it ran compiled code: {_REGISTERS}"),
    "fails_between_calls": Expected(f"rank 1 ended: {_REGISTERS}"),
    "leaves_the_process_group": Expected(
        "ranks [1] have ended or left the process group", "finished", within_s=KNOWN_S
    ),
    "killed_before_agreement": Expected(
        "ranks [1] did not come to 'captured' within 60 s", "killed", within_s=UNKNOWN_S
    ),
    "killed_while_agreeing": Expected(_LOST, "killed"),
    "killed_while_compiling": Expected(_LOST, "killed"),
    "killed_before_first_call": Expected(_LOST, "killed"),
    "killed_while_recompiling": Expected(_KILLED, "killed"),
    "killed_in_a_collective": Expected(_KILLED, "killed"),
    "killed_with_the_store": Expected(
        "the process that holds it, rank 0 or the launcher, has ended", "killed", victim_rank=0
    ),
    "stopped_while_compiling": Expected(_LOST, "did not end"),
    "stopped_in_a_collective": Expected(_KILLED, "did not end", within_s=UNKNOWN_S),
}
"""Rows that end with an error on every rank."""

SURVIVED = {
    "late_to_compile": "",
    "late_to_a_call": "",
    "recompiles_alone": "",
    "recompiles_alone_with_symbolic_sizes": "",
    "read_only_caches": "cannot be written",
    "full_disk_for_dumps": "dumps of this rank are incomplete",
}
"""Rows in which all ranks finish; what the rank says that the fault befalls."""

QUICK = ("other_plan_agreed_on_before", "fails_in_recompile", "killed_while_compiling")
"""Rows of `make test`."""


def test_every_row_is_expected_to_end_somehow() -> None:
    assert {*ENDS, *SURVIVED} == {*ROWS}


@pytest.fixture(scope="module")
def matrix() -> dict[str, list[Ending]]:
    found = run_rows(name for name in ROWS if name not in MOUNTS and name not in QUICK)
    print("\n" + table(found))
    return found


def _check_ends(name: str, endings: list[Ending]) -> None:
    expected = ENDS[name]
    for ending in endings:
        is_victim = ending.rank == expected.victim_rank
        kind = expected.victim if is_victim else "raised"
        words = expected.victim_words if is_victim else expected.words
        assert ending.kind == kind, ending.log
        assert words in ending.said, ending.log
        if not is_victim:
            assert ending.seconds < expected.within_s, ending.log


@pytest.fixture(scope="module")
def quick_rows() -> dict[str, list[Ending]]:
    found = run_rows(QUICK)
    print("\n" + table(found))
    return found


@pytest.mark.parametrize("name", QUICK)
def test_every_rank_of_a_quick_row_ends_and_names_the_cause(
    quick_rows: dict[str, list[Ending]], name: str
) -> None:
    _check_ends(name, quick_rows[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in ENDS if name not in QUICK])
def test_every_rank_ends_and_names_the_cause(matrix: dict[str, list[Ending]], name: str) -> None:
    _check_ends(name, matrix[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in SURVIVED if name not in MOUNTS])
def test_all_ranks_survive(matrix: dict[str, list[Ending]], name: str) -> None:
    _check_survived(name, matrix[name])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MOUNTS)
def test_all_ranks_survive_a_disk(name: str) -> None:
    try:
        endings = run_row(name)
    except OSError as error:
        pytest.skip(str(error))
    print("\n" + table({name: endings}))
    _check_survived(name, endings)


def _check_survived(name: str, endings: list[Ending]) -> None:
    assert len(endings) == NUM_RANKS
    for ending in endings:
        assert ending.kind == "finished", ending.log
        assert ending.seconds < SURVIVED_S
    assert SURVIVED[name] in endings[VICTIM].said
