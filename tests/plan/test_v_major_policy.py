# SPDX-License-Identifier: Apache-2.0
"""Tests which payload policies choose for each step, and what a payload stands for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.v_major.delta_code import BITS, FULL, distortion
from cocodiff_compile.v_major.payload import UNCOMPRESSED, CachedRoles, Payload
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Paper, Policy, StepFacts, is_refreshed

MIXED = Payload((4, 4, 8, FULL))
INTRA = Payload.uniform(8, is_intra_coded=True)
REUSING = Payload((FULL,) * 4, 0.5, reuses_output=True)

targets = st.floats(min_value=10, max_value=100)
drifts = st.floats(min_value=0, max_value=1e6)
coded = st.sampled_from(BITS)


def alone(num_steps: int | None, warm_up: int, refresh: int, count: int) -> list[int]:
    """The steps of the first `count` that stand alone whatever their data."""
    facts = (StepFacts(step, num_steps) for step in range(count))
    return [item.step for item in facts if is_refreshed(item, warm_up, refresh)]


def bits_of(payload: Payload) -> int:
    """Returns the bits of a payload that carries all roles alike; uncompressed counts as 32."""
    (bits,) = set(payload.bits)
    return bits if bits != FULL else 32


# Steps that stand alone


@pytest.mark.parametrize(
    ("num_steps", "warm_up", "refresh", "expected"),
    [
        (None, 1, 0, [0]),
        (None, 3, 0, [0, 1, 2]),
        (None, 1, 3, [0, 3, 6, 9]),
        (None, 2, 3, [0, 1, 4, 7]),
        (None, 1, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (None, 4, 5, [0, 1, 2, 3, 8]),
        (7, 1, 0, [0, 7, 8, 9]),
        (7, 1, 4, [0, 4, 7, 8, 9]),
        (1, 1, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10, 2, 0, [0, 1]),
        (2, 5, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_first_steps_every_so_many_and_those_beyond_stand_alone(
    num_steps: int | None, warm_up: int, refresh: int, expected: list[int]
) -> None:
    assert alone(num_steps, warm_up, refresh, 10) == expected


@given(st.integers(1, 5), st.integers(0, 6), st.none() | st.integers(1, 12))
def test_there_are_never_more_coded_steps_in_a_row_than_refresh_allows(
    warm_up: int, refresh: int, num_steps: int | None
) -> None:
    found = alone(num_steps, warm_up, refresh, 30)
    assert set(range(warm_up)) <= set(found)
    if refresh:
        after_warm_up = [step for step in found if step >= warm_up - 1]
        gaps = [b - a for a, b in itertools.pairwise(after_warm_up)]
        assert max(gaps) <= refresh


FIRSTS: list[tuple[Policy, Payload]] = [
    (Fixed(MIXED, 2, 3), UNCOMPRESSED),
    (Fixed(MIXED, 2, 3, INTRA), INTRA),
    (Adaptive(40.0, 2, 3), INTRA),
    (Adaptive(90.0, 2, 3), UNCOMPRESSED),
]


@pytest.mark.parametrize(("policy", "first"), FIRSTS)
@pytest.mark.parametrize("drift", [None, 0.0, 1e-9, 0.5, 1e30, float("nan"), float("inf")])
def test_what_is_refreshed_carries_the_first_whatever_the_drift(
    policy: Policy, first: Payload, drift: float | None
) -> None:
    assert policy.first == first
    for step in range(12):
        chosen = policy.choose(StepFacts(step, 9, drift, Payload.uniform(2)))
        if step in (0, 1, 4, 7, 9, 10, 11):
            assert chosen == first
        elif drift in (None, 0.0, 1e-9):
            assert chosen != first


@given(
    st.sampled_from(
        [*(policy for policy, _ in FIRSTS), Paper(), Paper(2, 3, 7), Fixed(UNCOMPRESSED)]
    ),
    st.integers(0, 60),
    st.none() | st.integers(1, 60),
    st.none() | drifts,
    coded,
)
def test_what_is_chosen_is_one_of_what_may_be(
    policy: Policy, step: int, num_steps: int | None, drift: float | None, last: int
) -> None:
    """All ranks compile and remember for these, and for nothing else."""
    assert (
        policy.choose(StepFacts(step, num_steps, drift, Payload.uniform(last))) in policy.payloads
    )
    assert policy.first in policy.payloads
    assert policy.first.is_keyframe


# The same in every step


@given(st.integers(1, 50), st.none() | drifts, coded)
def test_fixed_carries_the_same_whatever_it_hears(
    step: int, drift: float | None, last: int
) -> None:
    policy = Fixed(MIXED)
    assert policy.choose(StepFacts(step, None, drift, Payload.uniform(last))) == MIXED
    assert policy.usual == MIXED
    assert not policy.measures_drift


# As much as the target needs


def test_without_a_drift_adaptive_begins_with_the_usual() -> None:
    policy = Adaptive(40.0)
    assert policy.measures_drift
    assert policy.choose(StepFacts(1, None, None, INTRA)) == policy.usual
    assert policy.choose(StepFacts(1, None, None, Payload.uniform(2))) == policy.usual
    assert not policy.usual.is_keyframe


@pytest.mark.parametrize("target", [20.0, 40.0, 90.0])
@pytest.mark.parametrize("drift", [None, 0.0, 1e-9, 0.5, float("nan")])
def test_after_an_uncompressed_step_differences_begin_with_most_bits(
    target: float, drift: float | None
) -> None:
    """It was in full since fewer did not suffice; how much changed since nobody knows."""
    chosen = Adaptive(target).choose(StepFacts(5, None, drift, UNCOMPRESSED))
    assert chosen == Payload.uniform(max(BITS))


@pytest.mark.parametrize(
    ("drift", "worst", "suffices"),
    [
        (0.0, 0.0, True),
        (distortion(8), 10 * distortion(8), True),
        (1.9e-4, 0.06, True),  # 40 - 3 dB are 2e-4, 25 dB more are 0.063
        (2.1e-4, 1e-3, False),
        (1e-5, 0.07, False),
        (0.5, 0.5, False),
        (float("nan"), 0.0, False),
        (0.0, float("nan"), False),
        (float("inf"), float("inf"), False),
    ],
)
def test_what_an_intra_coded_step_lost_says_whether_its_code_suffices(
    drift: float, worst: float, suffices: bool
) -> None:
    """It tells nothing of the change; but if it lost too much, nothing may lean on it."""
    policy = Adaptive(40.0)
    chosen = policy.choose(StepFacts(1, None, drift, INTRA, worst))
    assert chosen == (policy.usual if suffices else UNCOMPRESSED)


@given(targets, drifts, drifts, coded)
def test_a_head_of_one_token_may_lose_no_more_than_so_many_times_the_mean(
    target: float, drift: float, worst: float, last: int
) -> None:
    """Whichever of both needs more bits decides."""
    policy, payload = Adaptive(target), Payload.uniform(last)
    by_mean = bits_of(policy.choose(StepFacts(3, None, drift, payload)))
    by_worst = bits_of(policy.choose(StepFacts(3, None, worst / 10**2.5, payload)))
    chosen = policy.choose(StepFacts(3, None, drift, payload, worst))
    assert bits_of(chosen) == max(by_mean, by_worst)


@given(targets)
def test_adaptive_begins_intra_coded_in_most_bits_if_these_keep_the_target(target: float) -> None:
    """The share that the code loses of a whole first step has to be one that the target allows."""
    loses_db = -10 * math.log10(distortion(max(BITS)))
    first = Adaptive(target).first
    if abs(loses_db + Adaptive(target).gain_db - target) > 1e-9:
        assert first == (INTRA if loses_db + Adaptive(target).gain_db > target else UNCOMPRESSED)


def test_adaptive_begins_uncompressed_for_the_highest_targets_only() -> None:
    firsts = [Adaptive(float(target)).first for target in range(10, 101)]
    assert firsts == [INTRA] * 38 + [UNCOMPRESSED] * 53  # 8 bits are 44.1 dB off, 3 are gained


@pytest.mark.parametrize("last", BITS)
@pytest.mark.parametrize("target", [40.0, 90.0])
def test_nothing_lost_needs_fewest_bits_and_a_huge_or_unknown_loss_an_uncompressed_step(
    last: int, target: float
) -> None:
    policy, payload = Adaptive(target), Payload.uniform(last)
    assert policy.choose(StepFacts(3, None, 0.0, payload)) == Payload.uniform(min(BITS))
    for drift in (1e9, 1e300, float("inf"), float("nan")):
        assert policy.choose(StepFacts(3, None, drift, payload)) == UNCOMPRESSED
        assert policy.choose(StepFacts(3, None, 0.0, payload, drift)) == UNCOMPRESSED


def test_a_high_target_begins_its_differences_with_most_bits() -> None:
    assert Adaptive(40.0).usual == Payload.uniform(4)
    assert Adaptive(60.0).usual == Payload.uniform(max(BITS))


@given(targets, drifts, coded, st.none() | st.integers(3, 60), st.floats(-9, 9), st.floats(0, 9))
def test_as_few_bits_as_keep_the_target(
    target: float, drift: float, last: int, num_steps: int | None, gain_db: float, rise_db: float
) -> None:
    """The docstring of `Adaptive` gives the rule: the loss, in dB below what is sent, may miss the
    target by `gain_db`, and by up to `rise_db` more in later steps if their number is known.
    """
    step = 2
    policy = Adaptive(target, gain_db=gain_db, rise_db=rise_db)
    chosen = policy.choose(StepFacts(step, num_steps, drift, Payload.uniform(last)))
    change = drift / distortion(last)
    risen_db = rise_db * step / num_steps if num_steps else 0.0
    allowed = 10 ** ((gain_db + risen_db - target) / 10)
    fits = [bits for bits in BITS if change * distortion(bits) <= allowed]
    assert chosen == (Payload.uniform(min(fits)) if fits else UNCOMPRESSED)


@given(targets, drifts, coded, st.tuples(st.integers(1, 19), st.integers(1, 19)).map(sorted))
def test_a_later_step_never_chooses_more_bits_for_the_same_change(
    target: float, drift: float, last: int, ordered: list[int]
) -> None:
    facts = (StepFacts(step, 20, drift, Payload.uniform(last)) for step in ordered)
    early, late = (bits_of(Adaptive(target).choose(item)) for item in facts)
    assert late <= early


def test_a_step_may_lose_more_at_the_end_of_a_picture_than_at_its_beginning() -> None:
    payload = Payload.uniform(2)
    drift = 10 ** ((8 - 40) / 10)  # 2 bits are 5 dB too few at first, and enough in the end
    bits = [bits_of(Adaptive(40.0).choose(StepFacts(at, 50, drift, payload))) for at in (1, 30, 49)]
    assert bits == [3, 2, 2]


@given(st.tuples(targets, targets).map(sorted), drifts, coded)
def test_a_higher_target_never_chooses_fewer_bits(
    ordered: list[float], drift: float, last: int
) -> None:
    facts = StepFacts(3, None, drift, Payload.uniform(last))
    low, high = (bits_of(Adaptive(target).choose(facts)) for target in ordered)
    assert low <= high


@given(targets, st.tuples(drifts, drifts).map(sorted), coded)
def test_a_larger_drift_never_chooses_fewer_bits(
    target: float, ordered: list[float], last: int
) -> None:
    facts = (StepFacts(3, None, drift, Payload.uniform(last)) for drift in ordered)
    low, high = (bits_of(Adaptive(target).choose(item)) for item in facts)
    assert low <= high


@given(targets, st.floats(min_value=1e-9, max_value=1e3), coded)
def test_a_change_of_the_same_size_chooses_the_same_whatever_the_last_step_carried(
    target: float, change: float, last: int
) -> None:
    """The number of bits does not rise any more while a change is steady."""
    policy = Adaptive(target)
    facts = StepFacts(3, None, change * distortion(last), Payload.uniform(last))
    chosen = policy.choose(facts)
    if chosen.is_keyframe:
        return
    settled = policy.choose(
        replace(facts, drift=change * distortion(bits_of(chosen)) * (1 - 1e-9), last=chosen)
    )
    assert bits_of(settled) <= bits_of(chosen)


def test_every_number_of_bits_is_chosen_by_some_drift() -> None:
    policy = Adaptive(40.0)
    facts = [StepFacts(3, None, 10 ** (-place / 4), Payload.uniform(4)) for place in range(60)]
    assert {policy.choose(item) for item in facts} == {*map(Payload.uniform, BITS), UNCOMPRESSED}


# As in the paper


def test_output_is_reused_in_all_stages_but_those_that_leave_nothing_out() -> None:
    policy = Paper(2, 0, 4, reuses_output=True)
    chosen = [policy.choose(StepFacts(step, 13)) for step in range(13)]
    assert all(payload.reuses_output == (payload.skipped_share > 0) for payload in chosen)
    assert set(chosen) <= set(policy.payloads)
    assert policy.usual.reuses_output


def skipped_share(policy: Paper, num_steps: int) -> list[float]:
    return [policy.choose(StepFacts(step, num_steps)).skipped_share for step in range(num_steps)]


def test_the_share_that_is_skipped_rises_in_stages_to_all_in_the_last_step() -> None:
    first, rising = [0.0, 0.0], [0, 0, 0.25, 0.25, 0.5, 0.5, 0.5, 0.75, 0.75, 1, 1]
    assert skipped_share(Paper(2, 0, 4), 13) == [*first, *rising]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 60))
def test_the_share_that_is_skipped_never_falls(warm_up: int, buckets: int, num_steps: int) -> None:
    shares = skipped_share(Paper(warm_up, 0, buckets), num_steps)
    assert shares == sorted(shares)
    assert set(shares[:warm_up]) <= {0.0}
    if num_steps > warm_up + 1:
        assert shares[-1] == 1.0


def test_everything_else_is_uncompressed_as_in_the_paper() -> None:
    policy = Paper()
    assert (policy.warm_up, policy.refresh) == (5, 10)
    assert all(payload.bits == UNCOMPRESSED.bits for payload in policy.payloads)
    assert policy.first == UNCOMPRESSED
    assert policy.choose(StepFacts(14, 50)) == UNCOMPRESSED
    assert policy.choose(StepFacts(24, 50)) == UNCOMPRESSED
    assert not policy.measures_drift


def test_without_a_number_of_steps_nothing_is_skipped() -> None:
    assert all(Paper().choose(StepFacts(step, None)) == UNCOMPRESSED for step in range(50))


# A kind of step


def test_a_payload_names_the_bits_of_each_role() -> None:
    assert MIXED.bits_of() == {"q": 4, "k": 4, "v": 8, "o": FULL}
    assert Payload.uniform(2).bits_of() == dict.fromkeys("qkvo", 2)


@pytest.mark.parametrize(
    ("payload", "is_uncompressed", "is_keyframe", "text"),
    [
        (UNCOMPRESSED, True, True, "uncompressed"),
        (Payload.uniform(2), False, False, "2 bits"),
        (MIXED, False, False, "Q 4 bits, K 4 bits, V 8 bits, O uncompressed"),
        (
            replace(UNCOMPRESSED, skipped_share=0.25),
            False,
            False,
            "uncompressed, 25% of tokens skipped",
        ),
        (Payload((4, 4, 4, 4), 0.5), False, False, "4 bits, 50% of tokens skipped"),
        (REUSING, False, False, "uncompressed, 50% of tokens skipped, O too"),
        (INTRA, False, True, "8 bits, intra-coded"),
        (replace(MIXED, is_intra_coded=True), False, True, f"{MIXED}, intra-coded"),
    ],
)
def test_a_payload_is_uncompressed_if_all_roles_are_and_a_keyframe_if_intra_coded(
    payload: Payload, is_uncompressed: bool, is_keyframe: bool, text: str
) -> None:
    assert payload.is_uncompressed is is_uncompressed
    assert payload.is_keyframe is is_keyframe
    assert str(payload) == text


@pytest.mark.parametrize("bits", BITS)
def test_intra_coding_is_another_kind_of_as_many_bytes(bits: int) -> None:
    plain, intra = Payload.uniform(bits), Payload.uniform(bits, is_intra_coded=True)
    assert intra != plain
    assert str(intra) != str(plain), "by which ranks tell what they carried"
    assert intra.bits == plain.bits
    assert intra.sent_share(16, 64) == plain.sent_share(16, 64)


@pytest.mark.parametrize(
    ("payload", "element_bits", "group", "share"),
    [
        (UNCOMPRESSED, 16, 64, 1.0),
        (Payload.uniform(8), 16, 64, 65.5 / 128),
        (Payload.uniform(1), 32, 128, 17.5 / 512),
        (Payload.uniform(3), 16, 24, 10.5 / 48),
        (MIXED, 16, 64, (33.5 + 33.5 + 65.5 + 128) / (4 * 128)),
        (replace(UNCOMPRESSED, skipped_share=0.25), 16, 64, (0.75 * 3 + 1) / 4),
        (replace(MIXED, skipped_share=0.5), 16, 64, (0.5 * (33.5 + 33.5 + 65.5) + 128) / (4 * 128)),
        (REUSING, 16, 64, 0.5),
    ],
)
def test_the_share_that_is_sent_counts_the_bits_of_scales(
    payload: Payload, element_bits: int, group: int, share: float
) -> None:
    assert payload.sent_share(element_bits, group) == pytest.approx(share)


@pytest.mark.parametrize(
    ("payloads", "sent", "held"),
    [
        ([UNCOMPRESSED], "", ""),
        ([UNCOMPRESSED, Payload.uniform(4)], "qkvo", "qkvo"),
        ([UNCOMPRESSED, MIXED], "qkv", "qkv"),
        ([UNCOMPRESSED, Payload((FULL, FULL, 2, FULL))], "v", "v"),
        ([UNCOMPRESSED, replace(UNCOMPRESSED, skipped_share=0.5)], "v", "qkv"),
        ([Payload((4, FULL, FULL, 2), 0.5)], "qvo", "qkvo"),
        ([UNCOMPRESSED, REUSING], "v", "kvo"),
        ([UNCOMPRESSED, Payload.uniform(4), REUSING], "qkvo", "qkvo"),
        ([INTRA], "", ""),
        ([INTRA, MIXED], "qkv", "qkv"),
        ([INTRA, replace(UNCOMPRESSED, skipped_share=0.5)], "v", "qkv"),
    ],
)
def test_what_any_kind_of_step_needs_is_cached_and_nothing_else(
    payloads: list[Payload], sent: str, held: str
) -> None:
    found = CachedRoles.for_payloads(payloads)
    assert (found.sent, found.held) == (frozenset(sent), frozenset(held))


@pytest.mark.parametrize(
    ("payloads", "coded"),
    [
        ([UNCOMPRESSED, REUSING], ""),
        ([INTRA, MIXED], "qkv"),
        ([Payload((4, FULL, FULL, 2), 0.5)], "qo"),
        (
            [
                UNCOMPRESSED,
                replace(UNCOMPRESSED, skipped_share=0.5),
                Payload((FULL, FULL, 2, FULL)),
            ],
            "v",
        ),
    ],
)
def test_where_no_tokens_are_skipped_only_what_is_coded_is_cached(
    payloads: list[Payload], coded: str
) -> None:
    found = CachedRoles.for_payloads(payloads).without_skipping
    assert found.sent == found.held == frozenset(coded)


def test_a_kind_of_step_that_is_a_keyframe_needs_nothing() -> None:
    """All of a policy need what those need that lean on others."""
    policy = Adaptive(40.0)
    leaning = [payload for payload in policy.payloads if not payload.is_keyframe]
    assert CachedRoles.for_payloads(policy.payloads) == CachedRoles.for_payloads(leaning)
    assert len(leaning) == len(BITS)


@pytest.mark.parametrize(
    ("roles", "sides"),
    [
        ("v", (True, True)),
        ("q", (False, True)),
        ("o", (False, False)),
        ("qk", (False, True)),
        ("qkv", (True, True)),
        ("", (False, False)),
    ],
)
def test_an_exchange_is_cached_on_the_sides_that_any_of_its_roles_needs(
    roles: str, sides: tuple[bool, bool]
) -> None:
    cached_roles = CachedRoles(frozenset("v"), frozenset("qkv"))
    assert cached_roles.sides_of(tuple(roles)) == sides  # type: ignore[arg-type]


@pytest.mark.parametrize("buckets", [4, 100])
def test_the_papers_schedule_sends_about_60_percent_of_qkv_in_50_steps(buckets: int) -> None:
    """5 steps in full, then ever fewer tokens, every 10th step in full."""
    policy = Paper(buckets=buckets)
    payloads = [policy.choose(StepFacts(step, 50)) for step in range(50)]
    sent = sum(1 - payload.skipped_share for payload in payloads) / 50
    assert sent == pytest.approx(0.6, abs=0.01)
    assert all(payload.share_of("o", 16, 64) == 1 for payload in payloads)
