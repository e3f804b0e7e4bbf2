"""LeRobotDatasets as others write them, and of the versions 2.0 and 2.1, with a file for each episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.load_set import load_demonstrations, read_demonstrations
from recipes.demonstrations.pictures import decoded, encoded, write_video
from tests.known import known

CHUNK = 2  # of three listed episodes the last one is in a folder of its own
Features = Mapping[str, tuple[str, Sequence[int]]]


def lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(file: Path, rows: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), file)


def make(
    folder: Path,
    episodes: Sequence[tuple[int, int]] = ((3, 0), (3, 1)),
    tasks: Mapping[int, str] | None = None,
    fps: float = 10,
    row: Callable[[int, int], Mapping[str, Any]] | None = None,
    features: Features | None = None,
    ends: Sequence[int] | None = None,
    version: str = "v3.0",
) -> str:
    """Write a data set; an episode is its rows and the number of its task. Before version 3 each has a file."""
    tasks, has_files = tasks or {0: "pick", 1: "place"}, not version.startswith("v3")
    kinds = {"action": ("float32", [2]), "observation.state": ("float32", [2]), "timestamp": ("float32", [1])}
    kinds |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", [1]))
    rows, listed = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, (count, task) in enumerate(episodes):
        begin = len(rows)
        for step in range(count):
            index = {"frame_index": step, "episode_index": number, "index": len(rows), "task_index": task}
            numbers = {"action": [0.1, 0.2], "observation.state": [float(step), 1.0], "timestamp": step / fps}
            rows.append({**index, **numbers, **(row(number, step) if row else {})})
        listed.append({"episode_index": number, "tasks": [tasks.get(task, "?")], "length": count})
        if has_files:
            table(folder / f"data/chunk-{number // CHUNK:03d}/episode_{number:06d}.parquet", rows[begin:])
        else:
            end = ends[number] if ends else len(rows)
            listed[-1] |= {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": begin}
            listed[-1] |= {"dataset_to_index": end}
    if has_files:
        lines(folder / "meta/tasks.jsonl", [{"task_index": number, "task": text} for number, text in tasks.items()])
        lines(folder / "meta/episodes.jsonl", listed)
        place = "chunk-{episode_chunk:03d}/%sepisode_{episode_index:06d}"
        paths = {"data_path": f"data/{place % ''}.parquet", "video_path": f"videos/{place % '{video_key}/'}.mp4"}
    else:
        table(folder / "data/chunk-000/file-000.parquet", rows)
        table(folder / "meta/episodes/chunk-000/file-000.parquet", listed)
        named = {"task_index": list(tasks), "__index_level_0__": list(tasks.values())}
        table(folder / "meta/tasks.parquet", pa.table(named))
        paths = {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None}
    about = {"codebase_version": version, "robot_type": "arm", "fps": fps, "chunks_size": CHUNK, **paths}
    counts = {"total_episodes": len(episodes), "total_frames": len(rows), "total_tasks": len(tasks)}
    columns = {
        name: {"dtype": kind, "shape": list(shape), "names": None}
        for name, (kind, shape) in {**kinds, **(features or {})}.items()
    }
    info = {**about, **counts, "splits": {"train": f"0:{len(episodes)}"}, "features": columns}
    (folder / "meta/info.json").write_text(json.dumps(info))
    return str(folder)


def described(folder: str, **changes: Any) -> None:
    """Change the description of a data set."""
    file = Path(folder, "meta/info.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def pictured(tmp_path: Path, features: Features) -> str:
    """Write a data set with pictures of 4 x 6 pixels, whose colour is 9."""
    cell = {"bytes": encoded(np.full((4, 6, 3), 9, np.uint8)), "path": None}
    return make(tmp_path, row=lambda episode, step: dict.fromkeys(features, cell), features=features)


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (7, 40)])
def test_tasks_are_known_by_their_numbers(numbers: tuple[int, int], tmp_path: Path) -> None:
    first, second = numbers
    tasks = {first: "pick", second: "place"}
    data = load_demonstrations([make(tmp_path, episodes=((2, second), (1, first)), tasks=tasks)])
    assert [data.tasks[task] for task in data.task_of] == ["place", "place", "pick"]


@pytest.mark.parametrize(
    ("made", "words"),
    [({"episodes": ((3, 5),)}, "task"), ({"ends": (2, 6)}, "the list of episodes|rows")],
    ids=["a task that is not listed", "borders that contradict"],
)
def test_lists_that_contradict_are_refused(made: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=words):
        load_demonstrations([make(tmp_path, **made)])


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [("task_index", 0.5, "`0.5`, not a whole"), ("index", "a", "`a`, not a whole"), ("timestamp", "a", "not a time")],
)
def test_indices_are_whole_numbers(column: str, value: Any, words: str, tmp_path: Path) -> None:
    folder = make(tmp_path, episodes=((1, 0),), row=lambda episode, step: {column: value})
    with pytest.raises(DatasetError, match=f"the `{column}` of a row is .*{words}"):
        load_demonstrations([folder])


def test_an_instruction_that_is_missing_is_no_word(tmp_path: Path) -> None:
    folder = make(tmp_path, episodes=((2, 0),))
    table(tmp_path / "meta/tasks.parquet", pa.table({"task_index": [0, 1], "task": ["pick", None]}))
    with pytest.raises(DatasetError, match="an entry has no `task`"):
        load_demonstrations([folder])


@pytest.mark.parametrize("fps", [29.97, 2.5, 0.5, 59.94, 15])
def test_rates_are_read_as_they_are(fps: float, tmp_path: Path) -> None:
    data = load_demonstrations([make(tmp_path, fps=fps, episodes=((620, 0), (3, 1)))])
    assert (data.fps, len(data)) == (pytest.approx(fps), 623)


@pytest.mark.parametrize(
    ("role", "name", "kind", "value"),
    [
        *(
            ("interventions", name, "float32", lambda step: [float(step == 1)])
            for name in (
                "complementary_info.is_intervention",
                "intervention",
                "intervene_flag",
                "observation.is_intervention",
            )
        ),
        # Of modes 1 alone is an intervention.
        ("interventions", "action_modes", "int64", lambda step: (0, 1, -10)[step]),
        *(
            ("successes", name, "bool", lambda step: step == 1)
            for name in ("next.success", "success", "is_success", "info.success")
        ),
        *(("rewards", name, "float32", lambda step: float(step == 1)) for name in ("next.reward", "reward", "rewards")),
    ],
)
def test_columns_are_found_by_usual_names(
    role: str, name: str, kind: str, value: Callable[[int], Any], tmp_path: Path
) -> None:
    folder = make(tmp_path, row=lambda episode, step: {name: value(step)}, features={name: (kind, [1])})
    assert getattr(load_demonstrations([folder]), role).tolist() == [0, 1, 0] * 2


@pytest.mark.parametrize(
    ("name", "camera"),
    [
        ("observation.image", "image"),
        ("observation.image.top", "top"),
        ("observation.images.wrist_left", "wrist_left"),
        ("observation.images.depth_rendered", "depth_rendered"),  # of colours
        ("agentview", "agentview"),
    ],
)
def test_cameras_are_found_by_usual_names(name: str, camera: str, tmp_path: Path) -> None:
    cameras = load_demonstrations([pictured(tmp_path, {name: ("image", [4, 6, 3])})]).cameras
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
    features = {name: ("image", shape), "observation.image": ("image", [4, 6, 3])}
    folder = pictured(tmp_path, features)
    columns = {key: {"dtype": kind, "shape": size, "names": None} for key, (kind, size) in features.items()}
    columns["action"] = {"dtype": "float32", "shape": [2], "names": None}
    described(folder, features={**columns, name: {**columns[name], "info": info}})
    data = load_demonstrations([folder])
    assert list(data.cameras) == ["image"]
    assert [f"`{name}`" in note for note in data.notes] == [True]


def image(mode: str = "RGB", turned: int = 1, kind: str = "PNG", **extra: Any) -> bytes:
    """Return an image of 4 x 6 pixels, white above and black below, as a viewer shows it."""
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:2] = 255
    turns = {1: pixels, 3: pixels[::-1, ::-1], 6: np.rot90(pixels)}
    exif, out = Image.Exif(), BytesIO()
    exif[0x112] = turned
    Image.fromarray(np.ascontiguousarray(turns[turned])).convert(mode).save(out, kind, exif=exif, **extra)
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [image(), image("L"), image("RGBA"), image(turned=3), image(turned=6), image("P"), image(kind="JPEG", turned=6)],
)
def test_images_are_seen_as_a_viewer_shows_them(data: bytes) -> None:
    picture = decoded(data)
    assert picture.shape == (4, 6, 3)
    assert (picture[0] > 240).all()
    assert (picture[3] < 15).all()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"bytes": image("P", transparency=0), "path": None}, "transparent in places"),
        ({"bytes": image("RGB", transparency=(0, 0, 0)), "path": None}, "transparent in places"),
        ({"bytes": None, "path": None}, "neither `bytes` of an image nor the `path`"),
        ("top.png", "neither `bytes` of an image nor the `path`"),
        (image(), "neither `bytes` of an image nor the `path`"),
    ],
)
def test_a_cell_without_an_image_is_refused(cell: Any, message: str, tmp_path: Path) -> None:
    features: Features = {"observation.images.top": ("image", [4, 6, 3])}
    folder = make(tmp_path, row=lambda episode, step: dict.fromkeys(features, cell), features=features)
    with pytest.raises(DatasetError, match="cannot be decoded") as caught:
        read_demonstrations(folder).cameras["top"].read(np.arange(1))
    assert message in (caught.value.why or "")


@pytest.mark.parametrize(("part", "episodes"), [("train", [0, 1]), ("test", [2]), ("rest", [1, 2])])
def test_a_split_is_a_part_of_the_episodes(part: str, episodes: list[int], tmp_path: Path) -> None:
    folder = make(tmp_path, episodes=((2, 0), (3, 1), (4, 0)))
    described(folder, splits={"train": "0:2", "test": "2:3", "rest": "1:"})
    data = read_demonstrations(folder, part=part)
    assert known(data.numbers).tolist() == episodes
    assert len(data) == sum((2, 3, 4)[episode] for episode in episodes)
    with pytest.raises(DatasetError, match="no split `val`") as caught:
        read_demonstrations(folder, part="val")
    assert "`train`, `test`, `rest`" in (caught.value.help or "")


def test_two_columns_of_one_role_are_refused(tmp_path: Path) -> None:
    features = {"next.reward": ("float32", [1]), "reward": ("float32", [1])}
    folder = make(tmp_path, row=lambda episode, step: dict.fromkeys(features, 0.0), features=features)
    with pytest.raises(DatasetError, match="could both be the reward") as caught:
        load_demonstrations([folder])
    assert "data.columns: {reward: " in (caught.value.help or "")
    rewards = read_demonstrations(folder, columns={"reward": "next.reward"}).rewards
    assert rewards is not None


LENGTHS = (3, 2, 4)


def make_listed(folder: Path, version: str = "v2.1", camera: str | None = None) -> Path:
    """Write a data set whose numbers tell episode and step; of a camera, pictures of the episode's brightness."""

    def row(number: int, step: int) -> dict[str, Any]:
        cell = {"bytes": encoded(picture(number)), "path": None}
        seen = {"observation.images.top": cell} if camera == "image" else {}
        return {"action": [0.1 * number, 0.01 * step], "observation.state": [float(number)], **seen}

    features: Features = {"observation.state": ("float32", [1])}
    if camera is not None:
        features = {**features, "observation.images.top": (camera, [16, 16, 3])}
    episodes = [(length, 4 + number % 2) for number, length in enumerate(LENGTHS)]
    make(folder, episodes, {4: "pick", 5: "place"}, row=row, features=features, version=version)
    for number, length in enumerate(LENGTHS if camera == "video" else ()):
        video = folder / f"videos/chunk-{number // CHUNK:03d}/observation.images.top/episode_{number:06d}.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        write_video(video, [picture(number)] * length, 10)
    return folder


