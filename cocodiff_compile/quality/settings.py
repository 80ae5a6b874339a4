"""What a quality run compares, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cocodiff_compile.errors import UserError
from cocodiff_compile.graph.delta_code import BITS
from cocodiff_compile.quality.sample import Sampling

EXACT = "exact"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
POLICIES = ("paper", "paper-seen", "int8", "int4", "int3", "int2", "int1", "adaptive40")
"""What is compared unless something else is asked for."""


def v_major_of(name: str) -> dict[str, Any]:
    """The options of a policy by its name: paper, paper-seen, intN, adaptiveDB, omitPERCENT."""
    if name in ("paper", "paper-seen"):
        return {"policy": "paper", "compare": "seen" if name == "paper-seen" else "sent"}
    found = re.fullmatch(r"(int|adaptive|omit)(\d+)", name)
    if found is None:
        raise UserError(
            f"unknown policy {name!r}; known: paper, paper-seen, int1..int8, adaptiveDB (such as "
            "adaptive40), omitPERCENT (such as omit50)"
        )
    kind, number = found[1], int(found[2])
    if kind == "adaptive":
        return {"policy": "adaptive", "target_psnr_db": number}
    if kind == "omit":
        return {"policy": "fixed", "bits": "full", "omitted": number / 100, "refresh": 10}
    if number not in BITS:
        raise UserError(f"policy {name!r}: bits are one of {', '.join(map(str, BITS))}")
    return {"policy": "fixed", "bits": number}


@dataclass(frozen=True)
class QualitySettings:
    """`share`: how much of an exact step communication is to take on emulated links, in per cent;
    None: links as they are.
    """

    policies: tuple[str, ...] = POLICIES
    pictures: int = 16
    steps: int = 50
    batch: int = 4
    dtype: str = "fp32"
    share: int | None = None
    weights: str = ""

    @property
    def seeds(self) -> range:
        """One per batch of pictures."""
        return range(-(-self.pictures // self.batch))

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.steps, batch=self.batch, dtype=DTYPES[self.dtype])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QualitySettings:
        return cls(**{**data, "policies": tuple(data["policies"])})
