"""Any environment of Gymnasium, behind our interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.contract import random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.env_state import pack, unpack
from recipes.embodied.envs.registry import make_env
from rlinf_core.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")


class Toy(gymnasium.Env):
    """Observations of several parts, an action with bounds of its own, and success."""

    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Box(0, 255, (40, 48, 3), np.uint8),
            "wrist": gymnasium.spaces.Box(0, 255, (8, 6, 3), np.uint8),
            "words": gymnasium.spaces.Text(30),
            "arm": gymnasium.spaces.Dict({"joints": gymnasium.spaces.Box(-1, 1, (2, 2), np.float64)}),
            "tool": gymnasium.spaces.Discrete(3, start=1),
        }
    )
    action_space = gymnasium.spaces.Box(np.array([0.0, -np.inf]), np.array([10.0, np.inf]), dtype=np.float64)

    def __init__(self, goal: float = 5.0) -> None:
        self.goal = goal
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.look(), {}

    def look(self) -> dict[str, Any]:
        images = {"camera": np.full((40, 48, 3), 7, np.uint8), "wrist": np.full((8, 6, 3), 9, np.uint8)}
        return {**images, "words": f"push to {self.goal}", "arm": {"joints": self.np_random.random((2, 2))}, "tool": 2}

    def step(self, action: np.ndarray) -> Any:
        self.actions.append(action)
        solved = bool(action[0] == self.goal)
        return self.look(), float(action[0]), solved, False, {"is_success": solved}


@pytest.fixture
def toy_id() -> Any:
    gymnasium.register("RlinfToy-v0", entry_point=Toy)
    yield "RlinfToy-v0"
    del gymnasium.registry["RlinfToy-v0"]


def test_a_class_is_an_environment_by_itself() -> None:
    settings = EnvSettings(num_envs=2, options={"goal": 7.5}, max_episode_steps=9)
    env = make_env(f"{__name__}:Toy", settings)
    assert set(env.reset()) == {"images.camera", "images.wrist", "instructions", "states"}
    result = env.step(np.full((2, 1, 2), 0.5, np.float32))  # 7.5 of 0 to 10, the goal
    assert result.terminations.all()
    same = make_env("gymnasium", EnvSettings(num_envs=2, task=f"{__name__}:Toy", options={"goal": 7.5}))
    assert np.array_equal(same.reset()["states"], make_env(f"{__name__}:Toy", settings).reset()["states"])
    with pytest.raises(ConfigError, match="has no `task: CartPole-v1`"):
        make_env(f"{__name__}:Toy", EnvSettings(num_envs=2, task="CartPole-v1"))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'goals'"):
        make_env(f"{__name__}:Toy", EnvSettings(num_envs=2, options={"goals": 3.0}))


@pytest.mark.parametrize(
    ("task", "processes", "mapping"),
    [
        (
            f"{__name__}:Toy",
            0,
            "states [7] = arm.joints [2, 2] + tool [3, one-hot], images.camera = camera,"
            " images.wrist = wrist, instructions = words; actions = 2 numbers",
        ),
        ("CartPole-v1", 1, "states [4] = the observation [4]; actions = one of 2 choices"),
        (
            "Pendulum-v1",
            0,
            "states [3] = the observation [3]; actions = 1 number, -1..1 stretched to the bounds of the space",
        ),
    ],
)
def test_an_environment_says_what_becomes_of_its_spaces(task: str, processes: int, mapping: str) -> None:
    env = make_env("gymnasium", EnvSettings(num_envs=1, task=task, num_processes=processes))
    assert env.mapping == mapping
    env.close()


@pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1"])
def test_a_process_of_its_own_changes_nothing_about_the_spec(task: str) -> None:
    """Bounds of the simulator's own numbers, too, by which actions are clipped."""
    inside, outside = (
        make_env("gymnasium", EnvSettings(num_envs=1, task=task, num_processes=processes)) for processes in (0, 1)
    )
    assert outside.spec == inside.spec
    for env in (inside, outside):
        env.close()


