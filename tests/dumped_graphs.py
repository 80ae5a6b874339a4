# SPDX-License-Identifier: Apache-2.0
"""Writes the graph after every pass for many models, and compares two such folders.

    python -m tests.dumped_graphs write FOLDER        with the code of this checkout
    python -m tests.dumped_graphs compare OLD NEW     prints what differs

Graphs are compared up to the names of their nodes. To compare with an earlier version, copy this
file into a checkout of it and write a folder there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import cocodiff_compile
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.v_major.options import VMajorOptions
from tests.support.idioms import IDIOMS

POLICIES = {"paper": {}, "fixed": {"bits": 4}, "adaptive": {}}
NUM_RANKS = 4


def topology(num_ranks: int) -> dict[str, Any]:
    """A machine with a slow link, along two axes where the ranks allow that."""
    inner = 2 if num_ranks % 2 == 0 and num_ranks > 2 else 1
    axes = [("gpu", inner, "pcie"), ("node", num_ranks // inner, "wire")]
    return {
        "name": "slow",
        "copy_bytes_per_s": 1e10,
        "links": {
            "pcie": {"bytes_per_s": 2e10, "latency_s": 1e-6},
            "wire": {"bytes_per_s": 2e8, "latency_s": 1e-6},
        },
        "axes": [{"name": n, "size": size, "link": link} for n, size, link in axes if size > 1],
    }


FORCED = {"tapa": "on", "head_chunks": 2, "token_chunks": 2}
CHOSEN: Mapping[str, Any] = {}


def cases() -> Iterator[tuple[str, Callable[[Mapping[str, Any]], None], list[Mapping[str, Any]]]]:
    """Yields the name of a case, what explains it under some options, and these options."""
    for idiom in IDIOMS:
        forced = FORCED if idiom.num_ranks > 2 and idiom.num_ranks % 2 == 0 else {}

        def explain_idiom(options: Mapping[str, Any], idiom: Any = idiom) -> None:
            with fake_ranks(idiom.num_ranks):
                cocodiff_compile.explain(idiom.model(), *idiom.arguments(), options=options)

        yield f"idiom {idiom.name}", explain_idiom, [{**machine_options(idiom.num_ranks), **forced}]
    for name in SMALL_MODELS:
        every = [{**machine_options(NUM_RANKS), **options} for options in (CHOSEN, FORCED)]
        if name == "flux":
            every += [
                {**machine_options(NUM_RANKS), "v_major": _policy(policy)} for policy in POLICIES
            ]
        yield f"model {name}", lambda options, name=name: _explain_model(name, options), every


def _explain_model(name: str, options: Mapping[str, Any]) -> None:
    small = SMALL_MODELS[name]
    with fake_ranks(NUM_RANKS):
        model = small.build(num_layers=1, heads=4, head_size=32)
        inputs = small.inputs(model, image_tokens=128, text_tokens=16)
        shared = {**options, "shard": {"min_gain": 0}}
        cocodiff_compile.explain(model, **inputs, options=shared)


def _policy(name: str) -> dict[str, Any]:
    """Coding whatever it gains; the option for that had another name in version 0.1."""
    is_new = "only_if_faster" in {field.name for field in fields(VMajorOptions)}
    always = {"only_if_faster": False} if is_new else {"when": "always"}
    return {"policy": name, **POLICIES[name], **always}


def machine_options(num_ranks: int) -> dict[str, Any]:
    file = Path(tempfile.gettempdir()) / f"slow_{num_ranks}.json"
    file.write_text(json.dumps(topology(num_ranks)))
    return {"topology": str(file)}


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, explain, every in cases():
        for number, options in enumerate(every):
            torch._dynamo.reset()
            torch.manual_seed(0)
            own = folder / f"{name.replace('/', ' ')} {number}"
            own.mkdir(parents=True)
            with tempfile.TemporaryDirectory() as dumps:
                explain({**options, "debug_dir": dumps})
                for place, graph in enumerate(sorted(Path(dumps).glob("rank_*/graph_*"))):
                    for dump in sorted(graph.rglob("*.py")):
                        inner = "_".join(dump.relative_to(graph).parts)
                        (own / f"{place}_{inner[:-3]}.txt").write_text(plain(dump.read_text()))
            print(own.name, len(list(own.iterdir())), flush=True)


_NAME = re.compile(r"^\s*(\w+)(?::.*?)? = ", re.MULTILINE)


def plain(dump: str) -> str:
    """Returns the code of a dump with its values numbered in their order, without comments."""
    code = dump[dump.index("    def forward(") : dump.index("def example_inputs(")]
    lines = [re.sub(r"\s*#.*", "", line).rstrip() for line in code.splitlines()]
    lines = [re.sub(r";  .* = None$", "", line) for line in lines if line.strip()]
    head, body = lines[0], "\n".join(lines[1:])
    names = re.findall(r"(\w+): ", head) + _NAME.findall(body)
    numbers = {name: f"v{number}" for number, name in enumerate(dict.fromkeys(names))}
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: numbers.get(m[0], m[0]), f"{head}\n{body}\n")


def compare(old: Path, new: Path) -> int:
    """Prints the files that differ, by case, and how many are the same; returns how many differ."""
    names = [sorted(str(f.relative_to(top)) for f in top.rglob("*.txt")) for top in (old, new)]
    common = [name for name in names[0] if name in set(names[1])]
    differ = [name for name in common if (old / name).read_text() != (new / name).read_text()]
    only = sorted({*names[0]} ^ {*names[1]})
    print(f"{len(common) - len(differ)} of {len(common)} graphs are the same up to names")
    for name, count in sorted(Counter(Path(item).parent.name for item in differ).items()):
        print(f"  differs: {name}: {count} graphs")
    for name in only:
        print(f"  only in one: {name}")
    return len(differ) + len(only)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])) > 0)
