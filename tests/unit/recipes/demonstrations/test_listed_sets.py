"""LeRobotDatasets of the versions 2.0 and 2.1: a file for each episode, and lists as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.load_set import load_demonstrations
from recipes.demonstrations.pictures import encoded, write_video

LENGTHS = (3, 2, 4)
CHUNK = 2  # of the three episodes the last one is in a folder of its own


def lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path, version: str = "v2.1", camera: str | None = None, **changes: Any) -> Path:
    """Write a data set whose numbers tell episode and step; of a camera, pictures of the episode's brightness."""
    (folder / "meta").mkdir(parents=True)
    index = 0
    for number, length in enumerate(LENGTHS):
        rows: list[dict[str, Any]] = []
        for step in range(length):
            place = {"frame_index": step, "episode_index": number, "index": index, "task_index": 4 + number % 2}
            row = {"action": [0.1 * number, 0.01 * step], "observation.state": [float(number)], "timestamp": step / 10}
            if camera == "image":
                row["observation.images.top"] = {"bytes": encoded(picture(number)), "path": None}
            rows.append({**place, **row})
            index += 1
        file = folder / f"data/chunk-{number // CHUNK:03d}/episode_{number:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), file)
        if camera == "video":
            video = folder / f"videos/chunk-{number // CHUNK:03d}/observation.images.top/episode_{number:06d}.mp4"
            video.parent.mkdir(parents=True, exist_ok=True)
            write_video(video, [picture(number)] * length, 10)
    lines(folder / "meta/tasks.jsonl", [{"task_index": 4, "task": "pick"}, {"task_index": 5, "task": "place"}])
    listed = [
        {"episode_index": number, "tasks": [("pick", "place")[number % 2]], "length": length}
        for number, length in enumerate(LENGTHS)
    ]
    lines(folder / "meta/episodes.jsonl", listed)
    kinds: dict[str, tuple[str, list[int]]] = {"action": ("float32", [2]), "observation.state": ("float32", [1])}
    if camera is not None:
        kinds["observation.images.top"] = (camera, [16, 16, 3])
    kinds |= {"timestamp": ("float32", [1]), **dict.fromkeys(("frame_index", "index"), ("int64", [1]))}
    info = {
        "codebase_version": version,
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "total_tasks": 2,
        "chunks_size": CHUNK,
        "fps": 10,
        "splits": {"train": "0:2", "test": "2:3"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {name: {"dtype": kind, "shape": shape, "names": None} for name, (kind, shape) in kinds.items()},
        **changes,
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def picture(number: int) -> Any:
    return np.full((16, 16, 3), 60 * (number + 1), np.uint8)


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_rows_and_tasks_are_read_by_their_numbers(version: str, tmp_path: Path) -> None:
    data = load_demonstrations([str(make(tmp_path / "set", version))])
    assert data.bounds.tolist() == [0, 3, 5, 9]
    assert np.allclose(data.actions[:, 0], np.repeat([0, 0.1, 0.2], LENGTHS))
    assert [data.tasks[data.task_of[row]] for row in data.bounds[:-1]] == ["pick", "place", "pick"]
    assert data.place_of(5).endswith("data/chunk-001/episode_000002.parquet, row 0 (step 0 of episode 2)")
    assert data.statistics is None


@pytest.mark.parametrize("camera", ["image", "video"])
def test_pictures_are_those_of_their_episode(camera: str, tmp_path: Path) -> None:
    data = load_demonstrations([str(make(tmp_path / "set", camera=camera))])
    seen = data.cameras["top"].read(np.array([8, 0, 4]))
    assert np.allclose(seen.mean(axis=(1, 2, 3)), [180, 60, 120], atol=3)


def _without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def _wrote(file: str, text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / file).write_text(text, encoding)

    return spoil


def _rewritten(file: str, change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        change(rows)
        lines(folder / file, rows)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("data/chunk-001/episode_000002.parquet"), "the file with the rows of episode 2 is missing"),
        (_without("meta/tasks.jsonl"), "a file of the data set is missing"),
        (_without("meta/episodes.jsonl"), "a file of the data set is missing"),
        (_rewritten("meta/episodes.jsonl", lambda rows: rows.pop()), "but has 9 rows of 2"),
        (_rewritten("meta/episodes.jsonl", lambda rows: rows.append(rows[1])), "episode 1 is listed twice"),
        (_rewritten("meta/episodes.jsonl", lambda rows: rows[0].update(length=0)), "listed with 0 rows"),
        (
            _rewritten("meta/episodes.jsonl", lambda rows: (rows[0].update(length=2), rows[1].update(length=3))),
            "the `episode_index` of a row is 0; the list of episodes says 1",
        ),
        (_rewritten("meta/tasks.jsonl", lambda rows: rows.pop()), "is 5, which has no instruction"),
        (_rewritten("meta/episodes.jsonl", lambda rows: rows[1].update(tasks=["pick"])), "episode 1 is listed with"),
        (_wrote("meta/tasks.jsonl", "[1]\n"), "a line is not a JSON object"),
        (_wrote("meta/tasks.jsonl", '{"task_index": 0, "task": "a", "task": "b"}\n'), "names the key 'task' twice"),
        (_wrote("meta/tasks.jsonl", "[" * 9000), "nested more than"),
        (_wrote("meta/tasks.jsonl", '{"task_index": 0}', "utf-16"), "the file is UTF-16 text"),
        (_wrote("meta/info.json", '{"fps": 10, "fps": 20}'), "names the key 'fps' twice"),
        (_wrote("meta/info.json", '{"a":' * 9000), "nested more than"),
    ],
)
def test_contradictions_are_refused(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "set")
    spoil(folder)
    with pytest.raises(DatasetError) as raised:
        load_demonstrations([str(folder)])
    assert message in str(raised.value)


def test_a_missing_video_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", camera="video")
    (folder / "videos/chunk-000/observation.images.top/episode_000001.mp4").unlink()
    with pytest.raises(DatasetError, match="the video of episode 1, camera `top`, is missing"):
        load_demonstrations([str(folder)])


def test_older_and_unknown_versions_are_refused(tmp_path: Path) -> None:
    for version in ("v1.6", "v4.0"):
        with pytest.raises(DatasetError, match=r"versions 2\.0, 2\.1 and 3 are supported"):
            load_demonstrations([str(make(tmp_path / version, version))])
