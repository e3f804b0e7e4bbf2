"""Batches of environments that raise are made again, and repeat their episodes; what cannot be repeated is left out."""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.batched_env import BatchedEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation, StepResult, Transition
from recipes.embodied.envs.repeating import SimulatorError
from recipes.embodied.loop.protocols import FAILED_EPISODES, Layout
from recipes.embodied.workers.env_worker import EnvWorker
from rlinf_core import ConfigError
from rlinf_core.job.load import load_job
from tests.known import known
from tests.unit.recipes.embodied.conftest import CountingEnv
from tests.unit.recipes.embodied.loop.test_faults import Local

# Rows end after 3, 5, 7 actions, and by time after 12.
ENDS = {"end": [3, 5, 7, 0], "solved": 3}


class Fragile(CountingEnv):
    """A `CountingEnv` whose `operation` number `at` of all raises, or all from then on (`always`)."""

    operation: ClassVar[str] = "_advance"
    at: ClassVar[int] = -1
    always: ClassVar[bool] = False
    # Batches after the first one begin otherwise in this row.
    drifting: ClassVar[int | None] = None
    calls: ClassVar[int] = 0
    made: ClassVar[int] = 0

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.number, Fragile.made = Fragile.made, Fragile.made + 1

    def _call(self, operation: str) -> None:
        if operation != self.operation:
            return
        Fragile.calls += 1
        if Fragile.calls - 1 == self.at or (self.always and Fragile.calls > self.at):
            raise ValueError("the mesh has 0 faces")

    def _start(self, *how: Any) -> None:
        self._call("_start")
        super()._start(*how)
        if self.drifting is not None and self.number:
            self.draw[self.drifting] += 1

    def _advance(self, *how: Any) -> Transition:
        # What raises has moved some environments already.
        moved = super()._advance(*how)
        self._call("_advance")
        return moved

    def _observe(self) -> Observation:
        self._call("_observe")
        return super()._observe()


