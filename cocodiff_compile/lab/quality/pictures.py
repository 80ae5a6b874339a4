# SPDX-License-Identifier: Apache-2.0
"""Draws pictures for training and evaluation: two plain shapes on a shaded background, described by
eight words.

A prompt is eight words, one per position: the background, then shape, colour and location of a
first object, then of a second, then the size of both. A word is an index into the vocabulary of its
position.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 24
"""The side in pixels; a picture is [3, SIDE, SIDE] in -1..1."""
BACKGROUNDS = torch.tensor(
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
NUM_LOCATIONS = 9
NUM_SIZES = 3
VOCABULARY = (len(BACKGROUNDS), *(NUM_SHAPES, len(COLOURS), NUM_LOCATIONS) * 2, NUM_SIZES)
"""The number of words that each position of a prompt can hold."""
NUM_WORDS = len(VOCABULARY)


def random_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Returns random prompts, [count, NUM_WORDS]."""
    columns = [torch.randint(size, (count,), generator=generator) for size in VOCABULARY]
    return torch.stack(columns, dim=1)


def draw_pictures(prompts: Tensor) -> Tensor:
    """Returns the picture of each prompt, with smooth edges: [count, 3, SIDE, SIDE]."""
    ground, *objects, size = prompts.unbind(1)
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    shade = 0.15 * (x + y)
    picture = BACKGROUNDS[ground][:, :, None, None] + shade
    radius = 0.22 + 0.09 * size[:, None, None]
    for shape, colour, location in (objects[3:], objects[:3]):  # the first object is drawn on top
        right = (location % 3 - 1)[:, None, None] * 0.55
        down = (torch.div(location, 3, rounding_mode="floor") - 1)[:, None, None] * 0.55
        distance = _distances(x - right, y - down, radius)
        picked = distance.gather(1, shape[:, None, None, None].expand(-1, 1, SIDE, SIDE))
        cover = torch.sigmoid(-picked * 1.5 * SIDE)
        picture = picture + cover * (COLOURS[colour][:, :, None, None] - picture)
    return picture.clamp(-1, 1)


def _distances(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Returns how far pixels lie outside of a disc, square, diamond and ring: [count, 4, ...]."""
    disc = torch.hypot(x, y) - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.85 * radius
    diamond = (x.abs() + y.abs()) / 2**0.5 - 0.75 * radius
    ring = (torch.hypot(x, y) - radius).abs() - 0.35 * radius
    return torch.stack([disc, square, diamond, ring], dim=1)
