# SPDX-License-Identifier: Apache-2.0
"""Graphs that Dynamo captured for any size, shared out: one graph is right for several resolutions,
on every simulated rank, where tokens divide; where they do not, there is a graph for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.collect import collect_reports
from cocodiff_compile.shard.any_size import is_for_any_size
from tests.support.plain_dits import WIDTH, Block

NUM_RANKS = 4
OPTIONS = {"shard": {"min_gain": 0}, "topology": "flat"}


def _compiled(model: Callable[..., Any], graphs: list[GraphModule], **options: Any) -> Any:
    """Returns a model whose graphs run on all simulated ranks; asserts that these agree."""
    config = CompileConfig.from_options({**OPTIONS, **options})

    def generate(gm: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        graphs.append(gm)
        is_shared = bool(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))

        def call(*values: Any) -> Any:
            if not is_shared:
                return gm.forward(*values)
            given = [[*values[:-1], torch.tensor([rank])] for rank in range(NUM_RANKS)]
            groups = {"0": lambda _rank: range(NUM_RANKS)}
            first, *others = run_lockstep(gm.graph, given, groups)
            for other in others:
                assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))
            return first

        return make_boxed_func(call)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, config, generate)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend)


def _count(gm: GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "text", "num_graphs"),
    [
        ("flux", 16, 2),
        ("flux", 18, 2),  # the text does not divide: it is padded
        pytest.param("sd3.5", 16, 2, marks=SLOW),
        pytest.param("qwen-image", 16, 2, marks=SLOW),
        pytest.param("wan", 16, 3, marks=SLOW),  # one more where the number of frames changes
        pytest.param("hunyuan-video", 16, 3, marks=SLOW),
        pytest.param("z-image", 16, 2, marks=SLOW),
    ],
)
def test_one_graph_is_shared_out_for_several_resolutions(
    name: str, text: int, num_graphs: int
) -> None:
    small = SMALL_MODELS[name]
    graphs: list[GraphModule] = []
    with fake_ranks(NUM_RANKS), torch.no_grad(), collect_reports() as reports:
        torch.manual_seed(0)
        model = small.build(num_layers=1, heads=8, head_size=16)
        compiled = _compiled(model, graphs)
        for tokens in (64, 144, 256):
            inputs = small.inputs(model, image_tokens=tokens, text_tokens=text)
            expected = small.sample(model(**inputs))
            torch.testing.assert_close(
                small.sample(compiled(**inputs)), expected, rtol=1e-5, atol=1e-5
            )
    assert len(graphs) == num_graphs
    first, *others = graphs
    assert not is_for_any_size(first.graph)
    for gm in others:
        assert is_for_any_size(gm.graph)
        assert _count(gm, ALL_TO_ALL) == _count(first, ALL_TO_ALL)
        assert 1 <= _count(gm, ALL_GATHER) <= _count(first, ALL_GATHER)
    sites = [len(report.summary["sites"]) for report in reports]
    assert sites == [sites[0]] * num_graphs


def test_tokens_that_do_not_divide_are_compiled_for_each_size() -> None:
    model = Block().eval()
    graphs: list[GraphModule] = []
    with fake_ranks(NUM_RANKS), torch.no_grad():
        compiled = _compiled(model, graphs)
        for tokens in (9, 13, 18, 13, 16, 24, 32):
            x = torch.randn(1, tokens, WIDTH)
            torch.testing.assert_close(compiled(x), model(x))
    assert all(_count(gm, ALL_TO_ALL) == 4 for gm in graphs)
    assert [is_for_any_size(gm.graph) for gm in graphs] == [False, False, False, True]


def test_a_size_that_does_not_divide_is_captured_anew() -> None:
    model = Block().eval()
    graphs: list[GraphModule] = []
    with fake_ranks(NUM_RANKS), torch.no_grad():
        compiled = _compiled(model, graphs)
        for tokens in (8, 12, 16, 24, 18, 20):
            x = torch.randn(1, tokens, WIDTH)
            torch.testing.assert_close(compiled(x), model(x))
    assert [is_for_any_size(gm.graph) for gm in graphs] == [False, True, False]


def _scaled(x: Tensor, scale: float) -> Tensor:
    q = (x * scale).unflatten(-1, (8, -1)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q + scale, q * 2).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("tokens", [(16, 24, 32), (9, 13, 18)])
def test_floats_may_change_with_sizes(tokens: tuple[int, ...]) -> None:
    """Dynamo puts a float that changes into a tensor; outside of Dynamo, what it holds is not known
    while a graph is compiled.
    """
    graphs: list[GraphModule] = []
    with fake_ranks(NUM_RANKS), torch.no_grad():
        compiled = _compiled(_scaled, graphs)
        for place, count in enumerate(tokens):
            x = torch.randn(1, count, WIDTH)
            given = (x, 0.5 + place)
            torch.testing.assert_close(compiled(*given), _scaled(*given))
            torch.testing.assert_close(compiled(x, 0.1), _scaled(x, 0.1))
    assert all(_count(gm, ALL_TO_ALL) == 4 for gm in graphs)


def test_a_graph_without_attention_is_compiled_once_for_any_size() -> None:
    graphs: list[GraphModule] = []
    with fake_ranks(NUM_RANKS), torch.no_grad():
        compiled = _compiled(lambda x: functional.gelu(x) * 2, graphs)
        for tokens in (8, 9, 12, 13):
            compiled(torch.randn(1, tokens, WIDTH))
    assert len(graphs) == 2


def test_v_major_is_compiled_for_each_size() -> None:
    """It keeps caches by the places of tokens."""
    model = Block().eval()
    graphs: list[GraphModule] = []
    with fake_ranks(NUM_RANKS), torch.no_grad():
        compiled = _compiled(model, graphs, v_major={})
        for tokens in (8, 16, 24):
            compiled(torch.randn(1, tokens, WIDTH))
    assert not any(is_for_any_size(gm.graph) for gm in graphs)


def test_tokens_with_registers_that_do_not_divide_are_compiled_for_each_size() -> None:
    """The tokens of the call divide, those of the attention do not, and no concatenation says which
    of them do.
    """
    block = Block().eval()
    graphs: list[GraphModule] = []

    def model(x: Tensor) -> Tensor:
        return block(functional.pad(x, (0, 0, 0, 3)))

    with fake_ranks(NUM_RANKS), torch.no_grad():
        compiled = _compiled(model, graphs)
        for tokens in (16, 24, 32):
            x = torch.randn(1, tokens, WIDTH)
            torch.testing.assert_close(compiled(x), model(x))
    assert [is_for_any_size(gm.graph) for gm in graphs] == [False] * 3
    assert all(_count(gm, ALL_TO_ALL) == 4 for gm in graphs)
