"""Plain models on real gloo ranks: shared out by the compiler, through every pass and Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.report.collect import collect_reports
from tests.support.plain_dits import PLAIN

EVERYTHING = {"shard": {"min_gain": 0}}


def _flux(_rank: int, _num_ranks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    small = SMALL_MODELS["flux"]
    model = small.build(num_layers=1, heads=6, head_size=16).eval()
    inputs = small.inputs(model, image_tokens=45, text_tokens=11)
    with torch.no_grad(), collect_reports() as reports:
        (expected,) = model(**inputs)
        compiled = torch.compile(
            model, backend="cocodiff", dynamic=False, fullgraph=True, options=EVERYTHING
        )
        (first,) = compiled(**inputs)
        (second,) = compiled(**inputs)
    return {
        "error": float((first - expected).abs().max() / expected.abs().max()),
        "again": torch.equal(first, second),
        "sites": len(reports[0].report.recognition.sites),
        "first": first,
    }


@pytest.mark.slow
@pytest.mark.gloo
def test_a_plain_flux_on_four_ranks_computes_what_one_process_computes() -> None:
    found = run_local_ranks(_flux, 4, timeout_s=400)
    for rank in found:
        assert rank["error"] < 1e-5
        assert rank["sites"] == 2
        assert rank["again"]
        assert torch.equal(rank["first"], found[0]["first"])


def _errors(rank: int, _num_ranks: int) -> dict[str, str]:
    plain = PLAIN["class-conditional"]
    errors = {}
    for fault in ("none", "inputs", "weights"):
        torch._dynamo.reset()
        torch.manual_seed(rank if fault == "weights" else 0)
        model = plain.build().eval()
        torch.manual_seed(rank if fault == "inputs" else 0)
        inputs = plain.inputs()
        compiled = torch.compile(model, backend="cocodiff_eager", dynamic=False, options=EVERYTHING)
        try:
            with torch.no_grad():
                compiled(*inputs)
            errors[fault] = ""
        except ValueError as error:
            errors[fault] = str(error)
    return errors


@pytest.mark.gloo
def test_ranks_that_are_called_with_other_values_say_so() -> None:
    first, second = run_local_ranks(_errors, 2, timeout_s=200)
    assert first == second
    assert first["none"] == ""
    for fault in ("inputs", "weights"):
        assert "option 'shard': rank 1 was called with another value than rank 0" in first[fault]
    assert "[2, 3, 8, 8] float32" in first["inputs"]
