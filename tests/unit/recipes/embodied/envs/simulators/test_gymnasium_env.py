"""Any environment of Gymnasium behind our interface, and what becomes of its spaces."""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.processes.simulator import Outcome
from recipes.embodied.envs.registry import make_env
from rlinf_core import ConfigError
from tests.known import known

pytest.importorskip("gymnasium")
import gymnasium
from gymnasium import spaces

from recipes.embodied.envs.simulators.gymnasium_env import cannot_be_made, checked_step
from recipes.embodied.envs.simulators.gymnasium_spaces import Reader, Writer


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
    envs = [make_env("gymnasium", EnvSettings(num_envs=1, task=task, num_processes=processes)) for processes in (0, 1)]
    assert envs[0].spec == envs[1].spec
    for env in envs:
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


@pytest.mark.parametrize(("value", "expected"), [(None, 200), (3, 3), (250, 250)])
def test_the_limit_of_the_id_is_the_default(value: int | None, expected: int) -> None:
    settings = EnvSettings(num_envs=1, task="MountainCar-v0", max_episode_steps=value, auto_reset=False)
    env = make_env("gymnasium", settings)
    assert env.max_episode_steps == expected
    env.reset()
    results = [env.step(np.zeros((1, 1, 1), np.int64)) for _ in range(expected)]
    assert [bool(result.truncations.any()) for result in results] == [False] * (expected - 1) + [True]


def test_an_environment_that_does_not_repeat_itself_is_told(toy_id: str) -> None:
    class Moody(Toy):
        def look(self) -> dict[str, Any]:
            return {**super().look(), "arm": {"joints": np.random.default_rng().random((2, 2))}}

    gymnasium.registry[toy_id].entry_point = Moody
    env, again = (make_env("gymnasium", EnvSettings(num_envs=1, task=toy_id, resumable=True)) for _ in range(2))
    env.reset()
    env.step(np.zeros((1, 1, 2), np.float32))
    state = env.save()
    assert not again.load(known(state))


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


def test_spaces_that_are_not_understood_are_refused(toy_id: str) -> None:
    class Sentence(Toy):
        observation_space = gymnasium.spaces.Text(5)

    gymnasium.registry[toy_id].entry_point = Sentence
    with pytest.raises(ConfigError, match="unsupported"):
        make_env("gymnasium", EnvSettings(num_envs=1, task=toy_id))


LARGEST = float(np.finfo(np.float32).max)
BYTES = {"low": 0, "high": 255, "dtype": np.uint8}


@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 2, np.int64), (-3, 3, np.int8), (0, 255, np.uint8)])
def test_whole_numbers_get_equal_parts(low: int, high: int, dtype: Any) -> None:
    count = high - low + 1
    drawn = np.linspace(-1, 1, 30 * count, endpoint=False)[:, None]
    taken = Writer("task", spaces.Box(low, high, (1,), dtype))(drawn)
    values, counts = np.unique(taken, return_counts=True)
    assert values.tolist() == list(range(low, high + 1))
    assert np.ptp(counts) <= 2
    assert taken.dtype == dtype


@pytest.mark.parametrize(
    ("low", "high"), [(-LARGEST, LARGEST), (-np.inf, np.inf), (0, np.inf), (-2, LARGEST), (-1e20, 1e20), (3, 7)]
)
def test_actions_are_finite_and_in_the_space(low: float, high: float) -> None:
    space = spaces.Box(low, high, (2,))
    for row in Writer("task", space)(np.array([[-5.0, 5.0], [-0.5, 0.5], [1.0, -1.0]], np.float32)):
        assert np.isfinite(row).all()
        assert space.contains(row)


def test_bounds_are_told() -> None:
    writer = Writer("task", spaces.Box(np.array([-2, -np.inf]), np.array([2, np.inf])))
    assert (writer.low, writer.high) == ((-2, None), (2, None))
    with pytest.raises(ConfigError, match="is unbounded"):
        Writer("task", spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64))


