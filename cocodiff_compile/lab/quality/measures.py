"""Measures how far pictures are from the exact ones, with scikit-image."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

_RANGE = 2.0
"""The range of pixel values, which lie in -1..1."""


@dataclass(frozen=True)
class Distance:
    """Holds the distance of two pictures; PSNR is infinite where they are equal."""

    psnr_db: float
    ssim: float
    mse: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def distances(pictures: Tensor, exact: Tensor) -> list[Distance]:
    """Returns the distance of each picture, [3, side, side] in -1..1."""
    return [_distance(*pair) for pair in zip(pictures, exact, strict=True)]


def _distance(picture: Tensor, exact: Tensor) -> Distance:
    from skimage.metrics import (  # noqa: PLC0415  (optional)
        mean_squared_error,
        peak_signal_noise_ratio,
        structural_similarity,
    )

    ours, theirs = picture.double().numpy(), exact.double().numpy()
    mse = float(mean_squared_error(theirs, ours))
    psnr = float(peak_signal_noise_ratio(theirs, ours, data_range=_RANGE)) if mse else float("inf")
    ssim = structural_similarity(theirs, ours, data_range=_RANGE, channel_axis=0)
    return Distance(psnr, float(ssim), mse)
