# SPDX-License-Identifier: Apache-2.0
"""Options and variables: what is taken, what is refused with which words, what is said."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cocodiff_compile.config import CompileConfig, ShardOptions
from cocodiff_compile.errors import UserError
from cocodiff_compile.passes import PASS_NAMES
from cocodiff_compile.say_once import forget_what_was_said
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.v_major.options import VMajorOptions
from cocodiff_compile.v_major.payload import Payload

KEYS = [
    "topology",
    "tapa",
    "v_first",
    "head_chunks",
    "token_chunks",
    "v_major",
    "debug_dir",
    "disable",
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs each test in a folder of its own, as checking options makes folders for dumps."""
    (tmp_path / "examples").symlink_to(Path("examples").absolute())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COCODIFF_DEBUG_DIR", raising=False)
    monkeypatch.delenv("COCODIFF_DISABLE", raising=False)
    forget_what_was_said()
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [None, {}])
def test_defaults(options: dict[str, Any] | None) -> None:
    assert dataclasses.asdict(CompileConfig.from_options(options)) == {
        "shard": None,
        "topology": "auto",
        "tapa": "auto",
        "v_first": True,
        "head_chunks": "auto",
        "token_chunks": "auto",
        "v_major": None,
        "decision": None,
        "debug_dir": None,
        "disable": (),
    }


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompileConfig().v_first = False  # type: ignore[misc]


PCIE = Link("pcie", 2e10, 4e10, 5e-6)
ETHERNET = Link("ethernet", 1.25e9, 2.5e9, 5e-5, ranks_per_link=2)
TWO_NODES = Topology("two-nodes", (Axis("tile", 2, PCIE), Axis("node", 2, ETHERNET)), 1e10)

GOOD = [
    ("topology", "auto", "auto"),
    ("topology", "aurora", "aurora"),
    ("topology", "examples/two_nodes.yaml", TWO_NODES),
    ("topology", Path("examples/two_nodes.yaml"), TWO_NODES),
    ("tapa", "auto", "auto"),
    ("tapa", "on", "on"),
    ("tapa", "off", "off"),
    ("v_first", True, True),
    ("v_first", False, False),
    ("head_chunks", "auto", "auto"),
    ("head_chunks", 1, 1),
    ("head_chunks", 8, 8),
    ("token_chunks", "auto", "auto"),
    ("token_chunks", 3, 3),
    ("v_major", None, None),
    ("v_major", {}, VMajorOptions()),
    ("v_major", {"policy": "fixed", "bits": 2}, VMajorOptions("fixed", bits=Payload.uniform(2))),
    ("debug_dir", None, None),
    ("debug_dir", "some/folder", Path("some/folder")),
    ("debug_dir", Path("some/folder"), Path("some/folder")),
    ("debug_dir", "~/folder", Path.home() / "folder"),
    ("disable", [], ()),
    ("disable", ["recognize-ulysses"], ("recognize-ulysses",)),
    ("disable", {"chunk-heads"}, ("chunk-heads",)),
    ("disable", tuple(reversed(PASS_NAMES)), PASS_NAMES),
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_good_value(key: str, value: Any, expected: Any) -> None:
    config = CompileConfig.from_options({key: value})
    assert getattr(config, key) == expected
    assert config == dataclasses.replace(CompileConfig(), **{key: expected})


BAD = [
    *(("topology", value, "'auto', a preset") for value in ("", "ring", None, 3, ["auto"], ".")),
    *(("tapa", value, "'auto', 'on', 'off'") for value in ("ON", "", True, None, ["on"])),
    *(("v_first", value, "True, False") for value in (1, 0, "true", None)),
    *(
        (key, value, "'auto' or a whole number from 1")
        for key in ("head_chunks", "token_chunks")
        for value in (0, -1, True, 1.5, "2", None, [2])
    ),
    *(("v_major", value, "None, or a dict") for value in (3, "on", [("a", 1)], {1: 2})),
    *(("debug_dir", value, "folder") for value in ("", 3, True, ["folder"])),
    *(
        ("disable", value, ", ".join(PASS_NAMES))
        for value in ("chunk-heads", ["chunk_heads"], [3], None, 3, {"chunk-heads": True})
    ),
]


@pytest.mark.parametrize(("key", "value", "allowed"), BAD)
def test_bad_value_is_refused_with_key_value_and_what_is_allowed(
    key: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError) as caught:
        CompileConfig.from_options({key: value})
    for words in (f"'{key}'", repr(value), allowed, "cocodiff"):
        assert words in str(caught.value)


def test_a_topology_file_is_read_once(tmp_path: Path) -> None:
    """Another path to the same content is the same option; a later edit of the file is not seen."""
    text = Path("examples/two_nodes.yaml").read_text()
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    config = CompileConfig.from_options({"topology": file})
    file.write_text(text.replace("size: 2", "size: 3"))
    assert config == CompileConfig.from_options({"topology": "examples/two_nodes.yaml"})
    assert repr(config) != repr(CompileConfig.from_options({"topology": file}))


def test_unknown_pass_is_named() -> None:
    with pytest.raises(ValueError, match="unknown: chunk_heads, nonsense"):
        CompileConfig.from_options({"disable": ["nonsense", "chunk-heads", "chunk_heads"]})


def test_file_is_no_debug_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"'debug_dir'.*this one is a file"):
        CompileConfig.from_options({"debug_dir": file})


