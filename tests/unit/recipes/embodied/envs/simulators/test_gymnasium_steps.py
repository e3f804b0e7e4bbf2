"""What environments of Gymnasium return, in a batch too; and single packages: ManiSkill, panda-gym, gym-hil."""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from recipes.embodied.envs import contract
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.contract import random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.training.arrays import NonFiniteError
from rlinf_core import ConfigError
from tests.known import known

pytest.importorskip("gymnasium")
import gymnasium
from gymnasium import spaces

from recipes.embodied.envs.simulators import gymnasium_spaces
from recipes.embodied.envs.simulators.gym_hil import pick_cube
from recipes.embodied.envs.simulators.gymnasium_env import GymnasiumEnv

STATES = spaces.Box(np.array([-1, -np.inf, 0], np.float32), np.array([1, np.inf, 5], np.float32))
SPOKEN = spaces.Dict(a=spaces.Discrete(2), t=spaces.Text(9))
PICTURE = spaces.Box(0, 255, (16, 16, 3), np.uint8)


class Odd(gymnasium.Env):
    """Returns from the given step on what it is told to return."""

    def __init__(
        self, space: Any = STATES, shown: Any = None, result: Any = None, first: Any = None, act: Any = None
    ) -> None:
        self.observation_space, self.action_space = space, act or spaces.Box(-1, 1, (1,))
        self._shown, self._result, self._first = shown, result, first

    def _fine(self) -> Any:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return (self._fine(), {}) if self._first is None else self._first

    def step(self, action: Any) -> Any:
        shown = self._fine() if self._shown is None else self._shown
        rest = (1.0, False, False, {}) if self._result is None else self._result
        return (shown, *rest) if isinstance(rest, tuple) else rest


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("Odd-v0", Odd)
    gymnasium_spaces._warned.clear()
    yield
    del gymnasium.registry["Odd-v0"]


