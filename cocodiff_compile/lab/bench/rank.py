# SPDX-License-Identifier: Apache-2.0
"""Runs one rank, under torchrun: `python -m cocodiff_compile.lab.bench.rank CASE RESULT`.

Rank 0 reports progress and writes the result. A rank that fails writes its traceback next to it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist

from cocodiff_compile.lab.bench.cases import Case
from cocodiff_compile.lab.bench.machine import new_run
from cocodiff_compile.lab.bench.measure import measure_case, worker_groups_of
from cocodiff_compile.lab.bench.worker_groups import worker_groups
from cocodiff_compile.lab.progress import say_from_rank

FAILURE_FILE = "failure{}.txt"


def main(arguments: Sequence[str]) -> None:
    case_file, result_file = map(Path, arguments)
    case = Case.from_json(json.loads(case_file.read_text()))
    try:
        with worker_groups(worker_groups_of([case])) as workers:
            result = measure_case(case, workers, say_from_rank)
            if dist.get_rank() == 0:
                result_file.write_text(json.dumps(result))
    except BaseException:
        name = FAILURE_FILE.format(f"{int(os.environ['RANK']):03d}")
        result_file.with_name(name).write_text(traceback.format_exc())
        raise


def measure_here(
    find_cases: Callable[[str], Sequence[Case]], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Measures every case on the ranks and links of the launcher. Rank 0 passes the run to `keep`
    after every case and returns it; others return None.
    """
    num_ranks, per_node = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    cases = find_cases(f"{num_ranks // per_node}x{per_node}")
    is_first = os.environ["RANK"] == "0"
    run = new_run()
    with worker_groups(worker_groups_of(cases)) as workers:
        for case in cases:
            say_from_rank(case.title)
            run["results"].append(measure_case(case, workers, say_from_rank))
            if is_first:
                keep(run)
    return run if is_first else None


if __name__ == "__main__":
    main(sys.argv[1:])
