"""The points of a sweep: how values are read from a command line, and what runs they give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.sweep.plan import MOST_POINTS, Axis, axes_of, points_of, short_keys, split_values
from rlinf_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4", ["1e-4"]),
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[a,b]", ["[a,b]"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{a: 1, b: [2,3]},null", ["{a: 1, b: [2,3]}", "null"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("'a,b'", ["'a,b'"]),
        ("it's,fine", ["it's", "fine"]),
        ('["]",1],2', ['["]",1]', "2"]),
        ("", [""]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_divide(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@given(st.lists(st.integers(), min_size=1, max_size=6))
def test_numbers_come_back_as_typed(numbers: list[int]) -> None:
    assert split_values(",".join(map(str, numbers))) == [str(number) for number in numbers]


def test_each_key_of_several_values_is_an_axis() -> None:
    axes = axes_of(["lr=1,2", "gamma=0.9,0.99"])
    assert axes == [Axis("lr", ("1", "2")), Axis("gamma", ("0.9", "0.99"))]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr=1,,2"], "a value of the sweep is empty"),
        (["lr=1,"], "a value of the sweep is empty"),
        (["lr=1,2,1"], "the value `1` is given twice"),
        (["lr=1,2", "lr=3,4"], "`lr` is swept twice"),
    ],
)
def test_slips_of_the_command_line_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        axes_of(overrides)
    assert message in str(error.value)


def test_every_combination_runs_with_every_seed() -> None:
    points = points_of(
        [Axis("actor.optim.lr", ("1e-4", "3e-4")), Axis("data.lr", ("a", "b"))],
        [{"actor.seed": 7, "data.seed": 0}, {"actor.seed": 8, "data.seed": 1}],
    )
    assert [point.name for point in points][:3] == [
        "01-optim.lr-1e-4-data.lr-a-seed-0",
        "02-optim.lr-1e-4-data.lr-a-seed-1",
        "03-optim.lr-1e-4-data.lr-b-seed-0",
    ]
    assert len({point.name for point in points}) == len(points) == 8
    assert points[1].overrides == ("actor.optim.lr=1e-4", "data.lr=a", "actor.seed=8", "data.seed=1")
    assert points[1].values == {"actor.optim.lr": "1e-4", "data.lr": "a", "seed": "1"}


def test_names_are_safe_for_folders() -> None:
    (point,) = points_of([Axis("env.task", ("../x y/;rm",))], [])
    assert point.name == "01-task-..-x-y-rm"
    assert "/" not in point.name


def test_too_many_runs_are_refused() -> None:
    axes = [Axis(f"key{number}", tuple(map(str, range(32)))) for number in range(2)]
    with pytest.raises(ConfigError, match=f"the sweep has 1024 runs, at most are {MOST_POINTS}"):
        points_of(axes, [])


def test_keys_are_as_short_as_they_can_be() -> None:
    assert short_keys(["actor.optim.lr", "critic.optim.lr", "algorithm.gamma", "seed"]) == {
        "actor.optim.lr": "actor.optim.lr",
        "critic.optim.lr": "critic.optim.lr",
        "algorithm.gamma": "gamma",
        "seed": "seed",
    }
