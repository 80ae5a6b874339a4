"""Pictures to train and to judge with: two plain shapes on a shaded ground, told in eight words.

A prompt is eight words, one per place in the sentence: the ground, then shape, colour and place of
a first thing, then of a second, then how large both are. A word is a number of its own vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 24
"""Pixels; a picture is [3, SIDE, SIDE] in -1..1."""
GROUNDS = torch.tensor(
    [[-0.8, -0.8, -0.6], [0.7, 0.7, 0.6], [-0.5, 0.1, 0.6], [0.1, 0.5, -0.4], [0.6, 0.2, -0.1]]
)
COLOURS = torch.tensor(
    [
        [0.9, -0.7, -0.7],
        [-0.7, 0.8, -0.6],
        [-0.8, -0.5, 0.9],
        [0.9, 0.8, -0.8],
        [0.8, -0.6, 0.8],
        [-0.7, 0.8, 0.9],
        [0.95, 0.95, 0.95],
        [-0.95, -0.95, -0.95],
    ]
)
NUM_SHAPES = 4
NUM_PLACES = 9
NUM_SIZES = 3
VOCABULARY = (
    len(GROUNDS),
    *(NUM_SHAPES, len(COLOURS), NUM_PLACES) * 2,
    NUM_SIZES,
)
"""How many words each place of a prompt can hold."""
NUM_WORDS = len(VOCABULARY)


def random_prompts(count: int, generator: torch.Generator) -> Tensor:
    """[count, NUM_WORDS] words."""
    columns = [torch.randint(size, (count,), generator=generator) for size in VOCABULARY]
    return torch.stack(columns, dim=1)


def draw_pictures(prompts: Tensor) -> Tensor:
    """The picture of each prompt, with smooth edges: [count, 3, SIDE, SIDE]."""
    ground, *things, size = prompts.unbind(1)
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    shade = 0.15 * (x + y)
    picture = GROUNDS[ground][:, :, None, None] + shade
    radius = 0.22 + 0.09 * size[:, None, None]
    for shape, colour, place in (things[3:], things[:3]):  # the first thing lies on top
        right = (place % 3 - 1)[:, None, None] * 0.55
        down = (torch.div(place, 3, rounding_mode="floor") - 1)[:, None, None] * 0.55
        distance = _distances(x - right, y - down, radius)
        picked = distance.gather(1, shape[:, None, None, None].expand(-1, 1, SIDE, SIDE))
        cover = torch.sigmoid(-picked * 1.5 * SIDE)
        picture = picture + cover * (COLOURS[colour][:, :, None, None] - picture)
    return picture.clamp(-1, 1)


def _distances(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """How far each pixel lies outside a disc, a square, a diamond and a ring: [count, 4, ...]."""
    disc = torch.hypot(x, y) - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.85 * radius
    diamond = (x.abs() + y.abs()) / 2**0.5 - 0.75 * radius
    ring = (torch.hypot(x, y) - radius).abs() - 0.35 * radius
    return torch.stack([disc, square, diamond, ring], dim=1)
