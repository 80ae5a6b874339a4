# SPDX-License-Identifier: Apache-2.0
"""Tests which device and which communication backend are chosen, over all cases."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from cocodiff_compile.devices.choose import (
    DEVICE_KINDS,
    TRANSPORT_VARIABLE,
    choose_device,
    choose_transport,
    device_kind,
)
from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.devices.cuda import CUDA, H100
from cocodiff_compile.devices.installed import (
    LEGACY_PACKAGES,
    Installed,
    installed_here,
    legacy_versions,
    why_not_legacy,
)
from cocodiff_compile.devices.xpu import AURORA_TILE, XPU
from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.launch.init_distributed import group_backend, import_legacy

ONECCL, IPEX = "oneccl-bind-pt", "intel-extension-for-pytorch"


def _installed(devices: str, built_in: str, oneccl: str = "", torch: str = "2.13.0") -> Installed:
    return Installed(
        torch,
        dict.fromkeys(devices.split(), 2),
        frozenset(built_in.split()),
        {ONECCL: oneccl} if oneccl else {},
    )


@pytest.mark.parametrize(
    ("devices", "asked", "expected"),
    [
        ("", None, "cpu"),
        ("xpu", None, "xpu"),
        ("cuda", None, "cuda"),
        ("xpu cuda", None, "cuda"),
        ("xpu cuda", "xpu", "xpu"),
        ("xpu", "cpu", "cpu"),
        ("", "xpu", "device 'xpu': torch 2.13.0 sees none; see cocodiff doctor"),
        ("xpu", "cuda", "device 'cuda': torch 2.13.0 sees none"),
        ("", "tpu", "device 'tpu' is unknown; allowed: cuda, xpu, cpu"),
    ],
)
def test_the_device(devices: str, asked: str | None, expected: str) -> None:
    installed = _installed(devices, "gloo")
    if expected in DEVICE_KINDS:
        assert choose_device(installed, asked).name == expected
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        choose_device(installed, asked)


CHOSEN = [
    # device, built in, oneccl-bind-pt, torch, asked, environment -> for init_process_group
    ("cpu", "gloo", "", "2.13.0", None, None, "gloo"),
    ("cpu", "gloo nccl xccl", "", "2.13.0", None, None, "gloo"),
    ("cuda", "gloo nccl", "", "2.13.0", None, None, "cpu:gloo,cuda:nccl"),
    ("cuda", "nccl", "", "2.13.0", None, None, "cuda:nccl"),
    ("xpu", "gloo xccl", "", "2.13.0", None, None, "cpu:gloo,xpu:xccl"),
    ("xpu", "gloo xccl", "2.8.0", "2.8.1", None, None, "cpu:gloo,xpu:xccl"),
    ("xpu", "gloo", "2.8.0", "2.8.1", None, None, "cpu:gloo,xpu:ccl"),
    ("xpu", "gloo", "2.8.0+xpu", "2.8.0+xpu", None, None, "cpu:gloo,xpu:ccl"),
    ("xpu", "gloo xccl", "2.8.0", "2.8.1", "ccl", None, "cpu:gloo,xpu:ccl"),
    ("xpu", "gloo xccl", "2.8.0", "2.8.1", None, "ccl", "cpu:gloo,xpu:ccl"),
    ("xpu", "gloo xccl", "2.8.0", "2.8.1", "xccl", "ccl", "cpu:gloo,xpu:xccl"),
    ("xpu", "gloo xccl", "", "2.13.0", "gloo", None, "gloo"),
    ("xpu", "gloo", "", "2.13.0", None, "gloo", "gloo"),
]


@pytest.mark.parametrize(
    ("device", "built_in", "oneccl", "torch", "asked", "variable", "expected"), CHOSEN
)
def test_the_communication_backend(
    device: str,
    built_in: str,
    oneccl: str,
    torch: str,
    asked: str | None,
    variable: str | None,
    expected: str,
) -> None:
    installed = _installed(device, built_in, oneccl, torch)
    environment = {TRANSPORT_VARIABLE: variable} if variable else {}
    kind = DEVICE_KINDS[device]
    chosen = choose_transport(kind, installed, asked, environment)
    assert group_backend(kind, chosen, installed) == expected


@pytest.mark.parametrize(
    ("device", "built_in", "oneccl", "asked", "words"),
    [
        ("xpu", "gloo", "", None, ["with xccl", "the oneccl-bind-pt of torch's own", "=gloo"]),
        ("xpu", "gloo", "2.8.0", None, ["2.8.0 is made for torch 2.8, this is 2.13.0"]),
        ("xpu", "gloo", "2.1.3", None, ["2.1.3 is made for torch 2.1, this is 2.13.0"]),
        ("xpu", "gloo", "2.8.0", "ccl", ["'ccl' on xpu: oneccl-bind-pt 2.8.0 is made for"]),
        ("xpu", "gloo", "", "xccl", ["'xccl' on xpu: torch 2.13.0 is built without it"]),
        ("xpu", "gloo xccl", "", "nccl", ["'nccl' on xpu; allowed: xccl, ccl, gloo"]),
        ("cuda", "gloo", "", None, ["nccl: torch 2.13.0 is built without it", "with nccl"]),
        ("cuda", "gloo nccl", "", "xccl", ["'xccl' on cuda; allowed: nccl"]),
        ("cpu", "gloo", "", "mpi", ["'mpi' on cpu; allowed: gloo", TRANSPORT_VARIABLE]),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    device: str, built_in: str, oneccl: str, asked: str | None, words: list[str]
) -> None:
    installed = _installed(device, built_in, oneccl)
    with pytest.raises(UserError) as raised:
        choose_transport(DEVICE_KINDS[device], installed, asked, {})
    for text in words:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("local_rank", "count", "expected"),
    [(0, 12, 0), (11, 12, 11), (3, 1, 0), (12, 12, None), (6, 6, None)],
)
def test_a_rank_takes_the_device_of_its_local_rank(
    local_rank: int, count: int, expected: int | None
) -> None:
    if expected is not None:
        assert XPU.index_of(local_rank, count) == expected
        return
    with pytest.raises(UserError, match=f"{count} are visible.*ZE_FLAT_DEVICE_HIERARCHY=FLAT"):
        XPU.index_of(local_rank, count)


@pytest.mark.parametrize(
    ("device", "setting", "value", "blocks"),
    [
        (XPU, "CCL_OP_SYNC", "1", True),
        (XPU, "CCL_OP_SYNC", "0", False),
        (XPU, "TORCH_XCCL_BLOCKING_WAIT", "1", True),
        (CUDA, "CUDA_LAUNCH_BLOCKING", "1", True),
        (CUDA, "TORCH_NCCL_BLOCKING_WAIT", "", False),
        (CUDA, "CCL_OP_SYNC", "1", False),
        (CPU, "CCL_OP_SYNC", "1", False),
    ],
)
def test_what_defeats_overlap_is_the_devices_own(
    device: object, setting: str, value: str, blocks: bool
) -> None:
    reason = device.why_no_overlap({setting: value})  # type: ignore[attr-defined]
    assert (f"{setting}={value} makes every exchange block" in reason) == blocks
    assert bool(reason) == blocks


def test_known_parts_have_figures_and_others_a_guess() -> None:
    assert XPU.cost_of("Intel(R) Data Center GPU Max 1550") is AURORA_TILE
    assert CUDA.cost_of("NVIDIA H100 80GB HBM3") is H100
    assert XPU.cost_of("Intel(R) Arc(TM) B580") is XPU.guess
    assert device_kind("privateuseone") is CPU


# The legacy packages


DOES_NOT_FIT = "raise AttributeError('as 2.8.0 does beside 2.13')"


def put_package(folder: Path, package: str, version: str, code: str = DOES_NOT_FIT) -> None:
    """A distribution, by default one whose import must not happen. It leaves a file if it does,
    whoever catches what it raises.
    """
    module = folder / LEGACY_PACKAGES[package]
    module.mkdir()
    mark = f"open({str(folder / 'imported')!r}, 'w').close()"
    module.joinpath("__init__.py").write_text(f"{mark}\n{code}")
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )


def test_versions_are_read_from_metadata_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert legacy_versions() == {}
    for package in LEGACY_PACKAGES:
        put_package(tmp_path, package, "2.8.0+xpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = installed_here()
    assert installed.packages == dict.fromkeys(LEGACY_PACKAGES, "2.8.0+xpu")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("ipex", "expected"),
    [("2.8.1", [IPEX, ONECCL]), ("2.7.0", [ONECCL]), ("", [ONECCL])],
)
def test_what_fits_is_imported_before_the_legacy_backend_is_used(
    ipex: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {ONECCL: "2.8.0"} | ({IPEX: ipex} if ipex else {})
    for package, version in packages.items():
        put_package(tmp_path, package, version, DOES_NOT_FIT if version == "2.7.0" else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = Installed("2.8.0+xpu", {"xpu": 2}, frozenset({"gloo"}), packages)
    chosen = choose_transport(XPU, installed, None, {})
    with patch.dict(sys.modules):
        import_legacy(chosen, installed)
        imported = [package for package, name in LEGACY_PACKAGES.items() if name in sys.modules]
    assert (chosen.name, imported) == ("ccl", expected)


@pytest.mark.parametrize(
    ("found", "torch", "fits"),
    [
        ("2.8.0", "2.8.0", True),
        ("2.8.10+xpu", "2.8.0+xpu", True),
        ("2.8.0", "2.13.0", False),
        ("2.1.0", "2.13.0", False),
        ("2.13.0", "2.1.0", False),
        ("2.8.0", "3.8.0", False),
        ("2.10.0+xpu", "2.10.0a0+git1234", True),
    ],
)
def test_a_legacy_package_must_be_of_torchs_series(found: str, torch: str, fits: bool) -> None:
    reason = why_not_legacy(IPEX, Installed(torch, packages={IPEX: found}))
    assert (reason == "") == fits
    assert why_not_legacy(IPEX, Installed(torch)) == f"{IPEX} is not installed"
