# SPDX-License-Identifier: Apache-2.0
"""Starts headless Chromium for tests of pages; without network, in an empty folder of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def why_no_browser() -> str:
    """Returns what is missing; nothing if pages can be tested."""
    try:
        import selenium  # noqa: F401, PLC0415  (optional)
    except ImportError:
        return "selenium is not installed: pip install -c constraints.txt '.[dev]'"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: `make test-page` as root installs it"
    return ""


@contextmanager
def chromium(width: int = 1440, height: int = 1000) -> Iterator[Any]:
    """Starts a browser, and ends it. Its console is kept: `driver.get_log("browser")`."""
    from selenium import webdriver  # noqa: PLC0415
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.binary_location = shutil.which("chromium") or ""
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def open_page(driver: Any, file: Path) -> float:
    """Opens a page, and waits until what is in sight is unpacked and drawn. Returns the seconds."""
    begin = time.perf_counter()
    driver.get(file.resolve().as_uri())
    wait_until(driver, "return document.readyState === 'complete' && idle() && drawn()", _READY)
    return time.perf_counter() - begin


_READY = """
window.idle = () => ![...document.querySelectorAll('.loading')].some((item) => item.offsetParent);
window.drawn = () => [...document.querySelectorAll('canvas.chart')].every(
  (item) => !item.offsetParent || item.width > 300);
"""


def wait_until(driver: Any, condition: str, before: str = "", seconds: float = 30.0) -> None:
    """Waits until a script returns true."""
    driver.execute_script(before)
    end = time.perf_counter() + seconds
    while not driver.execute_script(condition):
        if time.perf_counter() > end:
            raise TimeoutError(f"the page never came to: {condition}")
        time.sleep(0.02)


def console_errors(driver: Any) -> list[str]:
    """Returns what the browser complained about."""
    return [item["message"] for item in driver.get_log("browser") if item["level"] == "SEVERE"]
