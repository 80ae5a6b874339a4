# SPDX-License-Identifier: Apache-2.0
"""Tells where in the model a node comes from. It is a hint for people: nothing is decided by it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from torch.fx import Node

_ROOT = re.compile(r"^L\[[^\]]*\]")
# What hooks and wrappers leave in Dynamo's names between one module and the next.
_WRAPPERS = re.compile(
    r"\.(forward|func|args\[\d+\]|cell_contents|__self__|__dict__|__closure__\[\d+\])(?=[.\[]|$)"
    r"|\.(_modules|_orig_mod)(?=[.\[]|$)|\['_modules'\]"
)
_INDEX = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def module_path_of(nodes: Iterable[Node]) -> str:
    """The deepest module that all of `nodes` lie in, e.g. `blocks.0.attn`; empty if unknown."""
    paths = [path for node in nodes if (path := _path(node))]
    columns = zip(*paths, strict=False)
    return ".".join(column[0] for column in takewhile(lambda names: len(set(names)) == 1, columns))


def _path(node: Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [_parts(entry[0]) for entry in stack.values()]
    return max(paths, key=len, default=[])


def _parts(name: str) -> list[str]:
    bare = _WRAPPERS.sub("", _ROOT.sub("", name))
    return [part for part in _INDEX.sub(r".\1", bare).split(".") if part]