@pytest.mark.parametrize("place", ["file/below", "file/below/deeper", "nul\0byte"])
def test_folder_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"'debug_dir'.*can be written to"):
        CompileConfig.from_options({"debug_dir": str(tmp_path / place)})


@pytest.mark.parametrize("place", ["/proc", "/proc/nowhere"])
def test_folder_that_cannot_be_written_to_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=rf"'debug_dir'.*{place}.*can be written to"):
        CompileConfig.from_options({"debug_dir": place})


@pytest.mark.parametrize(
    ("key", "hint"),
    [("v_frist", "did you mean 'v_first'?"), ("debugdir", "did you mean 'debug_dir'?")],
)
def test_unknown_key_gets_a_suggestion(key: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        CompileConfig.from_options({key: True})
    assert f"unknown option {key!r}" in str(caught.value)
    assert hint in str(caught.value)
    assert all(known in str(caught.value) for known in KEYS)


@pytest.mark.parametrize("key", ["something else entirely", 3])
def test_unknown_key_without_a_likely_meaning_gets_the_list(key: Any) -> None:
    with pytest.raises(ValueError) as caught:
        CompileConfig.from_options({key: True})
    assert f"unknown option {key!r}" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert all(known in str(caught.value) for known in KEYS)


# Variables


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCODIFF_DEBUG_DIR", "from/variable")
    monkeypatch.setenv("COCODIFF_DISABLE", " chunk-heads, recognize-ulysses ,")
    config = CompileConfig.from_options()
    assert config.debug_dir == Path("from/variable")
    assert config.disable == ("recognize-ulysses", "chunk-heads")


def test_empty_variables_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCODIFF_DEBUG_DIR", "")
    monkeypatch.setenv("COCODIFF_DISABLE", "")
    assert CompileConfig.from_options() == CompileConfig()


@pytest.mark.parametrize(
    ("options", "debug_dir", "disable"),
    [
        ({"debug_dir": "from/option"}, Path("from/option"), ("chunk-heads",)),
        ({"debug_dir": None}, None, ("chunk-heads",)),
        ({"disable": []}, Path("from/variable"), ()),
        ({"disable": ["select-v-major"]}, Path("from/variable"), ("select-v-major",)),
    ],
)
def test_options_win_over_variables(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], debug_dir: Any, disable: Any
) -> None:
    monkeypatch.setenv("COCODIFF_DEBUG_DIR", "from/variable")
    monkeypatch.setenv("COCODIFF_DISABLE", "chunk-heads")
    config = CompileConfig.from_options(options)
    assert (config.debug_dir, config.disable) == (debug_dir, disable)


def test_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCODIFF_DISABLE", "nonsense")
    with pytest.raises(ValueError, match=r"'disable'.*nonsense.*recognize-ulysses"):
        CompileConfig.from_options()


# What is said


def test_active_options_and_defaults_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cocodiff_compile"):
        CompileConfig.from_options()
        CompileConfig.from_options({"debug_dir": "somewhere", "disable": ["recognize-ulysses"]})
    assert caplog.messages == []


# Through torch.compile


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_chunks": 0}, "'head_chunks'.*0.*'auto' or a whole number"),
        ({"v_frist": True}, "unknown option 'v_frist'.*'v_first'"),
        ({"disable": "chunk-heads"}, "'disable'.*'chunk-heads'"),
    ],
)
def test_value_error_reaches_the_caller_of_the_compiled_model(
    options: dict[str, Any], words: str
) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="cocodiff", options=options)
    with pytest.raises(ValueError, match=words) as caught:
        compiled(torch.ones(2))
    assert not isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)


def test_tokens_are_shared_out_if_asked_for() -> None:
    assert CompileConfig.from_options({}).shard is None
    assert CompileConfig.from_options({"shard": "tokens"}).shard == ShardOptions()
    given = CompileConfig.from_options({"shard": {"min_gain": 2}}).shard
    assert given == ShardOptions(min_gain=2.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("heads", "allowed: None, 'tokens', or a dict with text keys"),
        ({"ranks": 2}, "unknown key 'ranks' in option 'shard'"),
        ({"group": -100}, "this rank is not in that group"),  # what new_group returns there
        ({"degree": 0}, "allowed: None, or a whole number from 1"),
        ({"compare": "never"}, "allowed: 'first', 'all'"),
        ({"group": "world"}, "allowed: a process group, or a mesh of one dim"),
        ({"min_gain": -1}, "allowed: a number from 0"),
        ({"min_gain": True}, "allowed: a number from 0"),
    ],
)
def test_other_ways_to_share_out_are_refused(value: object, words: str) -> None:
    with pytest.raises(UserError) as raised:
        CompileConfig.from_options({"shard": value})
    assert words in str(raised.value)
