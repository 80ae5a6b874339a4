# SPDX-License-Identifier: Apache-2.0
"""Defines what a quality run compares, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.bench.cases import DTYPES
from cocodiff_compile.lab.quality.small_dit import Sampling
from cocodiff_compile.v_major.payload import ROLES

EXACT = "exact"
PASSES = "passes"
"""The name of our exact passes among policies: exchanges carry everything."""
POLICIES = ("paper", "paper-seen", "int8", "int4", "int3", "int2", "int1", "adaptive40")
"""The policies that are compared by default."""
_KNOWN = (
    "passes (exact), paper, paper-seen, intBITS (such as int4, or int2233 for Q, K, V and O; "
    "int2from8 codes keyframes too), adaptiveDB (such as adaptive40), skipPERCENT (such as "
    "skip50, of each stream; skip50o reuses O too, int4skip50o codes the rest)"
)


def v_major_of(name: str) -> dict[str, Any] | None:
    """Returns the option `v_major` of a policy by its name; `_KNOWN` lists the names."""
    if name == PASSES:
        return None
    if name in ("paper", "paper-seen"):
        return {"policy": "paper", "compare": "seen" if name == "paper-seen" else "sent"}
    if match := re.fullmatch(r"adaptive(\d+)", name):
        return {"policy": "adaptive", "target_psnr_db": int(match[1])}
    if match := re.fullmatch(r"(?:int(\d))?skip(\d+)(o?)", name):
        return {
            "policy": "fixed",
            "bits": int(match[1]) if match[1] else "full",
            "skipped_share": int(match[2]) / 100,
            "reuse_output": bool(match[3]),
            "select_per_stream": True,
            "refresh": 10,
        }
    if match := re.fullmatch(r"int(\d|\d{4})(?:from(\d))?", name):
        widths = [int(digit) for digit in match[1]]
        bits = widths[0] if len(widths) == 1 else dict(zip(ROLES, widths, strict=True))
        first = {"first_bits": int(match[2])} if match[2] else {}
        return {"policy": "fixed", "bits": bits, **first}
    raise UserError(f"unknown policy {name!r}; known: {_KNOWN}")


@dataclass(frozen=True)
class QualitySettings:
    """Holds the settings of a run. On emulated links, `share` is the wanted share of communication
    in an exact step, in per cent, or `rate_mbit` their rate; without both, links are used as they
    are.
    """

    policies: tuple[str, ...] = POLICIES
    pictures: int = 16
    steps: int = 50
    batch: int = 4
    dtype: str = "fp32"
    share: int | None = None
    rate_mbit: float | None = None
    weights: str = ""
    ready_steps: int = 0
    """How many steps of a variant are drawn so that all it needs is compiled; 0: a whole run."""
    chunks: bool = True
    """Whether lossy variants may cut heads and tokens into chunks, which takes long to compile."""
    is_profiled: bool = False
    """Whether one call of every variant is profiled at last."""
    debug_dir: str = ""
    """Where our compiles are written down."""
    decisions: str = ""
    """Where decisions are kept for the next run, which then compiles the same code."""

    def __post_init__(self) -> None:
        for name in ("pictures", "steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}; allowed: 1 or more")

    @property
    def is_timed(self) -> bool:
        """Returns whether links are emulated, so that times mean something."""
        return self.share is not None or self.rate_mbit is not None

    @property
    def seeds(self) -> range:
        """One seed per batch of pictures."""
        return range(-(-self.pictures // self.batch))

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.steps, batch=self.batch, dtype=DTYPES[self.dtype])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QualitySettings:
        return cls(**{**data, "policies": tuple(data["policies"])})
