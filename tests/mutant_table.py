"""The sabotages that `tests.mutants` tries, each with the tests that notice it."""

from __future__ import annotations

from dataclasses import dataclass

_RULES = "tests/test_op_rules.py::test_cutting_before_an_op_is_cutting_behind_it"


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


_ORDER = "tests/test_op_rules.py::test_sums_of_columns_are_not_cut"
_BROADCAST = "tests/test_op_rules.py::test_a_broadcast_matrix_holds_no_batch"


def _rule(what: str, path: str, old: str, new: str, *cases: str) -> Mutant:
    """A sabotage of a rule by which cuts pass an op."""
    tests = tuple(case if "::" in case else f"{_RULES}[{case}]" for case in cases)
    return Mutant(what, f"cocodiff_compile/cut/{path}", old, new, tests)


CUT_RULES = (
    _rule(
        "heads cut across a pad that moves them",
        "head_cut.py",
        "if padding_of(step.node, step.cut.dim) != (0, 0):",
        "if shape_of(step.node)[step.cut.dim] != shape_of(step.operand)[step.cut.dim]:",
        "pads-heads",
    ),
    _rule(
        "heads cut across an index of heads",
        "head_cut.py",
        "found[0] is not step.operand or found[1] == step.cut.dim:",
        "found[0] is not step.operand:",
        "indices-heads",
    ),
    _rule(
        "heads cut across a softmax over heads",
        "head_cut.py",
        """    if dim == step.cut.dim:
        raise CutUnknown(f"{step.node.name} is over the heads")""",
        """    if dim < 0:
        raise CutUnknown(f"{step.node.name} is over the heads")""",
        "softmax-heads",
    ),
    _rule(
        "heads cut across the blocks that are sent",
        "head_cut.py",
        "if not divides(num_ranks, step.cut.outer):",
        "if not divides(1, step.cut.outer):",
        "exchange-heads",
    ),
    _rule(
        "heads taken for the batch of a broadcast operand",
        "head_cut.py",
        "if step.cut.dim != dim or len(shape_of(step.operand)) != rank:",
        "if step.cut.dim != dim:",
        _BROADCAST,
    ),
    _rule(
        "heads beside which sums run in another order",
        "head_cut.py",
        "if strides[dim] > strides[cut_dim] and not same(value.shape[dim], 1):",
        "if strides[dim] < 0:",
        _ORDER,
    ),
    _rule(
        "a lost dim counted as kept",
        "head_cut.py",
        "drops_dim = node.target is aten.select.int and dim < cut.dim",
        "drops_dim = node.target is aten.select.int and dim < 0",
        "slices-heads",
    ),
    _rule(
        "one head alone squeezed away",
        "head_chunks.py",
        "            elif target in SQUEEZE:",
        "            elif target in SQUEEZE and not args:",
        "reshapes-heads",
    ),
    _rule(
        "another chunk's heads",
        "head_chunks.py",
        "picked = emit(graph, aten.select.int, viewed, cut.dim + 1, chunk, like=whole)",
        "picked = emit(graph, aten.select.int, viewed, cut.dim + 1, count - 1 - chunk, like=whole)",
        "copies-heads",
    ),
    _rule(
        "rows cut across a pad that moves them",
        "row_cut.py",
        "if padding_of(node, cut.dim) != (0, 0):",
        "if sizes_of(node)[cut.dim] != sizes_of(_operand)[cut.dim]:",
        "pads-rows",
    ),
    _rule(
        "rows multiplied with rows",
        "row_cut.py",
        "if left not in cuts or cuts[left].dim != dim or right in cuts:",
        "if left not in cuts or right in cuts:",
        "matmuls-rows",
    ),
    _rule(
        "a mask's rows read as the same for all queries",
        "row_cut.py",
        "sizes_of(attention.mask)[-2:-1] not in ((), (1,)):",
        "len(sizes_of(attention.mask)) > 4:",
        "attention-rows",
    ),
    _rule(
        "a causal attention in runs",
        "row_cut.py",
        "if attention.is_causal or attention.has_dropout:",
        "if attention.has_dropout:",
        "tests/test_op_rules.py::test_a_causal_attention_is_not_cut_by_rows",
    ),
    _rule(
        "runs joined between each other",
        "row_cut.py",
        "if not picked and any(first > second for first, second in itertools.pairwise(filled)):",
        "if picked and any(first > second for first, second in itertools.pairwise(filled)):",
        "concatenations-rows",
    ),
    _rule(
        "a slice of a run counted from the beginning of all rows",
        "row_runs.py",
        "begin, end = max(begin, first) - first, min(end, last) - first",
        "begin, end = max(begin, first) - first, min(end, last)",
        "tests/test_op_rules.py::test_a_slice_may_end_inside_a_chunk",
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
        "            break\n",
        "            continue\n",
        "test_exchange_cost",
    ),
    _quick(
        "numbers too large for a float",
        "cocodiff_compile/topology/files.py",
        "not LEAST <= checked <= MOST",
        "not 0 < checked",
        "test_given_files",
    ),
    _quick(
        "a probe cache of another machine",
        "cocodiff_compile/ranks/probe_cache.py",
        "if cached.measured and is_of_machine else",
        "if cached.measured else",
        "test_given_files",
    ),
    _quick(
        "infinite numbers as options",
        "cocodiff_compile/given_values.py",
        "return converted if math.isfinite(converted) else None",
        "return converted",
        "test_given_options",
    ),
)

