# SPDX-License-Identifier: Apache-2.0
"""Runs the rows of `fault_rank` on real ranks: when each rank ends, how, and what it says.

`python -m tests.fault_matrix docs/faults.md` writes the table of all rows.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fault_rank import NUM_RANKS, ROWS, TIMEOUT_S, VICTIM

ROOT = Path(__file__).parents[1]
GIVE_UP_S = 4 * TIMEOUT_S
"""Start of the processes, the timeout of the process group, and room for a busy machine."""
AT_A_TIME = 5


@dataclass(frozen=True)
class Ending:
    """The end of one rank: when and how it came, and what the rank said."""

    rank: int
    seconds: float
    """Time from the fault until the row ended for this rank."""
    kind: str
    """finished, raised, killed, or did not end."""
    said: str
    """The last line of its traceback, or what it warned of."""
    log: str


def run_row(name: str) -> list[Ending]:
    """Runs one row of the matrix and returns how each rank ended, by rank."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        with _mounted(folder / "mount", name):
            return _run(name, folder)


def _run(name: str, folder: Path) -> list[Ending]:
    ranks = [_start(name, rank, folder) for rank in range(NUM_RANKS)]
    ended: dict[int, float] = {}
    deadline = time.time() + GIVE_UP_S
    try:
        while len(ended) < NUM_RANKS and time.time() < deadline and not _only_stopped(ended, name):
            for rank, process in enumerate(ranks):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = _time(folder / f"end_{rank}", time.time())
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
        codes = [process.wait() for process in ranks]
    began = _time(folder / "fault", deadline - GIVE_UP_S)
    return [
        _ending(rank, codes[rank], ended.get(rank, time.time()) - began, folder, rank in ended)
        for rank in range(NUM_RANKS)
    ]


def _time(file: Path, otherwise: float) -> float:
    return float(file.read_text()) if file.exists() else otherwise


def _only_stopped(ended: Iterable[int], name: str) -> bool:
    """A rank that is stopped never ends by itself."""
    return name.startswith("stopped") and {*ended} == {*range(NUM_RANKS)} - {VICTIM}


def _start(name: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.support.fault_rank", name, str(rank), str(folder)]
    with folder.joinpath(f"log_{rank}").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )


def _ending(rank: int, code: int, seconds: float, folder: Path, has_ended: bool) -> Ending:
    log = folder.joinpath(f"log_{rank}").read_text(errors="replace")
    log = re.sub(r"^\[rank\d+\]: ?", "", log, flags=re.MULTILINE)
    if not has_ended:
        return Ending(rank, seconds, "did not end", "", log)
    if code == -signal.SIGKILL:
        return Ending(rank, seconds, "killed", "", log)
    kind = "finished" if code == 0 else "raised" if code > 0 else f"died of signal {-code}"
    return Ending(rank, seconds, kind, _said(log, kind), log)


def _said(log: str, kind: str) -> str:
    """The last error of a log, or its warnings of ours."""
    if kind == "finished":
        ours = [line for line in log.splitlines() if re.search("cannot be|incomplete", line)]
        return "; ".join(ours)
    errors = [
        line for line in log.splitlines() if re.match(r"[\w.]+(Error|Interrupt|Exit)\b", line)
    ]
    return errors[-1] if errors else ""


MOUNTS = {"full_disk_for_dumps": "size=16k", "read_only_caches": "ro"}
"""What the disk is like that some rows need."""


@contextmanager
def _mounted(folder: Path, name: str) -> Iterator[None]:
    """Raises OSError where none can be mounted."""
    if name not in MOUNTS:
        yield
        return
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", MOUNTS[name], "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise OSError("a disk cannot be mounted here: that takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_rows(names: Iterable[str]) -> dict[str, list[Ending]]:
    """Some at a time: most of a row is waiting."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = {name: pool.submit(run_row, name) for name in names}
        return {name: future.result() for name, future in found.items()}


def table(found: dict[str, list[Ending]]) -> str:
    """Returns a Markdown table with one line per rank of every row."""
    lines = ["| fault | rank | s | ends | says |", "|---|---|---|---|---|"]
    for name, endings in found.items():
        title = name.replace("_", " ")
        for ending in endings:
            said = _shortened(ending.said)
            lines.append(
                f"| {title} | {ending.rank} | {ending.seconds:.0f} | {ending.kind} | {said} |"
            )
            title = ""
    return "\n".join(lines)


def _shortened(said: str) -> str:
    said = re.sub(r"^([\w]+\.)+", "", said)
    said = re.sub(r"/tmp/[^\s)]*", "...", said)
    return said.replace("|", "\\|")[:300]


HEAD = f"""# What happens when a rank goes wrong

Written by `python -m tests.fault_matrix docs/faults.md`; `make test-faults` runs the same rows and
checks them. {NUM_RANKS} gloo ranks on one machine, the fault befalls rank {VICTIM} (and rank 0
where it is killed with the store, which it holds), the timeout of the process group is {TIMEOUT_S}
s. `s` is how long after the fault a rank raised or went on.

"""


if __name__ == "__main__":
    names = sys.argv[2:] or list(ROWS)
    found = run_rows(names)
    text = table(found)
    print(text)
    if sys.argv[1] != "-":
        Path(sys.argv[1]).write_text(HEAD + text + "\n")
    else:
        for name, endings in found.items():
            for ending in endings:
                if os.environ.get("SHOW_LOGS"):
                    print("=====", name, ending.rank, ending.log[-3000:])
