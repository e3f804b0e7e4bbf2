"""The picture of a placement: well-formed, complete, and no larger for a large cluster."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.placement.picture import ACCELERATOR, Card, Cell, Picture, Section, User, summarised
from rlinf_cli.placement.placement_svg import placement_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """Return the words of a picture, tooltips left out."""
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def fills(svg: str) -> set[str]:
    return {node.get("fill", "") for node in ElementTree.fromstring(svg).iter(f"{SVG}path")}


def node(rank: int, component: str, per_node: int = 8) -> Card:
    cells = (Cell(ACCELERATOR, i, (User(component, (rank * per_node + i,)),)) for i in range(per_node))
    return Card((rank,), None, tuple(cells), ())


def picture(cards: tuple[Card, ...], components: tuple[tuple[str, int], ...] = (("actor", 8),)) -> Picture:
    return Picture("job", "words", components, (Section("a800", "nodes", cards),))


def test_one_node_shows_every_unit_and_rank() -> None:
    drawn = texts(placement_svg(picture((node(0, "actor"),))))
    assert "node 0" in drawn
    assert [text for text in drawn if text.isdigit()] == [str(unit) for unit in range(8)]
    assert [text for text in drawn if text.startswith("actor ")] == [f"actor {rank}" for rank in range(8)]


def test_components_of_a_shared_unit_have_distinct_bands() -> None:
    shared = Cell(ACCELERATOR, 0, (User("actor", (0,)), User("rollout", (0, 1))))
    svg = placement_svg(picture((Card((0,), None, (shared,), ()),), (("actor", 1), ("rollout", 2))))
    assert "rollout 0-1" in texts(svg)
    assert {"#0072B2", "#E69F00"} <= fills(svg)


def test_a_process_on_several_units_is_drawn_once_across_them() -> None:
    wide = User("actor", (5,))
    svg = placement_svg(
        picture((Card((0,), None, (Cell(ACCELERATOR, 0, (wide,)), Cell(ACCELERATOR, 1, (wide,))), ()),))
    )
    assert texts(svg).count("actor 5") == 1


@pytest.mark.parametrize("ranks", [(10, 11), (960, 1023), tuple(range(128, 192))])
def test_ranks_are_set_smaller_before_any_is_left_out(ranks: tuple[int, ...]) -> None:
    user = User("a-component-of-a-long-name", ranks)
    cards = tuple(Card((rank,), None, (Cell(ACCELERATOR, 0, (user,)),), ()) for rank in range(4))
    svg = placement_svg(picture(cards, ((user.component, 1024),)))
    assert texts(svg).count(user.label) == 4
    sizes = {float(size) for size in re.findall(r'font-size="([0-9.]+)"[^>]*font-weight="600">' + user.label, svg)}
    assert 7 <= min(sizes) <= max(sizes) <= 13


def test_an_idle_unit_is_hatched_and_explained() -> None:
    svg = placement_svg(picture((Card((0,), None, (Cell(ACCELERATOR, 0, ()),), ()),)))
    assert any(text.startswith("idle") for text in texts(svg))
    assert 'fill="url(#idle)" stroke' in svg
    assert not any(text.startswith("idle") for text in texts(placement_svg(picture((node(0, "actor"),)))))


def test_processes_without_a_unit_are_a_bar_of_their_node() -> None:
    card = Card((3,), None, (), (User("agent", tuple(range(100))),))
    assert "agent 0-99" in texts(placement_svg(picture((card,), (("agent", 100),))))


def test_hundreds_of_like_nodes_are_a_few_cards_and_a_count() -> None:
    drawn = placement_svg(picture(tuple(node(rank, "actor") for rank in range(300)), (("actor", 2400),)))
    assert any("297 more" in text for text in texts(drawn))
    assert "actor 24-2399" in texts(drawn)
    assert len(drawn) < 30_000


def test_eighteen_nodes_are_all_drawn() -> None:
    drawn = texts(placement_svg(picture(tuple(node(rank, "actor") for rank in range(18)))))
    assert [f"node {rank}" for rank in range(18)] == [text for text in drawn if text.startswith("node ")]


def test_unlike_nodes_are_never_more_than_a_page_or_two() -> None:
    cards = tuple(node(rank, f"c{rank}") for rank in range(500))
    short = summarised(picture(cards, tuple((f"c{rank}", 8) for rank in range(500))))
    (section,) = short.sections
    assert len(section.cards) == 60
    assert sorted(rank for card in section.cards for rank in card.ranks) == list(range(500))


def test_more_components_than_colours_stay_apart_by_stripes() -> None:
    names = tuple(f"c{index}" for index in range(10))
    cells = tuple(Cell(ACCELERATOR, i, (User(name, (0,)),)) for i, name in enumerate(names))
    svg = placement_svg(picture((Card((0,), None, cells, ()),), tuple((name, 1) for name in names)))
    assert "url(#stripes)" in fills(svg)


@pytest.mark.parametrize("hostile", ["<script>&", "a\"b'c", "\x1b[31m\x00", "数据"])
def test_names_cannot_break_the_document(hostile: str) -> None:
    card = Card((0,), hostile, (Cell(hostile, 0, (User(hostile, (0,)),)),), ())
    svg = placement_svg(Picture(hostile, hostile, ((hostile, 1),), (Section(hostile, hostile, (card,)),)))
    root = ElementTree.fromstring(svg)
    assert not list(root.iter(f"{SVG}script"))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=40))
def test_every_rank_is_on_exactly_one_card(shapes: list[tuple[int, int]]) -> None:
    cards = tuple(
        Card(
            (rank,),
            None,
            tuple(Cell(ACCELERATOR, i, (User("actor", (i,)),)) for i in range(units)),
            tuple(User("agent", (i,)) for i in range(loose)),
        )
        for rank, (units, loose) in enumerate(shapes)
    )
    short = summarised(picture(cards, (("actor", 1), ("agent", 1))))
    assert [rank for section in short.sections for card in section.cards for rank in card.ranks] == list(
        range(len(shapes))
    )
    ElementTree.fromstring(placement_svg(picture(cards, (("actor", 1), ("agent", 1)))))