def played(steps: int = 1, **options: Any) -> None:
    env = GymnasiumEnv(EnvSettings(num_envs=2, task="Odd-v0", options=options))
    try:
        env.reset()
        for _ in range(steps):
            env.step(np.zeros((2, 1, 1), np.float32))
    finally:
        env.close()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"shown": np.zeros(4, np.float32)}, r"an observation of `Odd-v0` has the shape \[4\]"),
        ({"shown": np.zeros((1, 3), np.float32)}, r"has the shape \[1, 3\]"),
        ({"shown": np.array(["a", "b", "c"])}, "has values of the type"),
        (
            {"space": PICTURE, "shown": np.zeros((16, 16, 3))},
            "the type float64, but its space says uint8",
        ),
        ({"space": PICTURE, "shown": np.zeros((3, 16, 16), np.uint8)}, r"has the shape \[3, 16, 16\]"),
        ({"result": (None, False, False, {})}, "the reward of `Odd-v0` is None"),
        ({"result": (np.ones(2), False, False, {})}, "the reward of `Odd-v0` is an array of the shape"),
        ({"result": ("1", False, False, {})}, "the reward of `Odd-v0` is '1'"),
        ({"result": (1.0, 2, False, {})}, "`terminated` of `Odd-v0` is 2"),
        ({"result": (1.0, False, None, {})}, "`truncated` of `Odd-v0` is None"),
        ({"result": (1.0, False, False, {"success": "no"})}, "`success` of `Odd-v0` is 'no'"),
        ({"result": (1.0, False, False, {"is_success": np.array([True, False])})}, "`success` of `Odd-v0`"),
        ({"result": (1.0, False, {})}, "`step` of `Odd-v0` returns 4 values"),
        ({"result": 3}, "`step` of `Odd-v0` returns int"),
        ({"first": (1.0, 2.0)}, "`reset` of `Odd-v0` does not return an observation and a dictionary"),
        ({"first": np.zeros(3)}, "`reset` of `Odd-v0` does not return an observation and a dictionary"),
        ({"first": (np.zeros(2, np.float32), {})}, r"has the shape \[2\]"),
        ({"space": SPOKEN, "first": ({"a": 0}, {})}, "an observation of `Odd-v0` has no `t`|has no `t`, but"),
        ({"space": SPOKEN, "first": ({"a": 0, "t": b"go"}, {})}, "`t` of an observation of `Odd-v0` is b'go'"),
    ],
)
def test_what_does_not_fit_the_spaces_is_refused(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        played(**odd)


class Seedless(Odd):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Wrapping(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Leaves resets to an environment that takes no seed."""

    metadata = {"render_modes": [], "render_fps": "often"}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self) -> None:
        super().__init__(Seedless())


class Seeding(Wrapping):
    """Takes a seed for an environment that takes none."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset()


class Growing(Odd):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.action_space = spaces.Box(-2, 2, (1,))
        return super().reset(seed=seed)


def test_an_action_space_stays_what_it_is() -> None:
    env = make_env(f"{__name__}:Growing", EnvSettings(num_envs=1, max_episode_steps=2))
    with pytest.raises(ConfigError, match=r"`reset` of `.*Growing` changes its action space from Box\(-1.0, 1.0"):
        env.reset()


class Unequal(Odd):
    made = itertools.count(os.getpid())

    def __init__(self) -> None:
        bound = next(self.made)
        super().__init__(act=spaces.Box(-bound, bound, (1,)))


@pytest.mark.parametrize("processes", [0, 2])
def test_environments_of_a_batch_have_equal_spaces(processes: int) -> None:
    settings = EnvSettings(num_envs=2, max_episode_steps=2, num_processes=processes)
    with pytest.raises(ConfigError, match=r"environments of `.*Unequal` differ in their observations or actions"):
        make_env(f"{__name__}:Unequal", settings)


@pytest.mark.parametrize("name", ["Seedless", "Wrapping"])
def test_a_reset_without_a_seed_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"`reset` of `.*{name}` takes no `seed`"):
        make_env(f"{__name__}:{name}", EnvSettings(num_envs=1))


def test_a_wrapper_may_take_the_seed() -> None:
    env = make_env(f"{__name__}:Seeding", EnvSettings(num_envs=1, max_episode_steps=2))
    assert env.control_hz is None
    assert env.reset().keys() == {"states"}


def test_an_observation_that_is_no_number_is_refused() -> None:
    with pytest.raises(NonFiniteError):
        played(shown=np.array([0, np.nan, 0], np.float32))


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ([2, 0, 0], "number 0 is 2, and its bounds are -1 and 1"),
        ([1, -1e9, -3], "number 2 is -3, and its bounds are 0 and 5"),
        ([1.000001, 9, 5], None),
    ],
)
def test_states_out_of_their_bounds_are_told_once(
    shown: list[float], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rlinf"):
        played(steps=3, shown=np.array(shown, np.float32))
    messages = [record.getMessage() for record in caplog.records if "leaves its space" in record.getMessage()]
    assert [words in message for message in messages] == ([] if words is None else [True])
    assert all("`Odd-v0`" in message for message in messages)


def test_the_part_of_a_dictionary_is_named(caplog: pytest.LogCaptureFixture) -> None:
    space = spaces.Dict(a=spaces.Discrete(3), hand=spaces.Dict(b=spaces.Box(-2, 2, (2,), np.float64)))
    reader = gymnasium_spaces.Reader("task", space)
    with caplog.at_level(logging.WARNING, "rlinf"):
        seen = reader({"a": 2, "hand": {"b": np.array([0.0, 2.5])}})
        reader.check_bounds({name: np.array([value]) for name, value in seen.items()})
    assert "`hand.b` of an observation of `task` leaves its space: number 1 is 2.5" in caplog.text


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-2, 2, (1,)),
        spaces.Box(np.array([0, -np.inf, 3], np.float32), np.array([5, np.inf, np.inf], np.float32)),
        spaces.Box(0, 9, (2, 2), np.int64),
        spaces.Discrete(3, start=-1),
    ],
)
def test_a_spec_tells_the_numbers_that_a_simulator_gets(space: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    step = Odd.step

    def noted(self: Any, action: Any) -> Any:
        taken.append(np.asarray(action).reshape(-1))
        return step(self, action)

    monkeypatch.setattr(Odd, "step", noted)
    env = GymnasiumEnv(EnvSettings(num_envs=1, task="Odd-v0", options={"act": space}))
    actions = random_actions(env.spec, 1, chunk=6)
    env.reset()
    env.step(actions)
    wanted = env.spec.native(actions[0])
    np.testing.assert_allclose(np.stack(taken), wanted, rtol=1e-6)
    assert all(space.contains(item.reshape(space.shape).astype(space.dtype)) for item in wanted)


class RandomWalk(gymnasium.Env):
    """A random walk of 5 steps; the steps of a class attribute, counted over all environments, return or raise."""

    odd: dict[int, Any] = {}  # noqa: RUF012 - set by each test
    made = steps = 0

    def __init__(self) -> None:
        RandomWalk.made += 1
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._place, self._time = self.np_random.normal(), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        RandomWalk.steps += 1
        self._time += 1
        self._place += float(action[0]) + self.np_random.normal()
        action[0] = 7  # an environment may
        result = (
            self._seen(),
            self._place,
            self._time >= 5,
            False,
            {"success": True} if RandomWalk.odd == "tell" else {},
        )
        odd = RandomWalk.odd.get(RandomWalk.steps) if isinstance(RandomWalk.odd, dict) else None
        if odd == "raise":
            raise OSError("a cable")
        return result if odd is None else odd(result)

    def _seen(self) -> Any:
        return np.array([self._place, self._time], np.float32)


@pytest.fixture(autouse=True)
def walk() -> Iterator[None]:
    gymnasium.register("RlinfWalk-v0", entry_point=RandomWalk)
    yield
    del gymnasium.registry["RlinfWalk-v0"]


def walked_by(odd: Any) -> list[Any]:
    """Return what 3 environments show in 13 steps, with rewards and ends."""
    RandomWalk.odd, RandomWalk.made, RandomWalk.steps = odd, 0, 0
    env = GymnasiumEnv(EnvSettings(num_envs=3, task="RlinfWalk-v0", seed=4, resumable=True))
    history = [env.reset()["states"]]
    for step in range(13):
        result = env.step(np.full((3, 1, 1), np.sin(step), np.float32))
        history += [result.observations["states"], result.rewards, result.terminations, result.valid]
    env.close()
    return history


def same(history: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(history, other, strict=True))


def test_one_by_one_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    together = walked_by({})
    monkeypatch.setattr("recipes.embodied.envs.processes.simulation_batch.CheapSimulation", type("Other", (), {}))
    assert same(walked_by({}), together)


@pytest.mark.parametrize("at", [[1], [2], [14], [20], [35], [14, 24]])
def test_one_that_raises_is_repeated(at: list[int]) -> None:
    fine = walked_by({})
    again = walked_by(dict.fromkeys(at, "raise"))
    assert same(again, fine)
    assert RandomWalk.made == 3 + len(at)


def test_a_repeated_episode_has_all_its_steps() -> None:
    # The middle one of three steps is checked by itself, because it reports success; the next one raises.
    odd = {4: lambda result: (*result[:4], {"success": False}), 8: "raise"}
    assert same(walked_by(odd), walked_by({}))


def test_success_is_seen_in_any_step() -> None:
    assert same(walked_by("tell"), walked_by({}))
    RandomWalk.odd = "tell"
    env = GymnasiumEnv(EnvSettings(num_envs=3, task="RlinfWalk-v0"))
    env.reset()
    env.step(np.zeros((3, 1, 1), np.float32))
    assert env.knows_success


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda result: result[:4], "returns 4 values"),
        (lambda result: (*result[:1], "much", *result[2:]), "the reward of `RlinfWalk-v0` is 'much'"),
        (lambda result: (*result[:2], 3, *result[3:]), "`terminated` of `RlinfWalk-v0` is 3"),
        (lambda result: (np.zeros(3, np.float32), *result[1:]), "has the shape [3]"),
        (lambda result: (np.array(["a", "b"]), *result[1:]), "has values of the type <U1"),
    ],
)
def test_a_wrong_result_of_one_is_refused_at_once(wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        walked_by({8: wrong})
    assert words in str(refused.value)
    assert RandomWalk.steps <= 9


class Rendered(Odd):
    """Renders what a test gives it."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    view: ClassVar[Any] = None

    def __init__(self, render_mode: str) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return self.view


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (np.ones((8, 8, 4), np.uint8), "uint8 [8, 8, 4]"),
        (np.ones((8, 8, 3)), "float64 [8, 8, 3]"),
        (np.ones((8, 8), np.uint8), "uint8 [8, 8]"),
        (None, "object []"),
    ],
)
def test_a_view_that_no_video_takes_is_refused(view: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rendered, "view", view)
    options = {"render_mode": "rgb_array"}
    env = make_env(f"{__name__}:Rendered", EnvSettings(num_envs=1, max_episode_steps=2, options=options))
    env.reset()
    with pytest.raises(ConfigError) as refused:
        env.look(np.arange(1))
    assert f"returns {said}; `rgb_array` is uint8 [H, W, 3]" in refused.value.message


class StandIn(gymnasium.Env):
    """What the adapter uses of ManiSkill 3: tensors [B, ...], resets of some by `env_idx`, `info["success"]`."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, num_envs: int, obs_mode: str, sensor_configs: dict[str, int], **fields: Any) -> None:
        if fields["sim_backend"] == "physx_cpu" and num_envs > 1:
            raise RuntimeError("Cannot set the sim backend to 'cpu' and have multiple environments.")
        self.fields, self.num_envs, self.device = fields, num_envs, torch.device("cpu")
        self.control_freq = 20
        self.images, self.size = obs_mode == "rgb+state", sensor_configs
        self.single_action_space = gymnasium.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 4], np.float32))
        self.action_space = gymnasium.spaces.Box(-9, 9, (num_envs, 2))
        self.observation_space = gymnasium.spaces.Box(-9, 9, (num_envs, 3))
        self.place = torch.zeros(num_envs, 3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = (options or {}).get("env_idx", torch.arange(self.num_envs))
        self.place[rows] = torch.zeros(len(rows), 3)
        # As ManiSkill does it: the first seed counts, whoever is reset.
        with torch.random.fork_rng():
            torch.manual_seed(np.resize(seed, self.num_envs)[0])
            self.place[rows, 2] = torch.rand(len(rows))
        return self.seen(), {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        self.place[:, :2] += actions
        success = self.place[:, 1] > 6
        # A limit of the simulator's own is not what ends episodes here.
        truncated = torch.ones(self.num_envs, dtype=torch.bool)
        return self.seen(), -self.place[:, 0], success, truncated, {"success": success}

    def seen(self) -> Any:
        if not self.images:
            return self.place.clone()
        image = self.place[:, :1, None, None].abs().clamp(0, 255).to(torch.uint8)
        shape = (self.num_envs, self.size["height"], self.size["width"], 3)
        return {"state": self.place.clone(), "sensor_data": {"base_camera": {"rgb": image.expand(shape)}}}


class TestManiskill:
    """`env_type: maniskill`, with a stand-in for the package: it has not run with the package itself."""

    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from recipes.embodied.envs.simulators.maniskill import ManiskillEnv

        for name in ("mani_skill", "mani_skill.envs"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        gymnasium.register("StandIn-v1", StandIn, disable_env_checker=True, max_episode_steps=7)
        self.make = ManiskillEnv
        yield
        del gymnasium.registry["StandIn-v1"]

    def test_promises_are_kept_but_for_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:

        env = self.make(EnvSettings(num_envs=2, task="StandIn-v1", max_episode_steps=1000, auto_reset=False))
        contract._check_rest(env)
        with pytest.raises(ConfigError, match="equal starts"):
            self.make(EnvSettings(num_envs=2, task="StandIn-v1", group_size=2))

    def test_what_it_observes_and_how_episodes_end(self) -> None:
        options = {"cameras": ["main"], "image_size": 16, "control_mode": "pd_joint_delta_pos"}
        env = self.make(EnvSettings(num_envs=3, task="StandIn-v1", options=options))
        assert (env.spec.state_size, env.spec.action_size, env.spec.cameras) == (3, 2, {"main": (16, 16, 3)})
        assert env.max_episode_steps == 7
        assert env._base.fields["control_mode"] == "pd_joint_delta_pos"
        assert env.control_hz == 20
        seen = env.reset()
        assert seen["images.main"].dtype == np.uint8
        starts = seen["states"][:, 2].copy()
        # The bounds of the second number are -2 and 4: half a unit is 2.5.
        actions = np.full((3, 1, 2), 0.5, np.float32)
        actions[0] = 1
        first = env.step(actions)
        assert np.allclose(first.observations["states"][:, 1], [4, 2.5, 2.5])
        second = env.step(actions)
        assert second.terminations[:, 0].tolist() == [True, False, False]
        assert not second.truncations.any()
        assert np.asarray(known(second.episodes).success_at_end).tolist() == [True]
        assert second.observations["states"][0, :2].tolist() == [0, 0]
        assert second.observations["states"][1:, 2].tolist() == starts[1:].tolist()
        assert env.knows_success

    def test_environment_reset_alone_starts_elsewhere_each_time(self) -> None:
        env = self.make(EnvSettings(num_envs=3, task="StandIn-v1"))
        env.reset()
        actions = np.zeros((3, 1, 2), np.float32)
        actions[2] = 1  # solves it in two steps
        starts = [env.step(actions).observations["states"][2, 2] for _ in range(6)][1::2]
        assert len(set(starts)) == 3

    def test_what_the_simulator_refuses_is_told(self) -> None:
        with pytest.raises(ConfigError, match="have multiple environments") as caught:
            self.make(EnvSettings(num_envs=2, task="StandIn-v1", options={"sim_backend": "physx_cpu"}))
        assert "Vulkan" in (caught.value.help or "")

    def test_a_camera_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="no camera `hand_camera`") as caught:
            self.make(EnvSettings(num_envs=1, task="StandIn-v1", options={"cameras": ["wrist"]}))
        assert "`base_camera`" in (caught.value.help or "")


needs_panda = pytest.mark.skipif(find_spec("panda_gym") is None, reason="the extra `panda` is not installed")


def panda(task: str = "PandaReachDense-v3", **settings: Any) -> VectorEnv:
    return make_env("panda_gym", EnvSettings(num_envs=2, task=task, **settings))


@needs_panda
@pytest.mark.parametrize(("task", "states", "actions"), [("PandaReachDense-v3", 12, 3), ("PandaPush-v3", 24, 3)])
def test_it_steps_and_starts_again(task: str, states: int, actions: int) -> None:
    env = panda(task, max_episode_steps=3)
    try:
        assert (env.spec.state_size, env.spec.action_size) == (states, actions)
        first = env.reset()["states"]
        assert first.shape == (2, states)
        results = [env.step(np.zeros((2, 1, actions), np.float32)) for _ in range(3)]
        assert results[-1].episodes is not None
        assert results[-1].episodes.success_at_end is not None
        np.testing.assert_array_equal(env.reset(0)["states"], first)
    finally:
        env.close()
        env.close()


@needs_panda
def test_a_script_reaches() -> None:
    """The hand goes straight to the point: the first six states are where it is and where it should be."""
    env = panda(max_episode_steps=50, auto_reset=False)
    try:
        states, solved = env.reset()["states"], np.zeros(2, np.bool_)
        for _ in range(30):
            way = states[:, 3:6] - states[:, :3]
            result = env.step((10 * way)[:, None].astype(np.float32))
            states, solved = result.observations["states"], solved | env._episodes.success
        assert solved.all()
        assert env.knows_success
    finally:
        env.close()


@needs_panda
def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="PandaDance-v3"):
        panda("PandaDance-v3")


@needs_panda
def test_it_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    panda().close()
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""
    print("heard")
    assert capfd.readouterr().out == "heard\n"


@needs_panda
def test_pybullet_prints_nothing() -> None:
    program = (
        "from recipes.embodied.envs.base import EnvSettings\n"
        "from recipes.embodied.envs.registry import make_env\n"
        "make_env('panda_gym', EnvSettings(num_envs=1, task='PandaReach-v3')).close()\n"
        "import sys; print('seen', flush=True); print('too', file=sys.stderr, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("seen\n", "too\n")


OPEN, CLOSE = -1.0, 1.0


@pytest.mark.parametrize(
    ("away", "angle", "speed", "motion", "gripper"),
    [
        ((0.1, 0.0, -0.05), 0.0, 0.0, (0.1, 0.0, 0.05), OPEN),  # from afar, toward a place above it
        ((0.02, 0.0, -0.05), 0.0, 0.0, (0.02, 0.0, 0.01), OPEN),  # nearly there, lower
        ((0.0, 0.01, -0.05), 0.0, 0.0, (0.0, 0.01, -0.05), OPEN),  # above it, down
        ((0.0, 0.0, -0.01), 0.0, 0.0, (0.0, 0.0, 0.0), CLOSE),  # around it, waits for the fingers
        ((0.0, 0.0, -0.01), 0.4, 1.0, (0.0, 0.0, 0.0), CLOSE),  # they move
        ((0.0, 0.0, -0.02), 0.4, 0.0, (0.0, 0.0, 0.1), CLOSE),  # they hold it, up
        ((0.0, 0.0, -0.05), 0.4, 0.0, (0.0, 0.0, -0.05), OPEN),  # it was lost
    ],
)
def test_the_expert_goes_by_the_state_alone(
    away: tuple[float, ...], angle: float, speed: float, motion: tuple[float, ...], gripper: float
) -> None:
    chosen, command = pick_cube(np.array(away), angle, speed)
    np.testing.assert_allclose(chosen, motion, atol=1e-9)
    assert command == gripper