@pytest.mark.parametrize("shape", [(32, 24, 3), (3, 32, 24), (32, 24, 1), (1, 32, 24), (32, 24)])
def test_pictures_are_turned_into_ours(shape: tuple[int, ...]) -> None:
    reader = Reader("task", spaces.Box(shape=shape, **BYTES))
    assert (reader.cameras, reader.state_size) == ({"main": (32, 24, 3)}, 0)
    seen = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    picture = reader(seen)["images.main"]
    upright = seen if shape[0] == 32 else seen.transpose(1, 2, 0)
    assert np.array_equal(picture, np.broadcast_to(upright.reshape(32, 24, -1), (32, 24, 3)))


@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 4), (4, 84, 84, 3), (84, 84, 12), (6, 84, 84)])
def test_stacked_frames_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="not a single one: uint8"):
        Reader("task", spaces.Box(shape=shape, **BYTES))


def test_pictures_of_floats_and_parts_without_numbers() -> None:
    with pytest.raises(ConfigError, match="not a single one: float32"):
        Reader("task", spaces.Box(0, 1, (84, 84, 3)))
    with pytest.raises(ConfigError, match="`a` has no numbers"):
        Reader("task", spaces.Dict(a=spaces.Box(-1, 1, (0,)), b=spaces.Box(-1, 1, (2,))))


def test_parts_of_dictionaries_and_tuples_are_found() -> None:
    picture = spaces.Box(shape=(16, 16, 3), **BYTES)
    inner = spaces.Dict(img=picture, x=spaces.Box(-1, 1, (2,)))
    space = spaces.Dict(a=inner, b=spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2, start=5))))
    reader = Reader("task", space)
    assert (reader.cameras, reader.state_size) == ({"a.img": (16, 16, 3)}, 7)
    row = reader({"a": {"img": np.zeros((16, 16, 3), np.uint8), "x": np.array([0.5, 1])}, "b": (2, 5)})
    assert row["states"].tolist() == [0.5, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("space", "seen", "message"),
    [
        (spaces.Discrete(3), -1, "is -1"),
        (spaces.Box(-1, 1, (2,)), np.zeros(3), r"the shape \[3\]"),
        (spaces.Box(-1, 1, (2,)), np.array(["a", "b"]), "values of the type"),
        (spaces.Box(shape=(16, 16, 3), **BYTES), np.zeros((16, 16, 3)), "the type float64"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2)), {"a": 1}, "has no `b`"),
    ],
)
def test_observations_out_of_their_space_are_refused(space: Any, seen: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Reader("task", space)(seen)


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.array(1), np.array([1.0]), np.array([[1]])])
def test_one_number_is_a_reward(reward: Any) -> None:
    assert checked_step("task", (0, reward, False, np.bool_(True), {"success": 1}))[1] == Outcome(
        1.0, False, True, True
    )


@pytest.mark.parametrize(
    ("task", "error", "help"),
    [
        (
            "Hopper-v5",
            ModuleNotFoundError("No module named 'imageio'", name="imageio"),
            "run `pip install 'gymnasium[mujoco]'`",
        ),
        (
            "phys2d/CartPole-v1",
            ModuleNotFoundError("No module named 'jax'", name="jax"),
            "run `pip install 'gymnasium[jax]'`",
        ),
        ("Own-v0", ModuleNotFoundError("No module named 'other'", name="other"), "pip install other"),
        (
            "Hopper-v2",
            ImportError("The mujoco v2 and v3 based environments have been moved to the gymnasium-robotics project"),
            "a newer version of its id",
        ),
        ("Pusher-v4", ImportError("`Pusher-v4` is only supported on `mujoco<3`"), "pip install 'mujoco<3'"),
        (
            "GymV26Environment-v0",
            ImportError('To use the gym compatibility environments, run `pip install "shimmy[gym-v26]"`'),
            "shimmy:GymV26Environment-v0",
        ),
    ],
)
def test_a_missing_extra_is_named(task: str, error: ImportError, help: str) -> None:
    assert help in (cannot_be_made(task, error).help or "")


def test_bytes_of_a_grid_or_a_mask_are_no_colours() -> None:
    grid = Reader("task", spaces.Box(0, 10, (7, 7, 3), np.uint8))
    assert (grid.cameras, grid.state_size) == ({}, 147)
    with pytest.raises(ConfigError, match="its numbers go from 0 to 1, and those of a camera from 0 to 255"):
        Reader("task", spaces.Box(0, 1, (32, 32, 3), np.uint8))
