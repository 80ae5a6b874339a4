# SPDX-License-Identifier: Apache-2.0
"""The kit of pages: what is given is escaped, data survive, files are whole and link nowhere."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.report.page.document import document, render, write_file
from cocodiff_compile.report.page.sections import (
    Blobs,
    Card,
    Cell,
    Column,
    Facts,
    Legend,
    Part,
    Picture,
    Section,
    Table,
    Text,
    TimelineChart,
)

EVIL = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&{css}"
PARTS: list[Part] = [
    Text(EVIL),
    Text(EVIL, is_code=True),
    Facts([(EVIL, EVIL, EVIL)]),
    Card("bad", EVIL, EVIL, EVIL, EVIL, (EVIL, EVIL)),
    Table((Column(EVIL, hint=EVIL),), [(EVIL,), (Cell(EVIL, 1.0, hint=EVIL),)], EVIL),
    Legend([("#fff", EVIL, EVIL)]),
    TimelineChart({"charts": EVIL}, EVIL),
]
VOID = {"meta", "link", "input", "img", "br"}


class Tags(HTMLParser):
    """Reads a page: its elements with their attributes, and whether they close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID and tag != "option":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(*parts: Part) -> str:
    return document(EVIL, EVIL, [render(EVIL, [Section("Evil & co", EVIL, parts, EVIL)])])


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_whatever_is_given_stays_text(part: Part) -> None:
    plain = Tags(page())
    evil = Tags(page(part))
    assert not evil.open, "every element is closed"
    scripts = sum(tag == "script" for tag, _ in evil.seen)
    assert scripts - sum(tag == "script" for tag, _ in plain.seen) == isinstance(
        part, TimelineChart
    ), "one more script holds the data of a timeline, and none was given"
    assert not [tag for tag, _ in evil.seen if tag == "img"]
    assert not [name for _, attrs in evil.seen for name in attrs if name.startswith("on")]


def test_groups_are_picked_by_name_and_one_is_shown() -> None:
    groups = [render(f"<{n}>", [Section("A", "A", (Text(str(n)),))], n) for n in range(3)]
    seen = Tags(document("t", "s", groups, first=1)).seen
    shown = [attrs["data-group"] for tag, attrs in seen if tag == "div" and "data-group" in attrs
             and "hidden" not in attrs]  # fmt: skip
    assert shown == ["1"]
    ids = [attrs["id"] for _, attrs in seen if "id" in attrs]
    assert len(ids) == len(set(ids)), "names of elements are different in all groups"


def test_a_page_needs_no_network_and_no_other_file(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    picture.write_bytes(b"\x89PNG")
    text = page(*PARTS, Picture(picture, "a picture"))
    for tag, attrs in Tags(text).seen:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    code = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", code)
    assert "default-src 'none'" in text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_data_come_back_as_they_were(data: object) -> None:
    blobs = Blobs(prefix="x")
    name = blobs.add(data)
    assert json.loads(zlib.decompress(base64.b64decode(blobs.texts[name]))) == data


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a" / "index.html"
    write_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "\ud800")
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]
