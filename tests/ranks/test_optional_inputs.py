"""Models, numbers of layers and optional inputs beyond those of the demo: two ranks equal one."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils import _pytree as pytree

from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize
from cocodiff_compile.parallel.plans import _SHIPPED
from tests.support.captured import fake_ranks
from tests.support.live_mesh import parallelize_live

NUM_RANKS = 2
CHANNELS = 64
EVEN, UNEVEN = (48, 24), (45, 23)

Inputs = dict[str, Any]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _times(*shape: int) -> torch.Tensor:
    return 300 * _random(*shape).abs()


# Models that are not among the small ones.


def _helios(num_layers: int = 2, **config: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.HeliosTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=num_layers,
        rope_dim=(8, 4, 4),
        **config,
    ).eval()


def _helios_inputs(frames: int, height: int, width: int, history: bool = False) -> Inputs:
    inputs = {
        "hidden_states": _random(1, 4, frames, height, width),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": _random(1, 7, 32),
        "return_dict": False,
    }
    if history:
        inputs |= {
            "indices_hidden_states": torch.arange(1, 1 + frames)[None],
            "indices_latents_history_short": torch.arange(1)[None],
            "latents_history_short": _random(1, 4, 1, height, width, seed=1),
        }
    return inputs


def _minimax(num_layers: int = 2) -> Any:
    torch.manual_seed(0)
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        hidden_size=48,
        num_layers=num_layers,
        num_refiner_layers=1,
        ffn_dim=64,
        in_channels=4,
        audio_in_channels=8,
        text_dim=32,
        freq_dim=32,
        time_embed_hidden_dim=32,
        time_embed_dim=32,
        rope_freq_dim=2,
    ).eval()


def _minimax_inputs(video: int, audio: int, text: int) -> Inputs:
    tokens = torch.arange(text + audio + video)
    by_kind = tokens.split([text, audio, video])
    tags = [torch.full_like(rows, tag) for rows, tag in zip(by_kind, (1, 2, 0), strict=True)]
    return {
        "hidden_states": _random(1, video, 16),
        "audio_hidden_states": _random(1, audio, 8),
        "encoder_hidden_states": _random(1, text, 32),
        "timestep": torch.tensor([0.5, 0.1]),
        "timestep_indices": tokens % 2,
        "token_tags": torch.cat(tags),
        "position_ids": torch.stack([tokens, tokens // 2, tokens % 3], dim=1),
        "text_indices": by_kind[0],
        "audio_indices": by_kind[1],
        "video_indices": by_kind[2],
        "return_dict": False,
    }


def _ltx2(num_layers: int = 2, **config: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        audio_in_channels=6,
        audio_out_channels=6,
        audio_num_attention_heads=4,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=32,
        num_layers=num_layers,
        caption_channels=24,
        **config,
    ).eval()


def _ltx2_inputs(video: tuple[int, int, int], audio: int, text: int, **more: Any) -> Inputs:
    frames, height, width = video
    mask = torch.ones(2, text)
    mask[1, text // 2 :] = 0
    return {
        "hidden_states": _random(2, frames * height * width, 8),
        "audio_hidden_states": _random(2, audio, 6),
        "encoder_hidden_states": _random(2, text, 24),
        "audio_encoder_hidden_states": _random(2, text, 24, seed=1),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask.flip(0),
        "timestep": torch.tensor([500.0, 300.0]),
        "sigma": torch.tensor([0.5, 0.3]),
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": audio,
        "return_dict": False,
        **more,
    }


_LTX2_EVEN, _LTX2_UNEVEN = ((2, 3, 4), 8, 6), ((1, 3, 5), 7, 5)


@dataclass(frozen=True)
class Case:
    """`more` are inputs that the result must depend on, or else they prove nothing."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[Any], Inputs]
    more: Inputs = field(default_factory=dict)


def _small(
    label: str, name: str, tokens: tuple[int, int] = EVEN, more: Any = None, **build: Any
) -> Case:
    small = SMALL_MODELS[name]

    def inputs(model: Any) -> Inputs:
        return small.inputs(model, batch=2, image_tokens=tokens[0], text_tokens=tokens[1])

    return Case(f"{name} {label}", lambda: small.build(**build), inputs, more or {})


