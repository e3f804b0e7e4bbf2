"""A placement as a tree: groups, nodes, units. Equal nodes and units are merged into ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from rlinf_cli.console import console, prose
from rlinf_cli.placement.picture import ACCELERATOR, NODE, Card, Cell, Picture, Section
from rlinf_core.config.ranks import format_ranks

T = TypeVar("T")
# A line lists at most this many robot addresses.
_LISTED = 4
_BRANCHES = (("├── ", "│   "), ("└── ", "    "))


def tree_text(picture: Picture, *, every_node: bool = False) -> str:
    """Return the tree: a line for each run of equal nodes (or each node) and each run of equal units on them."""
    lines = [console.style(picture.title, "bold"), prose.parts(picture.subtitle)]
    for section, (branch, below) in _branched(picture.sections):
        lines.append(f"{branch}{console.style(section.title, 'bold')}  {console.style(section.subtitle, 'dim')}")
        runs = [[card] for card in section.cards] if every_node else _runs(section)
        if len(runs) == 1 and not (every_node or section.cards[0].host):
            lines.extend(f"{below}{leaf}" for leaf in _leaves(runs[0]))
            continue
        for run, (inner, deeper) in _branched(runs):
            ranks = [rank for card in run for rank in card.ranks]
            host = run[0].host if len(run) == 1 else None
            name = f"node{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
            lines.append(f"{below}{inner}{name}" + (f"  {console.style(host, 'dim')}" if host else ""))
            lines.extend(f"{below}{deeper}{leaf}" for leaf in _leaves(run))
    return "\n".join(lines)


def _branched(items: Sequence[T]) -> Iterator[tuple[T, tuple[str, str]]]:
    for index, item in enumerate(items):
        yield item, _BRANCHES[index == len(items) - 1]


def _runs(section: Section) -> list[list[Card]]:
    """Return runs of consecutive nodes with the same pattern of users."""
    return [list(run) for _, run in groupby(section.cards, key=lambda card: card.pattern)]


def _leaves(run: Sequence[Card]) -> list[str]:
    first = run[0]
    texts: list[tuple[str, str]] = []
    at = 0
    for (kind, components), cells in groupby(first.cells, key=lambda cell: (cell.kind, cell.components)):
        size = len(list(cells))
        across = [cell for card in run for cell in card.cells[at : at + size]]
        units = format_ranks(sorted(cell.index for cell in across)) if kind != ACCELERATOR else ""
        units = units or format_ranks(cell.index for cell in first.cells[at : at + size])
        addresses = [cell.address for cell in across if cell.address]
        listed = f" ({', '.join(addresses)})" if 0 < len(addresses) <= _LISTED else ""
        name = kind if kind == NODE else f"{kind} {units}{listed}"
        texts.append((name, _users(across) if components else console.style("idle", "dim")))
        at += size
    for index in range(len(first.loose)):
        ranks = sorted(rank for card in run for rank in card.loose[index].ranks)
        texts.append(("no unit", f"{first.loose[index].component} {format_ranks(ranks)}"))
    if not texts:
        texts.append(("", console.style("unused", "dim")))
    width = max(len(name) for name, _ in texts)
    return [f"{branch}{name.ljust(width)}  {users}".rstrip() for (name, users), (branch, _) in _branched(texts)]


def _users(cells: Sequence[Cell]) -> str:
    ranks: dict[str, set[int]] = {}
    for user in (user for cell in cells for user in cell.users):
        ranks.setdefault(user.component, set()).update(user.ranks)
    return ", ".join(f"{name} {format_ranks(sorted(user_ranks))}" for name, user_ranks in ranks.items())
