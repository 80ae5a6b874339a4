"""The computation alone: same shapes, same work, no collective left."""

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from cocodiff_compile.bench.without_exchanges import ComputeOnly, copy_instead
from cocodiff_compile.graph.aten import ALL_GATHER, ALL_TO_ALL, WAIT
from cocodiff_compile.lab.fake_ranks import fake_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize


def _collective_graph(splits_out: list[int]) -> Graph:
    world = dist.group.WORLD
    assert world is not None

    def step(value: Tensor) -> Tensor:
        exchanged = WAIT(ALL_TO_ALL(value + 1, splits_out, [2, 2], world.group_name))
        result: Tensor = WAIT(ALL_GATHER(exchanged, 2, world.group_name)) * 2
        return result

    return make_fx(step, tracing_mode="fake")(torch.zeros(4, 3)).graph


def test_collectives_become_copies_of_what_they_would_return() -> None:
    with fake_ranks(2):
        graph = _collective_graph([2, 2])
    copy_instead(graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    copies = [target for target in targets if target is torch.ops.cocodiff_bench.copy.default]
    assert len(copies) == 2
    assert not {ALL_TO_ALL, ALL_GATHER, WAIT} & set(targets)
    value = torch.arange(12.0).reshape(4, 3)
    result = torch.fx.GraphModule(torch.nn.Module(), graph)(value)
    assert torch.equal(result, torch.cat([value + 1] * 2) * 2)


def test_a_copy_is_no_view_of_what_it_copies() -> None:
    value = torch.zeros(4)
    torch.ops.cocodiff_bench.copy(value, 1).fill_(1)
    assert torch.equal(value, torch.zeros(4))


def test_a_collective_that_changes_the_size_unevenly_is_refused() -> None:
    with fake_ranks(2):
        graph = _collective_graph([2, 3])
    with pytest.raises(ValueError, match=r"\(5, 3\) of \(4, 3\)"):
        copy_instead(graph)


def test_a_model_compiles_and_its_collectives_are_remembered() -> None:
    small = SMALL_MODELS["flux"]
    backend = ComputeOnly()
    with fake_ranks(2), torch.no_grad():
        model = small.build(num_layers=1, num_single_layers=2)
        inputs = small.inputs(model)
        parallelize(model)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        sample = small.sample(compiled(**inputs))
    assert sample.shape == inputs["hidden_states"].shape
    assert len(backend.collectives) == 3 * 4 + 1  # three attentions and the gathered result
    assert {item.ranks for item in backend.collectives} == {(0, 1)}
