"""LeRobotDatasets as others write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.load_set import load_demonstrations, read_demonstrations
from recipes.demonstrations.pictures import encoded

DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


def make(
    folder: Path,
    episodes: Sequence[tuple[int, int]] = ((3, 0), (3, 1)),
    tasks: Mapping[int, str] | None = None,
    fps: float = 10,
    row: Callable[[int, int], Mapping[str, Any]] | None = None,
    features: Mapping[str, tuple[str, list[int]]] | None = None,
    ends: Sequence[int] | None = None,
) -> str:
    """Write a data set; an episode is its rows and the number of its task."""
    tasks = tasks or {0: "pick", 1: "place"}
    rows: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []
    for number, (count, task) in enumerate(episodes):
        begin = len(rows)
        for step in range(count):
            index = {"frame_index": step, "episode_index": number, "index": len(rows), "task_index": task}
            numbers = {"action": [0.1, 0.2], "observation.state": [float(step), 1.0], "timestamp": step / fps}
            rows.append({**index, **numbers, **(row(number, step) if row else {})})
        end = ends[number] if ends else len(rows)
        place = {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": begin, "dataset_to_index": end}
        listed.append({"episode_index": number, "tasks": [tasks.get(task, "?")], "length": count, **place})
    named = pa.table({"task_index": list(tasks), "__index_level_0__": list(tasks.values())})
    for name, table in (
        ("data/chunk-000/file-000", pa.Table.from_pylist(rows)),
        ("meta/episodes/chunk-000/file-000", pa.Table.from_pylist(listed)),
        ("meta/tasks", named),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"{name}.parquet")
    kinds = {"action": ("float32", [2]), "observation.state": ("float32", [2]), "timestamp": ("float32", [1])}
    kinds |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", [1]))
    info = {
        "codebase_version": "v3.0",
        "robot_type": "arm",
        "total_episodes": len(episodes),
        "total_frames": len(rows),
        "total_tasks": len(tasks),
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA,
        "video_path": None,
        "features": {
            name: {"dtype": kind, "shape": shape, "names": None}
            for name, (kind, shape) in {**kinds, **(features or {})}.items()
        },
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return str(folder)


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (7, 40)])
def test_tasks_are_known_by_their_numbers(numbers: tuple[int, int], tmp_path: Path) -> None:
    first, second = numbers
    tasks = {first: "pick", second: "place"}
    data = load_demonstrations([make(tmp_path, episodes=((2, second), (1, first)), tasks=tasks)])
    assert [data.tasks[task] for task in data.task_of] == ["place", "place", "pick"]


def test_a_task_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="task"):
        load_demonstrations([make(tmp_path, episodes=((3, 5),))])


@pytest.mark.parametrize("fps", [29.97, 2.5, 0.5, 59.94, 15])
def test_rates_are_read_as_they_are(fps: float, tmp_path: Path) -> None:
    data = load_demonstrations([make(tmp_path, fps=fps, episodes=((620, 0), (3, 1)))])
    assert (data.fps, len(data)) == (pytest.approx(fps), 623)


@pytest.mark.parametrize(
    "name", ["complementary_info.is_intervention", "intervention", "intervene_flag", "observation.is_intervention"]
)
def test_who_intervened_is_found_by_usual_names(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, row=lambda episode, step: {name: [float(episode == 1)]}, features={name: ("float32", [1])})
    interventions = load_demonstrations([folder]).interventions
    assert interventions is not None
    assert interventions.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("name", ["next.success", "success", "is_success", "info.success"])
def test_success_is_found_by_usual_names(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, row=lambda episode, step: {name: step == 2}, features={name: ("bool", [1])})
    successes = load_demonstrations([folder]).successes
    assert successes is not None
    assert successes.tolist() == [False, False, True] * 2


def test_borders_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        load_demonstrations([make(tmp_path, ends=(2, 6))])


@pytest.mark.parametrize(
    ("name", "camera"),
    [
        ("observation.image", "image"),
        ("observation.image.top", "top"),
        ("observation.images.wrist_left", "wrist_left"),
        ("agentview", "agentview"),
    ],
)
def test_cameras_are_found_by_usual_names(name: str, camera: str, tmp_path: Path) -> None:
    cell = {"bytes": encoded(np.full((4, 6, 3), 9, np.uint8)), "path": None}
    folder = make(tmp_path, row=lambda episode, step: {name: cell}, features={name: ("image", [4, 6, 3])})
    cameras = load_demonstrations([folder]).cameras
    assert {camera: cameras[camera].shape for camera in cameras} == {camera: (4, 6, 3)}
    assert cameras[camera].read(np.array([2])).max() == 9


@pytest.mark.parametrize(
    ("name", "shape", "info"),
    [
        ("observation.images.depth", [4, 6, 1], {}),
        ("observation.images.top_depth", [4, 6], {}),
        ("observation.images.top", [4, 6, 3], {"is_depth_map": True}),
        ("observation.images.wrist", [4, 6, 3], {"video.is_depth_map": True}),
    ],
)
def test_depth_is_left_out_and_told(name: str, shape: list[int], info: dict[str, Any], tmp_path: Path) -> None:
    cell = {"bytes": encoded(np.zeros((4, 6, 3), np.uint8)), "path": None}
    folder = make(
        tmp_path,
        row=lambda episode, step: {name: cell, "observation.image": cell},
        features={name: ("image", shape), "observation.image": ("image", [4, 6, 3])},
    )
    described = json.loads((tmp_path / "meta/info.json").read_text())
    described["features"][name]["info"] = info
    (tmp_path / "meta/info.json").write_text(json.dumps(described))
    data = load_demonstrations([folder])
    assert list(data.cameras) == ["image"]
    assert [f"`{name}`" in note for note in data.notes] == [True]


def test_a_camera_of_colours_may_be_called_depth(tmp_path: Path) -> None:
    cell = {"bytes": encoded(np.zeros((4, 6, 3), np.uint8)), "path": None}
    name = "observation.images.depth_rendered"
    folder = make(tmp_path, row=lambda episode, step: {name: cell}, features={name: ("image", [4, 6, 3])})
    assert list(load_demonstrations([folder]).cameras) == ["depth_rendered"]


@pytest.mark.parametrize(("part", "episodes"), [("train", [0, 1]), ("test", [2]), ("rest", [1, 2])])
def test_a_split_is_a_part_of_the_episodes(part: str, episodes: list[int], tmp_path: Path) -> None:
    folder = make(tmp_path, episodes=((2, 0), (3, 1), (4, 0)))
    described = json.loads((tmp_path / "meta/info.json").read_text())
    described["splits"] = {"train": "0:2", "test": "2:3", "rest": "1:"}
    (tmp_path / "meta/info.json").write_text(json.dumps(described))
    data = read_demonstrations(folder, part=part)
    assert data.numbers is not None
    assert data.numbers.tolist() == episodes
    assert len(data) == sum((2, 3, 4)[episode] for episode in episodes)
    with pytest.raises(DatasetError, match="no split `val`") as caught:
        read_demonstrations(folder, part="val")
    assert "`train`, `test`, `rest`" in (caught.value.help or "")


@pytest.mark.parametrize("name", ["next.reward", "reward", "rewards"])
def test_rewards_are_found_by_usual_names(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, row=lambda episode, step: {name: float(step)}, features={name: ("float32", [1])})
    rewards = load_demonstrations([folder]).rewards
    assert rewards is not None
    assert rewards.tolist() == [0, 1, 2] * 2


def test_two_columns_of_one_role_are_refused(tmp_path: Path) -> None:
    features = {"next.reward": ("float32", [1]), "reward": ("float32", [1])}
    folder = make(tmp_path, row=lambda episode, step: dict.fromkeys(features, 0.0), features=features)
    with pytest.raises(DatasetError, match="could both be the reward") as caught:
        load_demonstrations([folder])
    assert "data.columns: {reward: " in (caught.value.help or "")
    rewards = read_demonstrations(folder, columns={"reward": "next.reward"}).rewards
    assert rewards is not None


def test_modes_tell_interventions_by_1_alone(tmp_path: Path) -> None:
    modes = (0, -10, 1)
    folder = make(
        tmp_path, row=lambda episode, step: {"action_modes": modes[step]}, features={"action_modes": ("int64", [1])}
    )
    interventions = load_demonstrations([folder]).interventions
    assert interventions is not None
    assert interventions.tolist() == [False, False, True] * 2
