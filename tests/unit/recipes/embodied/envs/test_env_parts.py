"""Parts of environments: their names, states as bytes, starts, and observations in a row."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.config.camera_config import CAMERA_SOURCES
from recipes.embodied.config.env_types import ENV_TYPES, how_to_install
from recipes.embodied.config.intervention_types import JUDGES, SOURCES
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Transition
from recipes.embodied.envs.env_state import Starts, observation_digest, pack, unpack
from recipes.embodied.envs.franka.franka_kin import FrankaKinEnv
from recipes.embodied.envs.real.franka_robot import SPEC
from recipes.embodied.envs.registry import MissingPackageError, make_env
from recipes.embodied.using.collector import EpisodeCollector
from recipes.sections.imports import missing_module, missing_name
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.errors import ConfigError
from rlinf_core.process.requirements import install_command
from tests.known import known
from tests.unit.recipes.embodied.conftest import CountingEnv

SETTINGS = EnvSettings(num_envs=2)


def test_ours_and_a_users_own() -> None:
    for name in ("franka_kin", "recipes.embodied.envs.franka.franka_kin:FrankaKinEnv"):
        assert isinstance(make_env(name, SETTINGS), FrankaKinEnv)


@pytest.mark.parametrize("name", sorted(name for name, known in ENV_TYPES.items() if known.module))
def test_a_missing_package_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ENV_TYPES[name].module
    assert package is not None
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=package) as caught:
        make_env(name, SETTINGS)
    assert caught.value.package == package
    assert sys.executable in caught.value.message
    assert caught.value.help == (how_to_install(name) or f"run `{install_command(package)}`")


def test_a_simulator_has_an_interpreter_of_its_own() -> None:
    assert "`rlinf venv setup libero`" in (how_to_install("libero") or "")
    assert "`pip install mani_skill torch`" in (how_to_install("maniskill") or "")
    assert how_to_install("gymnasium") is None


def test_every_class_that_a_table_names_is_there() -> None:
    """Their packages may be missing here, so that they cannot be imported."""
    tables: tuple[Mapping[str, Any], ...] = (ENV_TYPES, SOURCES, JUDGES, CAMERA_SOURCES)
    rows = [row for table in tables for row in table.values()]
    targets = {row.target for row in rows if row.target}
    assert {target: missing_module(target) or missing_name(target) for target in targets} == dict.fromkeys(targets)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean `franka_kin`"):
        make_env("franka-kin", SETTINGS)


def test_an_env_worker_needs_no_torch() -> None:
    """The interpreter of a simulator has none."""
    code = "import sys; sys.modules['torch'] = None; import recipes.embodied.workers.env_worker"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", ["franka_kin", "franka_mujoco", "franka_robot"])
def test_environments_need_neither_torch_nor_ray(kind: str) -> None:
    """An interpreter of env workers may have a simulator and no torch."""
    code = (
        "import sys; from recipes.embodied.envs.registry import _ENVS, check_package, make_env\n"
        "from recipes.embodied.envs.base import EnvSettings\n"
        f"kind = {kind!r}\n"
        "try: check_package(kind)\n"
        "except Exception: sys.exit(0)\n"
        "_ENVS.get(kind) if kind == 'franka_robot' else make_env(kind, EnvSettings(num_envs=2)).reset()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'gymnasium')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_says_how_large_the_actions_of_an_arm_are() -> None:
    assert ENV_TYPES["franka_robot"].action_size == SPEC.action_size


OWN = """
import functools
from json import loads
Env = 3
class Ship:
    def step(self): ...
