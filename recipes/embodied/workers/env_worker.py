"""The workers that step environments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipes.demonstrations.first_comparison import StartFacts, Thumbnails, thumbnails
from recipes.embodied.config import EmbodiedConfig, PolicyJob, group_size, resets_each_pass
from recipes.embodied.config.algorithm_config import is_off_policy
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.config.intervention_types import ENVIRONMENT, NONE
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvError, EnvSettings, EnvSpec, Observation, StepResult
from recipes.embodied.envs.env_state import State, pack, unpack
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, camera_of
from recipes.embodied.envs.registry import make_env
from recipes.embodied.envs.simulators.packages import compare_starts
from recipes.embodied.interventions.registry import open_judge, open_source
from recipes.embodied.loop.protocols import (
    CHUNKS,
    EXECUTED,
    FAILED,
    INTERVENTIONS,
    OUTCOME,
    EpisodeSums,
    EpisodeTotals,
    Layout,
    sliced,
    stacked,
)
from recipes.embodied.loop.routing import Routes, make_routes
from recipes.embodied.loop.videos import EPISODES, EpisodeFrames, FrameRecorder
from recipes.embodied.models.folder_facts import observed_steps
from recipes.training.arrays import NonFiniteError
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.host_memory import keep_freed_memory
from rlinf_core import ConfigError, Worker

# Environments of a batch whose first images are compared with demonstrations.
_ENVIRONMENTS_SHOWN = 32
# The settings that a saved state belongs to: another value of any of them changes episodes.
_SETUP = ("env_type", "task", "options", "total_num_envs", "max_episode_steps", "ignore_terminations", "seed")


class StagedEnvironments:
    """The environments of one worker, a batch for each pipeline stage, and the routes of their observations.

    Args:
        config: the configuration of the job.
        environments: `env.train` or `env.eval`.
        worker: the worker that owns them.
        layout: the layout of the job.
        training: whether the environments are those of `env.train`.

    Attributes:
        resets: whether every rollout segment begins new episodes instead of continuing those of the previous one.

    Raises:
        ConfigError: the environments cannot be made, or segments reset and are shorter than an episode.
    """

    def __init__(
        self, config: PolicyJob, environments: EnvironmentConfig, worker: Worker, layout: Layout, *, training: bool
    ) -> None:
        info = worker.worker_info
        learns = config if training and isinstance(config, EmbodiedConfig) else None
        self.routes: Routes = make_routes(layout, config, training=training)
        self.passes = environments.rollout_epoch
        self.resets = learns is None or resets_each_pass(learns)
        # Values are needed where episodes are truncated.
        self._values = learns is not None and (
            learns.actor.model.add_value_head or is_off_policy(learns.algorithm.loss_type)
        )
        self._environments = environments
        self.shares = [self.routes.of_env(info.rank, stage) for stage in range(self.routes.stages)]
        self.batches: list[VectorEnv] = [
            make_env(
                environments.env_type,
                EnvSettings.of(
                    environments,
                    num_envs=self.routes.batch,
                    first_env=self.routes.first_env(info.rank, stage),
                    group_size=group_size(config, environments),
                    hardware=info.hardware,
                    resumable=not self.resets,
                    on_nonfinite=config.runner.on_nonfinite,
                    owner=str(info.address),
                    suspects=layout.suspects,
                    set_aside=layout.set_aside,
                    observed_steps=observed_steps(config.actor.model),
                ),
            )
            for stage in range(self.routes.stages)
        ]
        if training and config.env.train.intervention.source != NONE:
            for batch in self.batches:
                intervention = config.env.train.intervention
                batch.intervention = open_source(intervention.source, batch, intervention.options)
        if environments.judge.source != ENVIRONMENT:
            for batch in self.batches:
                batch.judge = open_judge(environments.judge.source, batch, environments.judge.options)
        # First observations of segments whose environments are already reset, by the number of the reset.
        self._begun: dict[int, list[Observation]] = {}
        # Whether the next segment continues the running episodes.
        self._continues = False
        steps = self._pass_steps(learns)
        self.chunks = -(-steps // config.actor.model.num_action_chunks)

    def _pass_steps(self, learns: EmbodiedConfig | None) -> int:
        """Return the steps of one rollout segment; an evaluation runs whole episodes, and is as long as the longest."""
        limit = self.batches[0].max_episode_steps
        steps = limit if learns is None else learns.env.train.max_steps_per_rollout_epoch
        if steps is not None and (not self.resets or (limit is not None and limit <= steps)):
            return steps
        kind = self._environments.task or self._environments.env_type
        long = "have no limit" if limit is None else f"last up to {limit} steps, and a pass {steps}"
        raise ConfigError(
            f"episodes of `{kind}` {long}: no {'evaluation' if learns is None else 'pass'} could end them",
            where="env.eval" if learns is None else "env.train",
            help="give `max_episode_steps` a value"
            + ("" if learns is None else f" of at most {steps}, or raise `max_steps_per_rollout_epoch`"),
        )

    def begin(self, reset: int) -> list[Observation]:
        """Return the first observations of a segment, by stage; `reset` is the number of the reset, if any."""
        if self._continues:
            return [batch.observe() for batch in self.batches]
        self._continues = not self.resets
        begun, self._begun = self._begun, {}
        return begun.get(reset) or [batch.reset(reset) for batch in self.batches]

    def first_pictures(self, reset: int) -> dict[str, Thumbnails]:
        """Return the camera images after a reset, by camera; the segment with this reset begins from it.

        Real robots are not moved for this, and return none.
        """
        begun = self._begins(reset)
        if not begun:
            return {}
        named = [(name, camera) for name in begun[0] if (camera := camera_of(name)) is not None]
        return {
            camera: np.concatenate([thumbnails(seen[name][:_ENVIRONMENTS_SHOWN]) for seen in begun])
            for name, camera in named
        }

    def facts(self, reset: int) -> StartFacts:
        """Return the facts for comparison with demonstrations; the segment with this reset begins from it."""
        rate = self.batches[0].control_hz
        if not self.batches[0].spec.has_instructions:
            return StartFacts(rate, None)
        begun = self._begins(reset)
        texts = tuple(dict.fromkeys(str(text) for seen in begun for text in seen[INSTRUCTIONS]))
        return StartFacts(rate, texts or None)

    def _begins(self, reset: int) -> list[Observation]:
        """Return the first observations after a reset, by stage; empty for real robots, which are not moved."""
        if any(batch.paces_itself for batch in self.batches):
            return []
        if reset not in self._begun:
            self._begun = {reset: [batch.reset(reset) for batch in self.batches]}
        return self._begun[reset]

    def first_message(self, observations: Observation) -> dict[str, Any]:
        """Return the message to rollout workers at the start of a segment."""
        return {"observations": observations, CHUNKS: np.full(self.routes.batch, self.chunks)}

    def message(self, result: StepResult) -> dict[str, Any]:
        """Return the message to rollout workers after a step; final observations only where their value is needed."""
        message: dict[str, Any] = {name: getattr(result, name) for name in OUTCOME}
        message["observations"] = result.observations
        if result.executed is not None and result.interventions is not None:
            message[EXECUTED], message[INTERVENTIONS] = result.executed, result.interventions
        if result.failed is not None:
            message[FAILED] = result.failed
        if result.final_observations is not None and self._values and result.truncations.any():
            message["final_observations"] = result.final_observations
        return message

    def save(self) -> bytes | None:
        """Return the state of all episodes; empty if none is continued, None if the environment cannot save it."""
        if not self._continues:
            return b""
        states = [state for batch in self.batches if (state := batch.save()) is not None]
        return pack(states, self._setup) if len(states) == len(self.batches) else None

    def load(self, packs: Sequence[bytes]) -> str | None:
        """Continue the episodes that env workers saved as `packs`.

        Returns:
            Why that is impossible; then the next segment begins new episodes. None if it worked.
        """
        if self.resets:
            return None
        if packs and not any(packs):
            # No episode was running when they were saved.
            self._continues, self._begun = False, {}
            return None
        if not packs:
            return "the checkpoint holds no environment state"
        states: list[State] = []
        try:
            for batch in self.batches:
                restored = unpack(packs, self._setup, batch.numbers)
                if restored is None:
                    return "the checkpoint's state is of other environments (`env.train` was changed)"
                states.append(restored)
            loaded = all(batch.load(state) for batch, state in zip(self.batches, states, strict=True))
        except Exception as error:  # noqa: BLE001 - whatever an environment or damaged bytes raise, the run can go on
            return f"their state cannot be loaded: {type(error).__name__}: {error}"
        if not loaded:
            return "the observations differ from those when the state was saved"
        self._continues, self._begun = True, {}
        return None

    @property
    def _setup(self) -> str:
        values = {name: getattr(self._environments, name) for name in _SETUP}
        return json.dumps({**values, "group_size": self.batches[0].settings.group_size}, sort_keys=True, default=str)

    def close(self) -> None:
        """Release the resources of the environments."""
        for batch in self.batches:
            for source in (batch.intervention, batch.judge):
                if source is not None:
                    source.close()
            batch.close()


class EnvWorker(ComparingWorker):
    """Steps batches of environments with the actions that rollout workers send.

    For every stage and chunk it exchanges one message with each rollout worker that acts for some of the stage's
    environments. With two stages, one steps while the other waits for its actions.
    """

    config_section = "env"

    def __init__(self, config: PolicyJob) -> None:
        super().__init__()
        self._config = config
        self._train: StagedEnvironments | None = None
        self._eval: StagedEnvironments | None = None
        self._films: list[FrameRecorder] = []
        # Errors of the environments' own code that have not been taken yet.
        self._errors: list[EnvError] = []

    def init_worker(self, layout: Layout) -> EnvSpec:
        """Make the environments.

        Returns:
            The spec of the environments.
        """
        self._layout = layout
        self._step = layout.step
        self._rollout = self._config.rollout.group_name
        self._train = self._made(self._config.env.train, layout, training=True)
        spec = self._train.batches[0].spec
        if spec.cameras:
            keep_freed_memory()
        return spec

    def _made(self, environments: EnvironmentConfig, layout: Layout, *, training: bool) -> StagedEnvironments:
        """Return the environments of a section, after a comparison of their stored starts."""
        staged = StagedEnvironments(self._config, environments, self, layout, training=training)
        section = "env.train" if training else "env.eval"
        first = staged.batches[0]
        if self._train is not None:
            _check_alike(first.spec, self._train.batches[0].spec)
        compare_starts(self._contact, section, environments.env_type, first.start_faults)
        if training and first.mapping is not None:
            self.log_on_first_rank("spaces of `%s`: %s", environments.task or environments.env_type, first.mapping)
        return staged

    def first_pictures(self) -> dict[str, Thumbnails]:
        """Return the camera images of the first starts, by camera; empty for real robots, which are not moved."""
        staged, reset = self._first
        return {} if staged is None else staged.first_pictures(reset)

    def env_facts(self) -> StartFacts | None:
        """Return the facts for comparison with demonstrations before the first episode."""
        staged, reset = self._first
        return None if staged is None else staged.facts(reset)

    @property
    def _first(self) -> tuple[StagedEnvironments | None, int]:
        """The environments that step first, and the number of their first reset."""
        if self._train is not None:
            return self._train, (self._step + 1) * self._train.passes
        return self._eval, 0

    def interact(self, step: int | None = None) -> EpisodeSums:
        """Step all environments for one rollout of `rollout_epoch` segments.

        Args:
            step: the training step, on which the starts depend; by default the one after the last.

        Returns:
            Sums over the episodes that ended.

        Raises:
            NonFiniteError: a reward, an observation or an action holds a NaN or an infinity.
        """
        stages = self._training
        self._step = step = self._step + 1 if step is None else step
        try:
            with self.worker_timer("env/rollout"):
                return self._passes(stages, step * stages.passes)
        except NonFiniteError as error:
            error.where = f"step {step}, {error.where}"
            raise

    def evaluate(self) -> EpisodeSums:
        """Act like `interact` in the environments of `env.eval`, from the same starts every time."""
        if self._eval is None:
            self._eval = self._made(self._config.env.eval, self._layout, training=False)
        return self._passes(self._eval, 0, films=self._config.env.eval.video_cfg.save_video)

    def take_errors(self) -> list[EnvError]:
        """Return the errors of the environments' own code since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def recorded_episodes(self, most: int = EPISODES) -> list[EpisodeFrames] | None:
        """Return the frames of the last evaluation's episodes, at most `most` of each outcome.

        Returns:
            None if the environments have no images.
        """
        films, self._films = self._films, []
        frames = [frame for film in films for frame in film.finish(most)]
        return frames if any(film.sees for film in films) else None

    def save_state(self) -> bytes | None:
        """Return the state of training's running episodes.

        Returns:
            Bytes for `load_state`, empty if every segment begins new episodes; None if the environment cannot save its
            state.
        """
        return self._training.save()

    def load_state(self, packs: Sequence[bytes]) -> str | None:
        """Continue the episodes of a checkpoint.

        Args:
            packs: the result of `save_state` of every env worker, whose number may have been different.

        Returns:
            Why that is impossible; then the next segment begins new episodes. None if it worked.
        """
        return self._training.load(packs)

    @property
    def _training(self) -> StagedEnvironments:
        if self._train is None:
            raise RuntimeError("called before init_worker()")
        return self._train

    def _passes(self, stages: StagedEnvironments, first_reset: int, *, films: bool = False) -> EpisodeSums:
        sums = EpisodeTotals(first_only=stages.resets)
        for number in range(stages.passes):
            begun = stages.begin(first_reset + number)
            if films and number == 0:
                self._films = [FrameRecorder(batch, first_reset) for batch in stages.batches]
            for stage, observations in enumerate(begun):
                self._send(stages, stage, stages.first_message(observations))
            for _ in range(stages.chunks):
                for stage, batch in enumerate(stages.batches):
                    with self.worker_timer("env/wait"):
                        actions = self._recv_actions(stages, stage)
                    with self.worker_timer("env/step", stages.routes.batch):
                        result = batch.step(actions)
                    self._send(stages, stage, stages.message(result))
                    if result.episodes is not None:
                        sums.add(result.episodes)
                    if result.failed is not None:
                        # If new episodes have begun, the failed ones are the previous ones.
                        begun = int(batch.settings.auto_reset)
                        sums.add_failed(batch.progress.episode[result.failed] - begun)
                    if result.errors:
                        self._errors += result.errors
                        sums.add_errors(len(result.errors))
        for batch in stages.batches:
            sums.add_figures(batch.take_figures())
        return sums.sums

    def _send(self, stages: StagedEnvironments, stage: int, message: dict[str, Any]) -> None:
        shares = stages.shares[stage]
        parts = {share.peer: sliced(message, share.start, share.stop, stages.routes.batch) for share in shares}
        self.send_to(parts, self._rollout)

    def _recv_actions(self, stages: StagedEnvironments, stage: int) -> Any:
        parts = self.recv_from(self._rollout, (share.peer for share in stages.shares[stage]))
        return stacked([{"actions": part} for part in parts.values()])["actions"]

    def _close(self) -> None:
        """Release the resources of the environments: a moving robot must not be left without its driver."""
        for stages in (self._train, self._eval):
            if stages is not None:
                stages.close()
        super()._close()


def _check_alike(spec: EnvSpec, trained: EnvSpec) -> None:
    """Refuse environments of evaluation without the observations or with other actions than those of training.

    They may observe more, such as a camera for videos.

    Raises:
        ConfigError: they differ.
    """
    for name in ("observations", "action_size", "num_choices"):
        mine, theirs = getattr(spec, name), getattr(trained, name)
        if mine != theirs and not (name == "observations" and mine.items() >= theirs.items()):
            raise ConfigError(
                f"the `{name}` of `env.eval` are not those of `env.train`, for which the policy is made",
                where="env.eval",
                why=f"they are {mine}, and those of training {theirs}",
                help="evaluate a task of the same kind, or by a file of its own: `rlinf eval FILE`",
            )
