"""Runs the Python blocks of a page: `python -m tests.support.run_page PAGE [pipeline]`.

The blocks of a page share one namespace. With `pipeline`, weights do not come from a hub: what
`FluxPipeline.from_pretrained` returns is tiny and random. A page of pieces, which makes no pipeline
of its own, is given one for each block, and a small model with inputs.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

from tests.support.pages import ROOT, runnable


def run_page(page: str, given: dict[str, Any]) -> None:
    """Runs the blocks in order, and says which one is run."""
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for block in runnable(page, "python"):
        print(f"{page}:{block.line}", flush=True)
        # As many lines before it as in the page, so that a traceback names the line of the page.
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, str(ROOT / page), "exec", dont_inherit=True), names)


def run_pieces(page: str) -> None:
    """Runs each block with a pipeline, a model and a process group that are there already."""
    import cocodiff_compile  # noqa: PLC0415

    cocodiff_compile.init_distributed()
    for block in runnable(page, "python"):
        print(f"{page}:{block.line}", flush=True)
        torch.compiler.reset()
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, str(ROOT / page), "exec", dont_inherit=True), _pieces())
    torch.distributed.destroy_process_group()


def _pieces() -> dict[str, Any]:
    import cocodiff_compile  # noqa: PLC0415
    from cocodiff_compile.lab.small_models import SMALL_MODELS  # noqa: PLC0415
    from tests.support.prompted_flux import prompted_flux  # noqa: PLC0415

    return {
        "cocodiff_compile": cocodiff_compile,
        "torch": torch,
        "pipe": prompted_flux(),
        "prompt": "a lighthouse at dusk",
        **_model(SMALL_MODELS["flux"]),
    }


def _model(small: Any) -> dict[str, Any]:
    model = small.build(num_layers=1)
    return {"model": model, "inputs": small.inputs(model)}


def main(page: str, kind: str = "") -> None:
    if kind == "pieces":
        run_pieces(page)
        return
    given: dict[str, Any] = {}
    if kind == "pipeline":
        from diffusers import FluxPipeline  # noqa: PLC0415

        from cocodiff_compile.lab.small_models import SMALL_MODELS  # noqa: PLC0415
        from tests.support.prompted_flux import prompted_flux  # noqa: PLC0415

        given = _model(SMALL_MODELS["flux"])
        with mock.patch.object(FluxPipeline, "from_pretrained", prompted_flux):
            run_page(page, given)
        return
    run_page(page, given)


if __name__ == "__main__":
    main(*sys.argv[1:])
