"""Where in the model a node comes from. A hint for people: nothing is decided by it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from torch.fx import Node

_INDEX = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def module_path_of(nodes: Iterable[Node]) -> str:
    """The deepest module that all of `nodes` lie in, e.g. `blocks.0.attn`; empty if unknown."""
    paths = [path for node in nodes if (path := _path(node))]
    if not paths:
        return ""
    columns = zip(*paths, strict=False)
    return ".".join(column[0] for column in takewhile(lambda names: len(set(names)) == 1, columns))


def _path(node: Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    names = [entry[0] for entry in stack.values()]
    if not names:
        return []
    deepest = max(names, key=len)
    dotted = _INDEX.sub(r".\1", deepest.replace("_modules", ""))
    parts = [part for part in dotted.split(".") if part and part not in ("L", "self")]
    return parts
