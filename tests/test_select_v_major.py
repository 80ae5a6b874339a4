"""select-v-major: what arrives is what the contract says, exchange by exchange, step by step.

Three proofs for every lossy kind of step, on ranks of a 2x3 grid with other data each:

    results     those of the captured graph whose exchanges carry what `code_by_contract` makes of
                what was packed, but for float error
    all else    the captured graph with these results gives the same to the bit
    memories    of sender and receiver are the same to the bit
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from cocodiff_compile.graph.aten import (
    ALL_GATHER,
    ALL_TO_ALL,
    FUSED_ATTENTION,
    bound,
    size_bytes,
)
from cocodiff_compile.graph.delta_code import BITS, FULL
from cocodiff_compile.graph.pipeline import PassResult
from cocodiff_compile.graph.records import Recognition
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.passes.split_tapa_phases import SplitTapaPhases
from cocodiff_compile.schedule.graph_tasks import is_anchor, is_write_back, reorder
from cocodiff_compile.v_major.travel import IN_FULL, Remembered, Travel
from tests.captured import capture_call, fake_ranks
from tests.idioms import IDIOMS
from tests.lockstep import equal_on_every_rank
from tests.selective import (
    GRID,
    NUM_RANKS,
    Captured,
    Selective,
    Step,
    captured_of,
    code_by_contract,
    differing_share,
    exchanged,
    is_data,
    small_model,
)

MODELS = {"flux": 8, "sd3": 16}
"""With the size of their heads."""
MIXED = Travel((4, 2, 8, FULL))
INF = float("inf")
EVERYTHING = Remembered(frozenset("qkvo"), frozenset("qkvo"))

every_model = pytest.mark.parametrize("name", MODELS)


def kinds_of_models(*travels: Travel) -> Any:
    """All of them of one model, the last of each."""
    cases = [("flux", travels[-1]), *(("sd3", travel) for travel in travels)]
    return pytest.mark.parametrize(("name", "travel"), cases, ids=str)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def model(name: str) -> Captured:
    return small_model(name, MODELS[name])


def same(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(mine, other)
        for own, others in zip(ours, theirs, strict=True)
        for mine, other in zip(own, others, strict=True)
    )


# All in full


@every_model
def test_in_full_every_value_is_captured_bit_for_bit(name: str) -> None:
    selective = Selective(model(name), IN_FULL, Travel.all_in(4), measures_drift=True)
    for inputs in selective.base.inputs(3):
        ours, exact = selective.step(IN_FULL, inputs), selective.exact(inputs)
        assert equal_on_every_rank(ours.outputs, exact.outputs)
        assert same(ours.results, exact.results)
        assert all(mine[-1] == 0 for mine in selective.memories), "nothing is lost"


@every_model
def test_in_full_both_sides_remember_what_travelled(name: str) -> None:
    selective = Selective(model(name), IN_FULL, Travel.all_in(4))
    for inputs in selective.base.inputs(2):
        step = selective.step(IN_FULL, inputs)
        for packed, pairs in zip(step.packed, selective.pairs(), strict=True):
            for message, received, (sent, held) in zip(
                packed, exchanged(packed), pairs, strict=True
            ):
                assert torch.equal(sent.flatten(), message.flatten())
                assert torch.equal(held.flatten(), received.flatten())


# Coded


def expected_messages(
    step: Step, selective: Selective, travel: Travel, memories: list[list[Tensor]]
) -> list[list[Tensor]]:
    """What arrives of what was packed, by piece and rank; `memories` of senders are updated."""
    found = []
    all_bits, groups = bits_of_pieces(selective.base, travel), selective.base.groups()
    for place, (packed, bits, group) in enumerate(zip(step.packed, all_bits, groups, strict=True)):
        if bits == FULL:
            memories[place] = [message.clone() for message in packed]
            found.append(packed)
            continue
        coded = [
            code_by_contract(message, memory, bits, group)
            for message, memory in zip(packed, memories[place], strict=True)
        ]
        memories[place] = [remembered for remembered, _ in coded]
        found.append([arrived.view_as(packed[0]) for _, arrived in coded])
    return found


def bits_of_pieces(base: Captured, travel: Travel) -> list[int]:
    """Where roles travel together, those of the last: all ask for the same then."""
    bits = {
        leg.exchange.start: travel.bits_of()[leg.role]
        for site in base.found.sites
        for leg in site.legs
    }
    return [
        bits[exchange.start]
        for site in base.found.sites
        for exchange in site.exchanges
        for _ in exchange.pieces
    ]


@kinds_of_models(*map(Travel.all_in, (8, 4, 2)), MIXED)
def test_coded_exchanges_give_what_the_contract_says(name: str, travel: Travel) -> None:
    selective = Selective(model(name), IN_FULL, travel)
    memories = _nothing_sent(selective)
    kinds = (IN_FULL, travel, travel)
    for kind, inputs in zip(kinds, selective.base.inputs(3), strict=True):
        step = selective.step(kind, inputs)
        messages = expected_messages(step, selective, kind, memories)
        expected = selective.with_messages(inputs, messages)
        for ours, theirs in zip(step.results, expected.results, strict=True):
            assert differing_share(ours, theirs) < 0.001
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
        assert same(step.packed, rest.packed)
    assert not equal_on_every_rank(step.outputs, selective.exact(inputs).outputs), "it is lossy"


def _nothing_sent(selective: Selective) -> list[list[Tensor]]:
    """Memories of senders before the first step, by piece and rank."""
    packed = [bound(piece.start)["input"].meta["val"] for piece in selective.base.pieces]
    return [[torch.zeros(fake.shape, dtype=fake.dtype)] * NUM_RANKS for fake in packed]


@pytest.mark.parametrize("bits", BITS)
def test_a_first_coded_step_without_one_in_full_gives_what_the_contract_says(bits: int) -> None:
    """Against memories of zeros, the difference is all."""
    travel = Travel.all_in(bits)
    selective = Selective(model("sd3"), travel)
    memories = _nothing_sent(selective)
    (inputs,) = selective.base.inputs(1)
    step = selective.step(travel, inputs)
    messages = expected_messages(step, selective, travel, memories)
    expected = selective.with_messages(inputs, messages)
    for ours, theirs in zip(step.results, expected.results, strict=True):
        assert differing_share(ours, theirs) < 0.001


@pytest.mark.parametrize(("name", "bits"), [("flux", 1), ("sd3", 8)])
def test_sender_and_receiver_remember_the_same_to_the_bit(name: str, bits: int) -> None:
    travel = Travel.all_in(bits)
    selective = Selective(model(name), IN_FULL, travel)
    kinds = (IN_FULL, travel, travel, travel)
    for kind, inputs in zip(kinds, selective.base.inputs(4, change=0.5), strict=True):
        selective.step(kind, inputs)
        for pairs in selective.pairs():
            expected = exchanged([sent for sent, _ in pairs])
            assert all(
                torch.equal(held, other) for (_, held), other in zip(pairs, expected, strict=True)
            )


def test_the_same_input_again_and_again_gives_the_exact_output_in_the_end() -> None:
    travel = Travel.all_in(4)
    selective = Selective(model("sd3"), travel)
    (inputs,) = selective.base.inputs(1)
    exact = selective.exact(inputs).outputs
    apart = [_largest_difference(selective.step(travel, inputs).outputs, exact) for _ in range(15)]
    assert apart[-1] < apart[0] / 30


def _largest_difference(ours: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]) -> Any:
    return max(
        float((mine - other).abs().max())
        for own, others in zip(ours, exact, strict=True)
        for mine, other in zip(own, others, strict=True)
    )


@kinds_of_models(*map(Travel.all_in, BITS), MIXED)
def test_as_many_bytes_travel_as_bits_and_one_byte_per_head_of_a_token(
    name: str, travel: Travel
) -> None:
    base = model(name)
    selective = Selective(base, travel)
    graph = selective.variants[travel].graph
    starts = graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    found = selective.results[travel].recognition
    assert found is not None
    pieces = [piece for site in found.sites for piece in site.pieces]
    assert {piece.start for piece in pieces} == set(starts)
    assert _num_gathers(graph) == _num_gathers(base.graph)
    for before, after, bits, group in zip(
        base.pieces, pieces, bits_of_pieces(base, travel), base.groups(), strict=True
    ):
        elements = bound(before.start)["input"].meta["val"].numel()
        coded = elements // group * (group * bits // 8 + 1)
        travelling = size_bytes(bound(after.start)["input"])
        assert travelling == after.size_bytes == (coded if bits != FULL else before.size_bytes)


def _num_gathers(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=ALL_GATHER))


def test_one_exchange_of_several_roles_takes_the_most_that_any_asks_for() -> None:
    base = idiom("packed by stack")
    (site,) = base.found.sites
    assert len(site.exchanges) == 2
    for bits, expected in (((2, 4, 3, 8), 4), ((1, 8, 2, 4), 8), ((2, FULL, 8, 4), FULL)):
        selective = Selective(base, Travel(bits), IN_FULL, Travel.all_in(4))
        found = selective.results[Travel(bits)].recognition
        assert found is not None
        before, after = base.pieces[0], found.sites[0].q.exchange
        elements = bound(before.start)["input"].meta["val"].numel()
        coded = elements // 8 * (expected + 1)
        assert after.size_bytes == (before.size_bytes if expected == FULL else coded)


SPELLINGS = (
    "bf16",
    "head first, one sample",
    "transposed in place",
    "packed by cat of sizes",
    "key is value",
    "heads padded as first dim",
    "rows dropped by block, packed by stack",
)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_ulysses_gives_what_the_contract_says(name: str) -> None:
    """In full to the bit, in three bits but for float error: of few digits as in bfloat16, some
    differences lie between two numbers, where either is right.
    """
    travel = Travel.all_in(3)
    selective = Selective(idiom(name), IN_FULL, travel)
    memories = _nothing_sent(selective)
    for kind, inputs in zip((IN_FULL, travel, travel), selective.base.inputs(3), strict=True):
        step = selective.step(kind, inputs)
        messages = expected_messages(step, selective, kind, memories)
        expected = selective.with_messages(inputs, messages)
        for ours, theirs in zip(step.results, expected.results, strict=True):
            assert differing_share(ours, theirs) <= (0 if kind.is_full else 0.02)
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)


# Drift


@pytest.mark.parametrize(("name", "bits"), [("flux", 2), ("sd3", 8)])
def test_drift_is_the_mean_share_of_energy_that_is_lost(name: str, bits: int) -> None:
    travel = Travel.all_in(bits)
    selective = Selective(model(name), IN_FULL, travel, measures_drift=True)
    kinds = (IN_FULL, travel, travel, IN_FULL)
    memories = _nothing_sent(selective)
    for kind, inputs in zip(kinds, selective.base.inputs(4), strict=True):
        step = selective.step(kind, inputs)
        messages = expected_messages(step, selective, kind, memories)
        for rank, mine in enumerate(selective.memories):
            pairs = zip(step.packed, messages, strict=True)
            lost = [_lost_share(packed[rank], arrived[rank]) for packed, arrived in pairs]
            assert mine[-1].shape == ()
            assert mine[-1].dtype == torch.float32
            assert float(mine[-1]) == pytest.approx(sum(lost) / len(lost), rel=0.01)
            assert (float(mine[-1]) == 0) == kind.is_full


def _lost_share(packed: Tensor, arrived: Tensor) -> float:
    exact = packed.double().flatten()
    return float((exact - arrived.double().flatten()).square().sum() / exact.square().sum())


def _in_order_of_tasks(graph: Graph, found: Recognition) -> PassResult:
    """As a schedule leaves it: light nodes where they are needed, copies early."""
    graph.eliminate_dead_code()
    anchors = [node for node in graph.nodes if is_anchor(node)]
    reorder(graph, anchors, tuple(range(len(anchors))))
    return PassResult(True, found)


@pytest.mark.parametrize("travel", [IN_FULL, Travel.all_in(4), Travel((4, FULL, 2, 8), 0.5)])
@pytest.mark.parametrize("measures_drift", [True, False])
def test_an_order_of_tasks_changes_no_value_and_no_memory(
    travel: Travel, measures_drift: bool
) -> None:
    base, kinds = model("sd3"), (IN_FULL, travel, Travel.all_in(4))
    plain = Selective(base, *kinds, measures_drift=measures_drift)
    ordered = Selective(base, *kinds, measures_drift=measures_drift, then=_in_order_of_tasks)
    steps = zip(_outputs_of_steps(plain, travel), _outputs_of_steps(ordered, travel), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(plain.memories, ordered.memories)


@pytest.mark.parametrize("measures_drift", [True, False])
def test_what_was_sent_is_remembered_before_the_attention(measures_drift: bool) -> None:
    """Else it takes up room until the end of the graph."""
    travel = Travel.all_in(4)
    selective = Selective(
        model("sd3"), travel, measures_drift=measures_drift, then=_in_order_of_tasks
    )
    nodes = list(selective.variants[travel].graph.nodes)
    (attention,) = (place for place, node in enumerate(nodes) if node.target in FUSED_ATTENTION)
    before = [node for node in nodes[:attention] if is_write_back(node)]
    assert len(before) == 6, "Q, K and V, as sent and as received"


def test_measuring_changes_nothing_else() -> None:
    travel = Travel.all_in(2)
    plain = Selective(model("sd3"), IN_FULL, travel)
    measuring = Selective(model("sd3"), IN_FULL, travel, measures_drift=True)
    assert len(measuring.memories[0]) == len(plain.memories[0]) + 1
    for kind, inputs in zip((IN_FULL, travel), plain.base.inputs(2), strict=True):
        ours, theirs = measuring.step(kind, inputs), plain.step(kind, inputs)
        assert equal_on_every_rank(ours.outputs, theirs.outputs)


# Memories


def test_all_kinds_of_steps_remember_in_the_same_places() -> None:
    travels = (IN_FULL, Travel.all_in(2), MIXED, Travel((FULL,) * 4, 0.5))
    selective = Selective(model("flux"), *travels, measures_drift=True)
    first, *others = ([(t.shape, t.dtype) for t in selective.memory_inputs(k)] for k in travels)
    assert len(first) == 2 * len(selective.base.pieces) + 1
    assert all(other == first for other in others)


def test_what_no_kind_of_step_needs_is_not_remembered() -> None:
    base = model("sd3")
    assert len(Selective(base, IN_FULL, MIXED).memories[0]) == 2 * 3
    tokens = Selective(base, IN_FULL, Travel((FULL,) * 4, 0.5))
    assert len(tokens.memories[0]) == 1 + 3  # V as sent; Q, K and V as received


def test_where_nothing_is_to_be_remembered_the_graph_stays_to_the_letter() -> None:
    base = model("sd3").copy()
    before = str(base.graph)
    with fake_ranks(NUM_RANKS):
        select = SelectVMajor(IN_FULL, Remembered.for_all([IN_FULL]))
        result = select.run(base.graph, base.found)
    assert not result.changed
    assert not result.declined
    assert str(base.graph) == before


# Not finite


def _broken(inputs: list[list[Any]], names: Sequence[str], value: float) -> list[list[Any]]:
    """With one element of one rank's picture that is not finite."""
    found = [list(mine) for mine in inputs]
    place = next(i for i, name in enumerate(names) if "hidden_states" in name)
    assert is_data(names[place], found[2][place])
    found[2][place] = found[2][place].clone()
    found[2][place].view(-1)[7] = value
    return found


