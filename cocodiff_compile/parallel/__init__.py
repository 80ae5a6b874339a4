"""Runs diffusers transformers with Ulysses. diffusers is imported when `parallelize` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["parallelize"]

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    *,
    ulysses_degree: int | None = None,
    mesh: DeviceMesh | None = None,
    plan: Mapping[str, Any] | None = None,
) -> ModelT:
    """Shards `model`'s tokens over the ranks and exchanges them for heads in attention, in place.

    Every rank calls this with the same weights, and afterwards calls the model with the same whole
    inputs and gets the same whole output. It is for inference only.

    `ulysses_degree` defaults to the world size. A smaller divisor of it makes groups of
    neighbouring ranks that are independent of each other (data parallel). `mesh` replaces the
    default mesh: it needs a dim "ulysses" and a dim "ring" of size 1.

    `plan` is a diffusers context-parallel plan and replaces the shipped one. A module name with the
    value None marks a module that runs on whole sequences: its attention is left unchanged. An
    attention without a diffusers attention processor cannot be detected: with a `plan` of your own,
    compare the result with one process once.

    Tokens and heads need not divide by the degree: they are padded with zeros, the padding takes no
    part in attention, and the output has the tokens of the input. With a `plan` of your own tokens
    must divide, since it does not say what an attention's keys consist of. Calls of one model must
    not overlap; different models may be called concurrently if their groups allow it.

    The model may be changed afterwards, in the same way on every rank: other attention processors,
    fused projections, adapters, offloading, replaced blocks, or a cache of diffusers, whose
    decisions then apply to all ranks. The model is checked before every call and prepared again if
    needed, or refused with a ValueError that says what to do. A third-party cache that decides from
    tokens must make its ranks agree itself.

    Raises ValueError, with the model unchanged, for a model that would compute wrong values or fail
    later; for tokens that cannot be padded, it raises when the model is called.

    The model then compiles with `fullgraph=True` under `torch.no_grad()`; no setting of Dynamo is
    changed for it.
    """
    try:
        from cocodiff_compile.parallel.apply import apply_ulysses  # noqa: PLC0415  (lazy)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "diffusers":
            raise
        raise ImportError(
            "cocodiff_compile.parallel needs diffusers: pip install 'cocodiff-compile[diffusers]'"
        ) from error
    apply_ulysses(model, ulysses_degree, mesh, plan)
    return model
