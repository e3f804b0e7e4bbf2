"""Recovery of a rollout: only env and rollout workers that died are restarted, and the rollout is repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from recipes.embodied.config import EmbodiedConfig, resets_each_pass
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.intervention_types import ENVIRONMENT, NONE
from recipes.embodied.loop.env_errors import SuspectedEpisodes
from recipes.embodied.loop.protocols import EmbodiedEnv, EmbodiedRollout, Layout
from rlinf_core import Relaunching, WorkerDiedError, WorkerGroup, WorkerGroupError, WorkerGroupHandle
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import Dead
from rlinf_core.worker.handle import wait_together

T = TypeVar("T")


class RolloutRecovery(Relaunching):
    """The recovery of rollouts and evaluations of a synchronous run.

    A rollout is a function of weights, step and the running episodes. The episodes are saved after each rollout, and
    loaded before a repetition.

    Args:
        config: the configuration of the job.
        actor, rollout, env: the workers.
        record: the record of the run.
        forget: forgets an attempt in the loop; called with whether the rollout workers need weights again.
        syncing: whether weights are being sent.

    Attributes:
        starts: the layout of the job and the spec of its environments, with which workers are prepared.
        episodes: the running episodes after the last rollout, see `EnvWorker.save_state`.
        suspects: the episodes in which simulator processes died.
    """

    def __init__(
        self,
        config: EmbodiedConfig,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[EmbodiedRollout],
        env: WorkerGroup[EmbodiedEnv],
        record: RunRecord,
        forget: Callable[[bool], None],
        syncing: Callable[[], bool],
    ) -> None:
        super().__init__({"rollout": rollout, "env": env}, record)
        self._synchronous = not config.runner.staleness
        # Robots and people cannot return to an earlier state: with them, the whole run restarts instead.
        sections = (config.env.train, config.env.eval)
        self._simulates = config.env.train.intervention.source == NONE and all(
            section.judge.source == ENVIRONMENT and not is_robot(section.env_type) for section in sections
        )
        self._resets = resets_each_pass(config)
        self._actor, self._rollout, self._env = actor, rollout, env
        self._forget, self._syncing = forget, syncing
        self.starts: tuple[Layout, Any] | None = None
        self._calls: list[WorkerGroupHandle[Any]] = []
        self._what, self._trains = "", False
        self._attempt = 0
        self.episodes: Sequence[bytes | None] = [b""]
        self.suspects = SuspectedEpisodes(record)

    @property
    def attempt(self) -> tuple[int, ...]:
        """The argument that distinguishes the calls of an attempt from earlier ones; the first attempt has none."""
        return (self._attempt,) if self._attempt else ()

    def rollouts(self, step: int, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which sends weights and runs a step's rollout; repeat it after deaths."""
        self._what, self._trains = f"the rollout of step {step}", True
        return self.repeat(attempt)

    def evaluation(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which sends weights and runs an evaluation; repeat it after deaths."""
        self._what, self._trains = "the evaluation", False
        return self.repeat(attempt)

    def watched(self, *calls: WorkerGroupHandle[Any]) -> tuple[WorkerGroupHandle[Any], ...]:
        """Return calls of an attempt, to be abandoned if it fails."""
        self._calls = [call for call in self._calls if not call.done()] + list(calls)
        return calls

    def saving(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Return the calls that save the running episodes after a rollout; none if each rollout resets."""
        return (self._env.save_state(),) if self._synchronous and not self._resets else ()

    # Recovery

    def relaunch(self, error: WorkerGroupError | WorkerDiedError) -> bool:
        """See `Relaunching`; the episode is recorded even if all workers restart instead."""
        self.suspects.died(error, self._record.step + 1 if self._trains else 0)
        return super().relaunch(error)

    def may_relaunch(self, dead: Dead) -> bool:
        return (
            self._synchronous
            and self.starts is not None
            and (self._simulates or "env" not in dead)
            # Sending gathers shards, so that an actor may still wait for one whose peer died.
            and not (self._syncing() and self._actor.world_size > 1)
        )

    def prepare(self, dead: Dead) -> str:
        if self.starts is None:
            raise RuntimeError("called before the workers were prepared")
        calls, self._calls = self._calls, []
        for call in calls:
            call.abandon()
        layout, spec = self.starts = self.suspects.known_in(self.starts[0]), self.starts[1]
        environments, acting = dead.get("env", ()), dead.get("rollout", ())
        made: list[WorkerGroupHandle[Any]] = []
        if environments:
            made.append(self._env.execute_on(*environments).init_worker(layout))
        if acting:
            made.append(self._rollout.execute_on(*acting).init_worker(layout, spec))
        wait_together(*made)
        self._rollout.drop_messages(self._env)
        self._rollout.drop_messages(self._actor)
        lost = self._load(environments)
        self._forget(bool(acting))
        self._attempt += 1
        return f"{self._what}; {lost}" if lost else self._what

    def _load(self, environments: Sequence[int]) -> str:
        """Restore the episodes after the last rollout; return which of them are lost, in words."""
        if self._resets:
            return ""
        packs = self.episodes
        whole = [pack for pack in packs if pack is not None]
        again = range(self._env.world_size) if self._trains else environments
        if len(whole) < len(packs):
            return f"unfinished episodes of {len(environments)} env workers are left out" if environments else ""
        if not again:
            return ""
        reasons = {reason for reason in self._env.execute_on(*again).load_state(whole).wait() if reason}
        return f"episodes start over: {'; '.join(sorted(reasons))}" if reasons else ""
