# SPDX-License-Identifier: Apache-2.0
"""Every public architecture: a site per Ulysses attention, in one graph, with the right roles."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.compiler.explain import Explanation
from cocodiff_compile.lab.small_models import SMALL_MODELS
from tests.support.captured import fake_ranks

JOINT = ("flux", "flux2", "sd3", "qwen-image", "chroma", "hunyuan-video")
ALWAYS_MASKED = ("hunyuan-video",)
MASKS_THE_TEXT_ALONE = ("ltx",)
"""Whose cross-attention exchanges nothing."""
ON_TWELVE = ("flux", "sd3", "qwen-image", "wan")
SHARED = {"shard": {"min_gain": 0}}
SLOW = [pytest.mark.slow]
CASES = [(name, False) for name in SMALL_MODELS]
CASES += [(name, True) for name, small in SMALL_MODELS.items() if small.has_mask]


@functools.cache
def _explain(name: str, num_ranks: int, masked: bool) -> tuple[Explanation, int]:
    with fake_ranks(num_ranks):
        return _explain_on_ranks(name, masked, num_layers=1 if masked or num_ranks > 4 else 2)


def _explain_on_ranks(name: str, masked: bool, num_layers: int) -> tuple[Explanation, int]:
    small = SMALL_MODELS[name]
    model = small.build(num_layers=num_layers, heads=12)
    expected = small.num_ulysses_attentions(model)
    inputs = small.inputs(model, masked=masked, batch=2 if masked else 1)
    torch._dynamo.reset()
    as_captured = {**SHARED, "tapa": "off", "v_first": False}
    return cocodiff_compile.explain(model, options=as_captured, **inputs), expected


def _module(weight_path: str) -> str:
    return weight_path.rsplit(".", 1)[-1]


@pytest.mark.parametrize(
    ("name", "masked", "num_ranks"),
    [
        *((*case, 4) for case in CASES),
        *(
            pytest.param(name, masked, 12, marks=[] if name in ON_TWELVE and not masked else SLOW)
            for name, masked in CASES
        ),
    ],
)
def test_every_ulysses_attention_is_a_site(name: str, masked: bool, num_ranks: int) -> None:
    explanation, expected = _explain(name, num_ranks, masked)
    assert len(explanation.graphs) == 1, "one graph, no break"
    assert len(explanation.sites) == expected
    assert not explanation.declined
    assert not explanation.graphs[0].report.recognition.unrelated
    for site in explanation.sites:
        assert {leg.num_heads for leg in site.legs} == {12}
        assert {leg.head_size for leg in site.legs} == {16}
        assert all(leg.exchange.num_ranks == num_ranks for leg in site.legs)
        assert len(site.exchanges) == 4
    masks = [site.attention.mask for site in explanation.sites]
    is_masked = masked and name not in MASKS_THE_TEXT_ALONE
    assert any(masks) == (is_masked or name in ALWAYS_MASKED)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_roles_are_those_of_the_modules_behind_them(name: str) -> None:
    """Roles come from the data flow; the modules' names, which no pass reads, must agree."""
    spelling = {
        "q": ("to_q", "add_q_proj"),
        "k": ("to_k", "add_k_proj"),
        "v": ("to_v", "add_v_proj"),
    }
    explanation, _ = _explain(name, 4, False)
    for site in explanation.sites:
        for leg in (site.q, site.k, site.v):
            for projection in leg.projections:
                stack = projection.node.meta["nn_module_stack"]
                path = max((entry[0] for entry in stack.values()), key=len)
                assert _module(path) in (*spelling[leg.role], "to_qkv_mlp_proj"), path
                assert projection.is_fused == (_module(path) == "to_qkv_mlp_proj")


@pytest.mark.parametrize("name", JOINT)
def test_joint_attention_has_a_projection_per_stream(name: str) -> None:
    explanation, _ = _explain(name, 4, False)
    double = [
        site
        for site in explanation.sites
        if re.match(r"transformer_blocks\.\d+\.attn", site.module_path)
    ]
    assert double
    for site in double:
        assert [len(leg.projections) for leg in (site.q, site.k, site.v)] == [2, 2, 2]


def test_a_fused_gemm_is_cut_into_query_key_and_value() -> None:
    explanation, _ = _explain("flux2", 4, False)
    fused = [site for site in explanation.sites if site.module_path.startswith("single_")]
    width = 12 * 16
    assert len(fused) == 2
    for site in fused:
        columns = [leg.projections[0].columns for leg in (site.q, site.k, site.v)]
        assert columns == [(0, width), (width, 2 * width), (2 * width, 3 * width)]


def test_the_parallel_mlp_of_a_single_stream_block_is_independent() -> None:
    explanation, _ = _explain("flux", 4, False)
    single = [site for site in explanation.sites if site.module_path.startswith("single_")]
    assert len(single) == 2
    for site in single:
        paths = [
            max((entry[0] for entry in node.meta["nn_module_stack"].values()), key=len)
            for node in site.independent
        ]
        assert any(path.endswith("proj_mlp") for path in paths), paths


@pytest.mark.parametrize("rank", [0, 3])
def test_a_group_that_is_a_part_of_the_world(rank: int) -> None:
    small = SMALL_MODELS["wan"]
    with fake_ranks(4, rank=rank):
        model = small.build(num_layers=1)
        inputs = small.inputs(model)
        torch._dynamo.reset()
        options = {"shard": {"min_gain": 0, "degree": 2}}
        (site,) = cocodiff_compile.explain(model, options=options, **inputs).sites
    assert site.q.exchange.ranks == ((0, 1) if rank == 0 else (2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    small = SMALL_MODELS["sd3"]
    with fake_ranks(4):
        model = small.build(num_layers=1, dtype=dtype)
        inputs = small.inputs(model)
        torch._dynamo.reset()
        (site,) = cocodiff_compile.explain(model, options=SHARED, **inputs).sites
    tokens, heads, size = site.v.tokens_per_rank, site.v.num_heads, site.v.head_size
    assert site.v.exchange.size_bytes == tokens * heads * size * 2


def test_regional_compilation_finds_the_site_of_each_block() -> None:
    small = SMALL_MODELS["flux"]
    with fake_ranks(4):
        model = small.build(num_layers=2)
        inputs = small.inputs(model)
        torch._dynamo.reset()
        with cocodiff_compile.collect_reports() as reports, torch.no_grad():
            model.compile_repeated_blocks(backend="cocodiff", fullgraph=True, options=SHARED)
            model(**inputs)
    # One graph serves all blocks of a kind, but for the first: its inputs may have other strides.
    assert len(reports) in (2, 3, 4)
    assert all(len(report.summary["sites"]) == 1 for report in reports)


@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_a_small_model_is_seeded_and_keeps_the_global_rng(name: str) -> None:
    state = torch.get_rng_state()
    first = SMALL_MODELS[name].build(num_layers=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    second = SMALL_MODELS[name].build(num_layers=1)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