def test_choices_and_states() -> None:
    env = make_env("gymnasium", EnvSettings(num_envs=3, task="CartPole-v1", max_episode_steps=500))
    assert (env.spec.state_size, env.spec.action_size, env.spec.num_choices) == (4, 1, 2)
    first = env.reset()["states"]
    assert first.shape == (3, 4)
    assert first.dtype == np.float32
    assert not np.array_equal(first[0], first[1])
    ended = 0
    for _ in range(60):
        result = env.step(np.ones((3, 1, 1), np.int64))  # always to the right: the pole falls soon
        assert result.rewards.tolist() == [[1.0]] * 3
        if result.episodes is not None:
            ended += len(result.episodes.env)
            assert (result.episodes.lengths < 15).all()
            assert result.episodes.returns.tolist() == result.episodes.lengths.tolist()
            assert result.episodes.success_once is None
    assert ended >= 9
    env.close()
    env.close()


def test_it_does_what_gymnasium_does() -> None:
    """The same seed and actions step by step in a plain environment."""
    env = make_env("gymnasium", EnvSettings(num_envs=1, task="CartPole-v1", max_episode_steps=500))
    state = env.reset()["states"][0]
    plain = gymnasium.make("CartPole-v1")
    plain.reset(seed=0)
    plain.unwrapped.state = np.array(state, np.float64)
    for action in (0, 1, 1, 0):
        result = env.step(np.array([[[action]]]))
        expected, *_ = plain.step(action)
        np.testing.assert_allclose(result.observations["states"][0], expected, atol=1e-5)
    assert not np.array_equal(state, result.observations["states"][0])


def test_starts_follow_seed_group_and_reset() -> None:
    def make(**extra: Any) -> Any:
        return make_env("gymnasium", EnvSettings(num_envs=4, task="CartPole-v1", group_size=2, **extra))

    env = make()
    first, second = env.reset()["states"], env.reset()["states"]
    assert np.array_equal(first[0], first[1])
    assert not np.array_equal(first[1], first[2])
    assert not np.array_equal(first[0], second[0])
    assert np.array_equal(make().reset(1)["states"], second)
    assert not np.array_equal(make(seed=9).reset(0)["states"], first)


@pytest.mark.parametrize(("value", "expected"), [(None, 200), (3, 3), (250, 250)])
def test_the_limit_of_the_id_is_the_default(value: int | None, expected: int) -> None:
    settings = EnvSettings(num_envs=1, task="MountainCar-v0", max_episode_steps=value, auto_reset=False)
    env = make_env("gymnasium", settings)
    assert env.max_episode_steps == expected
    env.reset()
    results = [env.step(np.zeros((1, 1, 1), np.int64)) for _ in range(expected)]
    assert [bool(result.truncations.any()) for result in results] == [False] * (expected - 1) + [True]


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_a_running_episode_is_continued_by_repeating_its_actions(task: str) -> None:
    def make() -> Any:
        return make_env("gymnasium", EnvSettings(num_envs=3, task=task, resumable=True, seed=2))

    env, again = make(), make()
    env.reset()
    for step in range(30):
        env.step(random_actions(env.spec, 3, seed=step))
    state = env.save()
    unpacked = unpack([pack([state], "")], "", again.numbers)
    assert unpacked is not None
    assert again.load(unpacked)
    for step in range(30, 60):
        one, other = (item.step(random_actions(env.spec, 3, seed=step)) for item in (env, again))
        assert np.array_equal(one.observations["states"], other.observations["states"])
        assert np.array_equal(one.dones, other.dones)
    assert again.save()["own/counts"].tolist() == env.save()["own/counts"].tolist()


def test_an_environment_that_does_not_repeat_itself_is_told(toy_id: str) -> None:
    class Moody(Toy):
        def look(self) -> dict[str, Any]:
            return {**super().look(), "arm": {"joints": np.random.default_rng().random((2, 2))}}

    gymnasium.registry[toy_id].entry_point = Moody
    env, again = (make_env("gymnasium", EnvSettings(num_envs=1, task=toy_id, resumable=True)) for _ in range(2))
    env.reset()
    env.step(np.zeros((1, 1, 2), np.float32))
    state = env.save()
    assert state is not None
    assert not again.load(state)