@pytest.mark.parametrize(("name", "travel"), [("flux", Travel.all_in(2)), ("sd3", MIXED)], ids=str)
@pytest.mark.parametrize(("value", "broken"), [(float("nan"), 0), (float("nan"), 1), (INF, 1)])
def test_what_is_not_finite_arrives_and_is_gone_a_step_later(
    name: str, travel: Travel, value: float, broken: int
) -> None:
    """In a step in full, and in one that is coded."""
    selective = Selective(model(name), IN_FULL, travel)
    kinds = (IN_FULL, travel, travel)
    for number, (kind, inputs) in enumerate(zip(kinds, selective.base.inputs(3), strict=True)):
        given = _broken(inputs, selective.base.names, value) if number == broken else inputs
        step, exact = selective.step(kind, given), selective.exact(given)
        assert all(memory.isfinite().all() for mine in selective.memories for memory in mine)
        for ours, theirs in zip(step.outputs, exact.outputs, strict=True):
            assert ours[0].isnan()[theirs[0].isnan()].all()
            assert ours[0].isfinite().all() == (number != broken)
        assert any(item[0].isnan().any() for item in exact.outputs) == (number == broken)


@pytest.mark.parametrize("name", ["sd3"])
def test_groups_that_are_finite_arrive_as_if_all_were(name: str) -> None:
    """In the first exchanges, which no other one comes before."""
    travel = Travel.all_in(4)
    clean, broken = (Selective(model(name), IN_FULL, travel) for _ in range(2))
    first, second = clean.base.inputs(2)
    for selective in (clean, broken):
        selective.step(IN_FULL, first)
    whole = clean.step(travel, second)
    holed = broken.step(travel, _broken(second, clean.base.names, float("nan")))
    for piece in range(3):
        for ours, theirs in zip(holed.results[piece], whole.results[piece], strict=True):
            is_nan = ours.isnan()
            assert 0 < is_nan.float().mean() < 0.5
            assert torch.equal(ours[~is_nan], theirs[~is_nan])


