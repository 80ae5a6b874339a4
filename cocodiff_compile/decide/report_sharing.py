# SPDX-License-Identifier: Apache-2.0
"""Reports what of a graph is shared out and what is whole, why, and what passes between the two.

It looks at every node and every reader once. It must be asked before shard-tokens rewrites the
graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.cost.ops import hinted_bytes, hinted_shape
from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.cut.rules import step_cut
from cocodiff_compile.decide.shard_report import (
    AttentionShare,
    Gather,
    LeftWhole,
    ModuleShare,
    ShardReport,
    Slice,
)
from cocodiff_compile.decide.shared_nodes import (
    ShareCosts,
    Sharing,
    attention_exchange_seconds,
    behind_split,
)
from cocodiff_compile.ir.aten import SLICING, is_alias, is_tensor, parse_fused_attention
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.layout import Size
from cocodiff_compile.ir.module_path import module_path_of
from cocodiff_compile.shard.gathers import kept_results
from cocodiff_compile.shard.shares import AttentionMode, Shared
from cocodiff_compile.shard.wanted_cuts import slicing_of
from cocodiff_compile.shard.whole_of_shares import WHOLE

CHEAPER_WHOLE = "cheaper whole"
NO_TOKENS = "no tokens were followed to it"
THE_MODEL = "(the model itself)"
"""The module of ops that lie in none of its own."""
_NUMBERED = re.compile(r"(?<=[a-z0-9])_\d+\b")


def report_sharing(
    graph: Graph,
    sharing: Sharing,
    num_ranks: int,
    costs: ShareCosts,
    keeps_shares: bool = False,
    is_applied: bool = True,
) -> ShardReport:
    """Returns a report of what was decided; `costs` may be others than those it was decided by."""
    return _Reporter(graph, sharing, num_ranks, costs, keeps_shares).report(is_applied)


@dataclass(frozen=True)
class _Reporter:
    graph: Graph
    sharing: Sharing
    num_ranks: int
    costs: ShareCosts
    keeps_shares: bool

    def report(self, is_applied: bool) -> ShardReport:
        whole = [node for node in self.ops if node not in self.sharing.steps]
        one_rank_s = sum(self.seconds.values())
        whole_s = sum(self.seconds[node] for node in whole)
        attentions = tuple(map(self._attention, filter(_attends, self.calls)))
        gathers, slices = tuple(self._gathers()), tuple(self._slices())
        passed_s = sum(map(self._exchange_seconds, self.sharing.steps.values()))
        passed_s += sum(item.seconds for item in gathers) + sum(item.seconds for item in slices)
        return ShardReport(
            num_ranks=self.num_ranks,
            is_applied=is_applied,
            num_shared=len(self.ops) - len(whole),
            num_whole=len(whole),
            num_without_tokens=sum(self.why_whole(node) == NO_TOKENS for node in whole),
            num_taken=sum(node.target is WHOLE for node in self.sharing.steps),
            num_kept=self._num_kept(),
            one_rank_s=one_rank_s,
            whole_part=whole_s / one_rank_s if one_rank_s else 0.0,
            step_s=sum(map(self._computing_s, self.calls)) + passed_s,
            attentions=attentions,
            gathers=gathers,
            slices=slices,
            left_whole=self._left_whole(),
            modules=self._modules(gathers),
        )

    @cached_property
    def calls(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @cached_property
    def ops(self) -> list[Node]:
        """Returns the calls that compute something."""
        return [node for node in self.calls if not (is_alias(node) or _is_split(node))]

    @cached_property
    def seconds(self) -> dict[Node, float]:
        """Returns how long one rank computes all of each node."""
        return {node: self.costs.node_seconds(node) for node in self.calls}

    def _computing_s(self, node: Node) -> float:
        """Returns how long a rank computes what it has of a node."""
        seconds = self.seconds[node]
        if node not in self.sharing.steps:
            return seconds
        return 0.0 if node.target is WHOLE else seconds / self.num_ranks

    def _num_kept(self) -> int:
        return sum(node in self.sharing.steps for node in self.kept)

    @cached_property
    def kept(self) -> frozenset[Node]:
        """Returns the results that leave the graph as shares if they are shared out."""
        return kept_results(self.graph) if self.keeps_shares else frozenset()

    # Why

    def why_whole(self, node: Node) -> str:
        """Returns why a node is not shared out."""
        if node in self.sharing.refused:
            return _without_numbers(self.sharing.refused[node])
        if node in self.sharing.could:
            return CHEAPER_WHOLE
        sources = [behind_split(node, source) for source in node.all_input_nodes]
        reasons = (
            self._why_not_followed(node, self.sharing.could[source].cut, source)
            for source in sources
            if source in self.sharing.could and is_tensor(source)
        )
        return next(reasons, NO_TOKENS)

    def _why_not_followed(self, node: Node, cut: Cut, source: Node) -> str:
        """Returns why no share of a node that reads a share was proposed."""
        if is_attention(node.target):
            return "its queries are not shared out"
        operand = node.all_input_nodes[0] if slicing_of(node) is not None else source
        try:
            step_cut(node, {operand: cut})
        except CutUnknown as error:
            return _without_numbers(str(error))
        return "it is shared out at other places, or too small"

    def _why_read_whole(self, reader: Node, source: Node) -> str:
        """Returns why a reader needs all of a node that is shared out."""
        if reader.op == "output":
            return "the graph returns it"
        step = self.sharing.steps.get(reader)
        if step is None:
            return self.why_whole(reader)
        if source in step.needs:
            return "its share needs other places"
        return "every share of it reads all"

    # What passes between shares and wholes

    def _readers(self) -> Iterator[tuple[Node, Node]]:
        """Yields every reader with each tensor that it reads, behind splits."""
        for node in self.graph.nodes:
            if not _is_split(node):
                for source in node.all_input_nodes:
                    whole = behind_split(node, source)
                    is_kept = node.op == "output" and source in self.kept
                    if is_tensor(whole) and not is_kept:
                        yield node, whole

    def _gathers(self) -> Iterator[Gather]:
        readers: dict[Node, list[Node]] = {}
        for reader, source in self._readers():
            step = self.sharing.steps.get(source)
            if step is not None and not _reads_share(self.sharing.steps.get(reader), source, step):
                readers.setdefault(source, []).append(reader)
        for source, found in readers.items():
            size_bytes = hinted_bytes(source)
            yield Gather(
                node=source.name,
                module=module_path_of([source]),
                shape=hinted_shape(source),
                size_bytes=size_bytes,
                seconds=self.costs.exchange_seconds(size_bytes),
                reader=found[0].name,
                reader_module=module_path_of([found[0]]),
                why=self._why_read_whole(found[0], source),
                num_readers=len(found),
            )

    def _slices(self) -> Iterator[Slice]:
        taken: dict[Node, int] = {}
        for reader, source in self._readers():
            step = self.sharing.steps.get(reader)
            if step is not None and source in step.needs and source not in self.sharing.steps:
                taken[source] = taken.get(source, 0) + 1
        for source, count in taken.items():
            share_bytes = hinted_bytes(source) // self.num_ranks
            copied = 2 * hinted_bytes(source) / self.num_ranks
            seconds = count * self.costs.device.memory_seconds(copied)
            module, shape = module_path_of([source]), hinted_shape(source)
            yield Slice(source.name, module, shape, share_bytes, seconds, count)

    # Rows

    def _attention(self, node: Node) -> AttentionShare:
        attention = parse_fused_attention(node)
        heads, tokens, keys = (
            hinted_shape(item)[dim]
            for item, dim in (
                (attention.query, attention.op.head_dim),
                (attention.query, attention.op.token_dim),
                (attention.key, attention.op.token_dim),
            )
        )
        could = self.sharing.could.get(node)
        could_be = could.mode.value if could is not None and could.mode is not None else ""
        is_shared = node in self.sharing.steps
        missing = -heads % self.num_ranks if could_be == AttentionMode.ULYSSES.value else 0
        by_tokens = could is not None and could.mode is not AttentionMode.BATCH
        return AttentionShare(
            node=node.name,
            module=module_path_of([node]),
            mode=could_be if is_shared else "whole",
            could_be=could_be,
            why_whole="" if is_shared else self.why_whole(node),
            heads=heads,
            padded_heads=heads + missing,
            tokens=_hinted(could.cut.segments) if could is not None and by_tokens else (tokens,),
            padded_tokens=_padded(could.cut) if could is not None and by_tokens else (tokens,),
            keys=keys,
            exchange_s=self._exchange_seconds(could),
            saved_s=self.seconds[node] * (1 - 1 / self.num_ranks) if could_be else 0.0,
        )

    def _exchange_seconds(self, step: Shared | None) -> float:
        if step is None:
            return 0.0
        return attention_exchange_seconds(step, self.num_ranks, self.costs)

    def _left_whole(self) -> tuple[LeftWhole, ...]:
        """Returns what stays whole, by op and reason; what is cheaper whole without views."""
        found: dict[tuple[str, str], LeftWhole] = {}
        for node in self.calls:
            if node in self.sharing.steps or _is_split(node):
                continue
            why = self.why_whole(node)
            if why == NO_TOKENS or (why == CHEAPER_WHOLE and is_alias(node)):
                continue
            op = str(node.target) if node.target is not operator.getitem else "getitem"
            first = LeftWhole(op, why, 0, 0.0, module_path_of([node]))
            row = found.get((op, why), first)
            seconds = row.seconds + self.seconds[node]
            found[op, why] = replace(row, count=row.count + 1, seconds=seconds)
        return tuple(sorted(found.values(), key=lambda row: (-row.seconds, -row.count)))

    def _modules(self, gathers: tuple[Gather, ...]) -> tuple[ModuleShare, ...]:
        rows: dict[str, ModuleShare] = {}
        for node in self.ops:
            name = _top_module(module_path_of([node]))
            row = rows.get(name, ModuleShare(name, 0, 0, 0.0, 0.0, (), 0, 0))
            rows[name] = self._with_node(row, node)
        for gather in gathers:
            name = _top_module(gather.module)
            row = rows.get(name, ModuleShare(name, 0, 0, 0.0, 0.0, (), 0, 0))
            rows[name] = replace(
                row,
                num_gathers=row.num_gathers + 1,
                gathered_bytes=row.gathered_bytes + gather.size_bytes,
            )
        return tuple(rows.values())

    def _with_node(self, row: ModuleShare, node: Node) -> ModuleShare:
        step, seconds = self.sharing.steps.get(node), self.seconds[node]
        if is_attention(node.target):
            mode = step.mode.value if step is not None and step.mode is not None else "whole"
            row = replace(row, attentions=(*row.attentions, mode))
        if step is not None:
            return replace(row, num_shared=row.num_shared + 1, shared_s=row.shared_s + seconds)
        return replace(row, num_whole=row.num_whole + 1, whole_s=row.whole_s + seconds)


def _attends(node: Node) -> bool:
    return is_attention(node.target)


def _is_split(node: Node) -> bool:
    """Returns whether a node only parts another one, for those that pick its results."""
    return node.target in SLICING and not is_tensor(node)


def _reads_share(reader: Shared | None, source: Node, step: Shared) -> bool:
    need = reader.needs.get(source) if reader is not None else None
    return need is not None and step.cut.is_like(need)


def _padded(cut: Cut) -> tuple[int, ...]:
    return _hinted([piece * cut.count for piece in cut.pieces])


def _hinted(sizes: Sequence[Size]) -> tuple[int, ...]:
    return tuple(map(optimization_hint, sizes))


def _top_module(path: str) -> str:
    """Returns the block that a module lies in, `blocks.0`, or else the first name of its path."""
    names = path.split(".") if path else []
    numbered = next((place for place, name in enumerate(names) if name.isdigit()), 0)
    return ".".join(names[: numbered + 1]) or THE_MODEL


def _without_numbers(reason: str) -> str:
    """Returns a reason without the numbers of its nodes, so that those of alike nodes are alike."""
    return _NUMBERED.sub("", reason)
