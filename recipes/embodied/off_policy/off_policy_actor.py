"""The actor of off-policy learning: it keeps the replay buffer and learns from batches of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.demonstrations.first_comparison import DataFacts, PicturesShown, facts_of
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.algorithm_config import (
    DEFAULT_BATCH,
    DEMONSTRATIONS,
    DEMONSTRATIONS_SHARE,
    INTERVENTIONS,
    INTERVENTIONS_SHARE,
    ONLINE,
    buffer_rows,
    off_policy_of,
)
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.envs.env_spec import EnvSpec, learned_spec
from recipes.embodied.envs.observation_keys import STATES
from recipes.embodied.learning.data_reading import first_pictures
from recipes.embodied.learning.running_returns import check_running, with_states
from recipes.embodied.learning.trajectory import RolloutChunks, joined
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_normalization, load_trained, write_description
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.squashed_policy import SquashedPolicy
from recipes.embodied.off_policy.algorithm import TransitionTensors, algorithm_of
from recipes.embodied.off_policy.buffer import ReplayBuffer, ReplayMixture
from recipes.embodied.off_policy.segments import SegmentWriter
from recipes.embodied.off_policy.sources import (
    BEFORE,
    add_recording,
    add_steps,
    demonstrations_buffer,
    fitting_data,
    intervened,
    transition_spec,
    transition_steps,
)
from recipes.embodied.workers.actor_base import BaseActor, memory
from recipes.training.arrays import read_arrays
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.tensor_files import read_tensors, write_tensors
from recipes.training.updater import SKIPPED, Figures
from rlinf_core import CheckpointError
from rlinf_core.process import pacing

# In a checkpoint: the folder of each rank's buffer, and the file of the state besides weights and optimizers.
REPLAY: Final = "replay"
_STATE: Final = "off_policy.safetensors"


class OffPolicyActor(BaseActor[EmbodiedConfig]):
    """Learns from transitions of earlier and current policies. Every rank has the buffer of its environments.

    A training step is one rollout, whose steps go into the buffer, and `update_to_data` updates for each of them.
    """

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Create policy, critics, optimizers and the replay buffer; all ranks start with the same weights."""
        torch.set_num_threads(1)
        config, algorithm = self._config.actor, algorithm_of(self._config.algorithm)
        torch.manual_seed(derive_seed(config.seed, Purpose.WEIGHTS))
        policy = make_model(config.model, spec).to(self.torch_device)
        if config.checkpoint_load_path is not None:
            load_trained(policy, config.model, spec, config.checkpoint_load_path)
        self._prepare(layout, spec, policy)
        size = policy.action_size if isinstance(policy, SquashedPolicy) else spec.action_size
        self._critics = {
            name: self._training_state(critics.to(self.torch_device).eval(), name)
            for name, critics in algorithm.make_critics(self._config, spec, size).items()
        }
        self._algorithm = algorithm(
            off_policy_of(self._config.algorithm),
            self._state,
            self._critics,
            lr=config.optim.lr,
            clip_grad=config.optim.clip_grad,
            skip_nonfinite=self._config.runner.on_nonfinite == "skip",
        )
        self._part = algorithm.learned_part(self._config, spec, size)
        self._mixture = self._buffers(learned_spec(spec, self._part.stop - (self._part.start or 0)))
        self._normalizes = self._config.algorithm.normalize_observations and spec.state_size > 0
        if self._normalizes:
            check_running(policy)
            if self._config.data.train_data_paths:
                # Demonstrations are read again: their buffer has padded and shifted rows, and no later step needs them.
                self._count(fitting_data(self._config.data, spec)[0].states)
        self._algorithm.normalize(self._policy.normalization)
        self._seen = 0
        # The last step whose rollout is in the buffer.
        self._added: int | None = None

    def _buffers(self, spec: EnvSpec) -> ReplayMixture:
        """Return the buffers that batches are sampled from, filled with earlier recordings and demonstrations."""
        replay = off_policy_of(self._config.algorithm).replay
        lanes = self._config.env.train.total_num_envs // self._routes.actors
        columns = transition_spec(spec)
        intervenes = self._config.env.train.intervention.source != NONE
        storage = None if replay.storage is None else Path(replay.storage)
        buffers = {
            name: ReplayBuffer(columns, lanes, rows, storage)
            for name, rows in buffer_rows(replay, self._world_size, intervenes=intervenes).items()
        }
        online, shares = buffers[ONLINE], dict[str, float]()
        if intervenes:
            shares[INTERVENTIONS] = INTERVENTIONS_SHARE
        self._recorder: SegmentWriter | None = None
        if replay.recording_path is not None:
            folder = Path(replay.recording_path) / str(self._rank)
            self._recorder = SegmentWriter(folder, lambda text: self.log_warning("%s", text))
            helped = buffers.get(INTERVENTIONS)
            add_recording(
                online, folder, lambda damage: self.log_warning("skipped unreadable data: %s", damage), helped
            )
        if self._config.data.train_data_paths:
            buffers[DEMONSTRATIONS] = demonstrations_buffer(self._config.data, spec)
            shares[DEMONSTRATIONS] = 1.0 if self._algorithm.records_alone else DEMONSTRATIONS_SHARE
        return ReplayMixture(buffers, {ONLINE: 1 - sum(shares.values()), **shares})

    def data_facts(self) -> DataFacts | None:
        """Return the facts of the demonstrations, on the first rank; None without demonstrations."""
        if self._rank or not self._config.data.train_data_paths:
            return None
        return facts_of(*fitting_data(self._config.data, self._spec), self._config.data.cameras)

    def first_pictures(self) -> list[PicturesShown]:
        """Return the first images of demonstrations, on the first rank; empty without demonstrations."""
        if self._rank or not self._config.data.train_data_paths:
            return []
        return first_pictures(*fitting_data(self._config.data, self._spec))

    # A training step

    def recv_rollout_batch(self, step: int | None = None, attempt: int = 0) -> int:
        """Receive this actor's share of a rollout and put it into the buffer.

        Args:
            step: the training step; by default the one after the last.
            attempt: see `trajectory_key`.

        Returns:
            The staleness: versions between the acting weights and those here.
        """
        config = self._config
        pieces = self._receive(step, attempt)
        staleness = self._state.version - min(piece.version for piece in pieces)
        if self._added == self._step:
            # The pieces came in an earlier attempt, in which another actor's share was missing.
            return staleness
        self._carried_out = self._added_rows = self._helped = 0
        lanes = self._mixture.buffers[ONLINE].lanes
        for chunks in split_passes(pieces, config.env.train.rollout_epoch, lanes):
            steps = transition_steps(chunks, self._part)
            if self._recorder is not None:
                self._recorder.append(steps)
            self._added_rows += add_steps(self._mixture.buffers[ONLINE], steps)
            self._carried_out += int(chunks.steps["valid"].sum()) * self._routes.actors
            if self._normalizes:
                self._count(steps[BEFORE + STATES][steps["valid"]], shared=self._world_size > 1)
            if INTERVENTIONS in self._mixture.buffers:
                self._helped += add_steps(self._mixture.buffers[INTERVENTIONS], intervened(steps))
            # Invalid rows are counted, too, so that all ranks take equally many updates.
            self._seen += steps["valid"].size * config.actor.model.num_action_chunks * self._routes.actors
        self._added = self._step
        return staleness

    def _count(self, states: NDArray[np.float32] | None, *, shared: bool = False) -> None:
        """Add states [n, S] to the statistics of normalization; `shared`: together with those of other ranks."""
        if states is None:
            return
        rows = torch.from_numpy(states)  # pyright: ignore[reportUnknownMemberType]
        counted = torch.ones(len(rows), dtype=torch.bool)
        reduce_sum = self._state.strategy.reduce_sum if shared else None
        self._algorithm.normalize(with_states(self._policy.normalization, rows, counted, reduce_sum, raw=True))

    def compute_advantages_and_returns(self, step: int | None = None) -> dict[str, float]:
        """Return the fill level of the buffer; off-policy learning has no advantages."""
        metrics = {f"replay/{name}": float(len(buffer)) for name, buffer in self._mixture.buffers.items()}
        if INTERVENTIONS in self._mixture.buffers:
            metrics["env/intervened"] = self._helped / max(1, self._added_rows)
        stored = sum(buffer.stored for buffer in self._mixture.buffers.values())
        return {
            **metrics,
            **({"replay/stored_gib": stored / 2**30} if stored else {}),
            "replay/gib": sum(buffer.nbytes for buffer in self._mixture.buffers.values()) / 2**30,
            "env/steps": float(self._carried_out),
        }

    def run_training(self, step: int | None = None) -> dict[str, float]:
        """Take the updates that the steps so far allow.

        Args:
            step: the training step, on which random numbers depend; by default that of the last rollout.

        Returns:
            Metrics, means over all updates, by their full names.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite (`runner.on_nonfinite`).
        """
        config, settings = self._config, off_policy_of(self._config.algorithm)
        step = self._step if step is None else step
        seed = derive_seed(config.actor.seed, Purpose.BATCHES, step, self._rank)
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        rate = self._state.apply_settings(step, config.runner.last_step)
        for critics in self._critics.values():
            critics.apply_settings(step, config.runner.last_step)
        allowed = int(settings.update_to_data * (self._seen - settings.learning_starts) + 1e-9)
        updates = max(0, allowed - self._algorithm.updates) if self._seen >= settings.learning_starts else 0
        share = (config.actor.global_batch_size or DEFAULT_BATCH) // self._world_size
        policy_figures, critic_figures, began = Figures(), Figures(), time.perf_counter()
        for _ in range(updates):
            with self.worker_timer("training/update", share):
                if pacing.active is not None:
                    # A rehearsal takes the time of an update without computing it.
                    self._algorithm.updates += 1
                    continue
                batch = self._mixture.sample(share, random, settings.n_steps, config.algorithm.gamma)
                tensors = TransitionTensors.of(batch, self._algorithm.prepare, self.torch_device)
                self._algorithm.update(tensors, step, policy_figures, critic_figures)
        self._algorithm.check_weights(f"step {step}")
        self._state.version += 1
        for critics in self._critics.values():
            critics.version += 1
        skipped = policy_figures.skipped + critic_figures.skipped
        if skipped:
            self.log_warning(SKIPPED, step, skipped)
        return {
            **critic_metrics(critic_figures),
            **replace(policy_figures, skipped=skipped).metrics(counts_skipped=config.runner.on_nonfinite == "skip"),
            **self._algorithm.metrics(),
            "train/actor/lr": rate,
            "train/updates": float(self._algorithm.updates),
            "train/updates_per_env_step": self._algorithm.updates / max(1, self._seen),
            "speed/updates_per_second": updates / (time.perf_counter() - began),
            **memory(self.torch_device),
        }

    # Checkpoints

    def save_checkpoint(self, folder: str) -> None:
        """Write weights, optimizers, temperature and buffers into a folder that every rank sees."""
        self._state.save(folder)
        for critics in self._critics.values():
            critics.save(folder)
        path = Path(folder)
        (path / REPLAY).mkdir(exist_ok=True)
        files = path / REPLAY / str(self._rank)
        arrays: dict[str, Any] = self._mixture.buffers[ONLINE].save(files / ONLINE)
        if INTERVENTIONS in self._mixture.buffers:
            helped = self._mixture.buffers[INTERVENTIONS].save(files / INTERVENTIONS)
            arrays |= {f"{INTERVENTIONS}/{name}": array for name, array in helped.items()}
        np.savez(path / REPLAY / f"{self._rank}.npz", seen=np.array(self._seen), **arrays)
        if self._rank == 0:
            write_tensors(path / _STATE, self._algorithm.state())
            write_description(path, self._config.actor.model, self._spec, self._policy.normalization)
            if self._policy.normalization != Normalization():
                self._policy.normalization.save(path)

    def load_checkpoint(self, folder: str) -> int:
        """Load a checkpoint of `save_checkpoint`, by the same number of ranks.

        Returns:
            The version of the weights.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model.
            ReplayError: the buffer has other sizes.
            NonFiniteError: a weight in it is NaN or infinite.
        """
        path = Path(folder)
        files = sorted((path / REPLAY).glob("*.npz"))
        if len(files) != self._world_size:
            raise CheckpointError(
                f"the checkpoint has replay buffers of {len(files)} actors, but the run has {self._world_size}",
                where=folder,
                help="resume with the same number of actors, or start a new run with `actor.checkpoint_load_path`",
            )
        self._state.load(folder)
        for critics in self._critics.values():
            critics.load(folder)
        self._algorithm.normalize(load_normalization(folder, self._spec))
        self._algorithm.load_state(_read_state(path / _STATE))
        arrays = read_arrays(path / REPLAY / f"{self._rank}.npz")
        self._seen = int(arrays.pop("seen"))
        helped, files = _taken_from(arrays, f"{INTERVENTIONS}/"), path / REPLAY / str(self._rank)
        self._mixture.buffers[ONLINE].load(arrays, files / ONLINE)
        if helped and INTERVENTIONS in self._mixture.buffers:  # a run may have begun without interventions
            self._mixture.buffers[INTERVENTIONS].load(helped, files / INTERVENTIONS)
        self._algorithm.check_weights(folder)
        return self._state.version


