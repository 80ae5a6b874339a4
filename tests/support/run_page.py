# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of a page: `python -m tests.support.run_page PAGE [KIND]`.

The blocks share one namespace. A page of the kind "model" is given a small model with inputs. On a
page of the kind "pipeline" weights do not come from a hub: what `FluxPipeline.from_pretrained`
returns is tiny and random. Each block of a page of the kind "pieces" stands alone: it is given such
a pipeline, a prompt, a small model with inputs, and the process group.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

from tests.support.pages import ROOT, Code, runnable


def main(page: str, kind: str = "") -> None:
    """Runs the blocks of a page, and says which one is run."""
    runs = {"": _run, "model": _run_model, "pipeline": _run_pipeline, "pieces": _run_pieces}
    run = runs[kind]
    run(page)


def _run(page: str, **given: Any) -> None:
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for block in runnable(page, "python"):
        _execute(page, block, names)


def _run_model(page: str) -> None:
    import cocodiff_compile  # noqa: PLC0415

    _run(page, torch=torch, cocodiff_compile=cocodiff_compile, **_small_model())


def _run_pipeline(page: str) -> None:
    from diffusers import FluxPipeline  # noqa: PLC0415

    from tests.support.prompted_flux import prompted_flux  # noqa: PLC0415

    with mock.patch.object(FluxPipeline, "from_pretrained", prompted_flux):
        _run(page, **_small_model())


def _run_pieces(page: str) -> None:
    import cocodiff_compile  # noqa: PLC0415
    from tests.support.prompted_flux import prompted_flux  # noqa: PLC0415

    cocodiff_compile.init_distributed()
    for block in runnable(page, "python"):
        torch.compiler.reset()
        pipe, prompt = prompted_flux(), "a lighthouse at dusk"
        modules = {"torch": torch, "cocodiff_compile": cocodiff_compile}
        _execute(page, block, {**modules, "pipe": pipe, "prompt": prompt, **_small_model()})
    torch.distributed.destroy_process_group()


def _small_model() -> dict[str, Any]:
    from cocodiff_compile.lab.small_models import SMALL_MODELS  # noqa: PLC0415

    small = SMALL_MODELS["flux"]
    model = small.build(num_layers=1)
    return {"model": model, "inputs": small.inputs(model)}


def _execute(page: str, block: Code, names: dict[str, Any]) -> None:
    print(f"{page}:{block.line}", flush=True)
    # As many lines before it as in the page, so that a traceback names the line of the page.
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, str(ROOT / page), "exec", dont_inherit=True), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
