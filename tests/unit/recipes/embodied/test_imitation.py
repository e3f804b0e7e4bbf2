"""Batches of demonstrations: what fits an environment, and what a policy learns from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.demonstrations import flipped
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.demonstrations.orientation import thumbnails
from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.imitation import ImitationData, shifted
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_normalization
from recipes.embodied.models.registry import make_model
from tests.unit.recipes.demonstrations.scenes import scenes

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
        (EnvSpec(2, 7), "has 1 numbers in an action, and the environment 7"),
        (EnvSpec(3, 1), "has 2 numbers in a state, and the environment 3"),
        (EnvSpec(2, 1, num_choices=4), "actions are of another kind"),
        (EnvSpec(2, 1, cameras={"main": (16, 8, 3)}), "8 x 8, and the environment's 16 x 8"),
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
    policy.normalization = data.normalization()
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
    assert ImitationData(write(normalization="none"), None, 1).normalization() == Normalization()


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
    with pytest.raises(DatasetError, match=r"row 2 .*number 0 of an action is 2, and the environment takes -1 to 1"):
        ImitationData(config, spec, 1)
    clipped = ImitationData(config.model_copy(update={"clip_actions": True}), spec, 1).demonstrations
    assert clipped.actions.max() == 1
    assert "5 numbers in 5 of 7 actions are clipped" in clipped.notes[-1]
    scaled = ImitationData(config.model_copy(update={"action_scale": 1 / 12}), spec, 1).demonstrations
    assert scaled.actions.max() == pytest.approx(1)


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
    config = DemonstrationsConfig.model_validate({"train_data_paths": sources, "flip": "vertical"})
    shown = ImitationData(config, None, 1).first_pictures()
    assert [each.where for each in shown] == [source["path"] for source in sources]
    assert [each.flip for each in shown] == [flip or "vertical" for flip in flips]
    for each in shown:
        assert np.array_equal(each.cameras["front"], thumbnails(flipped(pictures[[0, 2]], each.flip)))
