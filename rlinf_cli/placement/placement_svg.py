"""A placement as an SVG image: nodes as cards, units as cells, and in each cell a band per component using it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from rlinf_cli.placement.picture import ACCELERATOR, Card, Cell, Picture, Section, User, summarised
from rlinf_core.config.ranks import format_ranks

# The Okabe-Ito palette, safe for colour blindness; ordered so that neighbours contrast.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#5F6B7A")
_PAGE, _CARD, _LINE, _IDLE = "#F4F5F7", "#FFFFFF", "#D5D9E0", "#F0F2F5"
_INK, _SOFT = "#1B2330", "#667085"
# Letters of about half the width of others in a proportional font.
_NARROW = frozenset("fijlrt.,:;'|!()[]- ")
# Width of bold text relative to regular.
_BOLD = 1.1
_SMALLEST = 7.0
# A component's name is shrunk by up to this much before it is dropped.
_SHRUNK = 0.85
_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Noto Sans', 'DejaVu Sans', sans-serif"

_MARGIN = 36
_GAP = 16
_PAD = 14
_CELL_GAP = 4
_RADIUS = 5
_CELLS_A_ROW = 8
_CARD_HEADER = 34
_NUMBER = 14
_LOOSE = 22
_SECTION_HEADER = 46
_LEGEND_LINE = 30
_CARDS_A_ROW = 4
_NARROWEST = 620


def placement_svg(picture: Picture) -> str:
    """Return the picture as an SVG document."""
    picture = summarised(picture)
    geometry = _Geometry.of(picture)
    colors = {name: index for index, (name, _) in enumerate(picture.components)}
    canvas = _Canvas(colors)
    y = _title(canvas, picture, geometry)
    for section in picture.sections:
        y = _section(canvas, section, geometry, y)
    return canvas.document(geometry.width, y + _MARGIN - _GAP, picture.title)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Sizes that depend on the amount of content."""

    width: int
    columns: int
    cell_width: int
    cell_height: int
    card_width: int

    @classmethod
    def of(cls, picture: Picture) -> _Geometry:
        cards = max((len(section.cards) for section in picture.sections), default=1)
        columns = max(1, min(_CARDS_A_ROW, cards))
        # Few nodes are drawn large, many small.
        cell = {1: 66, 2: 46}.get(columns, 36)
        card = _CELLS_A_ROW * (cell + _CELL_GAP) - _CELL_GAP + 2 * _PAD
        width = max(_NARROWEST, columns * (card + _GAP) - _GAP + 2 * _MARGIN)
        return cls(width, columns, cell, max(44, round(cell * 0.95)), card)


@dataclass(slots=True)
class _Canvas:
    """The elements drawn so far."""

    colors: dict[str, int]
    parts: list[str] = field(default_factory=list[str])

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0, extra: str = ""
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"{extra}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float, fill: str = _INK, *, anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        shown = _escaped(text)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{place}{weight}>{shown}</text>')

    def open(self, title: str) -> None:
        """Start a group with a tooltip."""
        self.parts.append(f"<g><title>{_escaped(title)}</title>")

    def close(self) -> None:
        self.parts.append("</g>")

    def phrase(self, x: float, y: float, strong: str, rest: str, size: float) -> None:
        """Draw a bold word followed by softer text, in the viewer's font."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{_INK}">'
            f'<tspan font-weight="600">{_escaped(strong)}</tspan>'
            f'<tspan dx="{size * 0.6:g}" font-size="{min(size, 13):g}" fill="{_SOFT}">{_escaped(rest)}</tspan></text>'
        )

    def band(
        self, x: float, y: float, width: float, height: float, component: str, corners: tuple[float, float]
    ) -> str:
        """Draw an area in a component's colour, with the radii of its upper and lower corners; return the colour."""
        index = self.colors[component]
        color = _PALETTE[index % len(_PALETTE)]
        upper, lower = corners
        path = (
            f"M{x + upper:g},{y:g}h{width - 2 * upper:g}a{upper:g},{upper:g} 0 0 1 {upper:g},{upper:g}"
            f"v{height - upper - lower:g}a{lower:g},{lower:g} 0 0 1 {-lower:g},{lower:g}"
            f"h{2 * lower - width:g}a{lower:g},{lower:g} 0 0 1 {-lower:g},{-lower:g}"
            f"v{upper + lower - height:g}a{upper:g},{upper:g} 0 0 1 {upper:g},{-upper:g}z"
        )
        self.parts.append(f'<path d="{path}" fill="{color}"/>')
        if index >= len(_PALETTE):
            # Stripes mark the palette's second round.
            self.parts.append(f'<path d="{path}" fill="url(#stripes)"/>')
        return color

    def label(self, x: float, y: float, width: float, height: float, user: User, size: float, color: str) -> None:
        """Label an area in its middle: component and ranks where they fit, else ranks alone.

        Ranks are shrunk before any of them is dropped. An area too low for text gets none.
        """
        text, room = f"{user.component} {user.label}", width - 8
        if _text_width(text, size) * _BOLD * _SHRUNK > room:
            text, room = user.label, width - 4
        size = max(_SMALLEST, min(size, size * room / (_text_width(text, size) * _BOLD)))
        shown = _fitted(text, room, size)
        if shown and height >= size:
            self.text(x + width / 2, y + height / 2 + size * 0.36, shown, size, _on(color), anchor="middle", bold=True)

    def document(self, width: float, height: float, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="{escape(_FONT)}">'
            f"<title>{_escaped(title)}</title>"
            '<defs><pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="2.5" height="7" fill="#FFFFFF" fill-opacity="0.4"/></pattern>'
            '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="6" height="6" fill="{_IDLE}"/><rect width="1.2" height="6" fill="{_LINE}"/></pattern></defs>'
        )
        page = f'<rect width="{width:g}" height="{height:g}" fill="{_PAGE}"/>'
        return "\n".join([head, page, *self.parts, "</svg>", ""])


