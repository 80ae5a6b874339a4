"""Tests changes to a model before or after `parallelize`: it stays right, or it is refused."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import ContextParallelConfig
from diffusers.hooks import (
    HookRegistry,
    apply_group_offloading,
    apply_layer_skip,
    apply_layerwise_casting,
)
from diffusers.hooks.layer_skip import LayerSkipConfig
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize
from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import fake_ranks, recording_backend
from tests.support.live_mesh import parallelize_live

NUM_RANKS = 2

Change = Callable[[Any], Any]


# Changes of a model in place, or those that return another.


def _set_attn_processor(model: Any) -> None:
    model.set_attn_processor(FluxAttnProcessor())


def _set_one_attn_processor(model: Any) -> None:
    model.transformer_blocks[1].attn.set_processor(FluxAttnProcessor())


def _set_joint_processors(model: Any) -> None:
    model.set_attn_processor(JointAttnProcessor2_0())


def _share_a_processor_between_other_keys(model: Any) -> None:
    model.set_attn_processor(LTXVideoAttnProcessor())


def _fuse(model: Any) -> None:
    with torch.no_grad():
        model.fuse_qkv_projections()


def _fuse_and_unfuse(model: Any) -> None:
    _fuse(model)
    model.unfuse_qkv_projections()


def _set_ip_adapters(model: Any) -> None:
    torch.manual_seed(7)
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(64, 32, num_tokens=(3,)).eval())


class _LowRank(nn.Module):
    """A linear layer with a low-rank addition, as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base_layer(x) + self.up(self.down(x))
        return added


def _wrap_linears(model: Any) -> None:
    torch.manual_seed(7)
    model.proj_out = _LowRank(model.proj_out)
    model.context_embedder = _LowRank(model.context_embedder)
    for block in model.transformer_blocks:
        block.attn.to_q = _LowRank(block.attn.to_q)


def _wrap_and_unwrap_linears(model: Any) -> None:
    _wrap_linears(model)
    model.proj_out = model.proj_out.base_layer
    model.context_embedder = model.context_embedder.base_layer


def _replace_the_first_block(model: Any) -> None:
    other = SMALL_MODELS["qwen-image"].build(seed=9)
    model.transformer_blocks[0] = other.transformer_blocks[0]  # type: ignore[index, union-attr]


def _add_a_block(model: Any) -> None:
    other = SMALL_MODELS["qwen-image"].build(seed=9)
    model.transformer_blocks.append(other.transformer_blocks[0])  # type: ignore[index, union-attr]


def _load_state_dict(model: Any) -> None:
    model.load_state_dict(SMALL_MODELS["flux"].build(seed=9).state_dict())


def _compile_a_block(model: Any) -> None:
    """A block in a module that passes everything on to it."""
    model.transformer_blocks[0] = torch.compile(model.transformer_blocks[0], backend="eager")


def _double(model: Any) -> None:
    model.to(torch.float64)


