# SPDX-License-Identifier: Apache-2.0
"""Defines what is measured: workloads, grids of ranks, speeds of links, and variants."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.small_models import SMALL_MODELS, SmallModel
from cocodiff_compile.ranks.launch.init_distributed import rank_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIN_REPEATS = 8


@dataclass(frozen=True)
class Workload:
    """Describes a small model with random weights, and the size of its inputs."""

    model: str
    dtype: str = "fp32"
    num_layers: int = 4
    num_single_layers: int | None = None
    heads: int = 8
    head_size: int = 64
    image_tokens: int = 1024
    text_tokens: int = 128

    @property
    def small_model(self) -> SmallModel:
        return SMALL_MODELS[self.model]

    @property
    def num_attentions(self) -> int:
        """The number of attentions that exchange heads."""
        return self.small_model.num_ulysses_attentions(self.build())

    def for_ranks(self, num_ranks: int) -> Workload:
        """Returns it with heads and tokens in multiples of `num_ranks`: not every variant pads."""
        sizes = ("heads", "image_tokens", "text_tokens")
        shared = {name: -(-getattr(self, name) // num_ranks) * num_ranks for name in sizes}
        return replace(self, **shared)

    def build(self) -> nn.Module:
        """Returns the model, with the same weights on every rank, on this rank's accelerator."""
        model = self.small_model.build(
            num_layers=self.num_layers,
            num_single_layers=self.num_single_layers,
            heads=self.heads,
            head_size=self.head_size,
            dtype=DTYPES[self.dtype],
        )
        return model.to(rank_device())

    def inputs(self, model: nn.Module) -> dict[str, Any]:
        return self.small_model.inputs(
            model, image_tokens=self.image_tokens, text_tokens=self.text_tokens
        )


WORKLOADS = {
    "flux": Workload("flux", num_layers=2, num_single_layers=4),
    "sd3.5": Workload("sd3.5"),
    "qwen-image": Workload("qwen-image"),
    "wan": Workload("wan", image_tokens=1152),
    "flux-short": Workload("flux", num_layers=1, num_single_layers=1),
}
"""The workloads have similar sizes; "flux-short" compiles in a third of the time."""


@dataclass(frozen=True)
class Grid:
    nodes: int
    tiles: int

    @classmethod
    def parse(cls, text: str) -> Grid:
        nodes, _, tiles = text.partition("x")
        if not (nodes.isdecimal() and tiles.isdecimal()) or "0" in (nodes, tiles):
            raise UserError(f"grid {text!r}; allowed: NODESxTILES, like 2x2")
        return cls(int(nodes), int(tiles))

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tiles

    def __str__(self) -> str:
        return f"{self.nodes}x{self.tiles}"


@dataclass(frozen=True)
class Case:
    """A case is one workload on one grid, at several link speeds: those that make communication
    `shares` per cent of a stock step, and `rates_mbit`.
    """

    workload: Workload
    grid: Grid
    variants: tuple[str, ...]
    shares: tuple[int, ...] = ()
    rates_mbit: tuple[float, ...] = ()
    repeats: int = MIN_REPEATS
    profiled: bool = False
    """Whether one step of every variant is profiled instead of measured."""

    @property
    def title(self) -> str:
        plain = replace(self.workload, dtype="fp32")
        names = [name for name, workload in WORKLOADS.items() if workload == plain]
        name = names[0] if names else self.workload.model
        return f"{name} {self.workload.dtype} {self.grid}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        lists = {name: tuple(data[name]) for name in ("variants", "shares", "rates_mbit")}
        workload, grid = Workload(**data["workload"]), Grid(**data["grid"])
        return cls(**{**data, **lists, "workload": workload, "grid": grid})