def _title(canvas: _Canvas, picture: Picture, geometry: _Geometry) -> float:
    room = geometry.width - 2 * _MARGIN
    canvas.text(_MARGIN, _MARGIN + 22, _fitted(picture.title, room, 26), 26, bold=True)
    canvas.text(_MARGIN, _MARGIN + 48, _fitted(picture.subtitle, room, 14), 14, _SOFT)
    return _legend(canvas, picture, geometry, _MARGIN + 70)


def _legend(canvas: _Canvas, picture: Picture, geometry: _Geometry, y: float) -> float:
    entries = [(name, f"{size} process{'es' if size != 1 else ''}") for name, size in picture.components]
    cells = [cell for section in picture.sections for card in section.cards for cell in card.cells]
    if not all(cell.users for cell in cells):
        entries.append(("idle", "unused"))
    x = float(_MARGIN)
    for index, (name, words) in enumerate(entries):
        shown = _fitted(name, 260, 14)
        width = 24 + _text_width(shown, 14) * _BOLD + 8 + _text_width(words, 13) + 26
        if x > _MARGIN and x + width > geometry.width - _MARGIN + 26:
            x, y = float(_MARGIN), y + _LEGEND_LINE
        if index < len(picture.components):
            canvas.band(x, y, 16, 16, name, (4, 4))
        else:
            canvas.rect(x + 0.5, y + 0.5, 15, 15, "url(#idle)", radius=4, extra=f' stroke="{_LINE}"')
        canvas.phrase(x + 24, y + 13, shown, words, 14)
        x += width
    return y + _LEGEND_LINE


def _section(canvas: _Canvas, section: Section, geometry: _Geometry, y: float) -> float:
    room = geometry.width - 2 * _MARGIN
    title = _fitted(section.title, room / 2, 17)
    canvas.phrase(_MARGIN, y + 28, title, _fitted(section.subtitle, room - _text_width(title, 17) * _BOLD - 12, 13), 17)
    y += _SECTION_HEADER
    for first in range(0, len(section.cards), geometry.columns):
        row = section.cards[first : first + geometry.columns]
        height = max(_card_height(card, geometry) for card in row)
        for column, card in enumerate(row):
            _card(canvas, card, geometry, _MARGIN + column * (geometry.card_width + _GAP), y, height)
        y += height + _GAP
    return y + 6


def _card_height(card: Card, geometry: _Geometry) -> float:
    rows = len(_cell_rows(card.cells))
    units = rows * (geometry.cell_height + _NUMBER + _CELL_GAP)
    loose = len(card.loose) * (_LOOSE + _CELL_GAP)
    return _CARD_HEADER + max(units + loose, geometry.cell_height) + _PAD - _CELL_GAP


def _card(canvas: _Canvas, card: Card, geometry: _Geometry, x: float, y: float, height: float) -> None:
    width = geometry.card_width
    rank, *other_ranks = card.ranks
    if other_ranks:
        _many(canvas, card, x, y, width, height)
        return
    canvas.rect(x, y, width, height, _CARD, radius=10, extra=f' stroke="{_LINE}"')
    name = f"node {rank}"
    canvas.text(x + _PAD, y + 23, name, 14, bold=True)
    right = card.host or ("" if card.cells or card.loose else "unused")
    room = width - 2 * _PAD - _text_width(name, 14) * _BOLD - 12
    canvas.text(x + width - _PAD, y + 23, _fitted(right, room, 12), 12, _SOFT, anchor="end")
    top = y + _CARD_HEADER
    for row in _cell_rows(card.cells):
        _cells(canvas, card, row, geometry, x + _PAD, top)
        top += geometry.cell_height + _NUMBER + _CELL_GAP
    for user in card.loose:
        _loose(canvas, card, user, x + _PAD, top, width - 2 * _PAD)
        top += _LOOSE + _CELL_GAP


