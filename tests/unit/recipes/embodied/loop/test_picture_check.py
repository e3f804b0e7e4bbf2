"""The comparison of demonstrations' pictures with the environment's: what is noted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.names import Flip
from recipes.demonstrations.orientation import PicturesShown, Thumbnails, thumbnails
from recipes.embodied.loop.data_check import check_orientation
from rlinf_core.runners.storage.first_contact import read_comparisons
from tests.unit.recipes.demonstrations.scenes import scenes

UPRIGHT, SEEN = thumbnails(scenes(8, seed=2)), thumbnails(scenes(6, seed=1))


class Group:
    """Workers that return pictures, one list or dictionary by rank."""

    def __init__(self, *by_rank: Any) -> None:
        self.asked = 0
        self._by_rank = by_rank

    def first_pictures(self) -> Any:
        self.asked += 1
        return SimpleNamespace(wait=lambda: list(self._by_rank))


def shown(where: str = "set", flip: Flip = "none", **cameras: Thumbnails) -> PicturesShown:
    return PicturesShown(where, flip, cameras)


def record_of(folder: Path, step: int = 0) -> Any:
    return SimpleNamespace(step=step, folder=SimpleNamespace(path=folder))


def test_pictures_that_agree_are_noted(tmp_path: Path) -> None:
    check_orientation(Group([shown(main=UPRIGHT)], []), Group({"main": SEEN}), record_of(tmp_path), "env.eval")
    (noted,) = read_comparisons(tmp_path)
    assert (noted.what, noted.with_) == ("orientation of `main` in set", "first pictures of env.eval")
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
    group = Group([shown(flip=flip, main=kept)])
    with pytest.raises(DatasetError) as caught:
        check_orientation(group, Group({"main": SEEN}), record_of(tmp_path), "env.train")
    assert (caught.value.help or "").startswith(f"write `data.flip: {right}`; if the pictures are right")
    assert caught.value.where == "set"
    assert f"`{right}` 0.9" in (caught.value.why or "")
    assert [comparison.verdict for comparison in read_comparisons(tmp_path)] == ["differs"]


def test_one_of_several_data_sets_is_named(tmp_path: Path) -> None:
    group = Group([shown("one", main=UPRIGHT), shown("two", main=UPRIGHT[:, ::-1])])
    with pytest.raises(DatasetError) as caught:
        check_orientation(group, Group({"main": SEEN}), record_of(tmp_path), "env.train")
    assert caught.value.where == "two"
    assert "write `flip: vertical` beside the `path`" in (caught.value.help or "")
    assert [comparison.verdict for comparison in read_comparisons(tmp_path)] == ["agrees", "differs"]


def test_cameras_that_contradict_need_a_conversion(tmp_path: Path) -> None:
    group = Group([shown(main=UPRIGHT, wrist=UPRIGHT[:, ::-1])])
    with pytest.raises(DatasetError, match="camera `wrist`") as caught:
        check_orientation(group, Group({"main": SEEN, "wrist": SEEN}), record_of(tmp_path), "env.train")
    assert "its camera `main` is oriented as the environment's" in (caught.value.help or "")


def test_undecided_pictures_are_told_and_not_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = np.full_like(UPRIGHT, 9)
    check_orientation(Group([shown(main=plain)]), Group({"main": SEEN}), record_of(tmp_path), "env.train")
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
    group = Group([shown(main=UPRIGHT[:, ::-1])])
    check_orientation(group, Group({"main": SEEN}), record_of(tmp_path), "env.train", skips=True)
    (check,) = read_comparisons(tmp_path)
    assert (check.verdict, check.note) == ("skipped", "left out by `runner.skip_checks`")