def make(): ...
@functools.cache
def wrapped(): ...
if Env:
    def chosen(): ...
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Ship", None),
        ("wrapped", None),
        ("chosen", None),
        ("loads", None),
        ("make", "`own_kinds:make` is a function, not a class"),
        ("Env", "is a value"),
        ("step", "own_kinds.py defines no `step`"),
    ],
)
def test_the_kind_of_an_own_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str | None
) -> None:
    (tmp_path / "own_kinds.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = (f"env.train.env_type=own_kinds:{name}", "env.train.max_episode_steps=9")
    lines = [
        finding.message
        for finding in load_with_lint("embodied/gymnasium-ppo-laptop", overrides, environ={}).diagnostics
    ]
    messages = [line for line in lines if "own_kinds" in line]
    assert bool(messages) is (problem is not None), messages
    assert problem is None or all(problem in message for message in messages)


def test_rows_come_back_by_the_numbers_of_their_environments() -> None:
    one = {"number": np.array([0, 1]), "place": np.array([[1.0], [2.0]])}
    other = {"number": np.array([2, 3]), "place": np.array([[3.0], [4.0]])}
    packs = [pack([other], "setup"), pack([one], "setup")]
    unpacked = unpack(packs, "setup", np.array([3, 0]))
    assert known(unpacked)["place"].tolist() == [[4.0], [1.0]]
    both = unpack([pack([one, other], "setup")], "setup", np.array([1, 2]))
    assert known(both)["place"].tolist() == [[2.0], [3.0]]


def test_rows_of_other_lengths_are_filled_up() -> None:
    one = {"number": np.array([0]), "actions": np.ones((1, 2, 3), np.float32)}
    other = {"number": np.array([1]), "actions": np.ones((1, 4, 3), np.float32)}
    unpacked = unpack([pack([one], ""), pack([other], "")], "", np.array([0, 1]))
    assert unpacked is not None
    assert unpacked["actions"].shape == (2, 4, 3)
    assert unpacked["actions"].dtype == np.float32
    assert unpacked["actions"].sum(axis=(1, 2)).tolist() == [6, 12]


def test_another_setup_and_a_missing_environment_are_refused() -> None:
    packs = [pack([{"number": np.array([0])}], "task: pick")]
    assert unpack(packs, "task: reach", np.array([0])) is None
    assert unpack(packs, "task: pick", np.array([0, 1])) is None
    assert unpack([], "task: pick", np.array([0])) is None


def test_a_state_holds_no_python_objects() -> None:
    with pytest.raises(TypeError, match="`world` holds Python objects"):
        pack([{"number": np.array([0]), "world": np.array([object()])}], "")


def test_a_digest_tells_observations_apart() -> None:
    states = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.5]], np.float32)
    images = np.zeros((3, 2, 2, 3), np.uint8)
    digest = observation_digest({"states": states, "images": images, "instructions": np.array(["a", "b", "c"])})
    assert digest.shape == (3, 16)
    assert (digest[0] == digest[1]).all()
    assert (digest[0] != digest[2]).any()
    images[1, 0, 0, 0] = 1
    assert (observation_digest({"states": states, "images": images})[1] != digest[1]).any()


Make = Callable[..., VectorEnv]


def past(observations: Any) -> list[list[int]]:
    return observations["past.states"][..., 0].astype(int).tolist()


def actions(env: VectorEnv, chunk: int) -> Any:
    return np.ones((env.num_envs, chunk, 1), np.float32)


def test_steps_within_a_chunk_are_part_of_the_history(counting: Make) -> None:
    env = counting(2, observed_steps=3)
    first = env.reset()
    assert past(first) == [[0, 0]] * 2
    after = env.step(actions(env, 4)).observations
    assert after["states"][:, 0].tolist() == [4, 4]
    assert past(after) == [[2, 3]] * 2
    assert past(env.step(actions(env, 1)).observations) == [[3, 4]] * 2
    assert past(first) == [[0, 0]] * 2


def test_an_episode_begins_without_the_one_before(counting: Make) -> None:
    env = counting(2, observed_steps=3, options={"end": [2, 0]})
    env.reset()
    result = env.step(actions(env, 3))
    assert past(known(result.final_observations)) == [[0, 1], [1, 2]]
    assert past(result.observations) == [[0, 0], [1, 2]]
    starts = result.observations["past.states"][0, :, 1]
    assert (starts == result.observations["states"][0, 1]).all()


def test_a_resumed_run_has_the_same_history(counting: Make) -> None:
    env, again = (counting(2, observed_steps=4) for _ in range(2))
    env.reset()
    env.step(actions(env, 3))
    state = env.save()
    assert again.load(known(state))
    assert np.array_equal(again.observe()["past.states"], env.observe()["past.states"])
    one, other = (run.step(actions(run, 2)).observations for run in (env, again))
    assert np.array_equal(one["past.states"], other["past.states"])


def test_recordings_keep_each_observation_once(counting: Make) -> None:
    env = counting(1, observed_steps=2, max_episode_steps=3, auto_reset=False)
    collector = EpisodeCollector(env, 0, "count", "everything")
    assert past(collector.step(actions(env, 2))) == [[1]]
    collector.step(actions(env, 2))
    (episode,) = collector.episodes()
    assert "past.states" not in episode.columns
    assert episode.columns["states"][:, 0].tolist() == [0, 1, 2]


