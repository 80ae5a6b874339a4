"""One rank of a benchmark: `python -m cocodiff_compile.bench.rank CASE RESULT`, under torchrun.

Rank 0 prints how it goes, in lines that begin with `PROGRESS`, and writes the result. A rank that
fails writes its traceback beside the result.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist

from cocodiff_compile.bench.cases import Case
from cocodiff_compile.bench.crews import join_world
from cocodiff_compile.bench.links import Place
from cocodiff_compile.bench.machine import new_run
from cocodiff_compile.bench.measure import measure_case

PROGRESS = "@ "


def main(arguments: Sequence[str]) -> None:
    case_file, result_file = map(Path, arguments)
    case = Case.from_json(json.loads(case_file.read_text()))
    join_world()
    try:
        result = measure_case(case, _say)
    except BaseException:
        failure_file(result_file, dist.get_rank()).write_text(traceback.format_exc())
        raise
    if dist.get_rank() == 0:
        result_file.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure_here(
    find_cases: Callable[[str], Sequence[Case]],
) -> dict[str, Any] | None:
    """Every case on the ranks and links there are; the run on rank 0, None on the others."""
    join_world()
    place = Place.here()
    cases = find_cases(f"{place.num_nodes}x{place.ranks_per_node}")
    run = new_run()
    for case in cases:
        _say(case.title)
        run["results"].append(measure_case(case, _say))
    dist.barrier()
    dist.destroy_process_group()
    return run if place.rank == 0 else None


def failure_file(result_file: Path, rank: int) -> Path:
    return result_file.with_suffix(f".rank{rank:03d}.txt")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{PROGRESS}{text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
