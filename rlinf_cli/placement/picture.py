"""The model behind a placement's pictures: node cards, unit cells, user bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rlinf_core.config.ranks import format_ranks

ACCELERATOR, NODE = "accelerator", "node"
_UNITS_A_ROW = 8

# Up to this many nodes, each has its own card.
_ALL_CARDS = 24
# Of a longer run of equal nodes this many are drawn, plus one card for the rest.
_RUN_HEAD = 3
# A section has at most this many cards.
_MOST_CARDS = 60


@dataclass(frozen=True, slots=True)
class User:
    """Processes of one component on one unit."""

    component: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        return format_ranks(self.ranks)


@dataclass(frozen=True, slots=True)
class Cell:
    """One unit of a node: an accelerator, a robot, or the node itself.

    Attributes:
        kind: `accelerator`, `node`, or a robot's type.
        index: its number: an accelerator's on its node, a robot's in its group (as in rank maps).
        address: where a robot answers, or empty.
    """

    kind: str
    index: int
    users: tuple[User, ...]
    address: str = ""

    @property
    def name(self) -> str:
        """`3` for an accelerator, `Franka 0 · 10.10.10.1` for a robot, `node`."""
        if self.kind == ACCELERATOR:
            return str(self.index)
        if self.kind == NODE:
            return self.kind
        return f"{self.kind} {self.index}" + (f" · {self.address}" if self.address else "")

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(user.component for user in self.users)


@dataclass(frozen=True, slots=True)
class Card:
    """One node, or several alike.

    Attributes:
        ranks: the nodes' ranks; several for a card that stands for many nodes.
        host: its ssh destination, or None.
        cells: its units.
        loose: the processes without a unit.
    """

    ranks: tuple[int, ...]
    host: str | None
    cells: tuple[Cell, ...]
    loose: tuple[User, ...]

    @property
    def pattern(self) -> object:
        """Equal for two nodes that differ only in the ranks of their processes."""
        before = (None, *self.cells)
        cells = tuple(
            # A process that holds several units gives neighbouring cells equal users.
            (cell.kind, _counts(cell.users), previous is not None and previous.users == cell.users)
            for previous, cell in zip(before, self.cells, strict=False)
        )
        return cells, _counts(self.loose)


def _counts(users: Sequence[User]) -> tuple[tuple[str, int], ...]:
    """Return how many processes of each component there are."""
    return tuple((user.component, len(user.ranks)) for user in users)


@dataclass(frozen=True, slots=True)
class Section:
    """The nodes of one group."""

    title: str
    subtitle: str
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """The whole placement.

    Attributes:
        components: name and world size, in the order of the file, which is the order of the colours.
    """

    title: str
    subtitle: str
    components: tuple[tuple[str, int], ...]
    sections: tuple[Section, ...]


def summarised(picture: Picture) -> Picture:
    """Return the picture with long runs of equal nodes reduced to a few."""
    if sum(len(section.cards) for section in picture.sections) <= _ALL_CARDS:
        return picture
    return replace(
        picture, sections=tuple(replace(section, cards=_shortened(section.cards)) for section in picture.sections)
    )


def _shortened(cards: Sequence[Card]) -> tuple[Card, ...]:
    shown: list[Card] = []
    for _, run in groupby(cards, key=lambda card: card.pattern):
        like = list(run)
        shown.extend(like[:_RUN_HEAD])
        rest = like[_RUN_HEAD:]
        if len(rest) == 1:
            shown.append(rest[0])
        elif rest:
            shown.append(_merged(rest))
    if len(shown) <= _MOST_CARDS:
        return tuple(shown)
    return (*shown[: _MOST_CARDS - 1], _merged(shown[_MOST_CARDS - 1 :]))


def _merged(cards: Sequence[Card]) -> Card:
    """Return one card for several nodes, with all their processes as loose ones."""
    ranks: dict[str, list[int]] = {}
    for card in cards:
        for user in [*(user for cell in card.cells for user in cell.users), *card.loose]:
            ranks.setdefault(user.component, []).extend(user.ranks)
    together = tuple(User(name, tuple(sorted(set(user_ranks)))) for name, user_ranks in ranks.items())
    return Card(tuple(rank for card in cards for rank in card.ranks), None, (), together)


def picture_record(picture: Picture) -> dict[str, Any]:
    """Return the picture as data: what `placement.json` of a run keeps, and pages are made of."""
    picture = summarised(picture)
    colors = {name: index for index, (name, _) in enumerate(picture.components)}
    cells = [cell for section in picture.sections for card in section.cards for cell in card.cells]
    return {
        "title": picture.title,
        "subtitle": picture.subtitle,
        "components": [{"name": name, "size": size} for name, size in picture.components],
        "idle": not all(cell.users for cell in cells),
        "sections": [
            {
                "title": section.title,
                "subtitle": section.subtitle,
                "cards": [_card_record(card, colors) for card in section.cards],
            }
            for section in picture.sections
        ],
    }


def _card_record(card: Card, colors: Mapping[str, int]) -> dict[str, Any]:
    many = len(card.ranks) > 1
    title = f"and {len(card.ranks)} more" if many else f"node {card.ranks[0]}"
    alone = card.host or ("" if card.cells or card.loose else "unused")
    rows: list[dict[str, Any]] = []
    for accelerators, kin in groupby(card.cells, key=lambda cell: cell.kind == ACCELERATOR):
        cells = list(kin)
        for first in range(0, len(cells), _UNITS_A_ROW):
            row = cells[first : first + _UNITS_A_ROW]
            # One or two robots fill the row; accelerators take an eighth each, so that unlike nodes stay comparable.
            columns = _UNITS_A_ROW if accelerators else len(row)
            rows.append({"columns": columns, "runs": _run_records(row, title, colors)})
    return {
        "title": title,
        "about": f"nodes {format_ranks(card.ranks)}" if many else alone,
        "many": many,
        "rows": rows,
        "loose": _user_records(card.loose, colors),
    }


def _run_records(row: Sequence[Cell], title: str, colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the units of a row; a process that holds several of them is drawn once across these."""
    runs: list[dict[str, Any]] = []
    for _, run in groupby(enumerate(row), key=lambda item: item[1].users or item[0]):
        units = [cell for _, cell in run]
        kind = f"{ACCELERATOR} " if units[0].kind == ACCELERATOR else ""
        users = ", ".join(f"{user.component}:{user.label}" for user in units[0].users) or "idle"
        about = f"{title}, {kind}{', '.join(unit.name for unit in units)}: {users}"
        names = [unit.name for unit in units]
        runs.append({"units": names, "users": _user_records(units[0].users, colors), "about": about})
    return runs


def _user_records(users: Sequence[User], colors: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"component": user.component, "ranks": user.label, "color": colors[user.component]} for user in users]
