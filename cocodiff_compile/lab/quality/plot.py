# SPDX-License-Identifier: Apache-2.0
"""Plots a quality run: bytes against distance, and the pictures side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

SHOWN = 6
"""The number of pictures of each variant that are displayed."""


def saved(variant: Mapping[str, Any]) -> float:
    """Returns how many times fewer bytes a rank sends than uncompressed."""
    sent: float = variant["sent_bytes"]
    return variant["full_bytes"] / sent if sent else 1.0


def plot_frontier(result: dict[str, Any], file: Path) -> None:
    """Draws one point per policy, with a line from its worst picture to its best."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, variant in enumerate(result["variants"][1:]):
        psnrs = [item["psnr_db"] for item in variant["distances"]]
        color = "#e0803c" if variant["name"].startswith("paper") else "#4c6a92"
        axes.plot([saved(variant)] * 2, [min(psnrs), max(psnrs)], color=color, linewidth=1)
        axes.plot(saved(variant), mean(psnrs), "o", color=color)
        axes.annotate(
            variant["name"],
            (saved(variant), mean(psnrs)),
            textcoords="offset points",
            xytext=(6, 4 if number % 2 else -11),  # neighbours do not cover each other
            fontsize=8,
        )
    axes.set_xlabel("times fewer bytes than the exact run")
    axes.set_ylabel("PSNR to the exact run, dB (mean; line: all pictures)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    title = "small trained model, {pictures} pictures, {steps} steps, {dtype}"
    axes.set_title(title.format(**result["settings"]), loc="left", fontsize=9)
    figure.savefig(file, dpi=150)


def plot_pictures(result: dict[str, Any], file: Path) -> None:
    """Draws a row per variant and a column per picture, with distances to those of the first."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    variants = result["variants"]
    count = min(SHOWN, len(variants[0]["pictures"]))
    figure = Figure(figsize=(1.2 + count, 1.05 * len(variants)), layout="constrained")
    grid = figure.subplots(len(variants), count, squeeze=False)
    for variant, row in zip(variants, grid, strict=True):
        for place, axes in enumerate(row):
            picture = variant["pictures"][place]
            axes.imshow(((picture.permute(1, 2, 0) + 1) / 2).clamp(0, 1).numpy())
            axes.set(xticks=[], yticks=[])
            if variant is not variants[0]:
                psnr_db = variant["distances"][place]["psnr_db"]
                axes.set_title(f"{psnr_db:.0f} dB", fontsize=7, pad=2)
        row[0].set_ylabel(variant["name"], rotation=0, ha="right", va="center", fontsize=8)
    figure.savefig(file, dpi=120)