def _copy(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.proj_out.weight.zero_()
    return other


def _checkpoint(model: Any) -> None:
    model.enable_gradient_checkpointing()


def _set_attention_backend(model: Any) -> None:
    model.set_attention_backend("native")


def _skip_a_layer(model: Any) -> None:
    apply_layer_skip(model, LayerSkipConfig([0], fqn="blocks"))


def _skip_attention_scores(model: Any) -> None:
    config = LayerSkipConfig([0], skip_attention=False, skip_attention_scores=True)
    apply_layer_skip(model, config)


def offload_by_model(model: Any) -> None:
    """Does what a pipeline does after each call once `enable_model_cpu_offload` was called."""
    remove_hook_from_module(model, recurse=True)
    accelerate.cpu_offload_with_hook(model, "cpu")


def _offload_by_layer(model: Any) -> None:
    remove_hook_from_module(model, recurse=True)
    accelerate.cpu_offload(model, "cpu")


def offload_by_group(model: Any) -> None:
    apply_group_offloading(
        model,
        onload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )


def _cast_layerwise(model: Any) -> None:
    apply_layerwise_casting(model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


_IP_TOKENS = {"joint_attention_kwargs": {"ip_hidden_states": [torch.ones(2, 1, 3, 32) / 3]}}

CHANGES: list[tuple[str, Change, dict[str, Any]]] = [
    ("flux", _set_attn_processor, {}),
    ("flux", _set_one_attn_processor, {}),
    ("flux", _fuse, {}),
    ("flux", _fuse_and_unfuse, {}),
    ("flux", _set_ip_adapters, _IP_TOKENS),
    ("flux", _load_state_dict, {}),
    ("flux", _copy, {}),
    ("flux", _checkpoint, {}),
    ("flux", _set_attention_backend, {}),
    ("flux", offload_by_model, {}),
    ("flux", _offload_by_layer, {}),
    ("flux", offload_by_group, {}),
    ("flux", _cast_layerwise, {}),
    ("flux", _compile_a_block, {}),
    ("flux", _double, {}),
    ("sd3", _set_joint_processors, {}),
    ("sd3", _fuse, {}),
    ("sd3", _fuse_and_unfuse, {}),
    ("sd3", _wrap_linears, {}),
    ("sd3", _wrap_and_unwrap_linears, {}),
    ("sd3", _offload_by_layer, {}),
    ("sd3", _copy, {}),
    ("ltx", _share_a_processor_between_other_keys, {}),
    ("qwen-image", _replace_the_first_block, {}),
    ("qwen-image", _add_a_block, {}),
    ("wan", _skip_a_layer, {}),
    ("qwen-image", _skip_attention_scores, {}),
    ("qwen-image", _offload_by_layer, {}),
]


def _id(case: Any) -> str:
    name, change, _ = case
    return f"{name}_{change.__name__.strip('_')}"


def _difference(actual: Any, expected: Any) -> float:
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    return max(float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs)


def _build(name: str, num_layers: int = 2) -> tuple[Any, dict[str, Any]]:
    small = SMALL_MODELS[name]
    model = small.build(num_layers=num_layers)
    return model, small.inputs(model, batch=2)


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    if next(model.parameters()).dtype == torch.float64:
        inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.double(), inputs)
    with torch.no_grad():
        return model(**inputs)


def _changed(change: Change, model: Any) -> Any:
    other = change(model)
    return model if other is None else other


def _run(case: Any, order: str) -> float:
    """The largest difference to one process, of two calls."""
    name, change, more = case
    single, inputs = _build(name)
    inputs |= more
    expected = _call(_changed(change, single), inputs)
    model, _ = _build(name)
    if order == "before":
        model = parallelize_live(_changed(change, model))
    else:
        parallelize_live(model)
        before = dict(inputs)
        before.pop("joint_attention_kwargs", None)
        _call(model, before)  # a call between, so that nothing is done for the first time
        model = _changed(change, model)
    differences = [_difference(_call(model, inputs), expected)]
    if change in (offload_by_model, _offload_by_layer):
        change(model)
    return max(*differences, _difference(_call(model, inputs), expected))


def _run_all(_rank: int, _num_ranks: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in CHANGES:
        for order in ("after", "before"):
            try:
                results[f"{_id(case)} {order}"] = _run(case, order)
            except Exception:
                # The same on every rank, or the timeout ends it.
                results[f"{_id(case)} {order}"] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local_ranks(_run_all, NUM_RANKS, timeout_s=300)


@pytest.mark.gloo
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("case", CHANGES, ids=_id)
def test_a_changed_model_computes_what_one_process_computes(
    ranks: list[dict[str, Any]], case: Any, order: str
) -> None:
    for results in ranks:
        result = results[f"{_id(case)} {order}"]
        assert isinstance(result, float), result
        assert result < 1e-5


# Refused, with a remedy that works.


class _Custom:
    def __call__(self, _attn: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def _set_unknown_processors(model: Any) -> None:
    model.transformer_blocks[0].attn.set_processor(_Custom())


def _blur_queries(model: Any) -> None:
    config = SmoothedEnergyGuidanceConfig([0], fqn="transformer_blocks")
    _apply_smoothed_energy_guidance_hook(model, config, 1.0, "blur")


def _unblur_queries(model: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(model).remove_hook("blur", recurse=True)


def _unfuse(model: Any) -> None:
    model.unfuse_qkv_projections()


REFUSED: list[tuple[str, Change, str, Change]] = [
    (
        "flux",
        _set_unknown_processors,
        r"transformer_blocks.0.attn' uses _Custom.*parallel_config=self._parallel_config",
        _set_attn_processor,
    ),
    ("sd3.5", _fuse, r"norms.*unfuse_qkv_projections\(\)", _unfuse),
    (
        "sd3",
        _blur_queries,
        "queries of 'transformer_blocks.0.attn.to_q'",
        _unblur_queries,
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "message", "remedy"), REFUSED, ids=lambda c: getattr(c, "__name__", "")
)
def test_what_would_be_wrong_is_refused_and_the_remedy_works(
    name: str, change: Change, message: str, remedy: Change
) -> None:
    model, inputs = _build(name)
    with fake_ranks(NUM_RANKS, rank=0):
        _call(parallelize(model), inputs)
        change(model)
        with pytest.raises(ValueError, match=rf"(?s)changed since parallelize\(\).*{message}"):
            _call(model, inputs)
        with pytest.raises(ValueError, match=message):
            _call(model, inputs)  # it is not forgotten
        remedy(model)
        _call(model, inputs)
    model, _ = _build(name)
    change(model)
    with fake_ranks(NUM_RANKS, rank=0), pytest.raises(ValueError, match=message):
        parallelize(model)


def test_a_backend_that_ignores_the_ranks_is_refused_for_as_long_as_it_is_active() -> None:
    model, inputs = _build("flux")
    with fake_ranks(NUM_RANKS, rank=0):
        _call(parallelize(model), inputs)
        with (
            attention_backend("_native_math"),
            pytest.raises(ValueError, match=r"'_native_math'.*set_attention_backend"),
        ):
            _call(model, inputs)
        _call(model, inputs)
        with pytest.raises(ValueError, match="does not support context parallelism"):
            model.set_attention_backend("_native_math")


def test_whoever_runs_forward_alone_is_told_too() -> None:
    model, inputs = _build("flux")
    with fake_ranks(NUM_RANKS, rank=0), torch.no_grad():
        parallelize(model)
        model.forward(**inputs)
        _set_unknown_processors(model)
        with pytest.raises(ValueError, match="uses _Custom"):
            model.forward(**inputs)


def test_parallelism_is_not_enabled_twice() -> None:
    model, _ = _build("flux")
    with fake_ranks(NUM_RANKS, rank=0):
        parallelize(model)
        with pytest.raises(RuntimeError, match="already applied"):
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=NUM_RANKS))


# Compiled.


@pytest.mark.parametrize(
    ("name", "change"),
    [("sd3", _fuse), ("qwen-image", _replace_the_first_block)],
)
def test_a_compiled_model_is_compiled_again_in_one_graph(name: str, change: Change) -> None:
    model, inputs = _build(name, num_layers=1)
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    with fake_ranks(NUM_RANKS, rank=0):
        compiled = torch.compile(
            parallelize(model), backend=recording_backend(graphs), fullgraph=True
        )
        _call(compiled, inputs)
        _call(compiled, inputs)
        assert len(graphs) == 1
        change(model)
        _call(compiled, inputs)
        _call(compiled, inputs)
        sites = [len(recognize(gm.graph).sites) for gm in graphs]
    assert len(graphs) == 2, "no graph break, and nothing is compiled at each call"
    assert sites == [SMALL_MODELS[name].num_ulysses_attentions(model)] * 2


def test_a_compiled_model_refuses_too() -> None:
    model, inputs = _build("flux", num_layers=1)
    torch._dynamo.reset()
    with fake_ranks(NUM_RANKS, rank=0):
        compiled = torch.compile(parallelize(model), backend="eager", fullgraph=True)
        _call(compiled, inputs)
        _set_unknown_processors(model)
        with pytest.raises(Exception, match=r"transformer_blocks.0.attn' uses _Custom"):
            _call(compiled, inputs)
