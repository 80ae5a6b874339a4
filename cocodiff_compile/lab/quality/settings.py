"""What a quality run compares, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.bench.cases import DTYPES
from cocodiff_compile.lab.quality.sample import Sampling
from cocodiff_compile.v_major.travel import ROLES

EXACT = "exact"
POLICIES = ("paper", "paper-seen", "int8", "int4", "int3", "int2", "int1", "adaptive40")
"""What is compared unless something else is asked for."""
_KNOWN = (
    "paper, paper-seen, intBITS (such as int4, or int2233 for Q, K, V and O apart; int2from8 codes "
    "the first step too), adaptiveDB (such as adaptive40), omitPERCENT (such as omit50, of each "
    "stream; omit50o reuses output too, int4omit50o codes what is sent)"
)


def v_major_of(name: str) -> dict[str, Any]:
    """The options of a policy by its name: see `_KNOWN`."""
    if name in ("paper", "paper-seen"):
        return {"policy": "paper", "compare": "seen" if name == "paper-seen" else "sent"}
    if found := re.fullmatch(r"adaptive(\d+)", name):
        return {"policy": "adaptive", "target_psnr_db": int(found[1])}
    if found := re.fullmatch(r"(?:int(\d))?omit(\d+)(o?)", name):
        return {
            "policy": "fixed",
            "bits": int(found[1]) if found[1] else "full",
            "omitted": int(found[2]) / 100,
            "reuse_output": bool(found[3]),
            "streams": "apart",
            "refresh": 10,
        }
    if found := re.fullmatch(r"int(\d|\d{4})(?:from(\d))?", name):
        widths = [int(digit) for digit in found[1]]
        bits = widths[0] if len(widths) == 1 else dict(zip(ROLES, widths, strict=True))
        first = {"first_bits": int(found[2])} if found[2] else {}
        return {"policy": "fixed", "bits": bits, **first}
    raise UserError(f"unknown policy {name!r}; known: {_KNOWN}")


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

    def __post_init__(self) -> None:
        for name in ("pictures", "steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: a whole number from 1")

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
