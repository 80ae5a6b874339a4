# SPDX-License-Identifier: Apache-2.0
"""A graph for any size is compiled for each size that it is called with, up to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.compiler import per_shape
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.ir.aten import ALL_TO_ALL
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.say_once import forget_what_was_said
from tests.support.plain_dits import WIDTH, Block

CONFIG = CompileConfig.from_options({"shard": {"min_gain": 0}})


def test_sizes_beyond_the_limit_are_not_shared_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(per_shape, "MAX_SIZES", 2)
    forget_what_was_said()
    num_exchanges: list[int] = []

    def keep(gm: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        num_exchanges.append(len(gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL)))
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, CONFIG, keep)

    torch._dynamo.reset()
    model = Block().eval()
    with fake_ranks(2), torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        for tokens in (9, 11, 13, 11):  # the first is captured for its size alone
            compiled(torch.randn(1, tokens, WIDTH))
        assert num_exchanges == [4, 4, 4]
        assert "more than 2 sets of sizes" not in caplog.text
        for tokens in (15, 17):  # nothing is exchanged: the result is that of the model
            x = torch.randn(1, tokens, WIDTH)
            torch.testing.assert_close(compiled(x), model(x))
        compiled(torch.randn(1, 13, WIDTH))
    assert num_exchanges == [4, 4, 4, 0]
    assert caplog.text.count("more than 2 sets of sizes") == 1
