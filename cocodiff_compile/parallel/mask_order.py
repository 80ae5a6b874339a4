"""Orders the columns of a joint attention mask as the exchange orders the tokens.

A model builds its joint mask in the order of the whole sequence, here with T text and I image
tokens on two ranks:

    mask    [txt0 txt1 | img0 img1]

Each rank joins its own shards, and the all-to-all joins the ranks:

    tokens  [txt0 img0 | txt1 img1]

Every rank knows the mask, so that ordering it needs no communication. Where tokens are padded to
divide, the mask is padded too: the attention drops those columns with their keys, and nothing reads
the result of a padded query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cocodiff_compile.parallel.forward_arguments import ForwardArguments, unwrapped
from cocodiff_compile.parallel.token_hook import CallArguments, KeyedHook, TokenHook
from cocodiff_compile.parallel.token_padding import IMAGE, TEXT, TokenPadding


@dataclass(frozen=True)
class JointMask:
    """Describes where a joint mask enters: at `module`, or at each module of a ModuleList."""

    module: str
    text_first: bool
    mask: str = "attention_mask"
    image: str = "hidden_states"
    text: str = "encoder_hidden_states"


def interleave_ranks(
    mask: torch.Tensor, num_first: int, num_second: int, degree: int, pads: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Reorders [..., degree * (first + second)] from all first before all second to rank by rank.

    `num_first` and `num_second` count the tokens of one rank; `mask` lacks the last `pads` of each.
    """
    if mask.shape[-1] != degree * (num_first + num_second) - sum(pads):
        raise ValueError(
            f"An attention mask of {mask.shape[-1]} tokens does not fit {degree} ranks of "
            f"{num_first} and {num_second} tokens, the last {pads[0]} and {pads[1]} of them "
            "padding: pass a mask over the whole joint sequence."
        )
    num_whole = degree * num_first - pads[0]
    first = extend_mask(mask[..., :num_whole], pads[0])
    second = extend_mask(mask[..., num_whole:], pads[1])
    lead = mask.shape[:-1]
    by_rank = [first.reshape(*lead, degree, -1), second.reshape(*lead, degree, -1)]
    return torch.cat(by_rank, dim=-1).flatten(-2)


def extend_mask(mask: torch.Tensor, pad: int) -> torch.Tensor:
    """Appends `pad` columns of ones, which mask nothing."""
    if pad == 0:
        return mask
    return torch.cat([mask, mask.new_ones((*mask.shape[:-1], pad))], dim=-1)


def mask_hooks(
    model: nn.Module, masks: Sequence[JointMask], padding: TokenPadding
) -> list[KeyedHook]:
    """Returns hooks for the modules that `masks` name; they run after tokens are split."""
    hooks: list[KeyedHook] = []
    for joint in masks:
        module = model.get_submodule(joint.module)
        targets = module if isinstance(module, nn.ModuleList) else [module]
        for index, target in enumerate(map(unwrapped, targets)):
            hook = _OrderMaskHook(joint, ForwardArguments.of(target), padding)
            hooks.append((f"mask of {joint.module}[{index}]", target, hook))
    return hooks


@dataclass(eq=False)
class _OrderMaskHook(TokenHook):
    joint: JointMask
    arguments: ForwardArguments
    padding: TokenPadding

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        mask = self.arguments.get(self.joint.mask, args, kwargs)
        if mask is None:
            return args, kwargs
        num_text = self.arguments.get(self.joint.text, args, kwargs).shape[1]
        num_image = self.arguments.get(self.joint.image, args, kwargs).shape[1]
        pad_text, pad_image = (self.padding.pad_of(stream) for stream in (TEXT, IMAGE))
        sizes, pads = (num_text, num_image), (pad_text, pad_image)
        if not self.joint.text_first:
            sizes, pads = sizes[::-1], pads[::-1]
        ordered = interleave_ranks(mask, *sizes, self.padding.degree, pads)
        return self.arguments.replace(self.joint.mask, ordered, args, kwargs)
