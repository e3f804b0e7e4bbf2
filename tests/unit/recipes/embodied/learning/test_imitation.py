"""Batches of demonstrations: what fits an environment, and what a policy learns from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError, DatasetShape
from recipes.demonstrations.demonstrations import Demonstrations, flipped
from recipes.demonstrations.first_comparison import thumbnails
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.learning.data_fit import check_fits
from recipes.embodied.learning.imitation import ImitationData, shifted, spec_of
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_normalization
from recipes.embodied.models.registry import make_model
from tests.unit.recipes.demonstrations.test_pictures import scenes

LENGTHS = (4, 3)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., DemonstrationsConfig]:
    def made(camera: str = "front", **keys: Any) -> DemonstrationsConfig:
        features = {
            "observation.state": Feature("float32", (2,)),
            f"observation.images.{camera}": Feature("image", (8, 8, 3)),
            "action": Feature("float32", (1,)),
        }
        with DatasetWriter(tmp_path / "set", 10, features) as writer:
            for number, length in enumerate(LENGTHS):
                states = np.random.default_rng(number).normal(3, 5, (length, 2)).astype(np.float32)
                columns: dict[str, NDArray[Any]] = {
                    "observation.state": states,
                    f"observation.images.{camera}": np.full((length, 8, 8, 3), number, np.uint8),
                    "action": (10 * number + np.arange(length, dtype=np.float32))[:, None],
                }
                writer.add(columns, f"task {number}")
        return DemonstrationsConfig.model_validate({"train_data_paths": str(tmp_path / "set"), **keys})

    return made


def test_chunks_end_with_their_episode(write: Callable[..., DemonstrationsConfig]) -> None:
    data = ImitationData(write(), None, 3)
    observations, actions, valid = data.rows(np.array([0, 2, 6]))
    assert actions[..., 0].tolist() == [[0, 1, 2], [2, 3, 3], [12, 12, 12]]
    assert valid.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert data.rows(np.array([1]), 2)[1][..., 0].tolist() == [[1, 2]]
    assert observations["instructions"].tolist() == ["task 0", "task 0", "task 1"]
    assert observations["images.front"][:, 0, 0, 0].tolist() == [0, 0, 1]
    assert data.spec == EnvSpec(2, 1, cameras={"front": (8, 8, 3)}, has_instructions=True)


def test_the_only_camera_is_the_only_camera(write: Callable[..., DemonstrationsConfig]) -> None:
    spec = EnvSpec(2, 1, cameras={"main": (8, 8, 3)}, low=(None,), high=(None,))
    observations, _, _ = ImitationData(write(), spec, 1).rows(np.array([5]))
    assert set(observations) == {"states", "images.main"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvSpec(2, 7), "has 1 numbers in an action; the environment has 7"),
        (EnvSpec(3, 1), "has 2 numbers in a state; the environment has 3"),
        (EnvSpec(2, 1, num_choices=4), "actions and the environment's are of different kinds"),
        (EnvSpec(2, 1, cameras={"main": (16, 8, 3)}), "8 x 8; the environment's are 16 x 8"),
        (EnvSpec(2, 1, cameras={"main": (8, 8, 3), "hand": (8, 8, 3)}), "has no camera `main`"),
    ],
)
def test_data_of_another_environment_are_refused(
    write: Callable[..., DemonstrationsConfig], spec: EnvSpec, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        ImitationData(write(), spec, 1)


def test_a_policy_learns_what_was_shown(write: Callable[..., DemonstrationsConfig], tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = EnvSpec(2, 1, low=(None,), high=(None,))
    data = ImitationData(write(), spec, 1)
    policy = make_model(EmbodiedModelConfig(hidden_dim=32), spec)
    policy.normalization = data.normalization(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        data.loss(policy, 32).backward()
        optimizer.step()
    observations, actions, _ = data.rows(np.arange(sum(LENGTHS)))
    acted = policy.to_env(policy.act(policy.prepare(observations), greedy=True).actions)
    assert np.abs(acted - actions).mean() < 1.5  # actions are from 0 to 12
    policy.normalization.save(tmp_path)
    assert load_normalization(str(tmp_path), spec) == policy.normalization


def test_statistics_may_be_left_out(write: Callable[..., DemonstrationsConfig]) -> None:
    data = ImitationData(write(normalization="none"), None, 1)
    assert data.normalization(make_model(EmbodiedModelConfig(), data.spec)) == Normalization()


def test_pictures_shift_by_a_sixteenth_with_continued_edges() -> None:
    torch.manual_seed(0)
    pictures = np.zeros((200, 16, 48, 3), np.uint8)
    pictures[:, 8, 24] = 7
    pictures[:, :, 0] = 5
    moved = shifted(pictures)
    assert moved.shape == pictures.shape
    _, rows, columns = np.nonzero(moved[..., 0] == 7)
    assert (set(rows.tolist()), set(columns.tolist())) == (set(range(7, 10)), set(range(21, 28)))
    assert ((moved == 5).any(axis=(1, 2, 3)) == (columns >= 24)).all()
    assert (moved[columns == 27, :, :4] == 5).all()


def test_equal_seeds_move_pictures_equally() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    moved = [shifted(pictures) for _ in map(torch.manual_seed, (0, 0, 1))]
    assert np.array_equal(moved[0], moved[1])
    assert not np.array_equal(moved[0], moved[2])


def test_actions_beyond_the_range_are_refused_or_clipped(write: Callable[..., DemonstrationsConfig]) -> None:
    spec, config = EnvSpec(2, 1), write()
    with pytest.raises(DatasetError, match=r"row 2 .*number 0 of an action is 2; the environment takes -1 to 1"):
        ImitationData(config, spec, 1)
    (path,) = config.paths

    def read(**keys: Any) -> Demonstrations:
        source = {"path": path, **keys}
        return ImitationData(DemonstrationsConfig.model_validate({"train_data_paths": source}), spec, 1).demonstrations

    clipped = read(clip_actions=True)
    assert clipped.actions.max() == 1
    assert "clipped 5 numbers in 5 of 7 actions" in clipped.notes[-1]
    assert read(action_scale=1 / 12).actions.max() == pytest.approx(1)


@pytest.mark.parametrize("flips", [("none", "vertical"), ("rotate180", None), (None, "horizontal")])
def test_each_data_set_shows_its_first_pictures(flips: tuple[str | None, ...], tmp_path: Path) -> None:
    sources: list[dict[str, Any]] = []
    pictures = scenes(4, seed=0, size=16)
    for number, flip in enumerate(flips):
        features = {"observation.images.front": Feature("image", (16, 16, 3)), "action": Feature("float32", (1,))}
        with DatasetWriter(tmp_path / str(number), 10, features) as writer:
            for begin in (0, 2):
                action = np.zeros((2, 1), np.float32)
                writer.add({"observation.images.front": pictures[begin : begin + 2], "action": action}, "task")
        sources.append({"path": str(tmp_path / str(number)), **({} if flip is None else {"flip": flip})})
    config = DemonstrationsConfig.model_validate({"train_data_paths": sources})
    shown = ImitationData(config, None, 1).first_pictures()
    assert [item.where for item in shown] == [source["path"] for source in sources]
    assert [item.flip for item in shown] == [flip or "none" for flip in flips]
    for entry in shown:
        assert np.array_equal(entry.cameras["front"], thumbnails(flipped(pictures[[0, 2]], entry.flip)))


class Shown:
    """A policy that notes the tasks that it is shown, and learns nothing."""

    horizon, first_action, observed_steps = 0, 0, 1

    def __init__(self) -> None:
        self.tasks: list[str] = []

    def prepare(self, observations: Observation) -> Observation:
        self.tasks += observations["instructions"].tolist()
        return observations

    def from_env(self, actions: NDArray[Any]) -> torch.Tensor:
        return torch.zeros(actions.shape)

    def imitation_loss(self, inputs: Observation, actions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return actions.sum()


def shares(folder: Path, rows: dict[str, int], helped: dict[str, int], **keys: Any) -> dict[str, float]:
    """Return which share of 20 000 rows is of which data set; some rows of each are interventions."""
    weights: dict[str, float] = keys.pop("weights", {})
    sources: list[Any] = []
    for name, count in rows.items():
        features = {"action": Feature("float32", (1,)), "intervention": Feature("bool", (1,))}
        with DatasetWriter(folder / name, 10, features) as writer:
            for length in (count // 2, count - count // 2):
                taken = np.arange(length) < helped.get(name, 0)
                writer.add({"action": np.zeros((length, 1), np.float32), "intervention": taken}, name)
        path = str(folder / name)
        sources.append({"path": path, "weight": weights[name]} if name in weights else path)
    config = DemonstrationsConfig.model_validate({"train_data_paths": sources, **keys})
    data, policy = ImitationData(config, None, 1), Shown()
    assert len(data) == (2 * sum(helped.values()) if helped else len(data.demonstrations))
    torch.manual_seed(0)
    data.loss(cast("Any", policy), 20_000)
    return {name: policy.tasks.count(name) / 20_000 for name in rows}


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({"small": 3, "large": 1}, {"small": 0.75, "large": 0.25}),
        ({"small": 0.1, "large": 0.1}, {"small": 0.5, "large": 0.5}),
        ({"small": 1, "large": 99}, {"small": 0.01, "large": 0.99}),
        ({}, {"small": 0.04, "large": 0.96}),
    ],
)
@pytest.mark.parametrize("helped", [{}, {"small": 2, "large": 60}])
def test_rows_are_drawn_by_their_weights(
    weights: dict[str, float], wanted: dict[str, float], helped: dict[str, int], tmp_path: Path
) -> None:
    only = {"only_interventions": True} if helped else {}
    drawn = shares(tmp_path, {"small": 10, "large": 240}, helped, weights=weights, **only)
    if helped and not weights:
        wanted = {"small": 4 / 124, "large": 120 / 124}
    # Five deviations of the mean of 20 000 draws.
    for name, share in wanted.items():
        assert drawn[name] == pytest.approx(share, abs=5 * (share * (1 - share) / 20_000) ** 0.5)


def test_a_mixture_without_all_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="some of the data sets have a `weight`"):
        shares(tmp_path, {"one": 4, "other": 4}, {}, weights={"one": 1})


MAIN_AND_WRIST = EnvSpec(8, 7, cameras=dict.fromkeys(("main", "wrist"), (8, 8, 3)))


def data_of(*cameras: str) -> DatasetShape:
    return DatasetShape("set", 20, 7, False, 8, dict.fromkeys(cameras, (8, 8, 3)))


@pytest.mark.parametrize(
    ("names", "main", "wrist"),
    [
        (("agentview_rgb", "eye_in_hand_rgb"), "agentview_rgb", "eye_in_hand_rgb"),
        (("robot0_eye_in_hand_image", "agentview_image"), "agentview_image", "robot0_eye_in_hand_image"),
        (("wrist", "agentview_rgb", "main"), "main", "wrist"),
    ],
)
def test_cameras_of_simulators_are_known(names: tuple[str, ...], main: str, wrist: str) -> None:
    assert check_fits(data_of(*names), MAIN_AND_WRIST, {}) == {"main": main, "wrist": wrist}


@pytest.mark.parametrize(
    "names", [("agentview_rgb", "agentview_image", "wrist"), ("image", "image2"), ("top", "wrist")]
)
def test_cameras_that_could_be_others_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(DatasetError, match="has no camera `main`"):
        check_fits(data_of(*names), MAIN_AND_WRIST, {})
    chosen = {"main": names[0], "wrist": names[-1]}
    assert check_fits(data_of(*names), MAIN_AND_WRIST, chosen) == chosen


@pytest.mark.parametrize(("scale", "first"), [(0.1, [1.0, -0.5]), ((0.1, -0.2), [1.0, 1.0])])
def test_units_are_those_of_the_environment(scale: Any, first: list[float], tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", 10, {"action": Feature("float32", (2,))}) as writer:
        writer.add({"action": np.array([[10, -5], [0, 0]], np.float32)}, "degrees")

    def read(**keys: Any) -> ImitationData:
        source = {"path": str(tmp_path / "set"), **keys}
        return ImitationData(DemonstrationsConfig.model_validate({"train_data_paths": source}), EnvSpec(0, 2), 1)

    with pytest.raises(DatasetError, match="number 0 of an action is 10"):
        read()
    assert np.allclose(read(action_scale=scale).demonstrations.actions[0], first)
    with pytest.raises(DatasetError, match="an action has 2 numbers"):
        read(action_scale=(1, 2, 3))


def test_windows_reach_back_to_their_episodes_start(write: Callable[..., DemonstrationsConfig]) -> None:
    data = ImitationData(write(), None, 1)
    observations, actions, valid = data.rows(np.array([1, 4, 6]), 4, -2, 3)
    assert actions[..., 0].tolist() == [[0, 0, 1, 2], [10, 10, 10, 11], [10, 11, 12, 12]]
    assert valid.tolist() == [[False, True, True, True], [False, False, True, True], [True, True, True, False]]
    states = data.demonstrations.states
    assert states is not None
    assert np.array_equal(observations["past.states"], states[[[0, 0], [4, 4], [4, 5]]])
    assert observations["past.images.front"].shape == (3, 2, 8, 8, 3)
    assert np.array_equal(observations["states"], states[[1, 4, 6]])


@pytest.mark.parametrize("actions", [[[0, 1]], [[-1]]])
def test_integers_that_are_no_choice_are_refused(actions: list[list[int]]) -> None:
    rows = np.zeros(1, np.int64)
    data = Demonstrations("set", 10, np.array([0, 1]), np.array(actions), None, {}, ("go",), rows)
    with pytest.raises(DatasetError, match=r"an action is \d integers.*; a discrete action is one integer from 0"):
        spec_of(data)