# With other passes


@functools.cache
def _chunked(name: str) -> Captured:
    with fake_ranks(NUM_RANKS):
        return model(name).after(ChunkHeads(2).run)


def _in_phases(graph: Graph, found: Recognition) -> PassResult:
    result = SplitTapaPhases({"0": GRID}, "on").run(graph, found)
    assert result.changed
    assert result.recognition is not None
    pieces = [piece for site in result.recognition.sites for piece in site.pieces]
    assert all(len(piece.phases) == 2 for piece in pieces)
    return result


def _outputs_of_steps(selective: Selective, travel: Travel) -> list[Sequence[Sequence[Tensor]]]:
    kinds = (IN_FULL, travel, travel)
    inputs = selective.base.inputs(3)
    return [selective.step(kind, item).outputs for kind, item in zip(kinds, inputs, strict=True)]


@kinds_of_models(Travel.all_in(2), MIXED)
def test_chunks_of_heads_carry_the_same_bit_for_bit(name: str, travel: Travel) -> None:
    """A head of a token is coded for itself: it does not matter what it travels with."""
    whole = Selective(model(name), IN_FULL, travel)
    chunked = Selective(_chunked(name), IN_FULL, travel)
    assert len(chunked.base.pieces) == 2 * len(whole.base.pieces)
    steps = zip(_outputs_of_steps(whole, travel), _outputs_of_steps(chunked, travel), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)