def _read_state(file: Path) -> dict[str, torch.Tensor]:
    """Return the learner's state besides weights and optimizers.

    Raises:
        CheckpointError: the state cannot be read.
    """
    try:
        return read_tensors(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the learner state cannot be read",
            where=str(file),
            why=str(error),
            help="resume from another checkpoint",
        ) from None


def split_passes(pieces: list[RolloutChunks], passes: int, lanes: int) -> list[RolloutChunks]:
    """Split the pieces of a rollout into its segments, in order, each with all environments of this actor.

    Args:
        pieces: the pieces, in any order; environment numbers continue from segment to segment.
        passes: the number of passes.
        lanes: environments of this actor.
    """
    ordered = sorted(pieces, key=lambda piece: piece.first)
    passes_so_far: list[list[RolloutChunks]] = [[]]
    for piece in ordered:
        if sum(piece.batch for piece in passes_so_far[-1]) == lanes:
            passes_so_far.append([])
        passes_so_far[-1].append(piece)
    if len(passes_so_far) != passes:
        raise ValueError(f"{len(passes_so_far)} passes arrived; expected {passes}")
    return [joined(pieces) for pieces in passes_so_far]


def _taken_from(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Pop the arrays with a name prefix from a dictionary, and return them without the prefix."""
    return {name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}


def critic_metrics(figures: Figures) -> dict[str, float]:
    """Return the means of the critics' metrics by their full names; including the norm of their gradient."""
    renamed = {f"actor/{name}": f"critic/{name}" for name in ("grad_norm", "weights_changed")}
    return {f"train/{renamed.get(name, name)}": value for name, value in figures.means().items()}
