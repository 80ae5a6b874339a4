# SPDX-License-Identifier: Apache-2.0
"""Whole diffusers pipelines on real gloo ranks, with a transformer that the compiler shares out.

Every case is called as a user would, once uncompiled and once with compiled parts, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from cocodiff_compile.compiler.shard_graph import SharedCall
from cocodiff_compile.lab.distances import largest
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.tiny_pipelines import call_arguments, masked_prompts, tiny_pipeline
from cocodiff_compile.report.collect import collect_reports
from tests.ranks.test_shard_changed_models import offload_by_group, offload_by_model
from tests.support import pipeline_changes as change
from tests.support.pipeline_changes import by_block, by_broken_block, nothing, whole

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

TOLERANCE = 1e-3

Arguments = Mapping[str, Any]

LATENT = {"output_type": "latent"}
GUIDED = {**LATENT, "true_cfg_scale": 3.0}
LARGER = {**LATENT, "height": 64}
TWO_IMAGES = {**LATENT, "num_images_per_prompt": 2}
MORE_STEPS = {**LATENT, "num_inference_steps": 6}
IMAGE = {**LATENT, **change.image_arguments()}
SCALED = {**LATENT, "joint_attention_kwargs": {"scale": 0.4}}


def _offload(pipe: Any) -> None:
    offload_by_model(pipe.transformer)


def _offload_groups(pipe: Any) -> None:
    offload_by_group(pipe.transformer)


@dataclass(frozen=True)
class Case:
    """Describes a pipeline, what is done to it, its calls, and what must come of it."""

    pipeline: str = "flux"
    compile: Callable[[Any, str], None] = whole
    before: Callable[[Any], None] = nothing
    """What is done before the pipeline is compiled."""
    later: Callable[[Any], None] = nothing
    """What is done behind the first call of the compiled pipeline."""
    calls: tuple[Arguments, ...] = (LATENT,)
    sites: int = 4
    """How many attentions are shared out at least, in all graphs that are compiled at last."""
    alters: bool = False
    """Whether results must differ from those of the pipeline as it was built."""
    context: Callable[[], Any] = torch.no_grad


WHOLE = {
    "flux": Case(calls=(LATENT, GUIDED, {})),
    "flux, resolutions": Case(calls=(LATENT, LARGER, LATENT), sites=8),
    "flux, fused later": Case(later=change.fuse),
    "flux, offload": Case(later=_offload, calls=(LATENT, LATENT), sites=0),
    "flux, offload first": Case(before=_offload, calls=(LATENT, LATENT)),
    "flux, group offload first": Case(before=_offload_groups, calls=(LATENT, LATENT), sites=3),
}
ADAPTED = {
    "flux, IP adapter": Case(
        before=change.load_ip_adapter, calls=(IMAGE, {**GUIDED, **IMAGE}), alters=True
    ),
    "flux, IP adapter later": Case(later=change.load_ip_adapter, calls=(IMAGE,), alters=True),
    "flux, LoRA": Case(before=change.add_lora, calls=(LATENT, SCALED), sites=8, alters=True),
    "flux, LoRA later": Case(later=change.add_lora, alters=True),
    "flux, processors": Case(later=change.swap_processors, alters=True),
    "flux, cache": Case(later=change.enable_cache, calls=(MORE_STEPS,), sites=4, alters=True),
    "flux, cache first": Case(before=change.enable_cache, calls=(MORE_STEPS,), alters=True),
}
OTHERS = {
    "sd3": Case("sd3", calls=(LATENT, {}), sites=2),
    "qwen-image": Case("qwen-image", calls=(LATENT, {}), sites=2),
    "qwen-image, masked": Case("qwen-image", calls=({**LATENT, **masked_prompts()},), sites=2),
    "wan": Case("wan", calls=(LATENT, {}), sites=2),
    "controlnet": Case("flux controlnet", alters=True),
    "both": Case("flux controlnet", change.whole_and_controlnet, sites=6, alters=True),
    "in place": Case(compile=change.in_place, calls=(LATENT, TWO_IMAGES), sites=8),
    "inference mode": Case(context=torch.inference_mode),
}
BLOCKS = {
    "flux": Case(compile=by_block, calls=(LATENT, GUIDED, {}), sites=3),
    "flux, resolutions": Case(compile=by_block, calls=(LATENT, LARGER, LATENT), sites=7),
    "flux, fused later": Case(compile=by_block, later=change.fuse, sites=3),
    "flux, LoRA": Case(compile=by_block, before=change.add_lora, sites=3, alters=True),
    "flux, IP adapter": Case(
        compile=by_block, before=change.load_ip_adapter, calls=(IMAGE,), sites=3, alters=True
    ),
    "controlnet": Case("flux controlnet", by_block, sites=3, alters=True),
    "sd3": Case("sd3", by_block, calls=(LATENT, LARGER), sites=4),
    "qwen-image": Case("qwen-image", by_block, calls=(LATENT, LARGER), sites=4),
    "wan": Case("wan", by_block, calls=(LATENT, LARGER), sites=4),
}
CHANGED_BLOCKS = {
    "LoRA later": Case(compile=by_block, later=change.add_lora, sites=3, alters=True),
    "processors": Case(compile=by_block, later=change.swap_processors, sites=3, alters=True),
    "offload": Case(compile=by_block, later=_offload, calls=(LATENT, LATENT), sites=0),
    "group offload": Case(
        compile=by_broken_block, later=_offload_groups, calls=(LATENT, LATENT), sites=3
    ),
    "cache": Case(
        compile=by_broken_block,
        later=change.enable_cache,
        calls=(MORE_STEPS,),
        sites=3,
        alters=True,
    ),
    "masked": Case("qwen-image", by_block, calls=({**LATENT, **masked_prompts()},), sites=2),
    "two images": Case(compile=by_block, calls=(LATENT, TWO_IMAGES), sites=6),
    "inference mode": Case(compile=by_block, context=torch.inference_mode, sites=3),
}
GROUPS: dict[str, dict[str, Case]] = {
    "whole": WHOLE,
    "adapted": ADAPTED,
    "others": OTHERS,
    "blocks": BLOCKS,
    "changed blocks": CHANGED_BLOCKS,
}
"""The cases that share one start of ranks."""

GENERATED = {
    "whole": ("flux", "flux, resolutions", "flux, fused later", "flux, offload first"),
    "adapted": ("flux, IP adapter", "flux, LoRA"),
    "others": ("sd3", "qwen-image", "wan", "controlnet"),
    "blocks": ("flux", "flux, resolutions", "sd3", "qwen-image", "wan"),
}
"""The cases that Inductor generates code for."""


def _called(pipe: Any, case: Case) -> list[torch.Tensor]:
    return [pipe(**call_arguments(case.pipeline, **changed))[0] for changed in case.calls]


def _unaltered(case: Case) -> torch.Tensor:
    """Returns the first result of the pipeline as it was built."""
    adapting = change.image_arguments()
    changed = {name: value for name, value in case.calls[0].items() if name not in adapting}
    if "controlnet" in case.pipeline:
        changed["controlnet_conditioning_scale"] = 0.0
    result = tiny_pipeline(case.pipeline)(**call_arguments(case.pipeline, **changed))
    image: torch.Tensor = result[0]
    return image


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


def _trial(case: Case, backend: str) -> dict[str, Any]:
    torch._dynamo.reset()
    plain, ours = (tiny_pipeline(case.pipeline) for _ in range(2))
    with case.context(), collect_reports() as reports:
        case.before(plain)
        case.later(plain)
        expected = _called(plain, case)
        case.before(ours)
        case.compile(ours, backend)
        if case.later is not nothing:
            ours(**call_arguments(case.pipeline, **LATENT))
            case.later(ours)
            reports.clear()
        with mock.patch.object(
            SharedCall, "_rank_tensor", autospec=True, side_effect=SharedCall._rank_tensor
        ) as shared_calls:
            found = _called(ours, case)
        unaltered = _unaltered(case) if case.alters else expected[0]
    return {
        "errors": [_distance(*pair) for pair in zip(found, expected, strict=True)],
        "found": [item.clone() for item in found],
        "altered": _distance(unaltered, expected[0]),
        "sites": sum(len(item.summary["sites"]) for item in reports),
        "shared calls": shared_calls.call_count,
    }


def _trials(_rank: int, _num_ranks: int, group: str, names: Sequence[str], backend: str) -> Any:
    return {name: _trial(GROUPS[group][name], backend) for name in names}


def _check(group: str, names: Sequence[str], backend: str) -> None:
    first, second = run_local_ranks(_trials, 2, group, list(names), backend, timeout_s=1700)
    for name in names:
        case, ours, theirs = GROUPS[group][name], first[name], second[name]
        assert largest(ours["errors"]) <= TOLERANCE, name
        assert (ours["altered"] > 5 * TOLERANCE) == case.alters, name
        assert ours["sites"] >= case.sites, name
        assert ours["shared calls"] >= 2 * len(case.calls), name
        pairs = zip(ours["found"], theirs["found"], strict=True)
        assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", GROUPS)
def test_a_pipeline_stays_right_whatever_is_done_to_it(group: str) -> None:
    _check(group, list(GROUPS[group]), "cocodiff_eager")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", GENERATED)
def test_a_pipeline_is_compiled_by_inductor(group: str) -> None:
    _check(group, GENERATED[group], "cocodiff")
