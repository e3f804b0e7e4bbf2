"""The model behind a placement's pictures: node cards, unit cells, user bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rlinf_core.config.ranks import format_ranks

ACCELERATOR, NODE = "accelerator", "node"

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