def picture(number: int) -> Any:
    return np.full((16, 16, 3), 60 * (number + 1), np.uint8)


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_rows_and_tasks_are_read_by_their_numbers(version: str, tmp_path: Path) -> None:
    data = load_demonstrations([str(make_listed(tmp_path / "set", version))])
    assert data.bounds.tolist() == [0, 3, 5, 9]
    assert np.allclose(data.actions[:, 0], np.repeat([0, 0.1, 0.2], LENGTHS))
    assert [data.tasks[data.task_of[row]] for row in data.bounds[:-1]] == ["pick", "place", "pick"]
    assert data.place_of(5).endswith("data/chunk-001/episode_000002.parquet, row 0 (step 0 of episode 2)")
    assert data.statistics is None


@pytest.mark.parametrize("camera", ["image", "video"])
def test_pictures_are_those_of_their_episode(camera: str, tmp_path: Path) -> None:
    data = load_demonstrations([str(make_listed(tmp_path / "set", camera=camera))])
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
        (_rewritten("meta/episodes.jsonl", lambda rows: rows[0].update(length="4")), "is `4`, not a whole number"),
        (_rewritten("meta/episodes.jsonl", lambda rows: rows[0].update(length=2.5)), "is `2.5`, not a whole number"),
        (_rewritten("meta/tasks.jsonl", lambda rows: rows[0].update(task_index=True)), "is `True`, not a whole number"),
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
    folder = make_listed(tmp_path / "set")
    spoil(folder)
    with pytest.raises(DatasetError) as raised:
        load_demonstrations([str(folder)])
    assert message in str(raised.value)


def test_a_missing_video_is_named(tmp_path: Path) -> None:
    folder = make_listed(tmp_path / "set", camera="video")
    (folder / "videos/chunk-000/observation.images.top/episode_000001.mp4").unlink()
    with pytest.raises(DatasetError, match="the video of episode 1, camera `top`, is missing"):
        load_demonstrations([str(folder)])


def test_older_and_unknown_versions_are_refused(tmp_path: Path) -> None:
    for version in ("v1.6", "v4.0"):
        with pytest.raises(DatasetError, match=r"versions 2\.0, 2\.1 and 3 are supported"):
            load_demonstrations([str(make_listed(tmp_path / version, version))])
