# SPDX-License-Identifier: Apache-2.0
"""Enough of an XPU or a CUDA device to trace graphs for it with fake tensors, where torch was built
without.

What is missing there: a device guard, which views and copies enter, and the attention op that such
builds of torch take; without it attention falls apart into matmuls. Nothing can be computed. Once
loaded, all stays for as long as the process lives; the package itself knows nothing of it.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL({kind}, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::{kind}>)
"""
_ATTENTION = {
    "xpu": (torch.ops.aten._scaled_dot_product_fused_attention_overrideable, ()),
    "cuda": (torch.ops.aten._scaled_dot_product_efficient_attention, (False,)),
}
"""Attention op of each kind of device, and its arguments between mask and dropout."""
_IS_BUILT = {"xpu": torch.xpu._is_compiled, "cuda": torch.backends.cuda.is_built}


@functools.cache
def load_stand_in(kind: str) -> torch.library.Library | None:
    """Builds and loads what is missing of `kind`; what torch was built with is left as it is."""
    if kind == "cpu" or _IS_BUILT[kind]():
        return None
    _load_guard(kind)
    return _register_attention(kind)


def _load_guard(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD.format(kind=kind.upper()))
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
        command += [f"-I{path}" for path in include_paths()]
        command += [f"-L{path}" for path in library_paths()]
        subprocess.run([*command, "-lc10"], check=True)
        ctypes.CDLL(str(library))


def _register_attention(kind: str) -> torch.library.Library:
    """The op that builds for the device take for numbers of 32 bits."""
    library = torch.library.Library("aten", "IMPL")

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        assert not enable_gqa
        return fused(query, key, value, attn_mask, *more, dropout_p, is_causal, scale=scale)[0]

    fused, more = _ATTENTION[kind]
    library.impl("scaled_dot_product_attention", attention, f"Autograd{kind.upper()}")
    return library
