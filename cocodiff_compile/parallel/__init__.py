"""Ulysses for diffusers transformers. diffusers itself is imported when `parallelize` runs."""

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
    """Shard `model`'s tokens over the ranks and exchange them for heads in attention; in place.

    Every rank calls this with the same weights, and afterwards calls the model with the same whole
    inputs and gets the same whole output. Inference only.

    `ulysses_degree` defaults to the world size. A smaller divisor of it makes groups of
    neighbouring ranks; the groups know nothing of each other (data parallel). `mesh` replaces the
    mesh made here: it needs a dim "ulysses" and a dim "ring" of size 1.

    `plan` is a diffusers context-parallel plan and replaces the shipped one. A module name with
    the value None marks a module that runs on whole sequences: its attention is left as it is. An
    attention that uses no diffusers attention processor cannot be seen here: with a `plan` of your
    own, compare the result with one process once.

    Tokens and heads need not divide by the degree: they are padded with zeros, the padding takes
    no part in attention, and the output has the tokens of the input. With a `plan` of your own
    tokens must divide, since nothing then says what an attention's keys are made of. The calls of
    one model follow each other; two models may be called as their groups allow.

    The model may be changed afterwards, alike on every rank: other attention processors, fused
    projections, adapters, offloading, replaced blocks, a cache of diffusers, whose decisions become
    those of all ranks. It is looked at before every call and prepared anew, or refused with a
    ValueError that says what to do. A cache from elsewhere that decides from tokens must make its
    ranks agree itself.

    Raises ValueError, with the model untouched, for what would compute something wrong or fail
    without a reason later; for tokens that cannot be padded, when the model is called.

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