def _residuals(count: int, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    return [_random(2, tokens, CHANNELS, seed=seed + i) for i in range(count)]


def _flux_residuals(tokens: int) -> Inputs:
    return {
        "controlnet_block_samples": _residuals(2, tokens),
        "controlnet_single_block_samples": _residuals(1, tokens, seed=5),
    }


def _cases() -> list[Case]:
    cases = []
    for label, (image, text) in (("even", EVEN), ("uneven", UNEVEN)):
        tokens = (image, text)
        cases += [
            _small(f"control, {label}", "flux", tokens, _flux_residuals(image)),
            _small(f"control, {label}", "chroma", tokens, _flux_residuals(image)),
            _small(
                f"control, {label}",
                "sd3",
                tokens,
                {"block_controlnet_hidden_states": tuple(_residuals(1, image))},
            ),
            _small(
                f"control, {label}",
                "qwen-image",
                tokens,
                {"controlnet_block_samples": _residuals(2, image)},
            ),
        ]
    unified = {"controlnet_block_samples": {1: _random(2, 192, CHANNELS)}}
    cases.append(_small("control", "z-image", (48, 24), unified))
    repeated = {"controlnet_block_samples": _residuals(1, 48), "controlnet_blocks_repeat": True}
    cases.append(_small("control repeated", "flux", EVEN, repeated))
    for name in ("flux", "flux2", "chroma", "hunyuan-video"):
        cases.append(_small("1 + 3 layers", name, UNEVEN, num_layers=1, num_single_layers=3))
    for name in ("sd3.5", "qwen-image", "wan", "ltx", "z-image", "chronoedit"):
        cases.append(_small("3 layers", name, num_layers=3))
    cases += [
        _small("a timestep for all", "ltx", UNEVEN, {"timestep": torch.full((2, 1), 300.0)}),
        _small("a timestep per token", "ltx", UNEVEN, {"timestep": _times(2, 45)}),
        _small("a timestep per token", "wan", UNEVEN, {"timestep": _times(2, 45)}),
        _small("a record", "flux", EVEN, {"return_dict": True}),
    ]
    return cases + _more_models()


def _more_models() -> list[Case]:
    cases = [
        Case(f"helios {n} layers", lambda n=n: _helios(n), lambda _: _helios_inputs(2, 8, 6))
        for n in (1, 3)
    ]
    for guided in (True, False):
        build = lambda guided=guided: _helios(guidance_cross_attn=guided)  # noqa: E731
        cases.append(
            Case(f"helios history {guided}", build, lambda _: _helios_inputs(1, 6, 6, history=True))
        )
    cases += [
        Case("minimax even", lambda: _minimax(1), lambda _: _minimax_inputs(12, 5, 7)),
        Case("minimax uneven", lambda: _minimax(3), lambda _: _minimax_inputs(11, 5, 7)),
    ]
    for rope in ("interleaved", "split"):
        build = lambda rope=rope: _ltx2(rope_type=rope)  # noqa: E731
        cases += [
            Case(f"ltx2 {rope}", build, lambda _: _ltx2_inputs(*_LTX2_EVEN)),
            Case(f"ltx2 {rope} uneven", build, lambda _: _ltx2_inputs(*_LTX2_UNEVEN)),
        ]
    gated = {"gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True}
    adaptive = {"cross_attn_mod": True, "audio_cross_attn_mod": True}
    per_token = {"timestep": _times(2, 15), "audio_timestep": _times(2, 7)}
    some = {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([1.0, 0.0])}
    whole = {"spatio_temporal_guidance_blocks": [0]}
    self_mask = {"video_self_attention_mask": (_random(2, 24, 24) > 0).float()}
    cases += [
        Case("ltx2 gated", lambda: _ltx2(**gated, **adaptive), lambda _: _ltx2_inputs(*_LTX2_EVEN)),
        Case("ltx2 times", _ltx2, lambda _: _ltx2_inputs(*_LTX2_UNEVEN), per_token),
        Case("ltx2 some", lambda: _ltx2(**gated), lambda _: _ltx2_inputs(*_LTX2_UNEVEN), some),
        Case("ltx2 all", lambda: _ltx2(**gated), lambda _: _ltx2_inputs(*_LTX2_UNEVEN), whole),
        Case("ltx2 self mask", _ltx2, lambda _: _ltx2_inputs(*_LTX2_EVEN), self_mask),
        Case(
            "ltx2 apart", _ltx2, lambda _: _ltx2_inputs(*_LTX2_EVEN), {"isolate_modalities": True}
        ),
    ]
    return cases


def _tensors(output: Any) -> list[torch.Tensor]:
    return pytree.tree_leaves(tuple(output.values()) if isinstance(output, dict) else output)


def _distance(actual: Any, expected: Any) -> float:
    pairs = zip(_tensors(actual), _tensors(expected), strict=True)
    return max(float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs)


def _run(case: Case) -> dict[str, float]:
    model = case.build()
    fewer = case.inputs(model)
    inputs = {**fewer, **case.more}
    with torch.no_grad():
        without, expected = model(**fewer), model(**inputs)
        actual = parallelize_live(model)(**inputs)
    return {
        "to one process": _distance(actual, expected),
        "to fewer inputs": _distance(expected, without),
    }


def _run_all(_rank: int, _num_ranks: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in _cases():
        try:
            results[case.name] = _run(case)
        except Exception:
            # The same on every rank, or the timeout ends it.
            results[case.name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local_ranks(_run_all, NUM_RANKS, timeout_s=300)


@pytest.mark.gloo
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_two_ranks_compute_what_one_computes(ranks: list[dict[str, Any]], case: Case) -> None:
    for results in ranks:
        result = results[case.name]
        assert isinstance(result, dict), result
        assert result["to one process"] < 1e-5
        if set(case.more) - {"return_dict"}:
            assert result["to fewer inputs"] > 1e-4


# Refused, with a reason.


def test_every_class_with_a_plan_in_diffusers_has_one_here() -> None:
    """Their plans are not taken on trust."""
    folder = Path(diffusers.__file__).parent / "models" / "transformers"
    with_plan = set()
    for file in folder.glob("*.py"):
        for body in re.split(r"^class ", file.read_text(), flags=re.MULTILINE)[1:]:
            if re.search(r"^    _cp_plan = \{", body, flags=re.MULTILINE):
                with_plan.add(re.match(r"\w+", body)[0])  # type: ignore[index]
    assert len(with_plan) == 9
    assert with_plan <= set(_SHIPPED)


def test_a_plan_of_diffusers_that_was_never_compared_is_not_taken_unasked() -> None:
    class Another(diffusers.FluxTransformer2DModel):  # type: ignore[misc]
        pass

    small = SMALL_MODELS["flux"]
    model: Any = small.build(num_layers=1)
    model.__class__ = Another
    with fake_ranks(NUM_RANKS, rank=0):
        with pytest.raises(ValueError, match=r"Another .*plan=model._cp_plan"):
            parallelize(model)
        with torch.no_grad():
            parallelize(model, plan=model._cp_plan)(**small.inputs(model))


def test_keys_that_are_amplified_by_position_are_refused() -> None:
    with (
        fake_ranks(NUM_RANKS, rank=0),
        pytest.raises(ValueError, match=r"is_amplify_history=True.*one rank"),
    ):
        parallelize(_helios(is_amplify_history=True))


def test_a_mask_with_a_row_for_every_query_is_refused_where_queries_are_padded() -> None:
    mask = torch.ones(2, 15, 15)
    inputs = _ltx2_inputs(*_LTX2_UNEVEN, video_self_attention_mask=mask)
    with fake_ranks(NUM_RANKS, rank=0), torch.no_grad():
        model = parallelize(_ltx2())
        with pytest.raises(ValueError, match=r"15 rows.*a degree that divides the tokens"):
            model(**inputs)
