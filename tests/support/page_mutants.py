# SPDX-License-Identifier: Apache-2.0
"""The sabotages of pages, each with the tests that notice it."""

from __future__ import annotations

from tests.support.mutant_table import Mutant

PAGES: tuple[Mutant, ...] = (
    Mutant(
        "text that is markup",
        "cocodiff_compile/report/page/sections.py",
        '        return "".join(f"<p>{escape(part)}</p>" for',
        '        return "".join(f"<p>{part}</p>" for',
        ("tests/page/test_sections.py::test_whatever_is_given_stays_text",),
    ),
    Mutant(
        "what is added to a group has the names of its data",
        "cocodiff_compile/report/rank_page.py",
        'place, part="run")',
        "place)",
        (
            "tests/page/test_compile_page.py::"
            "test_v_major_waits_for_steps_and_then_shows_each_layer",
        ),
    ),
    Mutant(
        "lines that moved are lines that came",
        "cocodiff_compile/report/graph_text.py",
        "            result.append((MOVED_HERE if after[at] in there else ADDED, after[at]))",
        "            result.append((ADDED, after[at]))",
        ("tests/page/test_graph_text.py::test_marks_tell_both_sides",),
    ),
    Mutant(
        "waits of no exchange",
        "cocodiff_compile/report/page_data.py",
        'tasks[task.needs[0]] if task.kind == "wait" and task.needs else task for',
        "task for",
        ("tests/page/test_compile_page.py::test_waits_carry_what_they_wait_for",),
    ),
    Mutant(
        "a lost order is not told",
        "cocodiff_compile/compiler/finish_graph.py",
        "            dumps.update_page(report.kind, lost_order=True)\n",
        "",
        (
            "tests/page/test_compile_page.py::"
            "test_an_order_that_generated_code_does_not_keep_is_a_problem",
        ),
    ),
    Mutant(
        "losses of other attentions",
        "passes/select_v_major.py",
        "                rewriting.place = index\n",
        "",
        ("tests/page/test_compile_page.py::test_losses_are_those_of_their_attention",),
    ),
)
