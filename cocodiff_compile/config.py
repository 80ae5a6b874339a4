# SPDX-License-Identifier: Apache-2.0
"""Turns `torch.compile(..., options={...})` and `COCODIFF_*` variables into one frozen
`CompileConfig`.

An unknown key, a wrong type or an impossible value is refused with the key, the given value and
what is allowed; nothing is guessed.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from cocodiff_compile.decide.decision_file import GivenDecisions, load_decisions
from cocodiff_compile.errors import UserError, refuse_unknown
from cocodiff_compile.given_values import (
    has_text_keys,
    is_one_of,
    number,
    shown,
    shown_keys,
    whole_number,
)
from cocodiff_compile.passes import PASS_NAMES
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.files import load_topology
from cocodiff_compile.topology.presets import PRESETS
from cocodiff_compile.topology.read_plain_data import why_no_file
from cocodiff_compile.v_major.options import VMajorOptions

MAX_CHUNKS = 1024
"""The largest number of chunks. More would make a graph of millions of nodes; 2 to 8 are useful."""


@dataclass(frozen=True)
class ShardOptions:
    """Holds the options of shard-tokens."""

    group: str = ""
    """The name of the process group; empty for all ranks."""
    degree: int | None = None
    """How many ranks share the tokens of one call, neighbours in the group; None for all of them.
    """
    min_gain: float = 1.05
    """The least factor by which a step must be estimated to get faster, exchanges included; 0
    shares out all that can be, whatever exchanges cost.
    """
    compare: str = "first"
    """Which calls compare the inputs and weights of all ranks, which must be the same: the "first"
    one, or "all".
    """

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> ShardOptions:
        """Checks the keys and values of the option `shard`."""
        refuse_unknown(given, fields(cls), "unknown key {} in option 'shard'")
        group, gain = given.get("group"), given.get("min_gain", cls.min_gain)
        if isinstance(group, torch.distributed.device_mesh.DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if group == torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise UserError(
                "option shard['group'] of backend 'cocodiff': this rank is not in that group; "
                "compile with it on the ranks of the group, and without it on this one"
            )
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise _refuse("shard['group']", group, "a process group, or a mesh of one dim")
        degree = given.get("degree")
        if degree is not None and (whole_number(degree) is None or degree < 1):
            raise _refuse("shard['degree']", degree, "None, or a whole number from 1")
        least = number(gain)
        if least is None or least < 0:
            raise _refuse("shard['min_gain']", gain, "a number from 0")
        compare = given.get("compare", cls.compare)
        if compare not in ("first", "all"):
            raise _refuse("shard['compare']", compare, "'first', 'all'")
        return cls("" if group is None else str(group.group_name), degree, least, compare)


@dataclass(frozen=True)
class CompileConfig:
    """Holds the checked options. The defaults are the meaning of `options=None`."""

    shard: ShardOptions | None = None
    """How tokens of a plain model are shared out over ranks; None leaves models as they are."""
    topology: str | Topology = "auto"
    """"auto", the name of a preset, or the topology from a file."""
    tapa: Literal["auto", "on", "off"] = "auto"
    """Whether exchanges run in phases along the machine: where that is estimated to gain enough,
    wherever phases are possible, or never.
    """
    v_first: bool = True
    """Whether the graph is ordered so that exchanges hide behind computation, and V gets a GEMM of
    its own.
    """
    head_chunks: int | Literal["auto"] = "auto"
    """How many groups of heads an attention and its exchanges are cut into."""
    token_chunks: int | Literal["auto"] = "auto"
    """How many chunks of tokens are made of what lies between attentions."""
    v_major: VMajorOptions | None = None
    """How exchanges are compressed, which is lossy; None sends every value as it is."""
    decision: GivenDecisions | None = None
    """What an earlier compile decided, from a file; nothing is then measured or searched for."""
    debug_dir: Path | None = None
    """The folder that graphs and reports are written to."""
    disable: tuple[str, ...] = ()
    """The names of passes that do not run."""

    @property
    def selective(self) -> VMajorOptions | None:
        """The options of select-v-major; None if that pass does not run."""
        return None if "select-v-major" in self.disable else self.v_major

    @property
    def tapa_mode(self) -> Literal["auto", "on", "off"]:
        """The mode in which phases are chosen; "off" if split-tapa-phases is disabled."""
        return "off" if "split-tapa-phases" in self.disable else self.tapa

    @property
    def settings(self) -> dict[str, str]:
        """The versions and options that decide what a graph becomes, as text."""
        return {
            "the version of torch": torch.__version__,
            "the version of cocodiff-compile": version("cocodiff-compile"),
            "the version of Python": platform.python_version(),
            **{
                f"option {field.name!r}": repr(getattr(self, field.name))
                for field in fields(self)
                if field.name not in ("debug_dir", "decision")
            },
        }

    def made_with(self, dry_run: bool) -> dict[str, str]:
        """Returns the settings that a decision depends on, and whether its ranks run the graph."""
        return {**self.settings, "the compile": "a dry run" if dry_run else "ranks that run it"}

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None) -> CompileConfig:
        """Checks `options` and the environment; an option overrides its variable."""
        if options is not None and not isinstance(options, Mapping):
            raise UserError(
                f"options of backend 'cocodiff' are {shown(options)}; allowed: None, or a dict"
            )
        given = {} if options is None else dict(options)
        refuse_unknown(given, fields(cls), "unknown option {} for backend 'cocodiff'")
        checked = {key: _CHECKS[key](key, value) for key, value in given.items()}
        return cls(**{**_environment_options(), **checked})


def _environment_options() -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, read in _VARIABLES.items():
        variable = f"COCODIFF_{key.upper()}"
        if text := os.environ.get(variable):
            try:
                options[key] = _CHECKS[key](key, read(text))
            except UserError as error:
                raise UserError(f"environment variable {variable}: {error}") from None
    return options


def _read_list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_VARIABLES: dict[str, Callable[[str], object]] = {"debug_dir": str, "disable": _read_list}


def _refuse(key: str, given: object, allowed: str) -> UserError:
    return UserError(f"option {key!r} of backend 'cocodiff' is {shown(given)}; allowed: {allowed}")


def _check_topology(key: str, value: object) -> str | Topology:
    allowed = f"'auto', a preset ({', '.join(PRESETS)}), or the path of a topology file"
    path = _path(value)
    if path is None:
        raise _refuse(key, value, allowed)
    if is_one_of(value, ("auto", *PRESETS)):
        return value
    if reason := why_no_file(path):
        raise _refuse(key, value, f"{allowed} ({reason})")
    return load_topology(path)


def _check_tapa(key: str, value: object) -> str:
    if not is_one_of(value, ("auto", "on", "off")):
        raise _refuse(key, value, "'auto', 'on', 'off'")
    return value


def _check_v_first(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "True, False")
    return value


def _check_chunks(key: str, value: object) -> int | str:
    if is_one_of(value, ("auto",)):
        return "auto"
    count = whole_number(value)
    if count is None or not 1 <= count <= MAX_CHUNKS:
        raise _refuse(key, value, f"'auto' or a whole number from 1 to {MAX_CHUNKS}")
    return count


def _check_v_major(key: str, value: object) -> VMajorOptions | None:
    if value is None or isinstance(value, VMajorOptions):
        return value
    if not has_text_keys(value):
        raise _refuse(key, value, "None, or a dict with text keys")
    return VMajorOptions.from_mapping(value)


def _check_decision(key: str, value: object) -> GivenDecisions | None:
    if value is None or isinstance(value, GivenDecisions):
        return value
    path, allowed = _path(value), "None, or the path of a file of decisions"
    if path is None:
        raise _refuse(key, value, allowed)
    if reason := why_no_file(path):
        raise _refuse(key, value, f"{allowed} ({reason})")
    return load_decisions(path)


def _check_debug_dir(key: str, value: object) -> Path | None:
    if value is None:
        return None
    path = _path(value)
    if path is None:
        raise _refuse(key, value, "None, or the path of a folder")
    if why_no_file(path) == "":
        raise _refuse(key, value, "None, or the path of a folder; this one is a file")
    try:
        path = path.expanduser()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path  # a name of its own: other ranks try the same folder
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"None, or the path of a folder that can be written to ({reason})"
        raise _refuse(key, value, allowed) from None


def _path(value: object) -> Path | None:
    """Returns the path that text or a path object stands for; None for all else and empty text."""
    if not isinstance(value, (str, os.PathLike)):
        return None
    try:
        text = os.fspath(value)
    except Exception:  # an object's own __fspath__ may raise anything
        return None
    return Path(text) if isinstance(text, str) and text else None


def _check_disable(key: str, value: object) -> tuple[str, ...]:
    allowed = f"a list of pass names: {', '.join(PASS_NAMES)}"
    if isinstance(value, str) or not isinstance(value, (Sequence, set, frozenset)):
        raise _refuse(key, value, allowed)
    given = list(value)
    unknown = [name for name in given if not is_one_of(name, PASS_NAMES)]
    if unknown:
        named = shown_keys(sorted(unknown, key=shown))
        raise _refuse(key, value, f"{allowed} (unknown: {named})")
    return tuple(name for name in PASS_NAMES if name in given)


def _check_shard(key: str, value: object) -> ShardOptions | None:
    if value is None or isinstance(value, ShardOptions):
        return value
    if is_one_of(value, ("tokens",)):
        return ShardOptions()
    if not has_text_keys(value):
        raise _refuse(key, value, "None, 'tokens', or a dict with text keys")
    return ShardOptions.from_mapping(value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "shard": _check_shard,
    "topology": _check_topology,
    "tapa": _check_tapa,
    "v_first": _check_v_first,
    "head_chunks": _check_chunks,
    "token_chunks": _check_chunks,
    "v_major": _check_v_major,
    "decision": _check_decision,
    "debug_dir": _check_debug_dir,
    "disable": _check_disable,
}
