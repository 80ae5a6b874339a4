# SPDX-License-Identifier: Apache-2.0
"""Finds the transformer classes of the installed diffusers, and builds each of them tiny."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import diffusers
import torch
from diffusers.models import transformers
from torch import nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.coverage.image_classes import IMAGE_CLASSES
from cocodiff_compile.lab.coverage.more_image_classes import MORE_IMAGE_CLASSES
from cocodiff_compile.lab.coverage.more_video_classes import MORE_VIDEO_CLASSES
from cocodiff_compile.lab.coverage.other_classes import OTHER_CLASSES
from cocodiff_compile.lab.coverage.video_classes import VIDEO_CLASSES
from cocodiff_compile.lab.small_models import SMALL_MODELS

CLASSES = {
    **IMAGE_CLASSES,
    **MORE_IMAGE_CLASSES,
    **VIDEO_CLASSES,
    **MORE_VIDEO_CLASSES,
    **OTHER_CLASSES,
}
_SMALL = {small.class_name: small for small in SMALL_MODELS.values()}


def transformer_classes() -> list[str]:
    """Returns the names of all public models in `diffusers.models.transformers`."""
    found = set()
    for module_info in pkgutil.iter_modules(transformers.__path__):
        module = importlib.import_module(f"{transformers.__name__}.{module_info.name}")
        for name, item in vars(module).items():
            is_own = inspect.isclass(item) and item.__module__ == module.__name__
            if is_own and issubclass(item, diffusers.ModelMixin) and hasattr(diffusers, name):
                found.add(name)
    return sorted(found)


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a tiny model of a class and the arguments of a call. Raises UserError if no way to
    build it is listed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in _SMALL:
            model = _SMALL[name].build(num_layers=2)
            return model, _SMALL[name].inputs(model)
        if name not in CLASSES:
            raise UserError("no tiny configuration is listed")
        tiny = CLASSES[name]
        model = getattr(diffusers, name)(**tiny.config).eval()
        for parameter in model.parameters():  # some begin with zeros, which would hide errors
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return model, tiny.inputs()
