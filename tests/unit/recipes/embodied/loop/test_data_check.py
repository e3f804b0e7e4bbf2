"""What demonstrations say and show, held against what environments do: what is noted, told and refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.columns import DatasetError, Flip
from recipes.demonstrations.demonstrations import Demonstrations
from recipes.demonstrations.first_comparison import (
    DataFacts,
    PicturesShown,
    StartFacts,
    Thumbnails,
    facts_of,
    thumbnails,
)
from recipes.embodied.loop.data_check import check_data_facts, check_orientation
from rlinf_core.runners.storage.first_contact import ContactCheck, read_comparisons
from tests.unit.recipes.demonstrations.test_pictures import scenes

OPEN, CLOSE = "open the drawer", "close the drawer"


class Group:
    """Workers that return facts or pictures, by rank."""

    def __init__(self, *by_rank: Any) -> None:
        self.asked = 0
        self._by_rank = by_rank

    def answer(self) -> Any:
        self.asked += 1
        return SimpleNamespace(wait=lambda: list(self._by_rank))

    data_facts = env_facts = first_pictures = answer


def record_of(folder: Path, step: int = 0) -> Any:
    return SimpleNamespace(step=step, folder=SimpleNamespace(path=folder))


def facts(**changes: Any) -> DataFacts:
    first = DataFacts("set", 20.0, (OPEN, CLOSE), True, {"main": "main"}, (), ((-1.0, 1.0, 0.0, 0.5),))
    return first._replace(**changes)


def compare(folder: Path, data: DataFacts | None, *seen: StartFacts, **options: Any) -> dict[str, ContactCheck]:
    record = record_of(folder, options.pop("step", 0))
    check_data_facts(Group(None, data), Group(*seen), record, "env.eval", **options)
    return {check.what.partition(" of ")[0]: check for check in read_comparisons(folder)}


def test_what_agrees_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noted = compare(tmp_path, facts(), StartFacts(20.0, (OPEN,)))
    assert list(noted) == ["instructions", "cameras", "rate", "actions"]
    assert {check.verdict for check in noted.values()} == {"agrees"}
    assert noted["actions"].note.endswith("0: -1 to 1, 0 +- 0.5")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (("3", "task_7"), "write the sentence of each task"),
        (("open_the_drawer",), "write the sentence of each task"),
        (("push the block",), "give the data set and the environments the same sentences"),
        (("Open the drawer.",), "give the data set and the environments the same sentences"),
    ],
)
def test_instructions_that_nobody_learned_are_refused(tmp_path: Path, said: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(DatasetError, match=r"env.eval says `open the drawer`, an instruction that no demon") as caught:
        compare(tmp_path, facts(instructions=said), StartFacts(20.0, (OPEN,)))
    assert caught.value.where == "set"
    assert f"`{said[0]}`" in str(caught.value.why)
    assert str(caught.value.help).startswith(remedy)
    assert "differs" in [check.verdict for check in read_comparisons(tmp_path)]


def test_some_other_instructions_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = StartFacts(20.0, (OPEN,)), StartFacts(20.0, (OPEN, CLOSE))
    assert compare(tmp_path, facts(instructions=(OPEN,)), *seen)["instructions"].verdict == "differs"
    assert "the environments say `close the drawer`; the demonstrations say `open the drawer`" in caplog.text


def test_a_policy_without_instructions_may_learn_from_others(tmp_path: Path) -> None:
    noted = compare(tmp_path, facts(reads_instructions=False, instructions=("3",)), StartFacts(20.0, (OPEN,)))
    assert noted["instructions"].verdict == "agrees"
    assert noted["instructions"].note.endswith("the policy acts by none")


@pytest.mark.parametrize(
    ("changes", "name", "note"),
    [
        ({"fps": 30.0}, "rate", "30 rows a second; the environments take 20 actions a second"),
        ({"cameras": {"main": "top"}, "guessed": ("main",)}, "cameras", "write `data.cameras: {main: top}`"),
        ({"actions": ((-0.01, 0.012, 0.0, 0.0),)}, "actions", "none is beyond 0.012"),
    ],
)
def test_a_difference_is_told_and_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], name: str, note: str
) -> None:
    noted = compare(tmp_path, facts(**changes), StartFacts(20.0, None))
    assert [key for key, check in noted.items() if check.verdict == "differs"] == [name]
    assert note in noted[name].note
    assert note in caplog.text


def test_nothing_is_compared_without_data_later_on_or_if_skipped(tmp_path: Path) -> None:
    assert compare(tmp_path, None, StartFacts(20.0, (OPEN,))) == {}
    assert compare(tmp_path, facts(instructions=("3",)), StartFacts(20.0, (OPEN,)), step=2) == {}
    (check,) = compare(tmp_path, facts(instructions=("3",)), StartFacts(20.0, (OPEN,)), skips=True).values()
    assert (check.verdict, check.note) == ("skipped", "left out by `runner.skip_checks`")


def test_rates_of_a_rounded_name_agree(tmp_path: Path) -> None:
    assert compare(tmp_path, facts(fps=29.97), StartFacts(30.0, None))["rate"].verdict == "agrees"


def test_facts_are_those_of_the_rows_that_are_learned_from() -> None:
    actions = np.array([[0.5], [-0.25], [0.5], [-0.25]], np.float32)
    data = Demonstrations("set", 20, np.array([0, 4]), actions, None, {}, ("never", OPEN), np.ones(4, np.int64))
    cameras = {"main": "agentview_rgb", "wrist": "hand", "side": "left"}
    learned = facts_of(data, cameras, {"side": "left"})
    assert learned.instructions == (OPEN,)
    assert learned.guessed == ("wrist",)
    assert learned.actions == ((-0.25, 0.5, 0.125, 0.375),)


UPRIGHT, SEEN = thumbnails(scenes(8, seed=2)), thumbnails(scenes(6, seed=1))


def shown(where: str = "set", flip: Flip = "none", **cameras: Thumbnails) -> PicturesShown:
    return PicturesShown(where, flip, cameras)


def check(folder: Path, *shown: PicturesShown, step: int = 0, **options: Any) -> None:
    check_orientation(Group(list(shown), []), Group({"main": SEEN}), record_of(folder, step), "env.train", **options)


def test_pictures_that_agree_are_noted(tmp_path: Path) -> None:
    check(tmp_path, shown(main=UPRIGHT))
    (noted,) = read_comparisons(tmp_path)
    assert (noted.what, noted.with_) == ("orientation of `main` in set", "first pictures of env.train")
    assert noted.verdict == "agrees"
    assert noted.largest_difference < 0.1
    assert "`vertical` " in noted.note


@pytest.mark.parametrize(
    ("flip", "kept", "right"),
    [
        ("none", UPRIGHT[:, ::-1], "vertical"),
        ("none", UPRIGHT[:, ::-1, ::-1], "rotate180"),
        ("vertical", UPRIGHT[:, :, ::-1], "rotate180"),
        ("rotate180", UPRIGHT[:, :, ::-1], "vertical"),
        ("horizontal", UPRIGHT[:, :, ::-1], "none"),
    ],
)
def test_the_key_that_turns_them_is_named(flip: Flip, kept: Thumbnails, right: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        check(tmp_path, shown(flip=flip, main=kept))
    assert (caught.value.help or "").startswith(f"write `data.train_data_paths: {{path: ..., flip: {right}}}` for")
    assert caught.value.where == "set"
    assert f"`{right}` 0.9" in (caught.value.why or "")
    assert [comparison.verdict for comparison in read_comparisons(tmp_path)] == ["differs"]


def test_one_of_several_data_sets_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        check(tmp_path, shown("one", main=UPRIGHT), shown("two", main=UPRIGHT[:, ::-1]))
    assert caught.value.where == "two"
    assert "flip: vertical}` for this data set" in (caught.value.help or "")
    assert [comparison.verdict for comparison in read_comparisons(tmp_path)] == ["agrees", "differs"]


def test_cameras_that_contradict_need_a_conversion(tmp_path: Path) -> None:
    group = Group([shown(main=UPRIGHT, wrist=UPRIGHT[:, ::-1])])
    with pytest.raises(DatasetError, match="camera `wrist`") as caught:
        check_orientation(group, Group({"main": SEEN, "wrist": SEEN}), record_of(tmp_path), "env.train")
    assert "its camera `main` is oriented as the environment's" in (caught.value.help or "")


def test_undecided_pictures_are_told_and_not_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(tmp_path, shown(main=np.full_like(UPRIGHT, 9)))
    (noted,) = read_comparisons(tmp_path)
    assert noted.verdict == "agrees"
    assert noted.note.startswith("undecided, ")
    assert "orientation of pictures undecided, see first_contact.json: `main` of set" in caplog.text


def test_a_robot_that_is_not_moved_is_told(tmp_path: Path) -> None:
    check_orientation(Group([shown(main=UPRIGHT)]), Group({}), record_of(tmp_path), "env.train")
    assert "not compared: a robot" in read_comparisons(tmp_path)[0].note


def test_environments_are_asked_only_where_it_matters(tmp_path: Path) -> None:
    env = Group({"main": SEEN})
    check_orientation(Group([], None), env, record_of(tmp_path), "env.train")
    check_orientation(Group([shown(main=UPRIGHT[:, ::-1])]), env, record_of(tmp_path, step=3), "env.train")
    assert env.asked == 0
    assert read_comparisons(tmp_path) == []


def test_skipped_comparison_is_noted_and_refuses_nothing(tmp_path: Path) -> None:
    check(tmp_path, shown(main=UPRIGHT[:, ::-1]), skips=True)
    (noted,) = read_comparisons(tmp_path)
    assert (noted.verdict, noted.note) == ("skipped", "left out by `runner.skip_checks`")
