"""parallelize: refuses what it cannot do, and computes what one process computes."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize
from cocodiff_compile.parallel.plans import plan_for

WORLD_SIZE = 4
CASES = [(name, False) for name in SMALL_MODELS]
CASES += [(name, True) for name, small in SMALL_MODELS.items() if small.has_mask]


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def _flux() -> Any:
    return SMALL_MODELS["flux"].build(num_layers=1)


# What one process computes, on real ranks.


def _difference(name: str, masked: bool, degree: int) -> float:
    """Returns the largest difference between the parallel and the single-process output. Each
    Ulysses group has its own inputs.
    """
    small = SMALL_MODELS[name]
    seed = dist.get_rank() // degree
    model = small.build()
    inputs = small.inputs(model, batch=2, masked=masked, seed=seed)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(**inputs))
        actual = pytree.tree_leaves(parallelize(model, ulysses_degree=degree)(**inputs))
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))


def _differences(_rank: int, _world_size: int) -> dict[Any, float | str]:
    results: dict[Any, float | str] = {}
    for case in [*((*case, WORLD_SIZE) for case in CASES), ("flux", False, 2), ("chroma", True, 2)]:
        try:
            results[case] = _difference(*case)
        except Exception:
            # The same on every rank, or the timeout ends it.
            results[case] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def differences() -> list[dict[Any, float | str]]:
    return run_local_ranks(_differences, WORLD_SIZE, timeout_s=300)


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "masked"), CASES)
def test_four_ranks_compute_what_one_computes(
    differences: list[dict[Any, float | str]], name: str, masked: bool
) -> None:
    for by_case in differences:
        difference = by_case[name, masked, WORLD_SIZE]
        assert isinstance(difference, float), difference
        assert difference < 1e-5


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "masked"), [("flux", False), ("chroma", True)])
def test_two_groups_of_two_compute_apart(
    differences: list[dict[Any, float | str]], name: str, masked: bool
) -> None:
    for by_case in differences:
        difference = by_case[name, masked, 2]
        assert isinstance(difference, float), difference
        assert difference < 1e-5


@pytest.mark.parametrize("name", ["chroma", "hunyuan-video", "ltx", "qwen-image"])
def test_a_mask_matters_more_than_the_tolerance(name: str) -> None:
    """The parity above would otherwise pass with the mask in the wrong order."""
    small = SMALL_MODELS[name]
    model = small.build()
    masked, whole = (small.inputs(model, batch=2, masked=m) for m in (True, False))
    with torch.no_grad():
        outputs = [pytree.tree_leaves(model(**inputs))[0] for inputs in (masked, whole)]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


# Refusals.


def test_refuses_without_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        parallelize(_flux())


@pytest.mark.usefixtures("fake_ranks")
class TestRefuses:
    def test_what_is_no_diffusers_model(self) -> None:
        with pytest.raises(ValueError, match="Linear is not a diffusers model"):
            parallelize(nn.Linear(2, 2))

    def test_a_model_twice(self) -> None:
        model = parallelize(_flux())
        with pytest.raises(ValueError, match="already"):
            parallelize(model)

    def test_a_degree_of_one(self) -> None:
        with pytest.raises(ValueError, match="nothing to parallelise"):
            parallelize(_flux(), ulysses_degree=1)

    @pytest.mark.parametrize("degree", [3, 8, 0])
    def test_a_degree_that_does_not_divide_the_world(self, degree: int) -> None:
        with pytest.raises(ValueError, match=rf"{degree} does not divide .* 4 ranks.*\[2, 4\]"):
            parallelize(_flux(), ulysses_degree=degree)

    def test_fewer_heads_than_ranks(self) -> None:
        model = SMALL_MODELS["flux"].build(num_layers=1, heads=3)
        with pytest.raises(ValueError, match=r"3 heads, fewer .*degree 4.*at most 3"):
            parallelize(model)
        parallelize(model, ulysses_degree=2)  # untouched by the refusal

    def test_a_class_without_plan(self) -> None:
        model = _flux()
        model.__class__ = type("Another", (type(model),), {"_cp_plan": None})
        with pytest.raises(ValueError, match="Another: pass `plan=`"):
            parallelize(model)

    def test_an_unknown_processor(self) -> None:
        model = SMALL_MODELS["sd3"].build(num_layers=1)
        model.transformer_blocks[0].attn.processor = _Custom()
        with pytest.raises(ValueError, match=r"transformer_blocks.0.attn' uses _Custom"):
            parallelize(model)

    def test_fused_projections(self) -> None:
        model: Any = SMALL_MODELS["sd3.5"].build(num_layers=1)
        model.fuse_qkv_projections()
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            parallelize(model)

    def test_token_replace(self) -> None:
        model: Any = SMALL_MODELS["hunyuan-video"].build(num_layers=1)
        model.register_to_config(image_condition_type="token_replace")
        with pytest.raises(ValueError, match="token_replace"):
            parallelize(model)

    def test_an_attention_backend_without_context_parallel(self) -> None:
        model = _flux()
        model.transformer_blocks[0].attn.processor._attention_backend = "flex"
        with pytest.raises(ValueError, match=r"'flex'.*set_attention_backend"):
            parallelize(model)

    @pytest.mark.parametrize(
        ("shape", "names", "message"),
        [((4,), ("ulysses",), "'ring'"), ((2, 2), ("ring", "ulysses"), "ring attention")],
    )
    def test_a_mesh_diffusers_cannot_use(self, shape: Any, names: Any, message: str) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ValueError, match=message):
            parallelize(_flux(), mesh=mesh)

    def test_a_mesh_and_another_degree(self) -> None:
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("ring", "ulysses"))
        with pytest.raises(ValueError, match="ulysses_degree=2"):
            parallelize(_flux(), mesh=mesh, ulysses_degree=2)

    def test_a_plan_that_names_no_argument(self) -> None:
        from diffusers.models._modeling_parallel import ContextParallelInput  # noqa: PLC0415

        model = _flux()
        with pytest.raises(ValueError, match="'pixels'"):
            parallelize(model, plan={"": {"pixels": ContextParallelInput(split_dim=1)}})
        assert model._parallel_config is None

    @pytest.mark.parametrize("compiled", ["", "static", "dynamic"])
    def test_tokens_that_do_not_divide_under_a_plan_of_ones_own(self, compiled: str) -> None:
        small = SMALL_MODELS["flux"]
        model = _flux()
        parallelize(model, plan=model._cp_plan)
        inputs = small.inputs(model, text_tokens=10)
        if compiled:
            torch._dynamo.reset()
            dynamic = compiled == "dynamic"
            model = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
        message = "'encoder_hidden_states' .* 10 tokens.*degree 4"
        with torch.no_grad(), pytest.raises(Exception, match=message) as raised:
            model(**inputs)
        assert compiled or raised.type is ValueError

    def test_gradients_where_tokens_do_not_divide(self) -> None:
        model = parallelize(_flux())
        inputs = SMALL_MODELS["flux"].inputs(model, text_tokens=10)
        with pytest.raises(ValueError, match="inference only"):
            model(**inputs)

    @pytest.mark.parametrize("heads", [4, 6])
    def test_an_adapter_where_tokens_do_not_divide(self, heads: int) -> None:
        from diffusers.models.transformers.transformer_flux import (  # noqa: PLC0415
            FluxIPAdapterAttnProcessor,
        )

        model: Any = SMALL_MODELS["flux"].build(num_layers=1, heads=heads)
        attention = model.transformer_blocks[0].attn
        attention.processor = FluxIPAdapterAttnProcessor(16 * heads, 32)
        inputs = SMALL_MODELS["flux"].inputs(parallelize(model), text_tokens=10)
        with torch.no_grad(), pytest.raises(ValueError, match="an adapter's"):
            model(**inputs)

    def test_a_mask_over_text_only(self) -> None:
        small = SMALL_MODELS["chroma"]
        model = parallelize(small.build(num_layers=1))
        inputs = small.inputs(model, masked=True)
        inputs["attention_mask"] = inputs["attention_mask"][:, :24]
        with torch.no_grad(), pytest.raises(ValueError, match="mask of 24 tokens"):
            model(**inputs)


class _Custom:
    def __call__(self, _attn: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


# The rest of the contract.


@pytest.mark.usefixtures("fake_ranks")
def test_a_plan_leaves_what_it_maps_to_none() -> None:
    model: Any = SMALL_MODELS["sd3"].build(num_layers=2)
    model.transformer_blocks[1].attn.processor = custom = _Custom()
    parallelize(model, plan={"transformer_blocks.1": None})
    assert model.transformer_blocks[1].attn.processor is custom
    assert model.transformer_blocks[0].attn.processor._parallel_config is not None


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_what_is_known_of_a_model_is_in_its_plan(name: str) -> None:
    """The tokens of a model would otherwise be padded without any attention being told."""
    model = SMALL_MODELS[name].build(num_layers=1)
    plan = plan_for(model, None)
    assert plan.streams is not None
    split = {
        stream
        for (module, key), stream in plan.streams.splits.items()
        if key in plan.shards.get(module, ())
    }
    assert split == set(plan.streams.names)
    gathers = [name for name, entry in plan.shards.items() if not isinstance(entry, dict)]
    assert gathers
    assert all(plan.streams.gathered_at(name) in split for name in gathers)
    parallelize(model)
    for module_name, module in model.named_modules():
        config = getattr(getattr(module, "processor", None), "_parallel_config", None)
        if config is not None and re.fullmatch(SMALL_MODELS[name].ulysses_attention, module_name):
            assert set(config.key_streams) <= split


@pytest.mark.usefixtures("fake_ranks")
def test_a_given_mesh_serves_two_models() -> None:
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("ring", "ulysses"))
    groups = [parallelize(_flux(), mesh=mesh)._parallel_config for _ in range(2)]
    assert all(config.context_parallel_config._mesh is mesh for config in groups)


@pytest.mark.usefixtures("fake_ranks")
def test_the_device_count_is_patched_for_the_call_only() -> None:
    before = torch.accelerator.device_count
    parallelize(_flux())
    assert torch.accelerator.device_count is before


@pytest.mark.parametrize("module", ["cocodiff_compile", "cocodiff_compile.parallel"])
def test_importing_does_not_import_diffusers(module: str) -> None:
    code = f"import sys, {module}; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_diffusers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cocodiff_compile.parallel.apply", None)
    for name in [name for name in sys.modules if name.startswith("cocodiff_compile.parallel.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'cocodiff-compile\[diffusers\]'"):
        parallelize(nn.Linear(2, 2))


@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_a_small_model_is_seeded_and_keeps_the_global_rng(name: str) -> None:
    state = torch.get_rng_state()
    first = SMALL_MODELS[name].build(num_layers=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    second = SMALL_MODELS[name].build(num_layers=1)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
