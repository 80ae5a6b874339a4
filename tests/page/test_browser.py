# SPDX-License-Identifier: Apache-2.0
"""Pages in a browser: they open, draw, filter, fold, search and print, by mouse and by keyboard."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from tests.support.browser import chromium, console_errors, open_page, wait_until, why_no_browser
from tests.support.planted import ODD_NAME, explain_planted
from tests.support.ulysses_block import WIDTH, Block

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "there is one")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of one graph, and a page of two."""
    folder = tmp_path_factory.mktemp("pages")
    explain_planted(folder).write_page(folder / "one.html")
    torch._dynamo.reset()
    with fake_ranks(2):
        model, x = Block().eval(), torch.ones(1, 4, WIDTH)
        first = cocodiff_compile.explain(model, x)
        second = cocodiff_compile.explain(model, torch.ones(1, 64, WIDTH))
        both = type(first)((*first.graphs, *second.graphs))
    both.write_page(folder / "two.html")
    _run_v_major(folder / "run")
    return folder


def _run_v_major(folder: Path) -> None:
    options = {"v_major": {"policy": "adaptive", "only_if_faster": False}, "debug_dir": str(folder)}
    torch._dynamo.reset()
    with fake_ranks(2), torch.no_grad(), cocodiff_compile.denoising(num_steps=3) as run:
        model = torch.compile(Block().eval(), backend="cocodiff_eager", options=options)
        for _ in range(3):
            model(torch.randn(1, 4, WIDTH))
            run.step()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(browser: Any, files: Path) -> Iterator[Any]:
    """The page of one graph, freshly opened. No test may leave an error on the console."""
    open_page(browser, files / "one.html")
    yield browser
    assert console_errors(browser) == []


def find(page: Any, selector: str) -> Any:
    return page.find_element("css selector", selector)


def text_of(page: Any, selector: str) -> str:
    return str(
        page.execute_script("return document.querySelector(arguments[0]).innerText", selector)
    )


def colors_in(page: Any) -> int:
    """Returns how many colors the timeline has."""
    script = """
    const canvas = document.querySelector('canvas.chart');
    const data = new Uint32Array(canvas.getContext('2d')
      .getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return new Set(data).size;"""
    return int(page.execute_script(script))


def press(page: Any, selector: str, *keys: str) -> None:
    find(page, selector).send_keys(*keys)


def range_shown(page: Any) -> str:
    """Returns which part of the step is shown, once it was drawn."""
    page.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => "
                              "requestAnimationFrame(() => done()))")  # fmt: skip
    return text_of(page, ".timeline .count")


def test_opens_draws_and_leaves_markup_in_names_alone(page: Any) -> None:
    assert page.title == "cocodiff: rank 0"
    assert colors_in(page) > 5
    assert ODD_NAME in text_of(page, "#g0-problems")
    assert page.execute_script("return document.querySelectorAll('img').length") == 0
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_a_stranger_finds_the_declined_attention_and_its_remedy_first(page: Any) -> None:
    first = text_of(page, "#g0-problems .card")
    assert first.startswith("attention declined")
    assert "register_attention(torch.ops.hand_written.opaque_attention" in first
    assert "exchange exposed" in text_of(page, "#g0-problems .card.warn")


def test_the_filter_leaves_rows_with_all_words(page: Any) -> None:
    shown = """return [...document.querySelectorAll('#g0-attentions tbody tr')]
        .filter((row) => !row.hidden).length"""
    assert page.execute_script(shown) == 2
    press(page, "#g0-attentions .filter", "declined opaque")
    assert page.execute_script(shown) == 1
    assert text_of(page, "#g0-attentions .count") == "1 of 2 rows"


def test_a_column_sorts_by_number_and_says_so(page: Any) -> None:
    head = find(page, "#g0-problems thead th button")
    cells = """return [...document.querySelectorAll('#g0-problems tbody tr')]
        .map((row) => +row.cells[0].dataset.sort)"""
    head.send_keys("\ue007")
    assert page.execute_script(cells) == sorted(page.execute_script(cells))
    head.send_keys("\ue007")
    assert page.execute_script(cells) == sorted(page.execute_script(cells), reverse=True)
    assert find(page, "#g0-problems thead th").get_attribute("aria-sort") == "descending"


def test_sections_fold_one_by_one_and_all_at_once(page: Any) -> None:
    summary = find(page, "#g0-attentions > summary")
    summary.send_keys("\ue007")
    assert not find(page, "#g0-attentions .table").is_displayed()
    find(page, "#fold").click()
    assert not find(page, "#g0-summary .facts").is_displayed()
    find(page, "nav a[href='#g0-attentions']").click()
    assert find(page, "#g0-attentions .table").is_displayed(), "a link opens its section"


def test_the_timeline_zooms_and_picks_by_keyboard(page: Any) -> None:
    whole = range_shown(page)
    press(page, "canvas.chart", "e")
    detail = text_of(page, ".detail")
    assert "waits for Q" in detail
    assert "the rank stands still" in detail
    assert "hides behind" in detail
    press(page, "canvas.chart", "+", "+")
    assert range_shown(page) != whole
    press(page, "canvas.chart", "0")
    assert range_shown(page) == whole
    press(page, "canvas.chart", "\ue014")  # right
    assert text_of(page, ".detail") != detail
    press(page, "canvas.chart", "\ue00c")  # escape
    assert "pick one with the arrow keys" in text_of(page, ".detail")


