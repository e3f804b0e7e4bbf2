"""How episodes of a data set end, by the columns that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.demonstrations import Demonstrations, Ends, ends_of, joined
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.demonstrations.load_set import read_demonstrations

h5py = pytest.importorskip("h5py")
NEVER, LAST, EARLY = [0, 0, 0], [0, 0, 1], [0, 1, 0]
ENDED, CUT = "ended", "cut off"


def ends(**columns: list[int]) -> Ends:
    flags = dict.fromkeys(("done", "terminated", "truncated", "success"))
    result = ends_of(np.array([2]), **{**flags, **{name: np.array(column, bool) for name, column in columns.items()}})
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("columns", "how", "assumed"),
    [
        ({"done": LAST, "success": NEVER}, ENDED, True),
        ({"done": LAST, "success": LAST}, ENDED, False),
        ({"done": LAST, "success": EARLY}, ENDED, True),
        ({"done": LAST, "truncated": NEVER}, ENDED, False),
        ({"done": LAST, "truncated": LAST, "success": NEVER}, CUT, False),
        ({"done": LAST, "truncated": LAST, "success": LAST}, CUT, False),
        ({"truncated": LAST}, CUT, False),
        ({"truncated": NEVER, "success": NEVER}, ENDED, False),
        ({"terminated": LAST}, ENDED, False),
        ({"terminated": NEVER, "success": LAST}, CUT, False),
        ({"terminated": NEVER, "done": LAST}, CUT, False),
        ({"terminated": LAST, "truncated": LAST}, ENDED, False),
        ({"success": LAST}, ENDED, False),
        ({"success": NEVER}, CUT, True),
        ({"success": EARLY}, CUT, True),
        # A column that is never true was not filled in.
        ({"done": NEVER, "success": LAST}, ENDED, False),
        ({"done": NEVER, "success": NEVER}, CUT, True),
    ],
)
def test_the_end_of_an_episode_follows_from_the_columns(columns: dict[str, Any], how: str, assumed: bool) -> None:
    terminations, truncations, guessed = ends(**columns)
    assert terminations.tolist() == [False, False, how == ENDED]
    assert truncations.tolist() == [False, False, how == CUT]
    assert guessed.tolist() == [False, False, assumed]


def test_an_end_within_a_demonstration_is_kept() -> None:
    assert ends(terminated=EARLY, truncated=LAST).terminations.tolist() == [False, True, False]
    assert ends(terminated=LAST, truncated=EARLY).truncations.tolist() == [False, True, False]
    assert ends_of(np.array([2]), done=np.zeros(3, bool), terminated=None, truncated=None, success=None) is None


def folder_of(folder: Path, origin: dict[str, str] | None = None, **columns: Any) -> Demonstrations:
    """Write episodes of LeRobot with flags, and read them."""
    features = {"action": Feature("float32", (1,)), **{f"next.{name}": Feature("bool", (1,)) for name in columns}}
    with DatasetWriter(folder, 10, features, origin=origin) as writer:
        for flags in zip(*columns.values(), strict=True):
            named = {f"next.{name}": np.array(rows, bool) for name, rows in zip(columns, flags, strict=True)}
            writer.add({"action": np.zeros((len(flags[0]), 1), np.float32), **named}, "walk")
    return read_demonstrations(str(folder))


def test_ends_stay_with_their_rows(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", done=[LAST, [1], LAST], truncated=[NEVER, [0], LAST])
    other = folder_of(tmp_path / "other", success=[[0, 1], [0, 0]])
    both = joined([one.chosen([2, 1]), other]).ends
    assert both is not None
    assert both.terminations.tolist() == [False, False, False, True, False, True, False, False]
    assert both.truncations.tolist() == [False, False, True, False, False, False, False, True]
    assert both.assumed.tolist() == [False] * 7 + [True]


def test_recordings_without_truncations_marked_borders_alone(tmp_path: Path) -> None:
    """`next.done` was true at the end of each recorded episode, also where a limit of steps had ended it."""
    columns = {"done": [LAST, LAST], "success": [NEVER, LAST]}
    recorded = folder_of(tmp_path / "recorded", {"recorded_by": "expert"}, **columns).ends
    foreign = folder_of(tmp_path / "foreign", **columns).ends
    assert recorded is not None
    assert foreign is not None
    assert recorded.terminations.tolist() == [False] * 5 + [True]
    assert foreign.terminations.tolist() == [False, False, True] * 2
    assert recorded.assumed.tolist() == foreign.assumed.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("name", ["done", "terminated", "truncated"])
def test_an_episode_that_continues_after_its_end_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"`next\.{name}` of a row is true, but its episode continues"):
        folder_of(tmp_path / "set", **{name: [EARLY, LAST]})


@pytest.mark.parametrize(
    ("columns", "how"),
    [
        ({"dones": LAST}, ENDED),
        ({"dones": LAST, "timeouts": LAST}, CUT),
        ({"terminals": LAST, "timeouts": NEVER}, ENDED),
        ({"terminals": NEVER, "timeouts": LAST}, CUT),
        ({"terminations": LAST, "truncations": NEVER}, ENDED),
        ({"infos/is_terminal": LAST}, ENDED),
    ],
)
def test_columns_of_hdf5_files_are_known_by_their_usual_names(
    columns: dict[str, Any], how: str, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "walks.hdf5", "w") as opened:
        demo = opened.create_group("data/demo_0")
        demo["actions"], demo["obs/position"] = np.zeros((3, 1)), np.zeros((3, 1))
        for name, rows in columns.items():
            demo[name] = np.array(rows)
    data = read_demonstrations(str(tmp_path / "walks.hdf5"), ["position"])
    assert data.ends is not None
    assert data.ends.terminations[-1] == (how == ENDED)
    assert data.ends.truncations[-1] == (how == CUT)
