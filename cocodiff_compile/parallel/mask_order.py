"""Order the columns of a joint attention mask as the exchange orders the tokens.

A model builds its joint mask in the order of the whole sequence, here with T text and I image
tokens on two ranks:

    mask    [txt0 txt1 | img0 img1]

Each rank joins its own shards, and the all-to-all joins the ranks:

    tokens  [txt0 img0 | txt1 img1]

The mask is known to every rank, so ordering it needs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from cocodiff_compile.parallel.forward_arguments import ForwardArguments


@dataclass(frozen=True)
class JointMask:
    """Where a joint mask enters; `module` may be a ModuleList, which means each of its modules."""

    module: str
    text_first: bool
    mask: str = "attention_mask"
    image: str = "hidden_states"
    text: str = "encoder_hidden_states"


def interleave_ranks(
    mask: torch.Tensor, num_first: int, num_second: int, degree: int
) -> torch.Tensor:
    """[..., degree * (first + second)], all first before all second, to rank by rank.

    `num_first` and `num_second` count the tokens of one rank.
    """
    if mask.shape[-1] != degree * (num_first + num_second):
        raise ValueError(
            f"An attention mask of {mask.shape[-1]} tokens does not fit {degree} ranks of "
            f"{num_first} and {num_second} tokens: pass a mask over the whole joint sequence."
        )
    first, second = mask[..., : degree * num_first], mask[..., degree * num_first :]
    lead = mask.shape[:-1]
    by_rank = [first.reshape(*lead, degree, -1), second.reshape(*lead, degree, -1)]
    return torch.cat(by_rank, dim=-1).flatten(-2)


def order_masks(model: nn.Module, masks: Sequence[JointMask], degree: int) -> None:
    """Hook the modules that `masks` name; to be called before the hooks that split the tokens."""
    for joint in masks:
        module = model.get_submodule(joint.module)
        for target in module if isinstance(module, nn.ModuleList) else [module]:
            registry = HookRegistry.check_if_exists_or_initialize(target)
            registry.register_hook(_OrderMaskHook(joint, degree), "cocodiff-order-mask")


class _OrderMaskHook(ModelHook):  # type: ignore[misc]
    def __init__(self, joint: JointMask, degree: int) -> None:
        super().__init__()
        self.joint = joint
        self.degree = degree

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self.arguments = ForwardArguments.of(module)
        return module

    def pre_forward(
        self, _module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = self.arguments.get(self.joint.mask, args, kwargs)
        if mask is None:
            return args, kwargs
        num_text = self.arguments.get(self.joint.text, args, kwargs).shape[1]
        num_image = self.arguments.get(self.joint.image, args, kwargs).shape[1]
        sizes = (num_text, num_image) if self.joint.text_first else (num_image, num_text)
        ordered = interleave_ranks(mask, *sizes, self.degree)
        return self.arguments.replace(self.joint.mask, ordered, args, kwargs)