def _many(canvas: _Canvas, card: Card, x: float, y: float, width: float, height: float) -> None:
    for step in (8, 4, 0):
        canvas.rect(x + step, y + step, width - 8, height - 8, _CARD, radius=10, extra=f' stroke="{_LINE}"')
    count = len(card.ranks)
    ranks = _fitted(format_ranks(card.ranks), width - 2 * _PAD - 60, 12)
    canvas.phrase(x + _PAD, y + 23, f"… and {count} more", f"nodes {ranks}", 14)
    if not card.loose:
        return
    room = width - 8 - 2 * _PAD
    share = (room + _CELL_GAP) / len(card.loose)
    top = y + _CARD_HEADER + _NUMBER
    for index, user in enumerate(card.loose):
        left = x + _PAD + index * share
        color = canvas.band(left, top, share - _CELL_GAP, height - 8 - (top - y) - _PAD, user.component, (5, 5))
        canvas.label(left, top, share - _CELL_GAP, height - 8 - (top - y) - _PAD, user, 12, color)


def _cell_rows(cells: Sequence[Cell]) -> list[Sequence[Cell]]:
    return [cells[first : first + _CELLS_A_ROW] for first in range(0, len(cells), _CELLS_A_ROW)]


def _cells(canvas: _Canvas, card: Card, row: Sequence[Cell], geometry: _Geometry, x: float, y: float) -> None:
    """Draw one line of units; adjacent units held by the same processes are drawn as one."""
    # One or two robots fill the line; accelerators always take an eighth, so that different nodes stay comparable.
    accelerators = all(cell.kind == ACCELERATOR for cell in row)
    slots = _CELLS_A_ROW if accelerators else max(len(row), 1)
    line = geometry.card_width - 2 * _PAD + _CELL_GAP
    pitch = line / slots
    for _, run in groupby(enumerate(row), key=lambda item: item[1].users or item[0]):
        held = [cell for _, cell in run]
        left = x + row.index(held[0]) * pitch
        width = len(held) * pitch - _CELL_GAP
        canvas.open(_tooltip(card, held))
        for offset, cell in enumerate(held):
            middle = left + offset * pitch + (pitch - _CELL_GAP) / 2
            canvas.text(middle, y + 9, _fitted(cell.name, pitch, 10), 10, _SOFT, anchor="middle")
        _bands(canvas, held[0].users, left, y + _NUMBER, width, geometry.cell_height)
        canvas.close()


def _bands(canvas: _Canvas, users: Sequence[User], x: float, y: float, width: float, height: float) -> None:
    if not users:
        canvas.rect(x + 0.5, y + 0.5, width - 1, height - 1, "url(#idle)", radius=_RADIUS, extra=f' stroke="{_LINE}"')
        return
    share = height / len(users)
    size = max(8.0, min(13.0, share * 0.62))
    for index, user in enumerate(users):
        corners = (_RADIUS if index == 0 else 0, _RADIUS if index == len(users) - 1 else 0)
        # A thin white gap separates the bands.
        drawn = share - (0 if index == len(users) - 1 else 1)
        color = canvas.band(x, y + index * share, width, drawn, user.component, corners)
        canvas.label(x, y + index * share, width, drawn, user, size, color)


def _loose(canvas: _Canvas, card: Card, user: User, x: float, y: float, width: float) -> None:
    canvas.open(f"node {card.ranks[0]}, no unit: {user.component}:{user.label}")
    color = canvas.band(x, y, width, _LOOSE, user.component, (_RADIUS, _RADIUS))
    canvas.label(x, y, width, _LOOSE, user, 11, color)
    canvas.close()


def _tooltip(card: Card, cells: Sequence[Cell]) -> str:
    kind = "" if cells[0].kind != ACCELERATOR else f"{ACCELERATOR} "
    units = ", ".join(cell.name for cell in cells)
    users = ", ".join(f"{user.component}:{user.label}" for user in cells[0].users) or "idle"
    return f"node {card.ranks[0]}, {kind}{units}: {users}"


def _on(color: str) -> str:
    """Return black or white, whichever has more contrast on `color` (relative luminance as defined by WCAG)."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return _INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.25 else "#FFFFFF"


def _text_width(text: str, size: float) -> float:
    """Return the approximate width of a text; the exact font is the reader's."""
    return size * sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.3 if c in _NARROW else 0.58 for c in text)


def _fitted(text: str, width: float, size: float) -> str:
    """Return `text`, truncated with an ellipsis to `width`."""
    if _text_width(text, size) <= width:
        return text
    while text and _text_width(text + "…", size) > width:
        text = text[:-1]
    return f"{text}…" if text else ""


def _escaped(text: str) -> str:
    """Return text for XML, which cannot express control characters, not even escaped."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))
