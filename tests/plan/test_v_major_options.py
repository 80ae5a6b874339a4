# SPDX-License-Identifier: Apache-2.0
"""`options={"v_major": {...}}`: what is taken, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.errors import UserError
from cocodiff_compile.v_major.delta_code import BITS, FULL
from cocodiff_compile.v_major.options import VMajorOptions
from cocodiff_compile.v_major.payload import UNCOMPRESSED, Payload
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Paper, Policy

KEYS = (
    "policy",
    "target_psnr_db",
    "gain_db",
    "rise_db",
    "bits",
    "first_bits",
    "skipped_share",
    "compare",
    "reuse_output",
    "select_per_stream",
    "compute_unsent",
    "layers",
    "buckets",
    "only_if_faster",
    "warm_up",
    "refresh",
    "memory_budget_mib",
    "guidance_passes",
)
OWNERS = {
    "target_psnr_db": "adaptive",
    "gain_db": "adaptive",
    "rise_db": "adaptive",
    "bits": "fixed",
    "first_bits": "fixed",
    "skipped_share": "fixed",
    "compare": "paper",
    "reuse_output": "paper",
    "select_per_stream": "paper",
    "compute_unsent": "paper",
    "layers": "paper",
    "buckets": "paper",
}
"""Keys that do not belong to every policy, with one that they belong to."""


def with_owner(key: str, value: object) -> dict[str, Any]:
    """The key, with the policy or the budget that it belongs to."""
    if key == "guidance_passes":
        return {"memory_budget_mib": 64.0, key: value}
    return {"policy": OWNERS[key], key: value} if key in OWNERS else {key: value}


def test_nothing_given_is_an_adaptive_policy_with_one_step_that_is_a_keyframe() -> None:
    options = VMajorOptions.from_mapping({})
    assert options == VMajorOptions()
    assert options.make_policy() == Adaptive(40.0, warm_up=1, refresh=0)
    assert options.budget_bytes is None


GOOD = [
    *(("policy", value, value) for value in ("adaptive", "fixed", "paper")),
    *(("target_psnr_db", value, value) for value in (10, 35, 42.5, 100)),
    *(("gain_db", value, value) for value in (-50, 0, 4.5, 50)),
    *(("rise_db", value, value) for value in (0, 4.5, 50)),
    *(("bits", value, Payload.uniform(value)) for value in BITS),
    ("bits", "full", UNCOMPRESSED),
    ("bits", {"q": 1, "k": 2, "v": 8, "o": "full"}, Payload((1, 2, 8, FULL))),
    ("bits", {"o": 4, "v": "full", "k": 3, "q": 2}, Payload((2, 3, FULL, 4))),
    *(("first_bits", value, value) for value in BITS),
    ("first_bits", "full", FULL),
    *(("skipped_share", value, value) for value in (0, 0.0, 0.3, 1, 1.0)),
    *(("compare", value, value) for value in ("sent", "seen")),
    *(("reuse_output", value, value) for value in (True, False)),
    *(("select_per_stream", value, value) for value in (True, False)),
    *(("compute_unsent", value, value) for value in (True, False)),
    *(("layers", value, tuple(value)) for value in ([1.0], (0, 0.5, 1))),
    *(("only_if_faster", value, value) for value in (True, False)),
    *((key, value, value) for key in ("buckets", "guidance_passes") for value in (1, 4, 10)),
    *(("warm_up", value, value) for value in (None, 1, 2, 50)),
    *(("refresh", value, value) for value in (None, 0, 1, 10)),
    *(("memory_budget_mib", value, value) for value in (None, 1, 0.5, 100_000)),
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD)
def test_good_value(key: str, value: object, expected: object) -> None:
    given = with_owner(key, value)
    options = VMajorOptions.from_mapping(given)
    assert getattr(options, key) == expected
    rest = {name: item for name, item in given.items() if name != key}
    assert options == dataclasses.replace(VMajorOptions(**rest), **{key: expected})


NOT_A_COUNT = (-1, 1.5, True, "2", [1])

BAD = [
    *(
        ("policy", value, "'adaptive', 'fixed', 'paper'")
        for value in ("Fixed", "", None, 3, ["fixed"])
    ),
    *(
        ("target_psnr_db", value, "a number from 10 to 100")
        for value in (9.9, 101, 0, -40, "40", True, None, float("nan"), float("inf"), [40])
    ),
    *(
        ("gain_db", value, "a number from -50 to 50")
        for value in (-51, 50.1, "3", True, None, float("nan"), [3])
    ),
    *(
        ("rise_db", value, "a number from 0 to 50")
        for value in (-0.1, 51, "3", True, None, float("nan"), [3])
    ),
    *(
        ("bits", value, "1, 2, 3, 4, 8, or 'full'")
        for value in (0, 5, 16, -1, 2.0, True, "4", "FULL", None, [4], (4, 4, 4, 4))
    ),
    *(
        ("first_bits", value, "1, 2, 3, 4, 8, or 'full'")
        for value in (0, 5, 16, -1, 2.0, True, "4", "FULL", None, [4], {"q": 4, "k": 4})
    ),
    *(
        ("bits", value, "the keys q, k, v, o")
        for value in ({}, {"q": 4}, {"q": 4, "k": 4, "v": 4, "o": 4, "x": 4}, {0: 4})
    ),
    *(
        ("skipped_share", value, "a number from 0 to 1")
        for value in (-0.1, 1.1, "0.5", True, None, float("nan"), [0.5])
    ),
    *(("compare", value, "'sent', 'seen'") for value in ("Sent", "", None, 3, ["sent"])),
    *(("reuse_output", value, "True, False") for value in (1, 0, "yes", None)),
    *(("select_per_stream", value, "True, False") for value in ("apart", "", None, 1)),
    *(("compute_unsent", value, "True, False") for value in ("skipped", "", None, 0)),
    *(
        ("layers", value, "numbers from 0 to 1, one for each attention")
        for value in (0.5, (), [], "1", None, {0: 0.5})
    ),
    *(("only_if_faster", value, "True, False") for value in ("pays", "", None, 1, [True])),
    *(
        (key, value, "a whole number from 1")
        for key in ("buckets", "guidance_passes")
        for value in (0, None, *NOT_A_COUNT)
    ),
    *(("warm_up", value, "a whole number from 1") for value in (0, *NOT_A_COUNT)),
    *(("refresh", value, "a whole number from 0") for value in NOT_A_COUNT),
    *(
        ("memory_budget_mib", value, "None, or a number above 0")
        for value in (0, -1, "1", True, float("nan"), [1])
    ),
]


@pytest.mark.parametrize(("key", "value", "allowed"), BAD)
def test_bad_value_is_refused_with_key_value_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    with pytest.raises(UserError) as caught:
        VMajorOptions.from_mapping(with_owner(key, value))
    for words in ("'v_major'", f"'{key}'", repr(value), allowed):
        assert words in str(caught.value)


@pytest.mark.parametrize("value", [5, "half", None, True])
def test_bad_bits_of_one_role_are_refused(value: object) -> None:
    bits = {"q": 4, "k": 4, "v": value, "o": 4}
    with pytest.raises(UserError) as caught:
        VMajorOptions.from_mapping({"policy": "fixed", "bits": bits})
    for words in ("'bits'", repr(value), "1, 2, 3, 4, 8, or 'full'"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("warmup", "did you mean 'warm_up'?"),
        ("bit", "did you mean 'bits'?"),
        ("first_bit", "did you mean 'first_bits'?"),
        ("target_psnr", "did you mean 'target_psnr_db'?"),
        ("memory_budget", "did you mean 'memory_budget_mib'?"),
    ],
)
def test_unknown_key_gets_a_suggestion(key: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        VMajorOptions.from_mapping({key: 1})
    assert f"unknown key {key!r}" in str(caught.value)
    assert hint in str(caught.value)
    assert all(known in str(caught.value) for known in KEYS)


@pytest.mark.parametrize("key", ["something else entirely", 3])
def test_unknown_key_without_a_likely_meaning_gets_the_list(key: Any) -> None:
    with pytest.raises(UserError) as caught:
        VMajorOptions.from_mapping({key: 1})
    assert f"unknown key {key!r}" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert all(known in str(caught.value) for known in KEYS)


@pytest.mark.parametrize(
    ("given", "is_good"),
    [
        ({"policy": "paper"}, True),
        ({"policy": "fixed", "bits": "full", "skipped_share": 0.5}, True),
        ({"policy": "fixed", "bits": 4, "skipped_share": 0.5}, False),
        ({"policy": "fixed", "bits": "full"}, False),
    ],
)
def test_only_what_is_uncompressed_is_compared_with_what_was_seen(
    given: dict[str, object], is_good: bool
) -> None:
    given = {**given, "compare": "seen"}
    if is_good:
        assert VMajorOptions.from_mapping(given).compare == "seen"
        return
    with pytest.raises(
        UserError, match="'compare': 'seen' requires skipped tokens and uncompressed V"
    ):
        VMajorOptions.from_mapping(given)


def test_passes_of_guidance_need_a_budget_to_share() -> None:
    with pytest.raises(
        UserError, match="'guidance_passes' divides a memory budget, and none is set"
    ):
        VMajorOptions.from_mapping({"guidance_passes": 2})


VALUES = {
    "target_psnr_db": 35,
    "bits": 2,
    "first_bits": 8,
    "skipped_share": 0.5,
    "compare": "sent",
    "reuse_output": True,
    "select_per_stream": True,
    "compute_unsent": True,
    "layers": (0.5, 1.0),
    "buckets": 2,
}
OF_TOKENS = {"reuse_output", "select_per_stream", "compute_unsent", "layers"}
TAKEN_BY = {
    "adaptive": {"target_psnr_db"},
    "fixed": {"bits", "first_bits", "skipped_share", "compare", *OF_TOKENS},
    "paper": {"compare", "buckets", *OF_TOKENS},
}


@pytest.mark.parametrize("policy", [None, *TAKEN_BY])
@pytest.mark.parametrize("key", VALUES)
def test_a_key_of_another_policy_is_refused_with_what_to_do(policy: str | None, key: str) -> None:
    given = {key: VALUES[key], **({"policy": policy} if policy else {})}
    policy = policy or "adaptive"
    if key in TAKEN_BY[policy]:
        given |= {"skipped_share": 0.5} if policy == "fixed" else {}
        assert VMajorOptions.from_mapping(given).policy == policy
        return
    with pytest.raises(UserError) as caught:
        VMajorOptions.from_mapping(given)
    owners = [repr(owner) for owner, keys in TAKEN_BY.items() if key in keys]
    belongs = f"{key!r} applies only to policy {' and '.join(owners)}"
    for words in (belongs, f"the policy is {policy!r}", f"'policy': {owners[0]}"):
        assert words in str(caught.value)


@pytest.mark.parametrize("key", sorted(OF_TOKENS))
def test_what_is_about_tokens_that_are_not_sent_needs_some(key: str) -> None:
    with pytest.raises(
        UserError, match=f"'{key}' applies to skipped tokens, and no token is skipped"
    ):
        VMajorOptions.from_mapping({"policy": "fixed", key: VALUES[key]})


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "1", None])
def test_a_bad_number_of_one_layer_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"'layers' is .*; allowed: a number from 0 to 1"):
        VMajorOptions.from_mapping({"policy": "paper", "layers": [0.5, value]})


POLICIES = [
    (
        {"policy": "fixed", "bits": 2, "warm_up": 3, "refresh": 5},
        Fixed(Payload.uniform(2), 3, 5),
    ),
    (
        {"policy": "fixed", "bits": {"q": 1, "k": 2, "v": "full", "o": 4}, "skipped_share": 0.25},
        Fixed(Payload((1, 2, FULL, 4), 0.25), 1, 0),
    ),
    ({"policy": "fixed"}, Fixed(Payload.uniform(4), 1, 0, UNCOMPRESSED)),
    ({"policy": "fixed", "first_bits": "full"}, Fixed(Payload.uniform(4), 1, 0, UNCOMPRESSED)),
    (
        {"policy": "fixed", "bits": 2, "first_bits": 8, "skipped_share": 0.5, "refresh": 5},
        Fixed(Payload((2, 2, 2, 2), 0.5), 1, 5, Payload((8, 8, 8, 8), is_intra_coded=True)),
    ),
    ({"target_psnr_db": 35, "warm_up": 3, "refresh": 5}, Adaptive(35.0, 3, 5)),
    ({"gain_db": -2, "rise_db": 7}, Adaptive(40.0, gain_db=-2.0, rise_db=7.0)),
    (
        {"policy": "fixed", "bits": "full", "skipped_share": 0.5, "reuse_output": True},
        Fixed(Payload((FULL,) * 4, 0.5, reuses_output=True), 1, 0),
    ),
    ({"policy": "paper"}, Paper(5, 10, 4)),
    ({"policy": "paper", "reuse_output": True}, Paper(5, 10, 4, reuses_output=True)),
    ({"policy": "paper", "buckets": 2, "warm_up": 1, "refresh": 0}, Paper(1, 0, 2)),
]


@pytest.mark.parametrize(("given", "policy"), POLICIES)
def test_a_policy_has_all_that_was_given(given: dict[str, Any], policy: Policy) -> None:
    assert VMajorOptions.from_mapping(given).make_policy() == policy


def test_a_budget_is_counted_in_mebibytes() -> None:
    assert VMajorOptions.from_mapping({"memory_budget_mib": 1.5}).budget_bytes == 1.5 * 2**20


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        VMajorOptions().warm_up = 3  # type: ignore[misc]


def test_the_same_errors_come_from_the_options_of_the_backend() -> None:
    with pytest.raises(UserError, match=r"'bits' is 5.*1, 2, 3, 4, 8"):
        CompileConfig.from_options({"v_major": {"policy": "fixed", "bits": 5}})


def test_the_list_of_keys_is_complete() -> None:
    assert set(KEYS) == {field.name for field in dataclasses.fields(VMajorOptions)}
