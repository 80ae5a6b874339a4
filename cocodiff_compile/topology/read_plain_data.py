# SPDX-License-Identifier: Apache-2.0
"""Reads plain data from an untrusted JSON or YAML file, bounded in size and depth, so that any file
is read or refused within a second.

It refuses, besides invalid JSON or YAML, anything but a regular file (a pipe would block), text
that is not UTF-8, duplicate keys, and YAML aliases, which can make a short file endless.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import shown

MAX_JSON_BYTES = 1 << 20
MAX_YAML_BYTES = 1 << 17
"""The limit is lower than that of JSON: PyYAML reads some 200 kB per second."""

MAX_DEPTH = 32
_TOO_DEEP = f"it is nested too deep; allowed: {MAX_DEPTH} levels"


def read_plain_data(path: Path) -> object:
    """Returns the data of a .json or YAML file. Raises UserError if it is unreadable."""
    is_json = path.suffix == ".json"
    text = _read_text(path, MAX_JSON_BYTES if is_json else MAX_YAML_BYTES)
    try:
        return _load_json(text) if is_json else _load_yaml(text)
    except ValueError as error:
        raise UserError(f"cannot be parsed: {error}") from None


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file, so that no reader sees half of it. Raises OSError if it cannot."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def why_no_file(path: Path) -> str:
    """Returns why there is nothing to read at `path`; empty if there is a regular file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except ValueError as error:  # a zero character in the name
        return f"it cannot be read: {error}"
    if stat.S_ISDIR(mode):
        return "it is a folder"
    return "" if stat.S_ISREG(mode) else "it is no regular file"


def _read_text(path: Path, max_bytes: int) -> str:
    if reason := why_no_file(path):
        raise UserError(reason)
    try:
        # What became a pipe since it was looked at must not block either.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise UserError(f"it is too long; allowed: {max_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"it is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None


def _load_json(text: str) -> object:
    try:
        data: object = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _refuse_deep(data)
    return data


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"key {shown(key)} occurs twice; allowed: once")
        unique[key] = value
    return unique


def _refuse_deep(data: object) -> None:
    """Checks the depth level by level, without recursion."""
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _parts(data: object) -> list[object]:
    if isinstance(data, dict):
        return list(data.values())
    return data if isinstance(data, list) else []


def _load_yaml(text: str) -> object:
    try:
        import yaml  # noqa: PLC0415  (optional: JSON needs nothing)
    except ImportError:
        raise UserError("YAML needs `pip install pyyaml`; JSON does not") from None
    try:
        return yaml.load(text, Loader=_yaml_loader())
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(str(error)) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # What PyYAML's constructors raise where a tag and its text do not fit, as in `!!int ""`.
        raise ValueError(f"a value does not fit its tag ({error!r})") from None


def _yaml_loader() -> Any:
    """Returns PyYAML's safe loader, without aliases or duplicate keys, with `1e10` a number."""
    import yaml  # noqa: PLC0415  (optional)

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                name = self.peek_event().anchor
                raise ValueError(f"alias *{name} is not supported; write out its value")
            if self.depth > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                _refuse_duplicates([(key, None) for key in keys])
            return super().construct_mapping(node, deep)

    exponent = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    return Loader
