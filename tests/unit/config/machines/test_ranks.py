"""Rank expressions: what they mean, that printing one and reading it back is the identity, and where mistakes are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.ranks import (
    MAX_RANK,
    RankMapPart,
    RankSyntaxError,
    format_range,
    format_ranks,
    intersect,
    merge_ranges,
    parse_rank_map,
    parse_ranks,
    subtract,
)

ranges = st.builds(lambda start, size: range(start, start + size), st.integers(0, 10**6), st.integers(1, 10**5))
blanks = st.sampled_from(["", " ", "  ", "\t"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [range(3, 4)]),
        ("0-7", [range(8)]),
        ("0-3,5", [range(4), range(5, 6)]),
        (" 0 - 3 , 5 ", [range(4), range(5, 6)]),
        ("007", [range(7, 8)]),
        ("5,0-3,2", [range(5, 6), range(4), range(2, 3)]),
        (str(MAX_RANK), [range(MAX_RANK, MAX_RANK + 1)]),
    ],
)
def test_ranges_are_kept_as_written(text: str, expected: list[range]) -> None:
    assert list(parse_ranks(text) or ()) == expected


@pytest.mark.parametrize("text", ["all", "  all "])
def test_all(text: str) -> None:
    assert parse_ranks(text) is None
    assert parse_rank_map(text)[0].resources is None


@given(st.lists(ranges, min_size=1, max_size=5), blanks)
def test_ranges_survive_printing_and_reading(written: list[range], blank: str) -> None:
    text = f"{blank},{blank}".join(format_range(piece) for piece in written)
    assert list(parse_ranks(blank + text + blank) or ()) == written


@given(st.sets(st.integers(0, 200), min_size=1))
def test_the_shortest_expression_names_the_same_ranks(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks))
    pieces = parse_ranks(text) or ()
    assert {rank for piece in pieces for rank in piece} == ranks
    assert all(after.start > before.stop for before, after in pairwise(pieces))


@given(st.lists(st.tuples(st.none() | ranges, st.none() | ranges), min_size=1, max_size=5), blanks)
def test_rank_maps_survive_printing_and_reading(written: list[tuple[range | None, range | None]], blank: str) -> None:
    text = f"{blank},{blank}".join(str(RankMapPart(*pair, 0, 0)) for pair in written)
    parts = parse_rank_map(text, item=2)
    assert [(part.resources, part.processes, part.item) for part in parts] == [(*pair, 2) for pair in written]
    # Every part knows where it stands.
    assert [text[part.start : part.end] for part in parts] == [str(part) for part in parts]


@given(st.lists(st.builds(range, st.integers(0, 60), st.integers(0, 60)), max_size=8))
def test_merged_ranges_hold_the_same_numbers_without_touching(pieces: list[range]) -> None:
    merged = merge_ranges(pieces)
    assert [number for piece in merged for number in piece] == sorted({number for piece in pieces for number in piece})
    assert all(after.start > before.stop for before, after in pairwise(merged))


@pytest.mark.parametrize(
    ("text", "wrong", "help"),
    [
        ("0-3,x", "x", "write `3`, `0-7` or `0-3,5`"),
        ("0-3, 1.5 ,7", "1.5", "write"),
        ("-1", "-1", "write"),
        ("0--3", "0--3", "write"),
        ("1:2:3", ":3", "RESOURCES:PROCESSES"),
        ("0-3: all", "all", "`all:0-7`"),
        ("7-0", "7-0", "did you mean `0-7`?"),
        ("0-3:9-4", "9-4", "did you mean `4-9`?"),
        ("0-9999999999", "0-9999999999", None),
        (f"{MAX_RANK + 1}", f"{MAX_RANK + 1}", None),
        ("٣", "٣", "write"),
        ("allx", "allx", "write"),
        ("All", "All", "write"),
    ],
)
def test_a_mistake_is_found_where_it_is(text: str, wrong: str, help: str | None) -> None:
    with pytest.raises(RankSyntaxError) as caught:
        parse_rank_map(text)
    assert text[caught.value.start : caught.value.end] == wrong
    assert (help in (caught.value.help or "")) if help else caught.value.help is None


@pytest.mark.parametrize(("text", "at"), [("", 0), ("0-3,", 4), (",0", 0), ("0,,1", 2), ("0:", 2), (":0", 0)])
def test_a_missing_piece_is_found_where_it_should_be(text: str, at: int) -> None:
    with pytest.raises(RankSyntaxError, match="missing here") as caught:
        parse_rank_map(text)
    assert (caught.value.start, caught.value.end) == (at, at)


@given(st.text(alphabet="0123456789-:, alx", max_size=12))
def test_any_text_is_read_or_refused_within_itself(text: str) -> None:
    refused: RankSyntaxError | None = None
    parts: tuple[RankMapPart, ...] = ()
    try:
        parts = parse_rank_map(text)
    except RankSyntaxError as error:
        refused = error
    if refused is not None:
        assert 0 <= refused.start <= refused.end <= len(text)
    else:
        again = parse_rank_map(",".join(map(str, parts)))
        assert [str(part) for part in again] == [str(part) for part in parts]


def test_a_large_range_costs_no_more_than_a_small_one() -> None:
    (part,) = parse_rank_map(f"0-{MAX_RANK}:0-{MAX_RANK}")
    assert isinstance(part.resources, range)
    assert len(part.resources) == MAX_RANK + 1


# Arithmetic on lists of ranges, against sets

piece_lists = st.lists(st.builds(range, st.integers(0, 40), st.integers(0, 40)), max_size=6).map(merge_ranges)


def numbers(ranges: tuple[range, ...]) -> list[int]:
    return [number for piece in ranges for number in piece]


@given(piece_lists, piece_lists)
def test_intersect(a: tuple[range, ...], b: tuple[range, ...]) -> None:
    assert numbers(intersect(a, b)) == sorted(set(numbers(a)) & set(numbers(b)))


@given(piece_lists, piece_lists)
def test_subtract(a: tuple[range, ...], b: tuple[range, ...]) -> None:
    assert numbers(subtract(a, b)) == sorted(set(numbers(a)) - set(numbers(b)))