class FragileBatch(BatchedEnv):
    """A walk whose simulator steps all environments at once, also those that rest; see `Fragile`."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.place = np.zeros((self.num_envs, 2), np.float32)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=2, action_size=1)

    def _begin_rows(self, mask: Any, seeds: Any) -> Observation:
        Fragile._call(cast("Any", self), "_start")
        self.place[mask, 0] = 0
        self.place[mask, 1] = (seeds % 1000)[mask]
        return {"states": self.place.copy()}

    def _step_all(self, actions: Any) -> tuple[Observation, Transition]:
        self.place[:, 0] += 1
        self.place[:, 1] += actions[:, 0]
        Fragile._call(cast("Any", self), "_advance")
        ends = np.array(ENDS["end"])
        ended = self.place[:, 0] == ends
        return {"states": self.place.copy()}, Transition(self.place[:, 1].copy(), ended, ended & False, ended)

    operation, at, always = "", -1, False

    def __getattribute__(self, name: str) -> Any:
        return getattr(Fragile, name) if name in ("operation", "at", "always") else super().__getattribute__(name)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_up(**attributes: Any) -> None:
        for name, value in {"calls": 0, "made": 0, **attributes}.items():
            monkeypatch.setattr(Fragile, name, value)

    set_up()
    return set_up


def made(kind: type[VectorEnv] = Fragile, **settings: Any) -> VectorEnv:
    own = {"options": ENDS} if kind is Fragile else {}
    return kind(EnvSettings(num_envs=4, repeats=True, max_episode_steps=12, seed=3, **own, **settings))


def played(env: VectorEnv, chunks: int = 8, size: int = 2) -> list[StepResult]:
    actions = np.random.default_rng(0).uniform(-1, 1, (chunks, 4, size, 1)).astype(np.float32)
    env.reset()
    return [env.step(chunk) for chunk in actions]


def check_equal(one: list[StepResult], other: list[StepResult]) -> None:
    for before, after in zip(one, other, strict=True):
        for name in ("rewards", "terminations", "truncations", "valid"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name), name)
        np.testing.assert_array_equal(after.observations["states"], before.observations["states"])
        assert (after.final_observations is None) == (before.final_observations is None)
        if before.final_observations is not None and after.final_observations is not None:
            np.testing.assert_array_equal(after.final_observations["states"], before.final_observations["states"])
            np.testing.assert_array_equal(known(after.episodes).returns, known(before.episodes).returns)


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("kind", [Fragile, FragileBatch])
@pytest.mark.parametrize(
    ("operation", "at"),
    [*(("_advance", at) for at in range(12)), *(("_start", at) for at in range(4)), ("_observe", 5)],
)
def test_new_batch_repeats_running_episodes(
    kind: type[VectorEnv], operation: str, at: int, auto_reset: bool, fragile: Callable[..., None]
) -> None:
    quiet = played(made(kind, auto_reset=auto_reset))
    fragile(operation=operation, at=at)
    raising = played(made(kind, auto_reset=auto_reset))
    if operation == "_advance":
        assert Fragile.calls > at
    assert all(result.failed is None for result in raising)
    check_equal(quiet, raising)


@pytest.mark.parametrize("seed", range(40))
def test_faults_at_random_change_nothing(seed: int, fragile: Callable[..., None]) -> None:
    random = np.random.default_rng(seed)
    size, auto_reset = int(random.integers(1, 6)), bool(random.integers(2))
    quiet = played(made(auto_reset=auto_reset), 6, size)
    fragile(operation=str(random.choice(["_advance", "_start", "_observe"])), at=int(random.integers(14)))
    raising = played(made(auto_reset=auto_reset), 6, size)
    assert all(result.failed is None for result in raising)
    check_equal(quiet, raising)


def test_all_of_a_batch_that_raises_twice_are_left_out(fragile: Callable[..., None]) -> None:
    fragile(at=4)
    env = made()
    env._simulator._replay = lambda: (_ for _ in ()).throw(ValueError("the mesh has 0 faces"))
    results = played(env, 4)
    assert [result.failed is None for result in results] == [True, True, False, True]
    failed = results[2]
    assert known(failed.failed).all()
    assert not failed.valid.any()
    assert failed.truncations[:, 0].all()
    assert len(known(failed.episodes).env) == 0
    # The next episodes are whole.
    assert results[3].valid.all()
    assert (results[3].observations["states"][:, 0] == 2).all()


def test_what_comes_out_otherwise_is_left_out(fragile: Callable[..., None]) -> None:
    fragile(at=3, drifting=1)
    results = played(made(), 2)
    assert results[0].failed is None
    assert known(results[1].failed).tolist() == [False, True, False, False]
    assert not results[1].valid[1].any()
    assert results[1].valid[2].all()


class Buggy(CountingEnv):
    """Raises where the number of a start is large: at the third action, or at the start."""

    operation: ClassVar[str] = "_advance"

    def _start(self, rows: Any, starts: Any) -> None:
        super()._start(rows, starts)
        if self.operation == "_start" and (self.draw[rows] > LARGE).any():
            raise ValueError("the mesh has 0 faces")

    def _advance(self, actions: Any, rows: Any) -> Transition:
        moved = super()._advance(actions, rows)
        moving = np.isin(np.arange(self.num_envs), np.arange(self.num_envs) if rows is None else rows)
        if self.operation == "_advance" and ((self.draw > LARGE) & (self.count == 3) & moving).any():
            raise ValueError("the mesh has 0 faces")
        return moved


LARGE = 0.7


@pytest.mark.parametrize("operation", ["_advance", "_start"])
@pytest.mark.parametrize("auto_reset", [True, False])
def test_environments_of_a_batch_that_have_the_error_are_found(
    operation: str, auto_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Buggy, "operation", operation)
    settings = EnvSettings(num_envs=6, repeats=True, max_episode_steps=8, seed=2, auto_reset=auto_reset)
    large = CountingEnv(settings).reset(0)["states"][:, 1] > LARGE
    assert 0 < large.sum() < 6
    env = Buggy(settings)
    env.reset(0)
    actions = np.zeros((6, 3 if operation == "_advance" else 1, 1), np.float32)
    result = env.step(actions)
    assert result.failed is None
    assert result.terminations.any(axis=1).tolist() == large.tolist()
    assert result.valid.all(axis=1).tolist() == [operation == "_advance" or not row for row in large]
    assert result.episodes is not None
    assert result.episodes.env.tolist() == np.flatnonzero(large).tolist()
    assert result.episodes.erred.all()
    assert result.episodes.lengths.tolist() == [actions.shape[1] if operation == "_advance" else 1] * int(large.sum())
    assert len({error.episode for error in result.errors}) == large.sum()
    # The others are in the third state, or the first.
    assert (env.observe()["states"][~large, 0] == actions.shape[1]).all()


def test_error_that_never_goes_away_ends_the_run(fragile: Callable[..., None]) -> None:
    fragile(at=0, always=True)
    words = r"raised ValueError: the mesh has 0 faces at \S+/test_repeating_batch.py:\d+ in _call \(environments 0 to"
    with pytest.raises(SimulatorError, match=words):
        played(made())
    # Three actions, each tried twice by all and once by each of four.
    assert Fragile.calls == 18


def test_batch_that_cannot_begin_again_ends_the_run(fragile: Callable[..., None]) -> None:
    fragile(operation="_start", at=1, always=True)
    with pytest.raises(SimulatorError, match="raised ValueError") as caught:
        played(made())
    assert "a new simulator that began the episode again raised as well" in str(caught.value)


def test_real_arms_and_own_errors_are_not_repeated(
    fragile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise ConfigError("there is no such mesh")

    fragile(at=1)
    with monkeypatch.context() as patch:
        patch.setattr(Fragile, "paces_itself", True)
        with pytest.raises(ValueError, match="0 faces"):
            played(made())
    monkeypatch.setattr(Fragile, "_advance", wrong)
    with pytest.raises(ConfigError, match="no such mesh"):
        played(made())
    assert Fragile.made == 2


def test_watcher_and_judge_stay_with_the_batch(fragile: Callable[..., None]) -> None:
    fragile(at=1)
    env = made()
    seen: list[int] = []
    env.watcher = lambda stepped, *_: seen.append(int(stepped.sum()))
    judge: Any = SimpleNamespace(judge=lambda observations: {}, close=lambda: None)
    env.judge = judge
    played(env, 1)
    assert Fragile.made == 2
    assert len(seen) == 2
    assert env.judge is judge


def test_failed_episodes_of_a_batch_are_counted(fragile: Callable[..., None]) -> None:
    sizes = "total_num_envs: 2, max_episode_steps: 5, max_steps_per_rollout_epoch: 4"
    train = f"env.train={{env_type: '{__name__}:Fragile', task: one, {sizes}}}"
    job = load_job("embodied/pick-laptop", (train, "actor.global_batch_size=8"), environ={})
    fragile(at=2, drifting=1)
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    try:
        sums = EnvWorker.interact(worker, 1)
    finally:
        worker._close()
    assert [message.get("failed") is not None for message in worker.sent] == [False, False, False, True, False]
    assert sums[FAILED_EPISODES] == (1.0, 0)
