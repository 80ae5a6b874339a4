# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of docs/read_a_report.md: FLUX over two nodes, light and dark.

python -m tests.page_screenshots [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.page import explain_flux
from tests.support.browser import chromium, open_page, wait_until, why_no_browser

_SHOW = """
setTheme(arguments[0]);
const canvas = document.querySelector('canvas.chart');
document.getElementById('g0-problems').open = false;
document.getElementById('g0-attentions').open = false;
canvas.focus({preventScroll: true});
scrollTo(0, 0);
"""
_DRAWN = "return document.querySelector('.detail dl') !== null"


def main(folder: str = "docs") -> None:
    if reason := why_no_browser():
        sys.exit(reason)
    explanation = explain_flux(4)
    with tempfile.TemporaryDirectory() as temporary, chromium(1440, 1330) as driver:
        file = Path(temporary) / "flux.html"
        explanation.write_page(file)
        for theme in ("light", "dark"):
            open_page(driver, file)
            _show(driver, theme)
            driver.save_screenshot(str(Path(folder) / f"page_{theme}.png"))


def _show(driver: Any, theme: str) -> None:
    """Zooms into an attention, and picks an exchange that hides behind computation."""
    driver.execute_script(_SHOW, theme)
    canvas = driver.find_element("css selector", "canvas.chart")
    canvas.send_keys("e", "e", "e", "e", "+", "+", "\ue015", "\ue012", "\ue012")  # down, left
    wait_until(driver, _DRAWN)
    driver.execute_script("scrollTo(0, 0)")


if __name__ == "__main__":
    main(*sys.argv[1:])
