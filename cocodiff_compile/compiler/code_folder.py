# SPDX-License-Identifier: Apache-2.0
"""The folder that Inductor writes its code to.

On a rank where it cannot be written every compile would fail, and with it those of all others. Such
a rank writes to a folder of its own instead, which goes with its process.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile

from cocodiff_compile.compat import inductor_folder
from cocodiff_compile.say_once import say_once

log = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def ensure_code_folder() -> None:
    """Sees to it that Inductor's folder can be written, and says so if it had to be another."""
    folder = inductor_folder()
    if reason := _why_unwritable(folder):
        own = _own_folder().name
        os.environ[VARIABLE] = own
        say_once(
            log,
            logging.WARNING,
            f"Inductor's folder {folder} cannot be written ({reason}): this rank compiles into "
            f"{own}, and keeps nothing; set {VARIABLE} to a folder that can be written",
        )


@functools.cache
def _why_unwritable(folder: str) -> str:
    """Returns why a folder cannot be written; nothing if it can be."""
    try:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103  (Inductor's own call)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"code")
    except OSError as error:
        return str(error)
    return ""


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="torchinductor_")
