# SPDX-License-Identifier: Apache-2.0
"""Writes a graph as text, a line for each node, and compares two such texts.

Every line begins with the name of its node, which no other has, so that comparing takes the time of
sorting, however large the graph: a line that stands in both texts is kept or moved, others were
added or removed.
"""

from __future__ import annotations

import bisect
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.ir.module_path import module_path_of

_SEPARATOR = "\t"
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64"}

KEPT, ADDED, REMOVED, MOVED_HERE, MOVED_AWAY = "=", "+", "-", ">", "<"


@dataclass(frozen=True)
class Line:
    """One node: `text` is what it computes, `module` where in the model it comes from."""

    text: str
    module: str


def lines_of(graph: Graph) -> list[Line]:
    """Returns a line for each node, in the order of the graph."""
    modules: dict[str, str] = {}
    return [Line(_text(node), module_of(node, modules)) for node in graph.nodes]


def module_of(node: Node, known: dict[str, str]) -> str:
    """Returns the module of a node, looked up once for all nodes of the same module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    key = "|".join(str(entry[0]) for entry in stack.values())
    if key not in known:
        known[key] = module_path_of([node])
    return known[key]


def _text(node: Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name}: {value_text(node)} = input"
    if node.op != "call_function":
        return f"{node.name} = {node.op} {node.target}"
    given = [_argument(item) for item in node.args]
    given += [f"{key}={_argument(item)}" for key, item in node.kwargs.items()]
    return f"{node.name}: {value_text(node)} = {op_name(node.target)}({', '.join(given)})"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_argument, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_argument(item)}" for key, item in value.items()) + "}"
    return repr(value)


@functools.lru_cache(maxsize=4096)
def op_name(target: Any) -> str:
    """Returns `aten.mm` for `aten.mm.default`; functions of Python by their own name."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def value_text(node: Node) -> str:
    """Returns the type of what a node makes: `bf16[1, 512, 3072]`."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{_SHORT.get(dtype, dtype)}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__ if value is not None else "?"


def packed(lines: Sequence[Line]) -> bytes:
    """Returns lines as few bytes, to be kept until a page is written."""
    text = "\n".join(f"{line.module}{_SEPARATOR}{line.text}" for line in lines)
    return zlib.compress(text.encode(), 1)


def unpacked(data: bytes) -> list[Line]:
    """Returns the lines that `packed` made these bytes from."""
    found = []
    for line in zlib.decompress(data).decode().split("\n"):
        module, _, text = line.partition(_SEPARATOR)
        found.append(Line(text, module))
    return found


def compared(before: Sequence[int], after: Sequence[int]) -> list[tuple[str, int]]:
    """Returns both sequences of different numbers as one, each number with what became of it."""
    place = {number: index for index, number in enumerate(after)}
    common = [place[number] for number in before if number in place]
    kept = {after[index] for index in _longest_rising(common)}
    there, result, at = set(before), [], 0
    for number in before:
        if number not in kept:
            result.append((MOVED_AWAY if number in place else REMOVED, number))
            continue
        while after[at] != number:
            result.append((MOVED_HERE if after[at] in there else ADDED, after[at]))
            at += 1
        result.append((KEPT, number))
        at += 1
    rest = after[at:]
    return result + [(MOVED_HERE if number in there else ADDED, number) for number in rest]


def _longest_rising(numbers: Sequence[int]) -> list[int]:
    """Returns the longest rising subsequence of different numbers."""
    ends: list[int] = []
    places: list[int] = []
    previous: list[int] = []
    for index, number in enumerate(numbers):
        length = bisect.bisect_left(ends, number)
        previous.append(places[length - 1] if length else -1)
        if length == len(ends):
            ends.append(number)
            places.append(index)
        else:
            ends[length], places[length] = number, index
    found = []
    at = places[-1] if places else -1
    while at >= 0:
        found.append(numbers[at])
        at = previous[at]
    return found[::-1]


def stages_data(stages: Sequence[tuple[str, Sequence[Line]]]) -> dict[str, Any]:
    """Returns texts one behind the other, each compared with the one before, as plain data: every
    different line once, and for each stage what became of which line.
    """
    pool: dict[Line, int] = {}
    modules: dict[str, int] = {}
    numbered = [
        (name, [pool.setdefault(line, len(pool)) for line in lines]) for name, lines in stages
    ]
    data = []
    before: Sequence[int] = numbered[0][1] if numbered else ()
    for name, after in numbered:
        marked = compared(before, after)
        counts = {mark: sum(own == mark for own, _ in marked) for mark in "+->"}
        data.append(
            {
                "name": name,
                "marks": "".join(mark for mark, _ in marked),
                "lines": _steps([number for _, number in marked]),
                "added": counts["+"],
                "removed": counts["-"],
                "moved": counts[">"],
            }
        )
        before = after
    return {
        "text": [line.text for line in pool],
        "module": [modules.setdefault(line.module, len(modules)) for line in pool],
        "modules": list(modules),
        "stages": data,
    }


def _steps(numbers: Sequence[int]) -> list[int]:
    """Returns the first number, then each one's distance from the one before: small numbers."""
    return [own - other for own, other in zip(numbers, [0, *numbers], strict=False)]
