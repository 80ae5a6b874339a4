# SPDX-License-Identifier: Apache-2.0
"""Options and variables that may be any object: taken, or refused by name, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import is_one_of, number, shown, shown_keys, whole_number
from cocodiff_compile.ranks.launch.launchers import find_launch, local_rank_of
from cocodiff_compile.v_major.options import VMajorOptions
from tests.plan.test_config import KEYS as OPTIONS
from tests.plan.test_v_major_options import KEYS as V_MAJOR_KEYS
from tests.plan.test_v_major_options import with_owner
from tests.support.odd_values import ENDLESS, HUGE, Hostile, nested, odd_values, plain_values

pytestmark = pytest.mark.timeout(60)

FUZZ = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MAX_MESSAGE = 3_000


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COCODIFF_DEBUG_DIR", raising=False)
    monkeypatch.delenv("COCODIFF_DISABLE", raising=False)


def _takes_or_refuses_by_name(options: Any, name: str) -> None:
    try:
        CompileConfig.from_options(options)
    except UserError as error:  # and nothing else, not even another ValueError
        assert name in str(error)
        assert len(str(error)) < MAX_MESSAGE


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_takes_any_object_or_refuses_it_by_name(key: str) -> None:
    for value in odd_values():
        _takes_or_refuses_by_name({key: value}, f"'{key}'")


@pytest.mark.parametrize("key", V_MAJOR_KEYS)
def test_a_key_of_v_major_takes_any_object_or_refuses_it_by_name(key: str) -> None:
    for value in odd_values():
        given = {"v_major": {**with_owner(key, value), key: value}}
        _takes_or_refuses_by_name(given, f"'{key}'")


@pytest.mark.parametrize("role", ["q", "v"])
def test_bits_of_a_role_take_any_object_or_refuse_it(role: str) -> None:
    for value in odd_values():
        bits = {"q": 4, "k": 4, "v": 4, "o": 4, role: value}
        _takes_or_refuses_by_name({"v_major": {"policy": "fixed", "bits": bits}}, "'bits'")
        layers = {"policy": "paper", "layers": [0.5, value]}
        _takes_or_refuses_by_name({"v_major": layers}, "'layers'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_chunks", np.array([2, 2])),
        ("head_chunks", np.array(2)),
        ("head_chunks", HUGE),
        ("token_chunks", torch.tensor(2)),
        ("token_chunks", ENDLESS),
        ("tapa", np.array(["auto"])),
        ("v_first", np.array(True)),
        ("disable", [np.arange(2)]),
        ("disable", [Hostile()]),
        ("disable", ["x"] * 100_000),
        ("topology", "x" * 5_000),
        ("topology", Hostile()),
        ("debug_dir", "x" * 5_000),
        ("debug_dir", "/".join(["x" * 100] * 50)),
        ("debug_dir", "~no-such-user-at-all/folder"),
        ("debug_dir", Hostile()),
        ("v_major", nested(100_000)),
        ("v_major", {"memory_budget_mib": HUGE}),
        ("v_major", {"memory_budget_mib": float("inf")}),
        ("v_major", {"target_psnr_db": np.ones(3)}),
        ("v_major", {"policy": "fixed", "bits": np.array([4, 4, 4, 4])}),
        ("v_major", {"policy": "fixed", "first_bits": np.ones(2)}),
        ("v_major", {"policy": "paper", "buckets": 10**9}),
        ("v_major", {"warm_up": HUGE}),
    ],
    ids=range(24),
)
def test_what_is_no_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"'{key}'.*allowed"):
        CompileConfig.from_options({key: value})


@pytest.mark.parametrize(
    "options",
    [[("tapa", "on")], "tapa", 3, np.arange(3), Hostile(), True, {"x": 1}, {Hostile(): 1}, {3: 3}],
    ids=range(9),
)
def test_options_that_are_none_are_refused(options: Any) -> None:
    with pytest.raises(UserError, match=r"option.*'cocodiff'.*allowed"):
        CompileConfig.from_options(options)


def test_a_long_unknown_key_gets_a_short_answer() -> None:
    with pytest.raises(UserError, match="unknown option 'xxx") as caught:
        CompileConfig.from_options({"x" * 10_000_000: 1})
    assert len(str(caught.value)) < MAX_MESSAGE
    with pytest.raises(UserError, match="'v_major': unknown key 'xxx"):
        VMajorOptions.from_mapping({"x" * 10_000_000: 1})


def test_numbers_of_numpy_that_are_numbers_of_python_are_taken() -> None:
    config = CompileConfig.from_options({"v_major": {"target_psnr_db": np.float64(35)}})
    assert config.v_major is not None
    assert type(config.v_major.target_psnr_db) is float


def test_ranks_that_try_the_same_folder_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Whatever another rank left there, or took away."""
    (tmp_path / ".writable").mkdir()
    config = CompileConfig.from_options({"debug_dir": tmp_path})
    assert config.debug_dir == tmp_path
    assert [file.name for file in tmp_path.iterdir()] == [".writable"]


