# SPDX-License-Identifier: Apache-2.0
"""A drawing as SVG text: shapes on a light card, so that it reads alike on light and dark pages."""

from __future__ import annotations

from html import escape

INK, MUTED, LINE, CARD = "#22303f", "#6f7884", "#d9d4c7", "#fbfaf6"
COMPUTE, LIGHT_COMPUTE, ATTENTION = "#4f7cac", "#9dbbdb", "#26405f"
EXCHANGE, LIGHT_EXCHANGE, WAIT = "#e07b39", "#f3b58a", "#f2e3d5"
HEADS = ("#4f7cac", "#e07b39", "#3a9188", "#8d6cab")
"""Colours of things that are told apart by their number."""

FONT = "'Inter','Segoe UI','Helvetica Neue','DejaVu Sans',sans-serif"
MARKERS = "".join(
    f'<marker id="{name}{color[1:]}" viewBox="0 0 8 8" refX="{place}" refY="4" '
    f'markerWidth="{size}" markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto">'
    f'<path d="M0 0.6 L8 4 L0 7.4 z" fill="{color}"/></marker>'
    for color in (MUTED, EXCHANGE, INK)
    for name, size, place in (("tip", 7, 7), ("head", 16, 2))
)
"""The ends of arrows, a small one and one for thick lines, which begins where the line ends."""


class Canvas:
    """Collects shapes; `text` is the finished file."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(
        self, place: tuple[float, float], size: tuple[float, float], fill: str, **more: str
    ) -> None:
        """Draws a rounded rectangle; `place` is its upper left corner."""
        (x, y), (width, height) = place, size
        radius = more.pop("rx", "3")
        self._add("rect", x=x, y=y, width=width, height=height, rx=radius, fill=fill, **more)

    def label(self, place: tuple[float, float], words: str, size: float = 12, **more: str) -> None:
        """Writes words, around `place` unless `anchor` says otherwise."""
        attributes = {
            "x": place[0],
            "y": place[1],
            "font-size": size,
            "text-anchor": more.pop("anchor", "middle"),
            "fill": more.pop("fill", INK),
            "font-weight": more.pop("weight", "400"),
        }
        self._shapes.append(f"<text {_written(attributes)}>{escape(words)}</text>")

    def named_box(
        self, place: tuple[float, float], size: tuple[float, float], fill: str, words: str
    ) -> None:
        """Draws a rectangle with words in its middle, in the colour that reads on it."""
        self.box(place, size, fill, stroke=CARD)
        dark = fill in (COMPUTE, ATTENTION, EXCHANGE, *HEADS)
        middle = (place[0] + size[0] / 2, place[1] + size[1] / 2 + 4)
        self.label(middle, words, 11.5, fill="#ffffff" if dark else INK)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        color: str = MUTED,
        bend: float = 0,
        **more: str,
    ) -> None:
        """Draws an arrow; `bend` is how far its middle stands off the straight line."""
        (x, y), (to_x, to_y) = start, end
        length = max(1.0, ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5)
        across = ((y - to_y) / length, (to_x - x) / length)
        middle = ((x + to_x) / 2 + 2 * bend * across[0], (y + to_y) / 2 + 2 * bend * across[1])
        path = f"M{_number(x)} {_number(y)} Q{_number(middle[0])} {_number(middle[1])} "
        attributes = {"stroke": color, "stroke_width": "1.4", **more}
        shape = f"{path}{_number(to_x)} {_number(to_y)}"
        tip = f"url(#{'head' if float(attributes['stroke_width']) > 3 else 'tip'}{color[1:]})"
        self._add("path", d=shape, fill="none", marker_end=tip, **attributes)

    def rule(self, start: tuple[float, float], end: tuple[float, float], **more: str) -> None:
        """Draws a thin straight line."""
        attributes = {"stroke": LINE, "stroke_width": "1", **more}
        self._add("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], **attributes)

    def _add(self, kind: str, **attributes: object) -> None:
        self._shapes.append(f"<{kind} {_written(attributes)}/>")

    @property
    def text(self) -> str:
        """Returns the SVG file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">'
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="12" '
            f'fill="{CARD}" stroke="{LINE}"/>'
        )
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join(
            [head, title, f"<defs>{MARKERS}</defs>", card, *self._shapes, "</svg>", ""]
        )


def _written(attributes: dict[str, object]) -> str:
    return " ".join(
        f'{name.replace("_", "-")}="{_number(value) if isinstance(value, float | int) else value}"'
        for name, value in attributes.items()
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
