"""HDF5 files as LIBERO and robomimic write them, and how the episodes of a data set end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.demonstrations import Demonstrations, Ends, ends_of, joined
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.demonstrations.load_set import load_demonstrations, read_demonstrations
from tests.known import known

h5py = pytest.importorskip("h5py")


def write(
    file: Path, observations: dict[str, Any], attributes: dict[str, Any] | None = None, lengths: tuple[int, ...] = (3,)
) -> Path:
    with h5py.File(file, "w") as opened:
        data = opened.create_group("data")
        for name, value in (attributes or {}).items():
            data.attrs[name] = json.dumps(value)
        # Written in an order that is not that of the numbers.
        for number in reversed(range(len(lengths))):
            demo, length = data.create_group(f"demo_{number}"), lengths[number]
            demo["actions"] = np.full((length, 7), number, np.float64)
            for name, shape in observations.items():
                kind = np.uint8 if len(shape) == 3 else np.float64
                demo[f"obs/{name}"] = (np.ones((length, *shape)) * (number + 1)).astype(kind)
    return file


@pytest.fixture
def lift(tmp_path: Path) -> Path:
    """A file with one demonstration of three steps."""
    return write(tmp_path / "lift.hdf5", {"object": (10,)})


def set_attribute(file: Path, place: str, name: str, value: Any) -> None:
    with h5py.File(file, "a") as opened:
        opened[place].attrs[name] = value


def test_libero(tmp_path: Path) -> None:
    file = tmp_path / "pick_up_the_bowl_demo.hdf5"
    observations = {"agentview_rgb": (8, 8, 3), "ee_states": (6,), "gripper_states": (2,), "joint_states": (7,)}
    said = {
        "problem_info": {"language_instruction": "pick up the bowl"},
        "env_args": {"env_kwargs": {"control_freq": 20}},
    }
    write(file, observations, said, tuple(range(2, 14)))
    demonstrations = load_demonstrations([str(file)])
    assert demonstrations.tasks == ("pick up the bowl",)
    assert demonstrations.fps == 20
    assert demonstrations.episodes == 12
    assert known(demonstrations.states).shape == (len(demonstrations), 8)
    # demo_10 after demo_9.
    assert np.array_equal(demonstrations.actions[demonstrations.bounds[:-1], 0], np.arange(12))
    assert demonstrations.cameras["agentview_rgb"].read(np.array([5, 0]))[:, 0, 0, 0].tolist() == [3, 1]


def test_robomimic(tmp_path: Path) -> None:
    file = tmp_path / "lift.hdf5"
    observations = {"robot0_eef_pos": (3,), "robot0_eef_quat": (4,), "robot0_gripper_qpos": (2,), "object": (10,)}
    write(file, observations, {"env_args": {"env_name": "Lift"}}, (3, 4))
    demonstrations = load_demonstrations([str(file)])
    assert (demonstrations.tasks, demonstrations.fps, demonstrations.cameras) == (("Lift",), None, {})
    assert known(demonstrations.states).shape == (7, 9)
    wider = load_demonstrations([str(file)], ["robot0_eef_pos", "object"])
    assert known(wider.states).shape == (7, 13)


def test_what_is_wrong_is_named(tmp_path: Path, lift: Path) -> None:
    damaged, empty = tmp_path / "damaged.hdf5", tmp_path / "empty.hdf5"
    damaged.write_bytes(b"nothing")
    h5py.File(empty, "w").close()
    for file, keys, message in (
        (tmp_path / "none.hdf5", None, "the file does not exist"),
        (damaged, None, "cannot be read as HDF5"),
        (empty, None, "has no demonstrations"),
        (lift, ["joints"], "has no observation `joints`"),
    ):
        with pytest.raises(DatasetError, match=message):
            load_demonstrations([str(file)], keys)


def write_lengths(file: Path, actions: int, observed: dict[str, int]) -> str:
    """Write two demonstrations with columns of so many rows."""
    with h5py.File(file, "w") as opened:
        for number in range(2):
            demo = opened.create_group(f"data/demo_{number}")
            demo["actions"] = np.full((actions, 7), 0.1 * number)
            for name, length in observed.items():
                demo[f"obs/{name}"] = np.arange(length, dtype=np.float64)[:, None] + 10 * number
    return str(file)


@pytest.mark.parametrize(("extra", "notes"), [(0, 0), (1, 1)])
def test_one_more_observation_than_actions_is_left_out(extra: int, notes: int, tmp_path: Path) -> None:
    file = write_lengths(tmp_path / "demo.hdf5", 3, {"eef_pos": 3 + extra, "joints": 3 + extra})
    data = load_demonstrations([file], ["eef_pos", "joints"])
    assert known(data.states)[:, 0].tolist() == [0, 1, 2, 10, 11, 12]
    assert len(data) == len(data.actions) == 6
    assert ["dropped the last observation of 2 demonstrations" in note for note in data.notes] == [True] * notes


@pytest.mark.parametrize(
    ("observed", "message"),
    [
        ({"eef_pos": 5, "joints": 5}, "has 3 actions and 5 observations"),
        ({"eef_pos": 2, "joints": 3}, "has 3 actions and 2 observations"),
        ({"eef_pos": 4, "joints": 3}, "has columns of 3 and of 4 rows"),
    ],
)
def test_other_numbers_of_observations_are_refused(observed: dict[str, int], message: str, tmp_path: Path) -> None:
    file = write_lengths(tmp_path / "demo.hdf5", 3, observed)
    with pytest.raises(DatasetError, match=message):
        load_demonstrations([file], ["eef_pos", "joints"])


@pytest.mark.parametrize("kind", [bytes, str])
def test_a_mask_is_a_part_of_the_demonstrations(kind: type, tmp_path: Path) -> None:
    file = tmp_path / "lift.hdf5"
    write(file, {"object": (10,)}, {}, (3, 4, 5))
    with h5py.File(file, "a") as opened:
        names = ["demo_2", "demo_0"]
        opened["mask/train"] = [name.encode() for name in names] if kind is bytes else names
        opened["mask/valid"] = ["demo_7"]
        opened["mask/one"] = "demo_0"
    data = read_demonstrations(str(file), ["object"], part="train")
    assert (known(data.numbers).tolist(), len(data)) == ([0, 2], 8)
    assert sorted(set(data.actions[:, 0].tolist())) == [0, 2]
    with pytest.raises(DatasetError, match="`mask/valid` lists `demo_7`, which does not exist"):
        read_demonstrations(str(file), ["object"], part="valid")
    with pytest.raises(DatasetError, match="has no `mask/test`") as caught:
        read_demonstrations(str(file), ["object"], part="test")
    assert "`train`, `valid`" in (caught.value.help or "")
    with pytest.raises(DatasetError, match="`mask/one` is no list"):
        read_demonstrations(str(file), ["object"], part="one")


@pytest.mark.parametrize("name", ["agentview_depth", "depth", "robot0_eye_in_hand_depth_image"])
def test_depth_is_left_out_and_told(name: str, tmp_path: Path) -> None:
    file = tmp_path / "lift.hdf5"
    write(file, {"agentview_image": (8, 8, 3), name: (8, 8, 1), "object": (10,)})
    data = load_demonstrations([str(file)], ["object"])
    assert list(data.cameras) == ["agentview_image"]
    assert [f"`obs/{name}`" in note for note in data.notes] == [True]


@pytest.mark.parametrize(("word", "flip"), [("opengl", "vertical"), ("opencv", "none"), ("", None), ("other", None)])
def test_the_attribute_tells_how_pictures_stand(word: str, flip: str | None, tmp_path: Path) -> None:
    said = {"macros_image_convention": word} if word else {}
    assert load_demonstrations([str(write(tmp_path / "a.hdf5", {"agentview_rgb": (8, 8, 3)}, said))]).flip == flip


@pytest.mark.parametrize(("shape", "read"), [((3, 8, 6), (8, 6, 3)), ((8, 6, 1), (8, 6, 3)), ((8, 6, 3), (8, 6, 3))])
def test_pictures_of_other_layouts_are_turned(shape: tuple[int, ...], read: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "demo.hdf5"
    write(file, {"agentview_image": shape, "object": (2,)})
    camera = load_demonstrations([str(file)], ["object"]).cameras["agentview_image"]
    assert camera.shape == read
    assert camera.read(np.array([1])).shape == (1, *read)


@pytest.mark.parametrize("solved", [(True, False), (False, False)])
def test_success_of_isaac_lab_is_that_of_the_last_step(solved: tuple[bool, ...], tmp_path: Path) -> None:
    file = write(tmp_path / "a.hdf5", {"eef_pos": (3,), "eef_quat": (4,), "gripper_pos": (2,)}, lengths=(2, 3))
    for number, item in enumerate(solved):
        set_attribute(file, f"data/demo_{number}", "success", item)
    successes = load_demonstrations([str(file)]).successes
    assert known(successes).tolist() == [False, solved[0], False, False, solved[1]]


def test_file_that_refers_to_others_or_to_itself_is_refused(tmp_path: Path) -> None:
    other, file = tmp_path / "other.hdf5", tmp_path / "lift.hdf5"
    observations = {"robot0_eef_pos": (3,)}
    write(other, observations, {}, (3,))
    (tmp_path / "raw").write_bytes(bytes(84))
    layout = h5py.VirtualLayout((3, 7), "f8")
    layout[:] = h5py.VirtualSource(str(other), "data/demo_0/actions", (3, 7))

    def expect(message: str, name: str, link: Any) -> None:
        write(file, observations, {}, (3,))
        with h5py.File(file, "a") as opened:
            demo: Any = opened["data/demo_0"]
            if callable(link):
                link(demo)
            else:
                demo[name] = link
        with pytest.raises(DatasetError, match=message):
            load_demonstrations([str(file)])

    expect("`data/demo_0/more` refers to another file", "more", h5py.ExternalLink(str(other), "/data"))
    expect("refers to another file", "", lambda demo: demo.create_virtual_dataset("rewards", layout))
    raw = [(str(tmp_path / "raw"), 0, 84)]
    expect("refers to another file", "", lambda demo: demo.create_dataset("rewards", (21,), "f4", external=raw))
    expect("refers to `/nothing`, which does not exist", "more", h5py.SoftLink("/nothing"))
    expect("is a link to a group", "more", h5py.SoftLink("/data"))
    expect("nested too deep", "", lambda demo: demo.__setitem__("more", demo.parent))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("actions", np.array([b"a", b"b", b"c"]), "`data/demo_1/actions` holds values of the type"),
        ("obs/object", np.array([b"a", b"b", b"c"]), "`data/demo_1/obs/object` holds values of the type"),
        ("actions", 1.0, "`data/demo_1/actions` holds no rows"),
        ("obs/object", h5py.Empty("f"), "`data/demo_1/obs/object` holds no rows"),
        ("actions", np.zeros((3, 0)), "`data/demo_1` has no actions"),
        ("actions", np.zeros((3, 6)), r"`data/demo_1/actions` is float64\[6\]; a row of `data/demo_0/actions` is .*7"),
        ("obs/view", np.zeros((3, 8, 8, 3), np.float32), r"`data/demo_1/obs/view` is float32.*; .* is uint8"),
        ("obs", np.zeros((3, 10)), "`data/demo_1` has no `obs`"),
    ],
)
def test_what_is_no_row_like_the_others_is_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    file = write(tmp_path / "lift.hdf5", {"object": (10,), "view": (8, 8, 3)}, lengths=(3, 3))
    with h5py.File(file, "a") as opened:
        demo: Any = opened["data/demo_1"]
        del demo[name]
        demo[name] = value
    with pytest.raises(DatasetError, match=message):
        load_demonstrations([str(file)], ["object"])


@pytest.mark.parametrize(
    "nothing", ["null", b"null", "", h5py.Empty("f"), np.array(["null"], object), np.bytes_(b"null")]
)
@pytest.mark.parametrize(
    "name", ["env_args", "problem_info", "total", "macros_image_convention", "num_samples", "success"]
)
def test_attributes_that_say_nothing(tmp_path: Path, name: str, nothing: Any) -> None:
    file = tmp_path / "open_the_drawer_demo.hdf5"
    write(file, {"object": (10,)}, {}, (3, 4))
    with h5py.File(file, "a") as opened:
        opened["data"].attrs[name] = opened["data/demo_0"].attrs[name] = nothing
    read = load_demonstrations([str(file)])
    assert (read.tasks, read.fps, read.flip, read.successes) == (("open the drawer",), None, None, None)


@pytest.mark.parametrize(
    ("said", "fps", "task"),
    [
        ({"env_args": {"env_name": None, "env_kwargs": None}}, None, "lift"),
        ({"env_args": {"env_kwargs": {"control_freq": None}}}, None, "lift"),
        ({"env_args": {"env_kwargs": {"control_freq": "20"}}}, 20, "lift"),
        ({"env_args": {"env_kwargs": [1], "env_name": "Lift"}}, None, "Lift"),
        ({"problem_info": {"language_instruction": ["pick it", None, "up"]}}, None, "pick it up"),
        ({"problem_info": {"language_instruction": None}, "env_args": {"env_name": "Lift"}}, None, "Lift"),
        ({"problem_info": [None]}, None, "lift"),
    ],
)
def test_parts_of_attributes_that_say_nothing(tmp_path: Path, said: dict[str, Any], fps: Any, task: str) -> None:
    write(tmp_path / "lift.hdf5", {"object": (10,)}, {**said, "total": 3}, (3,))
    read = load_demonstrations([str(tmp_path / "lift.hdf5")])
    assert (read.tasks, read.fps) == ((task,), fps)


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ("data", "total", "seven", "`total` is 'seven', not a whole number"),
        ("data", "total", 3.5, "`total` is 3.5, not a whole number"),
        ("data/demo_0", "num_samples", np.array([3, 4]), r"`num_samples` is array\(\[3, 4\]\), not a whole number"),
        ("data", "env_args", '{"env_kwargs": {"control_freq": [20]}}', r"control_freq` is \[20\], not a number of"),
        ("data", "env_args", '{"env_kwargs": {"control_freq": 0}}', "control_freq` is 0, not a number of rows"),
        ("data", "problem_info", '{"language_instruction": {"a": 1}}', "language_instruction` is .*, not a text"),
        ("data/demo_0", "success", "maybe", "`success` is 'maybe', not true or false"),
        ("data/demo_0", "success", np.array([True, False]), "`success` is .*, not true or false"),
    ],
)
def test_attributes_of_another_kind_are_named(lift: Path, place: str, name: str, value: Any, message: str) -> None:
    set_attribute(lift, place, name, value)
    with pytest.raises(DatasetError, match=message) as caught:
        load_demonstrations([str(lift)])
    assert str(caught.value.where).endswith(f"lift.hdf5, {place}")


@pytest.mark.parametrize(("value", "solved"), [(True, True), ("False", False), (1.0, True), (np.array([0]), False)])
def test_an_attribute_says_whether_the_task_is_solved(lift: Path, value: Any, solved: bool) -> None:
    set_attribute(lift, "data/demo_0", "success", value)
    read = load_demonstrations([str(lift)])
    assert known(read.successes).tolist() == [False, False, solved]


NEVER, LAST, EARLY = [0, 0, 0], [0, 0, 1], [0, 1, 0]
ENDED, CUT = "ended", "cut off"


def ends(**columns: list[int]) -> Ends:
    flags = dict.fromkeys(("done", "terminated", "truncated", "success"))
    result = ends_of(np.array([2]), **{**flags, **{name: np.array(column, bool) for name, column in columns.items()}})
    return known(result)


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
