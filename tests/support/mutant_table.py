# SPDX-License-Identifier: Apache-2.0
"""The sabotages of rules, given files, passes and V-Major, each with the tests that notice it."""

from __future__ import annotations

from dataclasses import dataclass

_RULES = "tests/values/test_op_rules.py::test_cutting_before_an_op_is_cutting_behind_it"


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in a file, replaced by `new`."""

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


_ORDER = "tests/values/test_op_rules.py::test_sums_of_columns_are_not_cut"
_BROADCAST = "tests/values/test_op_rules.py::test_a_broadcast_matrix_holds_no_batch"


def _rule(what: str, path: str, old: str, new: str, *cases: str) -> Mutant:
    """A sabotage of a rule by which cuts pass an op."""
    tests = tuple(case if "::" in case else f"{_RULES}[{case}]" for case in cases)
    return Mutant(what, f"cocodiff_compile/cut/{path}", old, new, tests)


CUT_RULES = (
    _rule(
        "heads cut across a pad that moves them",
        "view_rules.py",
        "if padding_of(node, cut.dim) != (0, 0):",
        "if shape_of(node)[cut.dim] != shape_of(_operand)[cut.dim]:",
        "pads-heads",
    ),
    _rule(
        "heads cut across an index of heads",
        "rules.py",
        "whole not in cuts or found[1] == cuts[whole].dim:",
        "whole not in cuts:",
        "indices-heads",
    ),
    _rule(
        "heads cut across a softmax over heads",
        "rules.py",
        '    if dim == cut.dim:\n        raise CutUnknown(f"{node.name} is over',
        '    if dim < 0:\n        raise CutUnknown(f"{node.name} is over',
        "softmax-heads",
    ),
    _rule(
        "heads cut across the blocks that are sent",
        "view_rules.py",
        "if cut.dim == 0 and not divides(num_ranks, cut.outer):",
        "if cut.dim == 0 and not divides(1, cut.outer):",
        "exchange-heads",
    ),
    _rule(
        "heads taken for the batch of a broadcast operand",
        "rules.py",
        "lambda item: 0 if len(shape_of(item)) == 3 else -1)",
        "lambda item: 0)",
        _BROADCAST,
    ),
    _rule(
        "heads beside which sums run in another order",
        "rules.py",
        "if strides[dim] > strides[cut_dim] and not same(value.shape[dim], 1):",
        "if strides[dim] < 0:",
        _ORDER,
    ),
    _rule(
        "a lost dim counted as kept",
        "view_rules.py",
        "return cut.at(cut.dim - 1) if drops_dim and dim < cut.dim else cut",
        "return cut.at(cut.dim - 1) if drops_dim and dim < 0 else cut",
        "slices-heads",
    ),
    _rule(
        "one head alone squeezed away",
        "emit_chunks.py",
        "if self.keeps_ops and node.target in SQUEEZE:",
        "if self.keeps_ops and node.target in SQUEEZE and not args:",
        "reshapes-heads",
    ),
    _rule(
        "another chunk's heads",
        "emit_chunks.py",
        "part = emit(graph, aten.select.int, viewed, cut.dim + 1, number, like=whole)",
        "part = emit(graph, aten.select.int, viewed, cut.dim + 1, -1 - number, like=whole)",
        "copies-heads",
    ),
    _rule(
        "rows cut across a pad that moves them",
        "view_rules.py",
        "if padding_of(node, cut.dim) != (0, 0):",
        "if shape_of(node)[cut.dim] != shape_of(_operand)[cut.dim]:",
        "pads-rows",
    ),
    _rule(
        "rows multiplied with rows",
        "rules.py",
        "has_rows = left in cuts and cuts[left].dim == len(shape_of(node)) - 2",
        "has_rows = left in cuts",
        "tests/values/test_op_rules.py::test_a_product_is_not_cut_along_what_it_sums_over",
    ),
    _rule(
        "a mask's rows read as the same for all queries",
        "rules.py",
        "if not all(same(size, 1) for size in mask_rows):",
        "if len(mask_rows) > 1:",
        "attention-rows",
    ),
    _rule(
        "a causal attention in chunks of rows",
        "rules.py",
        "    if attention.placed_by:",
        "    if attention.placed_by and attention.mask is not None:",
        "tests/values/test_op_rules.py::test_a_causal_attention_is_not_cut_by_rows",
    ),
    _rule(
        "scales of heads read as the same for all heads",
        "rules.py",
        "        dims.add(own % rank)",
        "        dims.add(-1)",
        "tests/values/test_attention_ops.py::test_passes_work_on_every_op_that_ships",
    ),
    _rule(
        "chunks joined between each other",
        "rules.py",
        "if not selected and any(first > second for first, second in itertools.pairwise(filled)):",
        "if selected and any(first > second for first, second in itertools.pairwise(filled)):",
        "concatenations-rows",
    ),
    _rule(
        "a slice of a chunk counted from the beginning of all rows",
        "emit_chunks.py",
        "begin, end = max(begin, first) - first, min(end, last) - first",
        "begin, end = max(begin, first) - first, min(end, last)",
        "tests/values/test_op_rules.py::test_a_slice_may_end_inside_a_chunk",
    ),
    _rule(
        "some of the heads taken for all of them",
        "checked_steps.py",
        "return dim == cut.dim and not is_whole",
        "return dim < 0",
        "slices-heads",
    ),
    _rule(
        "heads read as rows",
        "checked_steps.py",
        " or _computes_fewer_rows(node, step):",
        ":",
        "tests/values/test_op_rules.py::test_which_operands_are_read_by_chunk_depends_on_the_dim",
    ),
    _rule(
        "blocks joined in the order of channels",
        "joining.py",
        "return emit_contiguous(graph, emit(graph, aten.cat.default, parts, dim, like=like))",
        "return emit(graph, aten.cat.default, parts, dim, like=like)",
        "tests/values/test_op_rules.py::test_blocks_that_count_as_channels_last_are_joined_as_the_whole_lies",
    ),
    _rule(
        "terms of a sum in another order",
        "emit_chunks.py",
        "if node.target in SUMMING:",
        "if node.target is None:",
        "tests/values/test_op_rules.py::test_a_sum_of_copied_blocks_keeps_the_order_of_its_terms",
    ),
    _rule(
        "parts joined without regard to memory",
        "joining.py",
        "    is_permuted = order != list(range(len(order)))",
        "    order = list(range(len(order)))\n    is_permuted = False",
        "permutes-rows",
    ),
)


def _quick(what: str, path: str, old: str, new: str, test: str) -> Mutant:
    """A sabotage that some quick test of a file notices."""
    file, _, case = test.partition("::")
    return Mutant(what, path, old, new, (f"tests/{file}.py" + (case and f"::{case}"),))


GIVEN = (
    _quick(
        "traffic of outer axes counted as inner",
        "cocodiff_compile/cost/exchanges.py",
        "itertools.takewhile(",
        "filter(",
        "plan/test_exchange_cost",
    ),
    _quick(
        "numbers too large for a float",
        "cocodiff_compile/topology/files.py",
        "not LEAST <= checked <= MOST",
        "not 0 < checked",
        "plan/test_given_files",
    ),
    _quick(
        "a probe cache of another machine",
        "cocodiff_compile/ranks/probe_cache.py",
        "if cached.measured and is_of_machine else",
        "if cached.measured else",
        "plan/test_given_files",
    ),
    _quick(
        "infinite numbers as options",
        "cocodiff_compile/given_values.py",
        "return converted if math.isfinite(converted) else None",
        "return converted",
        "plan/test_given_options",
    ),
)

PASSES = (
    _quick(
        "a wait that Inductor may put right behind its exchange",
        "cocodiff_compile/compiler/pin_order.py",
        "        if is_collective(node) or is_wait(node):",
        "        if is_collective(node):",
        "compile/test_schedule_v_first::test_only_what_data_do_not_order_round_an_exchange_is_pinned",
    ),
    _quick(
        "a verdict on one op that is recalled for another",
        "cocodiff_compile/compiler/exact_rows.py",
        "    return node.target, layouts, repr(others)",
        "    return layouts",
        "values/test_chunk_tokens::test_a_verdict_is_that_of_the_ops_that_were_tried",
    ),
    _quick(
        "an attention with flags that nobody explained",
        "cocodiff_compile/ir/attention_ops.py",
        "            and argument.name not in known",
        "            and argument.name is None",
        "graph/test_register_attention::test_what_does_not_fit_the_op_is_refused",
    ),
    _quick(
        "an entry of the registry that another part of the program changes",
        "cocodiff_compile/ir/attention_ops.py",
        "**copy.deepcopy(entry))",
        "**entry)",
        "graph/test_register_attention::test_an_entry_is_not_changed_from_outside",
    ),
    _quick(
        "a graph break that is not noticed",
        "passes/recognize_ulysses.py",
        'around.from_outside == {"q", "k", "v"}',
        "not around.from_outside",
        "graph/test_recognize_cut_off::test_an_attention_that_is_exchanged_outside_of_its_graph_is_declined",
    ),
    _quick(
        "scales of a product that are forgotten",
        "passes/split_projections.py",
        "if bound(gemm)[name] != 1}",
        "if bound(gemm)[name] == 0}",
        "values/test_odd_views",
    ),
    _quick(
        "exchanged data that is sent elsewhere",
        "passes/chunk_heads.py",
        "            if is_collective(user):",
        "            if is_collective(user) and not user.users:",
        "values/test_chunk_heads::test_idiom_in_chunks_is_whole_bit_for_bit[replicated text]",
    ),
    _quick(
        "phases over each other's groups",
        "passes/split_tapa_phases.py",
        "blocks = blocks.to_front(axes).sent(len(axes), machine.groups[axes])",
        "blocks = blocks.to_front(axes).sent(len(axes), machine.groups[phases[-1]])",
        "values/test_split_tapa_phases::test_every_plan_moves_every_element_to_where_flat_does[2x3]",
    ),
    _quick(
        "messages back in the order of phases",
        "passes/split_tapa_phases.py",
        "value = begun.blocks.received().turned(machine.message_order).value",
        "value = begun.blocks.received().value",
        "values/test_split_tapa_phases::test_every_plan_moves_every_element_to_where_flat_does[2x3]",
    ),
    _quick(
        "joined tokens that nobody tries",
        "cocodiff_compile/compiler/exact_rows.py",
        "if item not in by_chunk and path and",
        "if item in by_chunk and path and",
        "values/test_odd_views",
    ),
)

CODE_AND_POLICY = (
    _quick(
        "one large token decides the spreads",
        "cocodiff_compile/v_major/delta_code.py",
        ".clamp(max=0.0))",
        ")",
        "plan/test_delta_code_outliers",
    ),
    _quick(
        "a head that the spreads do not fit is coded with them",
        "cocodiff_compile/v_major/delta_code.py",
        "(wanted > _MISFIT * even) | ",
        "",
        "plan/test_delta_code_outliers",
    ),
    _quick(
        "the worst loss is the mean",
        "cocodiff_compile/v_major/delta_code.py",
        "share.mean(), share.amax()",
        "share.mean(), share.mean()",
        "plan/test_delta_code_outliers",
    ),
    _quick(
        "adaptive falls back to the code that did not suffice",
        "cocodiff_compile/v_major/policy.py",
        "enough), UNCOMPRESSED)",
        "enough), self.first)",
        "plan/test_v_major_policy",
    ),
    _quick(
        "no token's own loss counts",
        "cocodiff_compile/v_major/policy.py",
        " and worst <= allowed * 10 ** (self.worst_db / 10)",
        "",
        "plan/test_v_major_policy",
    ),
    _quick(
        "the worst call is averaged away",
        "cocodiff_compile/v_major/selective_call.py",
        "float(worst.amax())",
        "float(worst.mean())",
        "plan/test_selective_call_drift",
    ),
)

MUTANTS: tuple[Mutant, ...] = (*CUT_RULES, *GIVEN, *PASSES, *CODE_AND_POLICY)