@FUZZ
@given(st.sampled_from(OPTIONS), plain_values())
def test_any_plain_value_of_an_option(key: str, value: Any) -> None:
    if key == "debug_dir" and isinstance(value, str):
        value = f"dumps/{value.replace('.', '').replace('/', '')}"
    _takes_or_refuses_by_name({key: value}, f"'{key}'")


@FUZZ
@given(st.sampled_from(V_MAJOR_KEYS), plain_values())
def test_any_plain_value_of_v_major(key: str, value: Any) -> None:
    _takes_or_refuses_by_name({"v_major": {**with_owner(key, value), key: value}}, f"'{key}'")


# Variables


@pytest.mark.parametrize(
    "text", ["x" * 5_000, "/dev/null", "~no-such-user-at-all", "a\udcff" * 200]
)
def test_a_bad_debug_folder_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("COCODIFF_DEBUG_DIR", text)
    with pytest.raises(UserError, match="environment variable COCODIFF_DEBUG_DIR: option"):
        CompileConfig.from_options()


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\udcff", "chunk-heads chunk-tokens"])
def test_a_bad_list_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    # os.environ itself takes no longer ones than the system does.
    monkeypatch.setattr("os.environ", {"COCODIFF_DISABLE": text})
    with pytest.raises(UserError, match="environment variable COCODIFF_DISABLE: option") as caught:
        CompileConfig.from_options()
    assert len(str(caught.value)) < MAX_MESSAGE


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize("text", ["", "-1", "1.0", "x", "9" * 5_000, "²", "٣", " 1", "0x1"])
@pytest.mark.parametrize(
    ("environment", "name"),
    [*((LAUNCHED, name) for name in LAUNCHED), *((SLURM, name) for name in SLURM)],
)
def test_a_launchers_variable_that_is_no_number_is_named(
    environment: dict[str, str], name: str, text: str
) -> None:
    with pytest.raises(UserError, match=f"environment variable {name}=.*is not a number"):
        find_launch({**environment, name: text})


def test_a_local_rank_without_a_launcher_is_named() -> None:
    assert local_rank_of({}) == 0
    assert local_rank_of({"LOCAL_RANK": "3"}) == 3
    with pytest.raises(UserError, match="LOCAL_RANK='first' is not a number"):
        local_rank_of({"LOCAL_RANK": "first"})


def test_slurms_list_of_nodes_is_bounded() -> None:
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE"):
        find_launch({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"})


# What is shown


@pytest.mark.parametrize("value", [3, "text", [1, "a"], {"b": 1, "a": 2}, None, 1.5, (1,), {4}])
def test_short_values_are_shown_as_python_does(value: Any) -> None:
    assert shown(value) == repr(value)


def test_anything_is_shown_in_bounded_text() -> None:
    for value in odd_values():
        assert 0 < len(shown(value)) < MAX_MESSAGE
    assert shown(ENDLESS) == "<a whole number of 100001 bits>"
    assert shown_keys(map(str, range(100))).endswith("18, 19, ...")
    assert shown_keys(["a", 1]) == "a, 1"


def test_numbers_are_those_of_python() -> None:
    assert (whole_number(3), whole_number(True), whole_number(3.0)) == (3, None, None)
    assert (number(3), number(2.5), number(True), number("3")) == (3.0, 2.5, None, None)
    assert (number(HUGE), number(float("nan")), number(float("inf"))) == (None, None, None)
    assert is_one_of("on", ("on", "off"))
    assert not is_one_of(np.array(["on"]), ("on", "off"))
