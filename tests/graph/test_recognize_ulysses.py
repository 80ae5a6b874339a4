# SPDX-License-Identifier: Apache-2.0
"""recognize-ulysses: every idiom is found, with the right roles and numbers, in the same graph."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from cocodiff_compile import explain
from cocodiff_compile.ir.records import Exchange, Leg, Recognition, UlyssesSite
from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support import hand_written as hw
from tests.support.captured import capture, capture_calls, fake_ranks, is_weight_of
from tests.support.hand_written import WIDTH
from tests.support.idioms import IDIOMS, Idiom

BY_NAME = {idiom.name: idiom for idiom in IDIOMS}
every_idiom = pytest.mark.parametrize("name", list(BY_NAME))


@dataclass(frozen=True)
class Seen:
    """A captured graph, its text before recognition, and what recognition said."""

    gm: GraphModule
    text: str
    recognition: Recognition

    @property
    def site(self) -> UlyssesSite:
        assert [item.reason for item in self.recognition.declined] == []
        (site,) = self.recognition.sites
        return site


def _text(gm: GraphModule) -> str:
    gm.recompile()
    return f"{gm.code}\n{gm.graph}"


def _see(gm: GraphModule) -> Seen:
    text = _text(gm)
    return Seen(gm, text, recognize(gm.graph))


@functools.cache
def _seen(name: str) -> Seen:
    idiom = BY_NAME[name]
    with fake_ranks(idiom.num_ranks):
        (gm,) = capture(idiom.model(), *idiom.arguments(), dynamic=idiom.dynamic)
        return _see(gm)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _hints(sizes: Any) -> tuple[int, ...]:
    return tuple(map(_hint, sizes))


def _shape(node: Node) -> tuple[int, ...]:
    return _hints(node.meta["val"].shape)


# Idioms are found


@every_idiom
def test_idiom_is_one_site_in_an_untouched_graph(name: str) -> None:
    seen = _seen(name)
    assert seen.site.index == 0
    assert seen.recognition.unrelated == ()
    assert _text(seen.gm) == seen.text


@every_idiom
def test_recognition_is_repeatable(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    with fake_ranks(idiom.num_ranks):
        again = recognize(seen.gm.graph)
    assert repr(again) == repr(seen.recognition)


@every_idiom
def test_roles_have_the_projections_of_the_model(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    for leg in seen.site.legs:
        wanted = idiom.projections[leg.role]
        found = {
            module: item
            for module in wanted
            for item in leg.projections
            if is_weight_of(seen.gm, item.node, module)
        }
        assert set(found) == set(wanted), leg.role
        assert len(leg.projections) == len(wanted), leg.role
        nodes = [item.node for item in leg.projections]
        assert nodes == sorted(nodes), f"{leg.role}: in graph order"
        for module, item in found.items():
            assert _hint(item.rows) == idiom.batch * _rows(idiom, leg, module)
            assert item.out_features == item.node.meta["val"].shape[-1]
            assert item.columns == idiom.columns.get(leg.role)
            assert item.is_fused == (leg.role in idiom.columns)


def _rows(idiom: Idiom, leg: Leg, module: str) -> int:
    if idiom.text_is_context:
        return idiom.tokens_of(leg.role)
    return idiom.text_tokens if "add" in module else idiom.tokens


@every_idiom
def test_exchanges_have_the_groups_and_sizes_of_the_model(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    for leg in seen.site.legs:
        exchange = leg.exchange
        rows = _shape(exchange.start)[0] // idiom.num_ranks
        assert exchange.direction == ("out" if leg.role == "o" else "in")
        assert (exchange.group, exchange.ranks) == ("0", tuple(range(idiom.num_ranks)))
        assert _hints(exchange.splits) == (rows,) * idiom.num_ranks
        assert exchange.wait in exchange.start.users
        total = idiom.size_bytes(leg.role)
        assert _hint(exchange.size_bytes) == total
        assert _hint(exchange.wire_bytes) == total * (idiom.num_ranks - 1) // idiom.num_ranks


@every_idiom
def test_legs_have_the_heads_and_tokens_of_the_model(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    for leg in seen.site.legs:
        assert leg.role == "qkvo"[seen.site.legs.index(leg)]
        assert _hint(leg.num_heads) == idiom.heads_of(leg.role), leg.role
        assert _hint(leg.head_size) == idiom.head_size_of(leg.role), leg.role
        assert _hint(leg.tokens_per_rank) == idiom.tokens_of(leg.role), leg.role
        if len(idiom.carries[leg.role]) == 1:
            values = leg.tokens_per_rank * leg.num_heads * leg.head_size
            size = idiom.batch * values * idiom.dtype.itemsize
            assert _hint(leg.exchange.size_bytes) == _hint(size), leg.role


@every_idiom
def test_packed_roles_share_their_exchange(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    site = seen.site
    for left in site.legs:
        for right in site.legs:
            shared = idiom.carries[left.role] == idiom.carries[right.role]
            assert (left.exchange.start is right.exchange.start) == shared
    count = len(set(idiom.carries.values()))
    assert (len(site.exchanges), site.is_packed) == (count, count < 4)


@every_idiom
def test_attention_is_described(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    attention = seen.site.attention
    assert (attention.form, attention.is_causal) == (idiom.form, idiom.is_causal)
    assert (attention.mask is not None) == idiom.has_mask


@every_idiom
def test_independent_work_is_what_the_exchanges_can_hide_behind(name: str) -> None:
    seen, idiom = _seen(name), BY_NAME[name]
    assert len(seen.site.independent) == len(idiom.independent)
    for node, module in zip(seen.site.independent, idiom.independent, strict=True):
        assert is_weight_of(seen.gm, node, module)


# Dims, proven with numbers that name their origin


def _push(value: Tensor, begin: Node, end: Node) -> Tensor:
    """Returns what `end` makes of `value` at `begin`; pointwise ops on the way count as copies."""
    known: dict[Node, Any] = {begin: value}

    def evaluate(node: Node) -> Any:
        if node in known:
            return known[node]
        if not isinstance(node.meta["val"], (Tensor, list, tuple)):
            return _hint(node.meta["val"])
        known[node] = _apply(node, evaluate)
        return known[node]

    result = evaluate(end)
    assert isinstance(result, Tensor)
    return result


def _apply(node: Node, evaluate: Any) -> Any:
    target: Any = node.target
    assert node.op == "call_function", f"{node.name} is not made from the exchanged tensor alone"
    copies = target is torch.ops.prims.convert_element_type.default
    if copies or torch.Tag.pointwise in getattr(target, "tags", ()):
        same = (item for item in node.all_input_nodes if _shape(item) == _shape(node))
        return evaluate(next(same)).contiguous()
    args, kwargs = map_arg((node.args, node.kwargs), evaluate)
    return target(*args, **kwargs)


def _coordinates(exchange: Exchange) -> list[list[set[int]]]:
    """Returns the places of `exchange.source` that every rank is sent, as one set per dim."""
    shape = _shape(exchange.source)
    indices = torch.arange(torch.Size(shape).numel()).view(shape)
    packed = _push(indices, exchange.source, exchange.start.args[0])  # type: ignore[arg-type]
    blocks = packed.chunk(exchange.num_ranks, dim=0)
    return [
        [set(place.tolist()) for place in torch.unravel_index(block.flatten(), shape)]
        for block in blocks
    ]


@every_idiom
def test_scatter_dim_is_where_ranks_get_different_parts(name: str) -> None:
    for exchange in _seen(name).site.exchanges:
        coordinates = _coordinates(exchange)
        for dim in range(len(_shape(exchange.source))):
            sets = [places[dim] for places in coordinates]
            if dim == exchange.scatter_dim:
                assert sum(map(len, sets)) == len(set().union(*sets))
                assert [min(places) for places in sets] == sorted(min(places) for places in sets)
            else:
                assert all(places == sets[0] for places in sets)


@every_idiom
def test_gather_dim_is_where_ranks_are_put_one_after_the_other(name: str) -> None:
    for leg in _seen(name).site.legs:
        exchange = leg.exchange
        shape = _shape(exchange.wait)
        senders = torch.arange(exchange.num_ranks).repeat_interleave(
            torch.Size(shape).numel() // exchange.num_ranks
        )
        result = _push(senders.view(shape), exchange.wait, exchange.result)
        assert tuple(result.shape) == _shape(exchange.result)
        if BY_NAME[name].padded_tokens and len(BY_NAME[name].carries[leg.role]) == 1:
            assert result.numel() == senders.numel(), "nothing is dropped yet"
        rows = result.movedim(exchange.gather_dim, 0).flatten(1)
        per_rank = rows.shape[0] // exchange.num_ranks
        expected = torch.arange(exchange.num_ranks).repeat_interleave(per_rank)
        assert torch.equal(rows, expected[:, None].expand_as(rows))


# More than one attention, more than one resolution, more than one group


@pytest.mark.parametrize("layout", [hw.DIFFUSERS, hw.HEAD_FIRST, hw.STACKED])
def test_stack_gives_its_sites_in_order(layout: hw.Layout) -> None:
    with fake_ranks(4):
        (gm,) = capture(hw.Stack(12, layout), torch.ones(2, 5, WIDTH))
        seen = _see(gm)
    assert [site.index for site in seen.recognition.sites] == list(range(12))
    assert seen.recognition.declined == seen.recognition.unrelated == ()
    assert _text(gm) == seen.text
    for index, site in enumerate(seen.recognition.sites):
        layer = f"layers_modules_{index}_modules"
        assert f"layers.{index}" in site.module_path
        for leg, module in zip(site.legs, ("to_q", "to_k", "to_v", "to_out"), strict=True):
            (item,) = leg.projections
            assert is_weight_of(gm, item.node, f"{layer}_{module}")
        assert len(site.independent) == 2
        for node, module in zip(site.independent, ("mlp_in", "mlp_out"), strict=True):
            assert is_weight_of(gm, node, f"{layer}_{module}")


def test_two_resolutions_share_a_dynamic_graph() -> None:
    with fake_ranks(4):
        calls = [(torch.ones(2, tokens, WIDTH),) for tokens in (5, 9)]
        (gm,) = capture_calls(hw.Block(), calls, dynamic=True)
        (site,) = _see(gm).recognition.sites
    assert isinstance(site.q.tokens_per_rank, torch.SymInt)
    assert isinstance(site.q.exchange.size_bytes, torch.SymInt)
    assert [_hint(leg.num_heads) for leg in site.legs] == [hw.HEADS] * 4


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_group_of_some_ranks_is_known_by_its_members(rank: int) -> None:
    with fake_ranks(6, rank):
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (2, 3), mesh_dim_names=("data", "ulysses")
        )
        group = mesh.get_group("ulysses")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hw, "group", lambda: group)
            (gm,) = capture(hw.Block(), torch.ones(2, 5, WIDTH))
        (site,) = _see(gm).recognition.sites
    for leg in site.legs:
        assert leg.exchange.group == group.group_name
        assert leg.exchange.ranks == tuple(range(rank // 3 * 3, rank // 3 * 3 + 3))


def test_explain_tells_the_same_as_recognition() -> None:
    torch._dynamo.reset()
    with fake_ranks(4):
        explanation = explain(BY_NAME["joint"].model(), *BY_NAME["joint"].arguments())
    assert explanation.declined == ()
    (site,) = explanation.sites
    assert len(site.exchanges) == 4
    assert "1 graph, 1 Ulysses attention" in str(explanation)


# The idioms themselves: what they compute is the attention of the whole sequence


def _local(parts: list[Tensor]) -> LocalTensor:
    return LocalTensor({rank: part.contiguous() for rank, part in enumerate(parts)})


def _my_heads(num_ranks: int, x: LocalTensor) -> LocalTensor:
    """Returns the heads that each rank slices for itself, on all ranks at once."""
    chunks = {rank: part.chunk(num_ranks, dim=2)[rank] for rank, part in x._local_tensors.items()}
    return LocalTensor(chunks)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@every_idiom
@torch.no_grad()
def test_idiom_computes_the_attention_of_the_whole_sequence(name: str) -> None:
    idiom = replace(BY_NAME[name], dtype=torch.float64)
    model, sharded, replicated = idiom.model(), idiom.sharded(), idiom.replicated()
    expected = _as_tuple(model.reference(*sharded, *replicated))
    with fake_ranks(idiom.num_ranks):
        shards = [_local(list(x.chunk(idiom.num_ranks, dim=1))) for x in sharded]
        copies = [_local([x] * idiom.num_ranks) for x in replicated]
        with LocalTensorMode(idiom.num_ranks):
            if idiom.text_is_replicated:
                model.my_heads = functools.partial(_my_heads, idiom.num_ranks)
            actual = _as_tuple(model(*shards, *copies))
    for place, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        parts = [found._local_tensors[rank] for rank in range(idiom.num_ranks)]
        if place == 1 and idiom.text_is_replicated:
            for part in parts:
                torch.testing.assert_close(part, wanted)
        else:
            torch.testing.assert_close(torch.cat(parts, dim=1), wanted)