def test_what_hides_what_is_told_both_ways(browser: Any, files: Path) -> None:
    """An exchange hides behind what hides it, in both timelines."""
    open_page(browser, files / "two.html")
    found = browser.execute_async_script("""
      const done = arguments[0];
      unpack('d1-0').then((data) => done(data.charts.map((given) => {
        const chart = new Chart(given), pairs = [];
        chart.kinds.forEach((kind, span) => {
          if (kind !== 'exchange') return;
          for (const [work] of chart.beside(span)) {
            const back = chart.beside(work).map((item) => item[0]);
            pairs.push([chart.isWork(work), back.includes(span)]);
          }
        });
        return pairs;
      })));""")
    assert len(found) == 2
    assert found[1], "something hides"
    assert all(is_work and is_back for pairs in found for is_work, is_back in pairs)


def test_the_mouse_shows_zooms_and_moves(page: Any) -> None:
    from selenium.webdriver import ActionChains  # noqa: PLC0415
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: PLC0415

    whole = range_shown(page)
    canvas = find(page, "canvas.chart")
    page.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas
    )
    wide = canvas.size["width"]
    at_wait = (200 - wide // 2, 22 + 26 + 12 - canvas.size["height"] // 2)
    ActionChains(page).move_to_element_with_offset(canvas, *at_wait).perform()
    assert "estimate" in text_of(page, ".detail")
    keys = ActionChains(page).key_down("\ue009")  # control
    keys.scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -400).key_up("\ue009").perform()
    zoomed = range_shown(page)
    assert zoomed != whole
    ActionChains(page).drag_and_drop_by_offset(canvas, -150, 0).perform()
    assert range_shown(page) != zoomed


def test_only_lines_in_sight_are_elements_and_search_goes_to_what_it_finds(page: Any) -> None:
    count = "return document.querySelectorAll('.diff .line').length"
    press(page, ".diff input", "opaque_attention")
    wait_until(page, "return document.querySelector('.diff .line.current') !== null")
    assert "hand_written.opaque_attention" in text_of(page, ".diff .line.current")
    assert text_of(page, ".diff .count") == "1 of 2 found", "the op, and what reads it"
    press(page, ".diff input", "\ue007")
    assert text_of(page, ".diff .count") == "2 of 2 found"
    assert 0 < page.execute_script(count) < 120


def test_dark_and_light_are_switched_and_repainted(page: Any) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(background)
    find(page, "#theme").click()
    assert page.execute_script(background) != light
    assert find(page, "#theme").get_attribute("aria-pressed") == "true"
    assert colors_in(page) > 5
    find(page, "#theme").click()
    assert page.execute_script(background) == light


def test_the_preferred_scheme_is_taken(browser: Any, files: Path) -> None:
    browser.execute_script("localStorage.clear()")
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    open_page(browser, files / "two.html")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_what_takes_the_focus_shows_it(page: Any) -> None:
    """Tab goes from one control to the next, and each has an outline."""
    seen = []
    for _ in range(12):
        page.switch_to.active_element.send_keys("\ue004")
        seen.append(
            page.execute_script(
                "const e = document.activeElement;"
                "return [e.tagName, getComputedStyle(e).outlineStyle]"
            )
        )
    assert len({name for name, _ in seen}) >= 3
    assert all(outline != "none" for _, outline in seen), seen


def test_print_opens_what_is_short_and_leaves_out_controls(page: Any) -> None:
    find(page, "#fold").click()
    printed = base64.b64decode(page.print_page())
    assert printed.startswith(b"%PDF")
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert find(page, "#g0-settings").get_attribute("open")
    assert not find(page, "#g0-graph").get_attribute("open")
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert not find(page, "#g0-settings").get_attribute("open")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not find(page, "#theme").is_displayed()
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_another_graph_is_unpacked_when_it_is_picked(browser: Any, files: Path) -> None:
    open_page(browser, files / "two.html")
    assert browser.execute_script("return document.querySelectorAll('canvas.chart').length") == 1
    shown = find(browser, "#picker").get_attribute("value")
    other = {"0": "1", "1": "0"}[shown]
    find(browser, f"#picker option[value='{other}']").click()
    wait_until(browser, "return document.querySelectorAll('canvas.chart').length === 2")
    assert not find(browser, f".group[data-group='{shown}']").is_displayed()
    assert find(browser, f".group[data-group='{other}'] canvas.chart").is_displayed()
    assert console_errors(browser) == []


def test_steps_of_v_major_are_told_by_keyboard(browser: Any, files: Path) -> None:
    open_page(browser, files / "run" / "rank_000" / "index.html")
    maps = [
        item for item in browser.find_elements("css selector", ".heatmap") if item.is_displayed()
    ]
    assert len(maps) == 2
    canvas = maps[0].find_element("css selector", "canvas")
    canvas.send_keys("\ue014", "\ue014")  # right
    assert "step 1" in maps[0].text
    assert "% sent" in maps[0].text
    assert console_errors(browser) == []


def test_a_narrow_window_needs_no_sideways_scrolling(browser: Any, files: Path) -> None:
    browser.set_window_size(560, 900)
    open_page(browser, files / "one.html")
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0
    browser.set_window_size(1440, 1000)
