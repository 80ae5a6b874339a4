"""Implements `cocodiff quality`: measures how far lossy runs are from the exact one, and what they
save.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles

_TIMEOUT_S = 3 * 3600.0


def add_quality(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command. Its dependencies are imported when it runs."""
    quality = commands.add_parser(
        "quality",
        help="compare lossy exchanges with the exact run: distance of pictures, bytes, time",
        description="Draws pictures with a small trained model, from the same noise, exactly and "
        "with each policy, compiled on gloo ranks of this machine. With --shares the ranks are "
        "nodes of an emulated cluster (root), and whole runs are timed, interleaved.",
    )
    quality.add_argument("--policies", metavar="A,B", help="the policies to compare; default: all")
    quality.add_argument("--pictures", type=int, default=16)
    quality.add_argument("--steps", type=int, default=50)
    quality.add_argument("--batch", type=int, default=4, help="pictures drawn at once")
    quality.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    quality.add_argument(
        "--ranks", type=int, default=2, help="local ranks, without --shares (default: 2)"
    )
    quality.add_argument("--grid", default="2x1", help="nodes x tiles, with --shares")
    quality.add_argument(
        "--shares",
        metavar="A,B",
        help="set links so that communication is A, B ... per cent of an exact step (root)",
    )
    quality.add_argument(
        "--weights", type=Path, help="the weights of the model; default: those of the package"
    )
    quality.add_argument("--out", type=Path, default=Path("build/quality"), metavar="DIR")
    quality.set_defaults(run=run_quality)


def run_quality(parsed: argparse.Namespace) -> int:
    """Returns the exit status."""
    from cocodiff_compile.lab.progress import timed_sayer  # noqa: PLC0415

    avoid_broken_tiles()
    try:
        for package in ("diffusers", "matplotlib", "skimage"):
            need_package(package, "quality")
        results = [_measure(parsed, share, timed_sayer()) for share in _shares(parsed)]
    except UserError as error:
        print(f"cocodiff quality: {error}", file=sys.stderr)
        return 2
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


def _measure(parsed: argparse.Namespace, share: int | None, say: Any) -> dict[str, Any]:
    from cocodiff_compile.lab.quality.settings import (  # noqa: PLC0415
        POLICIES,
        QualitySettings,
        v_major_of,
    )
    from cocodiff_compile.v_major.options import VMajorOptions  # noqa: PLC0415

    policies = tuple(parsed.policies.split(",")) if parsed.policies else POLICIES
    for name in policies:
        VMajorOptions.from_mapping(v_major_of(name))
    weights = str(parsed.weights.absolute()) if parsed.weights else ""
    settings = QualitySettings(
        policies, parsed.pictures, parsed.steps, parsed.batch, parsed.dtype, share, weights
    )
    if share is None:
        return _on_local_ranks(settings, parsed.ranks, say)
    return _on_emulated_cluster(settings, parsed.grid, say)


def _on_local_ranks(settings: Any, num_ranks: int, say: Any) -> dict[str, Any]:
    from cocodiff_compile.lab.local_ranks import run_local_ranks  # noqa: PLC0415

    results: list[dict[str, Any]] = run_local_ranks(
        local_rank,
        num_ranks,
        settings,
        timeout_s=_TIMEOUT_S,
        on_message=lambda rank, text: say(text) if rank == 0 else None,
    )
    return results[0]


def local_rank(_rank: int, _num_ranks: int, settings: Any) -> dict[str, Any]:
    from cocodiff_compile.lab.local_ranks import tell_parent  # noqa: PLC0415
    from cocodiff_compile.lab.quality.ranks import measure_quality  # noqa: PLC0415

    return measure_quality(settings, tell_parent)


def _on_emulated_cluster(settings: Any, grid: str, say: Any) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    from cocodiff_compile.lab.bench.cases import Grid  # noqa: PLC0415
    from cocodiff_compile.lab.bench.on_cluster import run_on_cluster  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.pt"
        run_on_cluster(
            Grid.parse(grid),
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
    from cocodiff_compile.report.describe import format_table  # noqa: PLC0415

    steps = result["settings"]["steps"]
    rows = [_row(variant, result["variants"][0], steps) for variant in result["variants"]]
    headers = (
        "policy",
        "bytes",
        "on the wire",
        "MB",
        "packets",
        "PSNR dB mean",
        "least",
        "SSIM mean",
        "MSE mean",
        "s per run",
        "ms per step",
        "speed",
        "MiB cached",
        "steps",
    )
    return format_table(headers, rows)


def _row(variant: dict[str, Any], exact: dict[str, Any], steps: int) -> Sequence[object]:
    psnrs = [item["psnr_db"] for item in variant["distances"]]
    seconds = median(variant["seconds"])
    kinds = ", ".join(f"{count} {kind}" for kind, count in variant["kinds"].items())
    return (
        variant["name"],
        f"1/{saved(variant):.2f}",
        *_on_the_wire(variant, exact),
        f"{mean(psnrs):.1f}",
        f"{min(psnrs):.1f}",
        f"{mean(item['ssim'] for item in variant['distances']):.4f}",
        f"{mean(item['mse'] for item in variant['distances']):.1e}",
        f"{seconds:.2f}",
        f"{1e3 * seconds / steps:.0f}",
        f"{median(exact['seconds']) / seconds:.2f}x",
        f"{variant['cache_bytes'] / 2**20:.1f}",
        kinds or "exact",
    )


def _on_the_wire(variant: dict[str, Any], exact: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the saving, bytes and packets of a run as the busiest node's interface counted them,
    or dashes if nothing was counted.
    """
    if not variant["counted_bytes"]:
        return ("-",) * 3
    size_bytes = median(variant["counted_bytes"])
    share = f"1/{median(exact['counted_bytes']) / size_bytes:.2f}"
    return share, f"{size_bytes / 1e6:.1f}", f"{median(variant['counted_packets']):,.0f}"


def saved(variant: dict[str, Any]) -> float:
    """Returns how many times fewer bytes a rank sends than uncompressed."""
    return variant["full_bytes"] / variant["sent_bytes"] if variant["sent_bytes"] else 1.0


def _write(results: Sequence[dict[str, Any]], folder: Path) -> None:
    from cocodiff_compile.lab.bench.machine import describe_machine  # noqa: PLC0415
    from cocodiff_compile.lab.quality.plot import plot_frontier, plot_pictures  # noqa: PLC0415

    plain = [
        {**item, "variants": [_plain(variant) for variant in item["variants"]]} for item in results
    ]
    data = {"machine": describe_machine(), "results": plain}
    file = folder / "results.json"
    file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    plot_frontier(results[0], folder / "frontier.png")
    plot_pictures(results[0], folder / "pictures.png")
    print(f"\nwritten: {file}, {folder / 'frontier.png'}, {folder / 'pictures.png'}")


def _plain(variant: dict[str, Any]) -> dict[str, Any]:
    """Returns a variant without its pictures. JSON has no infinity, so that the PSNR of equal
    pictures is null.
    """
    rest = {key: value for key, value in variant.items() if key != "pictures"}
    distances = [
        {key: value if isfinite(value) else None for key, value in item.items()}
        for item in variant["distances"]
    ]
    return {**rest, "distances": distances}