PASSES = (
    _quick(
        "a graph break that is not noticed",
        "passes/recognize_ulysses.py",
        'around.from_outside == {"q", "k", "v"}',
        "not around.from_outside",
        "test_recognize_cut_off::test_an_attention_that_is_exchanged_outside_of_its_graph_is_declined",
    ),
    _quick(
        "scales of a product that are forgotten",
        "passes/split_projections.py",
        "if bound(gemm)[name] != 1}",
        "if bound(gemm)[name] == 0}",
        "test_odd_views",
    ),
    _quick(
        "exchanged data that is sent elsewhere",
        "passes/chunk_heads.py",
        "            if is_collective(user):",
        "            if is_collective(user) and not user.users:",
        "test_chunk_heads::test_idiom_in_chunks_is_whole_bit_for_bit[replicated text]",
    ),
    _quick(
        "phases over each other's groups",
        "passes/split_tapa_phases.py",
        "blocks = blocks.to_front(axes).sent(len(axes), machine.groups[axes])",
        "blocks = blocks.to_front(axes).sent(len(axes), machine.groups[phases[-1]])",
        "test_split_tapa_phases::test_every_plan_moves_every_element_to_where_flat_does[2x3]",
    ),
    _quick(
        "messages back in the order of phases",
        "passes/split_tapa_phases.py",
        "value = begun.blocks.received().turned(machine.message_order).value",
        "value = begun.blocks.received().value",
        "test_split_tapa_phases::test_every_plan_moves_every_element_to_where_flat_does[2x3]",
    ),
    _quick(
        "joined tokens that nobody tries",
        "cocodiff_compile/compiler/exact_rows.py",
        "if item not in by_run and path and",
        "if item in by_run and path and",
        "test_odd_views",
    ),
)

CODE_AND_POLICY = (
    _quick(
        "one large token decides the spreads",
        "cocodiff_compile/v_major/delta_code.py",
        ".clamp(max=0.0))",
        ")",
        "test_delta_code_outliers",
    ),
    _quick(
        "a head that the spreads do not fit is coded with them",
        "cocodiff_compile/v_major/delta_code.py",
        "(wanted > _MISFIT * even) | ",
        "",
        "test_delta_code_outliers",
    ),
    _quick(
        "the worst loss is the mean",
        "cocodiff_compile/v_major/delta_code.py",
        "share.mean(), share.amax()",
        "share.mean(), share.mean()",
        "test_delta_code_outliers",
    ),
    _quick(
        "adaptive falls back to the code that did not suffice",
        "cocodiff_compile/v_major/policy.py",
        "enough), UNCOMPRESSED)",
        "enough), self.first)",
        "test_v_major_policy",
    ),
    _quick(
        "no token's own loss counts",
        "cocodiff_compile/v_major/policy.py",
        " and worst <= allowed * 10 ** (self.worst_db / 10)",
        "",
        "test_v_major_policy",
    ),
    _quick(
        "the worst call is averaged away",
        "cocodiff_compile/v_major/selective_call.py",
        "float(worst.amax())",
        "float(worst.mean())",
        "test_selective_call_drift",
    ),
)

PARALLEL = (
    _quick(
        "padded rows counted as real",
        "cocodiff_compile/parallel/token_padding.py",
        "num_local * (self.degree - rank) - pad)",
        "num_local * (self.degree - rank))",
        "test_token_padding",
    ),
    _quick(
        "each rank decides from its own tokens what a cache skips",
        "cocodiff_compile/parallel/cache_decisions.py",
        "return torch.stack(theirs).sum(0)",
        "return mine",
        "test_caches",
    ),
)

MUTANTS: tuple[Mutant, ...] = (*CUT_RULES, *GIVEN, *PASSES, *CODE_AND_POLICY, *PARALLEL)