class Scaling(CountingEnv):
    """Takes numbers without bounds, and scales them in place."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=2, action_size=1, low=(None,), high=(None,))

    def _advance(self, actions: Any, rows: Any) -> Transition:
        actions *= 0.1
        return super()._advance(actions, rows)


def test_recorded_actions_are_those_that_were_asked_for() -> None:
    collector = EpisodeCollector(
        Scaling(EnvSettings(num_envs=1, max_episode_steps=2, auto_reset=False)), 0, "", "everything"
    )
    collector.step(np.full((1, 2, 1), 3.5, np.float32))
    (episode,) = collector.episodes()
    assert episode.columns["actions"].tolist() == [[3.5], [3.5]]
    assert episode.columns["rewards"].tolist() == pytest.approx([0.35, 0.35])


def test_numbers_of_a_spec_are_plain() -> None:
    """A checkpoint holds them as JSON."""
    spec = EnvSpec(
        np.int64(3), np.prod((2, 1)), cameras={"main": np.array([8, 8, 3])}, low=np.zeros(2, np.float32), high=[1, None]
    )  # type: ignore[arg-type]
    assert spec == EnvSpec(3, 2, cameras={"main": (8, 8, 3)}, low=(0, 0), high=(1, None))
    assert EnvSpec.of_plain(json.loads(json.dumps(asdict(spec)))) == spec
    with pytest.raises(TypeError):
        EnvSpec(3.0, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"state_size": -1}, "`state_size` of a spec is -1"),
        ({"action_size": 0}, "`action_size` of a spec is 0"),
        ({"num_choices": 0}, "`num_choices` of a spec is 0"),
        ({"low": (0, 0)}, r"are \(0.0, 0.0\) and None; both have 2"),
        ({"low": (0, 0, 0), "high": (1, 1, 1)}, "both have 2 entries"),
        ({"low": (0, 2), "high": (1, 1)}, "`low` of a spec has 2.0, above the 1.0 of `high`"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EnvSpec(**{"state_size": 3, "action_size": 2, **keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"num_envs": 0},
        {"num_envs": "2"},
        {"num_envs": 2, "seed": -1},
        {"num_envs": 2, "max_episode_steps": 0},
        {"num_envs": 3, "group_size": 2},
    ],
)
def test_numbers_of_settings_are_checked(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected an integer >=|no whole groups of 2"):
        EnvSettings(**keys)


def test_actions_are_an_array() -> None:
    env = CountingEnv(SETTINGS)
    env.reset()
    with pytest.raises(ConfigError, match=r"the actions are a `Tensor`; the environments take an array"):
        env.step(torch.zeros(2, 1, 1))  # type: ignore[arg-type]


def test_an_id_of_gymnasium_is_a_type_by_itself() -> None:
    pytest.importorskip("gymnasium")
    assert make_env("CartPole-v1", SETTINGS).reset().keys() == {"states"}
    with pytest.raises(ConfigError, match="expected text"):
        make_env(CountingEnv, SETTINGS)  # type: ignore[arg-type]


seeds = st.integers(0, 2**32 - 1)


def draws(seed: int, groups: list[int], reset: int = 0, episode: int = 0) -> np.ndarray:
    starts = Starts(seed, np.array(groups))
    starts.begin(reset)
    return starts.of(np.arange(len(groups)), np.full(len(groups), episode)).uniform(5)


@given(seeds, st.integers(0, 1000), st.integers(0, 1000))
def test_the_same_place_has_the_same_numbers(seed: int, reset: int, episode: int) -> None:
    whole = draws(seed, [0, 1, 2, 3], reset, episode)
    part = draws(seed, [2, 3], reset, episode)
    assert np.array_equal(whole[2:], part)
    assert ((whole >= 0) & (whole < 1)).all()


@given(seeds)
def test_other_places_have_others(seed: int) -> None:
    first = draws(seed, [0])
    for other in (draws(seed + 1, [0]), draws(seed, [1]), draws(seed, [0], 1), draws(seed, [0], 0, 1)):
        assert not np.isin(first, other).any()


def test_members_of_a_group_share() -> None:
    drawn = draws(7, [0, 0, 1])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_numbers_are_spread_evenly() -> None:
    """Means, spreads and correlations of 200,000 draws are those of independent uniform numbers, within 5 sigma."""
    drawn = draws(0, list(range(40_000)))
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 5 * (1 / 12 / 40_000) ** 0.5
    assert np.abs(drawn.var(axis=0) - 1 / 12).max() < 5 * (1 / 180 / 40_000) ** 0.5
    correlations = np.corrcoef(drawn.T)
    assert np.abs(correlations - np.eye(5)).max() < 5 / 200
    following = np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]
    assert abs(following) < 5 / 200


def test_seeds_are_what_other_libraries_take() -> None:
    starts = Starts(3, np.arange(1000))
    starts.begin(0)
    result = starts.seeds()
    assert all(0 <= seed < 2**31 for seed in result)
    assert len(set(result)) > 990