@kinds_of_models(IN_FULL, Travel.all_in(4), MIXED)
def test_phases_carry_the_same_bit_for_bit(name: str, travel: Travel) -> None:
    chunked = _chunked(name)
    flat = Selective(chunked, IN_FULL, travel, MIXED)
    phased = Selective(chunked, IN_FULL, travel, MIXED, then=_in_phases)
    steps = zip(_outputs_of_steps(flat, travel), _outputs_of_steps(phased, travel), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(flat.memories, phased.memories)


# Tokens left out


class TokensByContract:
    """What is held of each exchange's result, where only the tokens whose V changed most are sent.

    Results have the tokens of rank 0, of rank 1, .. in their `gather_dim`, on the rank of some
    heads: what changed of a token is summed over these ranks.
    """

    def __init__(self, base: Captured, compare: str) -> None:
        self.compare = compare
        self.sites = [[leg.exchange for leg in site.legs] for site in base.found.sites]
        self.places = {piece.start: place for place, piece in enumerate(base.pieces)}
        self.held: dict[int, list[Tensor]] = {}
        self.seen: dict[int, list[Tensor]] = {}

    def step(self, exact: Sequence[list[Tensor]], count: int | None) -> list[list[Tensor]]:
        """What results from each exchange; `count` tokens of every rank are sent, None: all."""
        found = list(exact)
        for legs in self.sites:
            places = [self.places[item.start] for item in legs[:3]]
            tokens = None if count is None else self._changed_most(legs, exact, count)
            for place, leg in zip(places, legs, strict=False):
                if tokens is not None:
                    found[place] = [
                        self._merged(old, new, leg.gather_dim, tokens)
                        for old, new in zip(self.held[place], exact[place], strict=True)
                    ]
                self.held[place], self.seen[place] = found[place], exact[place]
        return found

    def _changed_most(
        self, legs: Sequence[Any], exact: Sequence[list[Tensor]], count: int
    ) -> Tensor:
        """A mask of tokens: [P * S]."""
        place, dim = self.places[legs[2].start], legs[2].gather_dim
        compared = (self.held if self.compare == "sent" else self.seen)[place]
        change = sum(
            (new.double() - old.double()).abs().movedim(dim, 0).flatten(1).sum(1)
            for new, old in zip(exact[place], compared, strict=True)
        )
        assert isinstance(change, Tensor)
        by_rank = change.view(NUM_RANKS, -1)
        chosen = by_rank.topk(count, 1).indices
        return torch.zeros_like(by_rank, dtype=torch.bool).scatter(1, chosen, True).flatten()

    @staticmethod
    def _merged(old: Tensor, new: Tensor, dim: int, tokens: Tensor) -> Tensor:
        shape = [1] * new.dim()
        shape[dim] = -1
        return torch.where(tokens.view(shape), new, old)


def _exact_results(
    selective: Selective, inputs: list[list[Any]], step: Step
) -> Sequence[list[Tensor]]:
    """What would result from each exchange if all that was packed travelled."""
    packed = [bound(piece.start)["input"] for piece in selective.base.pieces]
    return selective.exact(inputs, dict(zip(packed, step.packed, strict=True))).results


@pytest.mark.parametrize("compare", ["sent", "seen"])
@pytest.mark.parametrize(
    ("name", "omitted"), [("flux", 0.5), ("sd3", 0.25), ("sd3", 0.5), ("sd3", 1.0)]
)
def test_tokens_whose_v_changed_least_are_taken_from_memory(
    name: str, compare: Literal["sent", "seen"], omitted: float
) -> None:
    travel = Travel((FULL,) * 4, omitted)
    selective = Selective(model(name), IN_FULL, travel, compare=compare)
    reference = TokensByContract(selective.base, compare)
    tokens = int(selective.base.found.sites[0].v.tokens_per_rank)
    sent = max(1, tokens - int(omitted * tokens))
    assert 1 <= sent < tokens
    for number, inputs in enumerate(selective.base.inputs(4)):
        step = selective.step(travel if number else IN_FULL, inputs)
        exact = _exact_results(selective, inputs, step)
        assert same(step.results, reference.step(exact, sent if number else None))
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
    assert not same(step.results, exact)


@every_model
def test_of_some_tokens_as_many_bytes_travel_as_they_have(name: str) -> None:
    base, travel = model(name), Travel((FULL, 4, FULL, 8), 0.5)
    selective = Selective(base, IN_FULL, travel)
    graph = selective.variants[travel].graph
    found = selective.results[travel].recognition
    assert found is not None
    assert _num_gathers(graph) == _num_gathers(base.graph) + len(base.found.sites)
    for before, after in zip(base.found.sites, found.sites, strict=True):
        tokens = int(before.v.tokens_per_rank)
        for old, new in zip(before.legs, after.legs, strict=True):
            bits = travel.bits_of()[old.role]
            share = 1 if old.role == "o" else (tokens - tokens // 2) / tokens
            group, whole = int(old.head_size), int(old.exchange.size_bytes)
            coded = whole // (4 * group) * (group * bits // 8 + 1)
            assert new.exchange.size_bytes == share * (whole if bits == FULL else coded)


@pytest.mark.parametrize("name", ["sd3"])
def test_some_tokens_coded_are_remembered_the_same_by_both_sides(name: str) -> None:
    travel = Travel.all_in(4)
    some = Travel(travel.bits, 0.5)
    selective = Selective(model(name), IN_FULL, some)
    for kind, inputs in zip((IN_FULL, some, some), selective.base.inputs(3), strict=True):
        before = [[held.clone() for _, held in mine] for mine in selective.pairs()]
        step = selective.step(kind, inputs)
        for pairs in selective.pairs():
            expected = exchanged([sent for sent, _ in pairs])
            held = [item for _, item in pairs]
            assert same([held], [expected])
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
    for place, old in enumerate(before):
        kept = [
            (ours == theirs).float().mean()
            for ours, theirs in zip(
                (held for _, held in selective.pairs()[place]), old, strict=True
            )
        ]
        way_out = place % 4 == 3
        assert max(kept) < 0.1 if way_out else 0.5 <= min(kept) <= max(kept) < 0.6


@pytest.mark.parametrize("compare", ["sent", "seen"])
def test_some_tokens_in_phases_are_the_same_bit_for_bit(compare: Literal["sent", "seen"]) -> None:
    base, travel = model("flux"), Travel((FULL, 4, FULL, 8), 0.5)
    flat = Selective(base, IN_FULL, travel, compare=compare)
    phased = Selective(base, IN_FULL, travel, compare=compare, then=_in_phases)
    steps = zip(_outputs_of_steps(flat, travel), _outputs_of_steps(phased, travel), strict=True)
    assert all(equal_on_every_rank(ours, theirs) for ours, theirs in steps)
    assert same(flat.memories, phased.memories)


def test_a_token_that_is_not_finite_is_sent_and_not_remembered() -> None:
    travel = Travel((FULL,) * 4, 0.5)
    selective = Selective(model("sd3"), IN_FULL, travel)
    first, second, third = selective.base.inputs(3)
    selective.step(IN_FULL, first)
    step = selective.step(travel, _broken(second, selective.base.names, float("nan")))
    assert all(item[0].isnan().any() for item in step.outputs)
    assert all(memory.isfinite().all() for mine in selective.memories for memory in mine)
    after = selective.step(travel, third)
    assert all(item[0].isfinite().all() for item in after.outputs)


def test_tokens_are_left_out_of_whole_exchanges_only() -> None:
    some = Travel((FULL,) * 4, 0.5)
    coded = Travel((4, 4, 4, 4), 0.5)
    for travel, plain in ((some, IN_FULL), (coded, Travel.all_in(4))):
        selective = Selective(_chunked("sd3"), IN_FULL, travel)
        (declined,) = selective.results[travel].declined
        assert "chunks" in declined.reason
        expected = Selective(_chunked("sd3"), IN_FULL, plain, Travel.all_in(4))
        for kind, inputs in zip((IN_FULL, plain), selective.base.inputs(2), strict=True):
            ours = selective.step(kind if kind == IN_FULL else travel, inputs)
            assert equal_on_every_rank(ours.outputs, expected.step(kind, inputs).outputs)


def test_tokens_of_roles_that_travel_together_are_not_left_out() -> None:
    base = idiom("packed by stack")
    travel = Travel((FULL,) * 4, 0.5)
    selective = Selective(base, IN_FULL, travel)
    (declined,) = selective.results[travel].declined
    assert "travel together" in declined.reason


# Declined


def idiom(name: str, num_ranks: int = NUM_RANKS) -> Captured:
    (found,) = (item for item in IDIOMS if item.name == name)
    found = replace(found, num_ranks=num_ranks)
    with fake_ranks(num_ranks):
        gm, values = capture_call(found.model(), *found.arguments(), dynamic=found.dynamic)
        return captured_of(gm, values)


@pytest.mark.parametrize("travel", [IN_FULL, Travel.all_in(4)], ids=str)
@pytest.mark.parametrize("measures_drift", [True, False])
def test_symbolic_sizes_are_declined_and_the_graph_stays_to_the_letter(
    travel: Travel, measures_drift: bool
) -> None:
    _assert_declined(_dynamic(), travel, measures_drift, "symbolic sizes", "dynamic=False")


@functools.cache
def _dynamic() -> Captured:
    return idiom("dynamic")


@pytest.mark.parametrize("travel", [IN_FULL, Travel.all_in(4)], ids=str)
@pytest.mark.parametrize("measures_drift", [True, False])
def test_heads_that_8_do_not_divide_are_declined_and_the_graph_stays_to_the_letter(
    travel: Travel, measures_drift: bool
) -> None:
    _assert_declined(small_model("sd3", 12), travel, measures_drift, "heads of 12 elements", "8")


def _assert_declined(base: Captured, travel: Travel, measures_drift: bool, *words: str) -> None:
    assert base.pieces
    own = base.copy()
    before = str(own.graph)
    with fake_ranks(NUM_RANKS):
        select = SelectVMajor(travel, EVERYTHING, measures_drift=measures_drift)
        result = select.run(own.graph, own.found)
    assert not result.changed
    assert str(own.graph) == before
    assert len(result.declined) == len(own.pieces)
    assert all(word in item.reason for item in result.declined for word in words)


def test_an_exchange_that_is_declined_leaves_others_alone() -> None:
    """V of four elements per head, and O with it, stay as they are; Q and K are coded."""
    base = idiom("small values")
    travel = Travel.all_in(8)
    selective = Selective(base, IN_FULL, travel)
    (site,) = base.found.sites
    declined = selective.results[travel].declined
    assert len(declined) == 2
    assert all("heads of 4 elements" in item.reason for item in declined)
    assert len(selective.memories[0]) == 4
    for kind, inputs in zip((IN_FULL, travel), base.inputs(2), strict=True):
        step = selective.step(kind, inputs)
        exact = _exact_results(selective, inputs, step)
        places = [base.pieces.index(leg.exchange) for leg in site.legs]
        for place, is_coded in zip(places, (True, True, False, False), strict=True):
            is_same = same([step.results[place]], [exact[place]])
            assert is_same == (kind.is_full or not is_coded)
