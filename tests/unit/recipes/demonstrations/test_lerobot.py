"""LeRobotDataset folders: what is written is read again, and what is damaged is named, by its outer form too."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.demonstrations import joined
from recipes.demonstrations.lerobot.lerobot_set import read_lerobot, read_statistics
from recipes.demonstrations.lerobot.set_files import check_files, check_hdf5
from recipes.demonstrations.lerobot.set_info import Feature, read_info
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.demonstrations.load_set import load_demonstrations
from tests.known import known

LENGTHS = (5, 3, 7)
SIZE = (16, 24, 3)
MAIN = "observation.images.main"


def features(dtype: str = "image") -> dict[str, Feature]:
    return {
        "observation.state": Feature("float32", (4,)),
        MAIN: Feature(dtype, SIZE, ["height", "width", "channels"]),
        "action": Feature("float32", (2,), ["x", "y"]),
        "next.reward": Feature("float32", (1,)),
        "next.done": Feature("bool", (1,)),
    }


def episode(number: int, length: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(number)
    # Smooth pictures: noise is what no codec of videos keeps.
    ramp = np.linspace(0, 200, SIZE[0] * SIZE[1]).reshape(SIZE[:2])
    shades = [np.stack([ramp, ramp[::-1], np.full(SIZE[:2], 40.0 * number + 5 * t)], axis=-1) for t in range(length)]
    return {
        "observation.state": random.normal(size=(length, 4)).astype(np.float32),
        MAIN: np.stack(shades).astype(np.uint8),
        "action": random.uniform(-1, 1, size=(length, 2)).astype(np.float32),
        "next.reward": random.normal(size=length).astype(np.float32),
        "next.done": np.arange(length) == length - 1,
    }


def write(folder: Path, dtype: str = "image", fps: int = 10) -> list[dict[str, NDArray[Any]]]:
    episodes = [episode(number, length) for number, length in enumerate(LENGTHS)]
    with DatasetWriter(folder, fps, features(dtype), robot_type="panda", origin={"env": "test"}) as writer:
        for number, item in enumerate(episodes):
            writer.add(item, "pick it up" if number != 1 else "put it down")
    return episodes


@pytest.mark.parametrize(("dtype", "tolerance"), [("image", 0), ("video", 6)])
def test_what_is_written_is_read_again(tmp_path: Path, dtype: str, tolerance: int) -> None:
    written = write(tmp_path / "set", dtype)
    read = load_demonstrations([str(tmp_path / "set")])
    assert (read.fps, read.episodes, len(read)) == (10, 3, sum(LENGTHS))
    assert read.bounds.tolist() == [0, 5, 8, 15]
    assert [read.tasks[task] for task in read.task_of[[0, 6, 9]]] == ["pick it up", "put it down", "pick it up"]
    assert np.array_equal(read.actions, np.concatenate([item["action"] for item in written]))
    assert np.array_equal(known(read.states), np.concatenate([item["observation.state"] for item in written]))
    pictures = np.concatenate([item[MAIN] for item in written]).astype(int)
    shuffled = np.random.default_rng(0).permutation(len(read))
    result = read.cameras["main"].read(shuffled).astype(int)
    assert np.abs(result - pictures[shuffled]).mean() <= tolerance
    # Blue tells the frames apart.
    assert np.abs((result - pictures[shuffled])[..., 2].mean(axis=(1, 2))).max() < 2.5


def test_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    written = write(tmp_path / "set")
    result = read_statistics(tmp_path / "set")
    assert result is not None
    actions = np.concatenate([item["action"] for item in written]).astype(np.float64)
    pictures = np.concatenate([item[MAIN] for item in written]) / 255
    np.testing.assert_allclose(result["action"]["mean"], actions.mean(axis=0))
    np.testing.assert_allclose(result["action"]["std"], actions.std(axis=0))
    np.testing.assert_allclose(result["action"]["q10"], np.quantile(actions, 0.1, axis=0))
    np.testing.assert_allclose(result[MAIN]["mean"].ravel(), pictures.mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(result[MAIN]["std"].ravel(), pictures.std(axis=(0, 1, 2)))
    np.testing.assert_allclose(result[MAIN]["max"].ravel(), pictures.max(axis=(0, 1, 2)))


def test_a_folder_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "set"
    with DatasetWriter(target, 10, features()):
        pass
    assert list(tmp_path.iterdir()) == []  # without episodes it leaves nothing
    writer = DatasetWriter(target, 10, features())
    writer.add(episode(0, 4), "do it")
    assert not target.exists()
    writer.finish()
    with pytest.raises(DatasetError, match="something at the place"):
        DatasetWriter(target, 10, features())
    assert len(read_lerobot(target)) == 4


def test_an_interrupted_recording_keeps_its_episodes(tmp_path: Path) -> None:
    def record() -> None:
        with DatasetWriter(tmp_path / "set", 10, features()) as writer:
            writer.add(episode(0, 4), "do it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record()
    assert read_lerobot(tmp_path / "set").episodes == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros((4, 3), np.float32)}, r"the column `action` has rows of shape \[3\].* has \[2\]"),
        ({"action": np.zeros((3, 2), np.float32)}, "columns of one length"),
        ({"observation.state": None}, "the column `observation.state` is missing"),
    ],
)
def test_an_episode_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    columns = {name: rows for name, rows in {**episode(0, 4), **change}.items() if rows is not None}
    writer = DatasetWriter(tmp_path / "set", 10, features())
    with pytest.raises(DatasetError, match=message):
        writer.add(columns, "do it")


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: sorted(folder.glob(pattern))[0].unlink()


def damage(pattern: str) -> Callable[[Path], None]:
    return lambda folder: sorted(folder.glob(pattern))["mp4" in pattern].write_bytes(b"no such thing" * 20) and None


def blot(pattern: str) -> Callable[[Path], None]:
    """Return what spoils bytes within a frame, which decoders make up then."""

    def do(folder: Path) -> None:
        file = sorted(folder.glob(pattern))[1]
        with av.open(str(file)) as container:
            size, place = max((packet.size, packet.pos or 0) for packet in container.demux(video=0) if packet.size)
        content = bytearray(file.read_bytes())
        content[place + size // 2 : place + size] = bytes(size - size // 2)
        file.write_bytes(content)

    return do


def describe(**changes: Any) -> Callable[[Path], None]:
    """Return what changes the description; `shape` is that of an action."""

    def do(folder: Path) -> None:
        file = folder / "meta" / "info.json"
        said = json.loads(file.read_text())
        if "shape" in changes:
            said["features"]["action"]["shape"] = changes["shape"]
        file.write_text(json.dumps({**said, **changes}))

    return do


@pytest.mark.parametrize(
    ("spoil", "message", "place"),
    [
        (remove("meta/info.json"), "it has no `meta/info.json`", "set"),
        (damage("meta/info.json"), "is invalid", "info.json"),
        (remove("meta/tasks.parquet"), "a file of the data set is missing", "tasks.parquet"),
        (remove("data/*/*.parquet"), "the file with the rows of episode 0 is missing", "file-000.parquet"),
        (damage("data/*/*.parquet"), "cannot be read", "file-000.parquet"),
        (remove("meta/episodes/*/*.parquet"), "the list of episodes is missing", "episodes"),
        (remove("videos/*/*/*.mp4"), "the video of episode 0, camera `main`, is missing", "file-000.mp4"),
        (damage("videos/*/*/*.mp4"), "a video cannot be decoded", "file-001.mp4"),
        (blot("videos/*/*/*.mp4"), "a video cannot be decoded", "file-001.mp4"),
        (describe(features=["action"]), "is invalid.*`features` is not a mapping of columns", "info.json"),
        (describe(fps=30), "30 rows per second would put it at", "file-000.parquet, row 1"),
        (describe(codebase_version="v1.6"), "version v1.6", "info.json"),
        (describe(total_frames=99), "claims 99 rows", "set"),
        (describe(data_path="../set/{chunk_index}.parquet"), "the path pattern", "info.json"),
        (describe(data_path="{chunk_index.__class__}.parquet"), "the path pattern", "info.json"),
        (describe(video_path="/{video_key}/{other}.mp4"), "the path pattern", "info.json"),
        (describe(shape=[3]), "`action` has 2 numbers in a row; its description says 3", "file-000.parquet, row 0"),
        (damage("meta/stats.json"), "the statistics of the data set are invalid", "stats.json"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, spoil: Callable[[Path], None], message: str, place: str) -> None:
    write(tmp_path / "set", "video")
    spoil(tmp_path / "set")
    with pytest.raises(DatasetError, match=f"(?s){message}") as raised:
        read_lerobot(tmp_path / "set").cameras["main"].read(np.arange(sum(LENGTHS)))
    assert known(raised.value.where).endswith(place)


@pytest.mark.parametrize(("done", "refused"), [(1, True), (-2, False)])
def test_an_episode_does_not_go_on_after_it_is_done(tmp_path: Path, done: int, refused: bool) -> None:
    """A column that stays true to the end contradicts nothing."""
    rows = episode(0, 5)
    rows["next.done"][:] = False
    rows["next.done"][done : 2 if refused else None] = True
    with DatasetWriter(tmp_path / "set", 10, features(), robot_type="panda", origin={"env": "test"}) as writer:
        writer.add(rows, "pick it up")
        writer.add(episode(1, 3), "pick it up")

    with pytest.raises(DatasetError, match="its episode continues") if refused else nullcontext():
        assert read_lerobot(tmp_path / "set").episodes == 2


def test_a_version_without_its_letter_and_no_statistics(tmp_path: Path) -> None:
    write(tmp_path / "set")
    describe(codebase_version="3.0")(tmp_path / "set")
    (tmp_path / "set" / "meta" / "stats.json").unlink()
    read = read_lerobot(tmp_path / "set")
    assert (len(read), read.statistics) == (sum(LENGTHS), None)


@pytest.mark.parametrize("paths", ["demonstrations/laptop", Path("demonstrations/laptop"), []])
def test_data_sets_are_named_in_a_list(paths: Any) -> None:
    with pytest.raises(DatasetError, match="expected a list of data sets"):
        load_demonstrations(paths)


def test_several_data_sets_are_one(tmp_path: Path) -> None:
    written = [*write(tmp_path / "one"), *write(tmp_path / "two", "video")]
    both = load_demonstrations([str(tmp_path / "one"), str(tmp_path / "two")])
    assert both.episodes == 6
    assert np.array_equal(both.actions, np.concatenate([item["action"] for item in written]))
    rows = np.array([20, 3, 16, 0])
    pictures = np.concatenate([item[MAIN] for item in written])[rows]
    assert np.abs(both.cameras["main"].read(rows).astype(int) - pictures).max() <= 24
    part = both.chosen([4, 1])
    assert part.bounds.tolist() == [0, 3, 6]
    assert np.array_equal(part.actions, both.actions[[20, 21, 22, 5, 6, 7]])
    with pytest.raises(DatasetError, match="episode 6 does not exist"):
        both.chosen([6])
    with pytest.raises(DatasetError, match="episode 1 is named twice"):
        both.chosen([1, 4, 1])


def test_data_sets_of_other_rates_are_refused(tmp_path: Path) -> None:
    for name, fps in (("one", 10), ("two", 20)):
        write(tmp_path / name, fps=fps)
    one, two = (read_lerobot(tmp_path / name) for name in ("one", "two"))
    with pytest.raises(DatasetError, match=r"different rows per second \(fps\): 20, but"):
        joined([one, two])
    with pytest.raises(DatasetError, match="different kinds of actions: discrete, but"):
        joined([one, replace(one, actions=one.actions.astype(np.int64))])


def test_the_description_is_that_of_lerobot(tmp_path: Path) -> None:
    write(tmp_path / "set", "video")
    said = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    assert said["codebase_version"] == "v3.0"
    assert said["features"]["timestamp"] == {"dtype": "float32", "shape": [1], "names": None}
    assert said["features"][MAIN]["info"]["video.codec"] == "h264"
    assert read_info(tmp_path / "set").features == features("video")


@pytest.mark.parametrize("dtype", ["image", "video"])
@pytest.mark.parametrize(("name", "shape"), [(MAIN, SIZE), ("observation.images.depth", (*SIZE[:2], 1))])
@pytest.mark.parametrize("role", ["state", "action"])
def test_a_camera_is_no_part_of_numbers(
    tmp_path: Path, dtype: str, name: str, shape: tuple[int, ...], role: str
) -> None:
    folder = tmp_path / "set"
    with DatasetWriter(folder, 10, {**features(dtype), name: Feature(dtype, SIZE)}) as writer:
        writer.add({**episode(0, 4), name: episode(1, 4)[MAIN]}, "pick it up")
    said = json.loads((folder / "meta/info.json").read_text())
    said["features"][name]["shape"] = shape
    (folder / "meta/info.json").write_text(json.dumps(said))
    keys, columns = ([name], {}) if role == "state" else ([], {"action": name})
    with pytest.raises(DatasetError, match=f"`{name}` is a camera, `{dtype}` of shape .*{shape[2]}]"):
        read_lerobot(folder, keys, columns=columns)  # type: ignore[arg-type]
    assert sorted(read_lerobot(folder).cameras) == ["main"]


ROWS, TASKS = "data/chunk-000/file-000.parquet", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
VIDEO = f"videos/{MAIN}/chunk-000/file-000.mp4"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "set", 10, features("video")) as writer:
        writer.add(episode(0, 4), "do it")
    return tmp_path / "set"


def box(kind: bytes, content: bytes = b"", wide: bool = False) -> bytes:
    head = struct.pack(">I4sQ", 1, kind, 16 + len(content)) if wide else struct.pack(">I4s", 8 + len(content), kind)
    return head + content


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


@pytest.mark.parametrize("name", [ROWS, TASKS, EPISODES, VIDEO])
@pytest.mark.parametrize(
    "spoil", [None, lambda data: b"", cut, lambda data: bytes(len(data))], ids=["missing", "empty", "cut", "zeros"]
)
def test_a_file_that_is_missing_or_damaged_is_named(
    folder: Path, name: str, spoil: Callable[[bytes], bytes] | None
) -> None:
    check_files(folder, read_info(folder))
    file = folder / name
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DatasetError) as raised:
        check_files(folder, read_info(folder))
    assert raised.value.where is not None
    # Of a missing one the pattern is told, where another could have had its place.
    assert Path(raised.value.where).parent.parent == file.parent.parent or raised.value.where == str(file)
    assert raised.value.help == "copy the complete data set again"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (box(b"ftyp") + box(b"mdat", b"pictures") + box(b"moov"), None),
        (box(b"ftyp") + box(b"mdat", b"pictures", wide=True) + box(b"moov"), None),
        (box(b"ftyp") + box(b"moov") + struct.pack(">I4s", 0, b"mdat") + b"up to the end", None),
        (box(b"ftyp") + box(b"mdat", b"pictures"), "no index of its frames"),
        (box(b"ftyp") + box(b"mdat", b"pictures")[:-3], "cut off: 3 of"),
        (box(b"moov") + box(b"ftyp"), "starts with"),
        (box(b"ftyp") + struct.pack(">I4s", 5, b"mdat") + bytes(16), "damaged"),
        (box(b"ftyp") + struct.pack(">I4sQ", 1, b"mdat", 0) + bytes(16), "damaged"),
        (b"<!DOCTYPE html> not found", "starts with"),
    ],
)
def test_an_mp4_is_judged_by_its_boxes(folder: Path, content: bytes, why: str | None) -> None:
    (folder / VIDEO).write_bytes(content)
    if why is None:
        check_files(folder, read_info(folder))
        return
    with pytest.raises(DatasetError, match="not a complete mp4") as raised:
        check_files(folder, read_info(folder))
    assert why in (raised.value.why or "")


def test_hdf5_is_known_by_its_signature(tmp_path: Path) -> None:
    file = tmp_path / "demo.hdf5"
    for begin in (b"", bytes(512)):
        file.write_bytes(begin + b"\x89HDF\r\n\x1a\n" + bytes(100))
        check_hdf5(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DatasetError, match="not an HDF5 file"):
        check_hdf5(file)
