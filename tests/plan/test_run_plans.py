# SPDX-License-Identifier: Apache-2.0
"""Tests what ranks compare of a call: its sizes are numbers, whatever its graph calls them."""

from __future__ import annotations

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cocodiff_compile.ranks.agreement.compile_rounds import facts_by_ranks
from cocodiff_compile.ranks.agreement.run_plans import SizedPlans, SizeTexts, with_sizes

RANKS = (0, 1)
TOKENS = sympy.Symbol("s0", integer=True, positive=True)


def _plans(text: str, symbolic: bool) -> SizedPlans:
    facts = {RANKS: [("collective 0", f"all_to_all of {text}")]}
    expressions = [TOKENS * 32] if symbolic else []
    return SizedPlans(facts, facts, expressions, {TOKENS: 1} if symbolic else {})


def test_symbolic_and_plain_sizes_of_the_same_call_are_the_same_plan() -> None:
    symbolic, plain = _plans("<size 0>", symbolic=True), _plans("128", symbolic=False)
    assert symbolic.of_call(["x", 4])[RANKS].digest == plain.of_call(["x"])[RANKS].digest


def test_another_size_of_a_call_is_another_plan() -> None:
    plans = _plans("<size 0>", symbolic=True)
    assert plans.of_call(["x", 4])[RANKS].digest != plans.of_call(["x", 8])[RANKS].digest
    assert plans.of_call(["x", 8])[RANKS].facts[0] == ("collective 0", "all_to_all of 256")


def test_plans_of_the_same_sizes_are_made_once() -> None:
    plans = _plans("<size 0>", symbolic=True)
    assert plans.of_call(["x", 4]) is plans.of_call(["y", 4])


def test_the_planned_facts_count_as_much_as_the_captured_ones() -> None:
    same = {RANKS: [("option 'head_chunks'", "2")]}
    first = SizedPlans(same, {RANKS: [("exchange 0", "flat")]}, [], {})
    other = SizedPlans(same, {RANKS: [("exchange 0", "tile | gpu")]}, [], {})
    assert first.of_call([])[RANKS].digest != other.of_call([])[RANKS].digest


def test_numbers_stay_and_symbols_become_marks() -> None:
    shape_env = ShapeEnv()
    symbol = shape_env.create_unbacked_symint()
    texts = SizeTexts()
    assert texts.text(12) == "12"
    assert with_sizes([("a", f"{texts.text(symbol)}x3")], [7]) == [("a", "7x3")]
    assert isinstance(texts.symbolic[0], torch.SymInt)


def test_groups_of_the_same_ranks_do_not_hide_each_other() -> None:
    groups = {"a": RANKS, "b": RANKS}
    facts = {"a": [("collective 0", "all_gather")], "b": [("collective 0", "all_to_all")]}
    values = [value for _, value in facts_by_ranks(groups, facts)[RANKS]]
    assert len(dict(facts_by_ranks(groups, facts)[RANKS])) == 2
    assert values == ["all_gather", "all_to_all"]
