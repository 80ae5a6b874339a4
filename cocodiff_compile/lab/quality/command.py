# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff quality`: how far lossy runs are from the exact one, and what they save."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.lab.bench.cases import DTYPES, Grid
from cocodiff_compile.lab.bench.machine import describe_machine
from cocodiff_compile.lab.bench.run import run_on_cluster
from cocodiff_compile.lab.local_ranks import run_local_ranks, tell_parent
from cocodiff_compile.lab.progress import Say, timed_sayer
from cocodiff_compile.lab.quality.page import write_quality_page
from cocodiff_compile.lab.quality.plot import plot_frontier, plot_pictures, saved
from cocodiff_compile.lab.quality.ranks import measure_quality
from cocodiff_compile.lab.quality.settings import POLICIES, QualitySettings, v_major_of
from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles
from cocodiff_compile.report.tables import format_rows
from cocodiff_compile.v_major.options import VMajorOptions

_TIMEOUT_S = 3 * 3600.0


def add_quality(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    quality = commands.add_parser(
        "quality",
        help="compare lossy exchanges with the exact run: distance of pictures, bytes, time",
        description="Draws pictures with a small trained model, from the same noise, exactly and "
        "with each policy, compiled on gloo ranks of this machine. With --shares the ranks are "
        "nodes of an emulated cluster (root), and whole runs are timed, interleaved.",
    )
    quality.add_argument("--policies", metavar="A,B", help="the policies to compare; default: all")
    quality.add_argument("--pictures", type=int, default=16, help="pictures in all (default: 16)")
    quality.add_argument("--steps", type=int, default=50, help="denoising steps (default: 50)")
    quality.add_argument("--batch", type=int, default=4, help="pictures drawn at once (default: 4)")
    quality.add_argument("--dtype", choices=DTYPES, default="fp32")
    quality.add_argument(
        "--ranks", type=int, default=2, help="local ranks, without --shares (default: 2)"
    )
    quality.add_argument("--grid", default="2x1", help="nodes x tiles, with --shares (2x1)")
    quality.add_argument(
        "--shares",
        metavar="A,B",
        help="set links so that communication is A, B ... per cent of an exact step (root)",
    )
    quality.add_argument(
        "--weights", type=Path, help="the weights of the model; default: those of the package"
    )
    quality.add_argument(
        "--out",
        type=Path,
        default=Path("build/quality"),
        metavar="DIR",
        help="the folder for results (default: build/quality)",
    )
    quality.set_defaults(run=run_quality)


def run_quality(parsed: argparse.Namespace) -> int:
    avoid_broken_tiles()
    for package in ("diffusers", "matplotlib", "skimage"):
        need_package(package, "quality")
    results = [_measure(parsed, share, timed_sayer()) for share in _shares(parsed)]
    parsed.out.mkdir(parents=True, exist_ok=True)
    for result in results:
        print("\n" + _head(result) + "\n" + format_quality(result))
    _write(results, parsed.out)
    return 0


def _shares(parsed: argparse.Namespace) -> list[int | None]:
    if not parsed.shares:
        return [None]
    shares = parsed.shares.split(",")
    if not all(share.isdecimal() and 1 <= int(share) <= 99 for share in shares):
        raise UserError(
            f"--shares {parsed.shares!r}; allowed: whole numbers from 1 to 99, such as 75,90"
        )
    return [int(share) for share in shares]


def _measure(parsed: argparse.Namespace, share: int | None, say: Say) -> dict[str, Any]:
    policies = tuple(parsed.policies.split(",")) if parsed.policies else POLICIES
    for name in policies:
        if (v_major := v_major_of(name)) is not None:
            VMajorOptions.from_mapping(v_major)
    weights = str(parsed.weights.absolute()) if parsed.weights else ""
    settings = QualitySettings(
        policies, parsed.pictures, parsed.steps, parsed.batch, parsed.dtype, share, weights=weights
    )
    if share is not None:
        return on_emulated_cluster(settings, Grid.parse(parsed.grid), say)
    result: dict[str, Any]
    result, *_ = run_local_ranks(
        local_rank,
        parsed.ranks,
        settings,
        timeout_s=_TIMEOUT_S,
        on_message=lambda rank, text: say(text) if rank == 0 else None,
    )
    return result


def local_rank(_rank: int, _num_ranks: int, settings: QualitySettings) -> dict[str, Any]:
    return measure_quality(settings, tell_parent)


def on_emulated_cluster(settings: QualitySettings, grid: Grid, say: Say) -> dict[str, Any]:
    """Returns what the ranks of an emulated cluster measured."""
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.pt"
        run_on_cluster(
            grid,
            "cocodiff_compile.lab.quality.rank",
            settings.to_json(),
            result_file,
            say,
            name="quality",
            timeout_s=_TIMEOUT_S,
        )
        result: dict[str, Any] = torch.load(result_file, weights_only=True)
    return result


def _head(result: dict[str, Any]) -> str:
    given = result["settings"]
    links = "loopback"
    if result["rate_mbit"] is not None:
        links = f"emulated links of {result['rate_mbit']:.0f} Mbit/s ({given['share']} %)"
    return (
        f"{given['pictures']} pictures of {given['steps']} steps, guidance 2, {given['dtype']}, "
        f"{result['ranks']} gloo ranks, {links}"
    )


def format_quality(result: dict[str, Any]) -> str:
    """Returns a table with a row per policy."""
    return format_rows(quality_rows(result))


def quality_rows(result: dict[str, Any]) -> list[dict[str, object]]:
    """Returns the figures of each policy by the names of their columns."""
    steps = result["settings"]["steps"]
    return [_row(variant, result["variants"][0], steps) for variant in result["variants"]]


def _row(variant: dict[str, Any], exact: dict[str, Any], steps: int) -> dict[str, object]:
    distances = variant["distances"]
    psnrs = [item["psnr_db"] for item in distances]
    seconds = median(variant["seconds"])
    kinds = ", ".join(f"{count} {kind}" for kind, count in variant["kinds"].items())
    return {
        "policy": variant["name"],
        "bytes": f"1/{saved(variant):.2f}",
        **_on_the_wire(variant, exact),
        "PSNR dB mean": f"{mean(psnrs):.1f}",
        "least": f"{min(psnrs):.1f}",
        "SSIM mean": f"{mean(item['ssim'] for item in distances):.4f}",
        "MSE mean": f"{mean(item['mse'] for item in distances):.1e}",
        "s per run": f"{seconds:.2f}",
        "ms per step": f"{1e3 * seconds / steps:.0f}",
        "speed": f"{median(exact['seconds']) / seconds:.2f}x",
        "MiB cached": f"{variant['cache_bytes'] / 2**20:.1f}",
        "steps": kinds or "exact",
    }


def _on_the_wire(variant: dict[str, Any], exact: dict[str, Any]) -> dict[str, object]:
    """Returns a run as the busiest node's interface counted it, or dashes if nothing was."""
    if not variant["counted_bytes"]:
        return dict.fromkeys(("on the wire", "MB", "packets"), "-")
    size_bytes = median(variant["counted_bytes"])
    return {
        "on the wire": f"1/{median(exact['counted_bytes']) / size_bytes:.2f}",
        "MB": f"{size_bytes / 1e6:.1f}",
        "packets": f"{median(variant['counted_packets']):,.0f}",
    }


def _write(results: Sequence[dict[str, Any]], folder: Path) -> None:
    without_pictures = [
        {**item, "variants": list(map(plain, item["variants"]))} for item in results
    ]
    machine = describe_machine()
    data = {"machine": machine, "results": without_pictures}
    file = folder / "results.json"
    file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    plot_frontier(results[0], folder / "frontier.png")
    plot_pictures(results[0], folder / "pictures.png")
    page = folder / "index.html"
    rows = [quality_rows(result) for result in results]
    heads = [_head(result) for result in results]
    write_quality_page(results, rows, heads, machine, folder / "pictures.png", page)
    print(f"\nwritten: {file}, {folder / 'frontier.png'}, {folder / 'pictures.png'}, {page}")


def plain(variant: dict[str, Any]) -> dict[str, Any]:
    """Returns a variant without pictures, and null for infinity, which JSON does not have."""
    rest = {key: value for key, value in variant.items() if key != "pictures"}
    distances = [
        {key: value if isfinite(value) else None for key, value in item.items()}
        for item in variant["distances"]
    ]
    return {**rest, "distances": distances}