def test_dictionaries_images_and_bounds(toy_id: str) -> None:
    env: Any = make_env("gymnasium", EnvSettings(num_envs=2, task=toy_id, options={"goal": 10.0}))
    assert env.spec.cameras == {"camera": (40, 48, 3), "wrist": (8, 6, 3)}
    assert env.spec.has_instructions
    assert (env.spec.state_size, env.spec.action_size, env.spec.num_choices) == (7, 2, None)
    observations = env.reset()
    assert observations["images.camera"].shape == (2, 40, 48, 3)
    assert observations["images.camera"].dtype == np.uint8
    assert observations["images.wrist"].tolist() == np.full((2, 8, 6, 3), 9).tolist()
    assert observations["instructions"].tolist() == ["push to 10.0"] * 2
    assert observations["states"].shape == (2, 7)
    assert observations["states"][:, 4:].tolist() == [[0, 1, 0]] * 2
    result = env.step(np.array([[[0.0, 3.0]], [[2.0, -4.0]]], np.float32))
    assert result.rewards[:, 0].tolist() == [5, 10]  # -1..1 becomes 0..10, and beyond counts as the bound
    assert [simulation.env.unwrapped.actions[0].tolist() for simulation in env._simulators.simulations] == [
        [5, 3],
        [10, -4],
    ]
    assert result.episodes.success_at_end.tolist() == [True]
    assert result.episodes.env.tolist() == [1]


def test_a_bare_image_is_that_of_the_main_camera(toy_id: str) -> None:
    class Eye(Toy):
        observation_space = Toy.observation_space["camera"]

        def look(self) -> Any:
            return super().look()["camera"]

    gymnasium.registry[toy_id].entry_point = Eye
    env: Any = make_env("gymnasium", EnvSettings(num_envs=2, task=toy_id))
    assert env.spec.observations == {"images.main": ((40, 48, 3), "uint8")}
    assert list(env.reset()) == ["images.main"]


@pytest.mark.parametrize(
    ("task", "message"), [(None, "needs a task"), ("NoSuch-v0", "NoSuch"), ("CartPole-v1", "no_such_option")]
)
def test_what_cannot_be_made_is_refused(task: str | None, message: str) -> None:
    options = {"no_such_option": 1} if task == "CartPole-v1" else {}
    with pytest.raises(ConfigError, match=message):
        make_env("gymnasium", EnvSettings(num_envs=1, task=task, options=options))


def test_a_module_before_the_id_is_imported_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "registers_for_gymnasium"
    point = "gymnasium.envs.classic_control:CartPoleEnv"
    (tmp_path / f"{module}.py").write_text(
        f"import gymnasium\ngymnasium.register('{module}-v0', '{point}', max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = f"{module}:{module}-v0"
    assert make_env("gymnasium", EnvSettings(num_envs=1, task=task)).max_episode_steps == 7
    with pytest.raises(ConfigError, match="cannot be made"):
        make_env("gymnasium", EnvSettings(num_envs=1, task=f"no_{task}"))
    del gymnasium.registry[f"{module}-v0"]


def test_a_module_of_ones_own_is_not_sought_on_the_package_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advice(task: str) -> tuple[str, str]:
        with pytest.raises(ConfigError) as caught:
            make_env("gymnasium", EnvSettings(num_envs=1, task=task))
        return caught.value.message, caught.value.help or ""

    message, help = advice("nosuch:Bed-v0")
    assert message == "`nosuch:Bed-v0` cannot be made: there is no module `nosuch` here or on PYTHONPATH"
    assert help.startswith("`PYTHONPATH=FOLDER rlinf ...` names the folder that holds `nosuch`")
    (tmp_path / "bed_of_mine.py").write_text("import helper_of_mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert advice("bed_of_mine.inner:Bed-v0")[1].startswith("`bed_of_mine.inner` imports it: `PYTHONPATH=FOLDER")
    for task in ("nosuch:Bed-v0", "nosuch.beds:Bed-v0", "bed_of_mine:Bed-v0", "bed_of_mine.inner:Bed-v0"):
        assert "pip" not in advice(task)[1]


def test_spaces_that_are_not_understood_are_refused() -> None:
    class Sentence(Toy):
        observation_space = gymnasium.spaces.Text(5)

    gymnasium.register("RlinfText-v0", entry_point=Sentence)
    try:
        with pytest.raises(ConfigError, match="unsupported"):
            make_env("gymnasium", EnvSettings(num_envs=1, task="RlinfText-v0"))
    finally:
        del gymnasium.registry["RlinfText-v0"]
