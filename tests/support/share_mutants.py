# SPDX-License-Identifier: Apache-2.0
"""The sabotages of what shares tokens out over ranks, each with the tests that notice it."""

from __future__ import annotations

from tests.support.mutant_table import Mutant

_ODD = "tests/values/test_shard_odd_inputs.py::test_ranks_compute_what_one_process_computes"
_OWN = "tests/values/test_shard_tokens.py::test_models_of_ones_own_become_ulysses"
_MEMORY = "tests/values/test_shard_gathers.py::test_a_reader_of_memory_sees_the_memory_of_the_model"
_ANY_SIZE = "tests/values/test_shard_any_size.py"
_USED = "tests/ranks/test_token_shares.py::test_a_share_is_used_like_the_whole"

SHARES: tuple[Mutant, ...] = (
    Mutant(
        "padded keys take part in an attention",
        "cocodiff_compile/shard/emit_shares.py",
        "        if len(spans) == 1 and same(spans[0][1], shape_of(tokens)[dim]):",
        "        if spans:",
        (f"{_ODD}[NaN in padded rows]", f"{_OWN}[masked text, uneven]"),
    ),
    Mutant(
        "a mask keeps the order of the whole sequence",
        "cocodiff_compile/shard/emit_shares.py",
        "            if dim < 0 or same(shape_of(whole)[dim], 1):",
        "            if dim < 0 or not same(shape_of(whole)[dim], 0):",
        (f"{_OWN}[masked text]",),
    ),
    Mutant(
        "shares at other places count as the wanted ones",
        "cocodiff_compile/shard/shares.py",
        "    if not step.cut.is_like(cut):",
        "    if step.cut.dim != cut.dim:",
        ("tests/values/test_op_rules.py::test_shares_lie_where_their_reader_wants_them",),
    ),
    Mutant(
        "rows are written that are shared out at other places",
        "cocodiff_compile/cut/rules.py",
        "    first, last = view_rules.segments_within(cut, *view_rules.written_range(node), node)\n"
        "    if whole is rows or",
        "    first, last = 0, 0\n    if whole is rows and",
        ("tests/values/test_op_rules.py::test_rows_are_written_at_their_own_places",),
    ),
    Mutant(
        "what is gathered lies in memory as it comes",
        "cocodiff_compile/shard/emit_shares.py",
        "emit_dense_like(self.graph, self._gather(node), node)",
        "self._gather(node)",
        (f"{_MEMORY}[a view of permuted dims]", f"{_MEMORY}[strides of a sum]"),
    ),
    Mutant(
        "a view is gathered whose memory is looked at",
        "cocodiff_compile/shard/gathers.py",
        "    if node in looked_into and (has_gaps or _is_view(node)):",
        "    if node in looked_into and has_gaps and _is_view(node) and spans[0] == (0, 0):",
        (f"{_MEMORY}[rows before those]", f"{_MEMORY}[an op nobody knows]"),
    ),
    Mutant(
        "shares of other ranks are taken",
        "cocodiff_compile/shard/spread.py",
        "== (group, num_ranks)",
        '!= ("", 0)',
        (
            "tests/values/test_shard_tokens.py::test_a_block_takes_shares_of_its_own_ranks_only"
            "[columns-4-False]",
        ),
    ),
    Mutant(
        "queries that depend on each other are put in another order",
        "cocodiff_compile/shard/shares.py",
        "    return in_order or (op.has_independent_queries and not attention.placed_by)",
        "    return in_order or not attention.placed_by",
        (
            "tests/values/test_shard_attentions.py::"
            "test_queries_that_depend_on_each_other_stay_in_their_order[7-21]",
        ),
    ),
    Mutant(
        "a model may draw random numbers",
        "cocodiff_compile/decide/shared_nodes.py",
        "        return parse_fused_attention(node).has_dropout\n"
        "    return torch.Tag.nondeterministic_seeded in node.target.tags",
        "        return False\n    return False",
        (
            "tests/values/test_shard_odd_inputs.py::"
            "test_a_model_that_draws_random_numbers_is_declined",
        ),
    ),
    Mutant(
        "a minimum cut of rounded times",
        "cocodiff_compile/decide/shared_nodes.py",
        "        units = seconds if math.isinf(seconds) else round(seconds / _UNIT_S)",
        "        units = seconds",
        (
            "tests/values/test_coverage.py::test_a_class_is_shared_out_or_declined"
            "[ZImageTransformer2DModel]",
        ),
    ),
    Mutant(
        "a part of a share is a copy",
        "cocodiff_compile/shard/token_share.py",
        "        made._held, made._source = None, _Source(self, of_share, of_whole)",
        "        made._source = None",
        (f"{_USED}[written through a part-no_grad]",),
    ),
    Mutant(
        "a block may write to a share",
        "cocodiff_compile/compiler/written_shares.py",
        "if any(_memory_of(tensor) in self._memory for tensor in written):",
        "if any(_memory_of(tensor) == 0 for tensor in written):",
        (
            "tests/ranks/test_token_shares.py::test_a_compiled_block_that_writes_to_a_share_is_refused",
        ),
    ),
    Mutant(
        "weights of other blocks are not compared",
        "cocodiff_compile/compiler/shard_graph.py",
        "        if self._first_call != begun_calls():",
        "        if wholes:",
        ("tests/ranks/test_token_shares.py::test_other_weights_of_any_block_are_named",),
    ),
    Mutant(
        "a digest without places",
        "cocodiff_compile/ranks/agreement/same_inputs.py",
        "_hashed(_hashed(part) + places[: len(part)]).sum()",
        "_hashed(part).sum()",
        ("tests/plan/test_same_inputs.py::test_other_values_have_another_digest[an order]",),
    ),
    Mutant(
        "a digest that does not mix the bits of a word",
        "cocodiff_compile/ranks/agreement/same_inputs.py",
        "_hashed(_hashed(part) + places[: len(part)]).sum()",
        "(part * places[: len(part)]).sum()",
        (
            "tests/plan/test_same_inputs.py::test_other_values_have_another_digest"
            "[all signs, of 64 bits]",
            "tests/plan/test_same_inputs.py::test_every_length_of_a_mask_has_its_own_digest",
        ),
    ),
    Mutant(
        "constants of a graph are not compared",
        "cocodiff_compile/compiler/shard_graph.py",
        "            return {**captured.constants, **wholes}",
        "            return wholes",
        ("tests/ranks/test_shard_ranks.py::test_buffers_and_numbers_of_a_call_are_compared",),
    ),
    Mutant(
        "a value in two roles loses its padding twice",
        "cocodiff_compile/shard/emit_shares.py",
        "            for item in dict.fromkeys((attention.key, attention.value)):",
        "            for item in (attention.key, attention.value):",
        (
            "tests/values/test_shard_attentions.py::test_one_tensor_may_have_several_roles"
            "[5-21-qkk]",
        ),
    ),
    Mutant(
        "symbolic tokens are shared out that do not divide",
        "cocodiff_compile/shard/any_size.py",
        "    return bool(count % num_ranks == 0)",
        "    return True",
        (f"{_ANY_SIZE}::test_tokens_that_do_not_divide_are_compiled_for_each_size",),
    ),
    Mutant(
        "floats that changed are read in a graph for one size",
        "cocodiff_compile/compiler/per_shape.py",
        "            _insert_floats(module, floats)",
        "            assert module is not None",
        (f"{_ANY_SIZE}::test_floats_may_change_with_sizes[tokens1]",),
    ),
    Mutant(
        "a graph for any size leaves attentions whole",
        "cocodiff_compile/compiler/stages.py",
        "if any(is_attention(node.target) and node not in chosen.steps for node in graph.nodes):",
        "if not chosen:",
        (f"{_ANY_SIZE}::test_tokens_with_registers_that_do_not_divide_are_compiled_for_each_size",),
    ),
    Mutant(
        "ranks do not compare what they gather between blocks",
        "cocodiff_compile/ranks/agreement/eager_calls.py",
        "_count if is_compared else begin_call",
        "_count",
        (
            "tests/ranks/test_shares_and_models.py::test_ranks_that_read_different_shares_are_told[_each_rank_its_own]",
        ),
    ),
    Mutant(
        "an op that writes returns its first argument",
        "cocodiff_compile/shard/token_share.py",
        "return with_own_arguments(func, args, kwargs, result) if written else result",
        "return args[0] if written else result",
        (
            f"{_USED}[an op writes to its second argument-no_grad]",
            f"{_USED}[an op writes to another tensor-no_grad]",
        ),
    ),
    Mutant(
        "results that show the same memory become shares of their own",
        "cocodiff_compile/shard/gathers.py",
        "            if not _are_apart(one, other):",
        "            if one[0] is not other[0]:",
        (
            "tests/values/test_shard_gathers.py::test_results_that_show_the_same_memory_go_on_to_do_so",
        ),
    ),
    Mutant(
        "ranks may run other ops",
        "cocodiff_compile/ir/constants.py",
        "            ops.add(str(node.target))",
        "            ops.add(str(node.op))",
        ("tests/ranks/test_shares_and_models.py::test_ranks_that_compute_with_other_ops_are_told",),
    ),
)
