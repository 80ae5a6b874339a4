"""Turns on Ulysses for a diffusers transformer: all checks first, then all changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cocodiff_compile.parallel.check_model import check_model
from cocodiff_compile.parallel.checked_call import check_calls
from cocodiff_compile.parallel.make_mesh import at_least_one_device, make_mesh, resolve_degree
from cocodiff_compile.parallel.plans import plan_for
from cocodiff_compile.parallel.preparation import Preparation, check_prepared
from cocodiff_compile.parallel.processors import replace_processors
from cocodiff_compile.parallel.token_padding import TokenPadding
from cocodiff_compile.parallel.uneven_attention import SharedRanks, accept_uneven


def apply_ulysses(
    model: nn.Module,
    ulysses_degree: int | None,
    mesh: DeviceMesh | None,
    plan: Mapping[str, Any] | None,
) -> None:
    """Implements `parallelize`."""
    check_model(model)
    degree = resolve_degree(ulysses_degree, mesh)
    model_plan = plan_for(model, plan)
    check_prepared(model, model_plan, degree)
    config = SharedRanks(ulysses_degree=degree, mesh=mesh or make_mesh(model, degree))
    # First our processors, which have what diffusers looks for.
    replace_processors(model, model_plan)
    with at_least_one_device():
        # An empty plan: diffusers sets up groups, the processors' configs and the hooks are ours.
        model.enable_parallelism(config=config, cp_plan={})  # type: ignore[operator]
    accept_uneven()
    padding = TokenPadding(degree, model_plan.streams.names if model_plan.streams else ())
    check_calls(model, Preparation(model, plan, config, padding))
