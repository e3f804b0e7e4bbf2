"""The common part of actors: the policy, sending of weights, receiving of rollouts, checkpoints."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Generic, TypeVar

import torch
from torch import nn

from recipes.demonstrations.first_comparison import DataFacts, PicturesShown
from recipes.embodied.config import PolicyJob
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.learning.policy_precision import acting_types
from recipes.embodied.learning.trajectory import RolloutChunks
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.loop.routing import make_routes, trajectory_key
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import keep_loaded, load_normalization, load_trained, write_description
from recipes.embodied.models.registry import make_model
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.host_memory import keep_freed_memory, release_host_memory
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.sharding import is_sharded
from recipes.training.updater import check_weights
from recipes.training.weight_sources import WeightsOfRankZero, WeightSource
from recipes.training.weights.training_state import ACTOR, TrainingState
from recipes.training.weights.weight_sync import WeightSender, piece_messages, receiver_ranks
from recipes.training.without_memory import hollow_copy, without_memory
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

JobT = TypeVar("JobT", bound=PolicyJob)


class BaseActor(ComparingWorker, Generic[JobT]):
    """A worker that holds a policy, sends its weights to rollout workers and receives their rollouts."""

    config_section = "actor"

    def __init__(self, config: JobT) -> None:
        super().__init__()
        self._config = config

    def _prepare(
        self,
        layout: Layout,
        spec: EnvSpec,
        policy: BasePolicy,
        *,
        methods: Sequence[str] = (),
        initial: WeightSource | None = None,
    ) -> None:
        """Set the policy, and connect to the rollout workers; `initial` has the weights of a policy without memory."""
        self._layout, self._step, self._spec = layout, layout.step, spec
        self._policy = policy
        self._state = self._training_state(policy, methods=methods, blocks=policy.blocks, initial=initial)
        self._sender = WeightSender(
            self,
            (self._config.actor.group_name, self._rank),
            self._config.rollout.group_name,
            receiver_ranks(self._rank, layout.actors, layout.rollouts),
            in_background=self._config.runner.staleness > 0,
        )
        self._routes = make_routes(layout, self._config, training=True)
        self._channel = self.connect_channel(layout.trajectories)
        keep_loaded(
            self._contact, policy, self._config.actor.checkpoint_load_path or self._config.actor.model.model_path
        )
        release_host_memory()

    def _training_state(
        self,
        module: torch.nn.Module,
        component: str = ACTOR,
        *,
        methods: Sequence[str] = (),
        blocks: Sequence[torch.nn.Module] = (),
        initial: WeightSource | None = None,
    ) -> TrainingState:
        config = self._config.actor
        state = TrainingState(
            module,
            config.optim,
            config.fsdp_config,
            rank=self._rank,
            world_size=self._world_size,
            device=self.torch_device,
            blocks=blocks,
            methods=methods,
            component=component,
            sent_types=acting_types(module, config) if component == ACTOR else None,
            # Untrained weights of a folder are read from that folder again.
            saves_frozen=config.model.model_path is None or config.checkpoint_load_path is not None,
            initial=initial,
        )
        if config.model.compile:
            compile_training(module, methods, self.torch_device)
        return state

    def sync_model_to_rollout(self) -> int:
        """Send the weights to the rollout workers; each actor serves its share of them.

        Returns when they are received; if rollouts continue meanwhile (`runner.max_staleness`) at once, after copying
        the weights.

        Returns:
            The version of the weights.
        """
        state, sender = self._state, self._sender
        about = (state.version, self._policy.normalization)
        sender.send(piece_messages(state.sent_weights(), about, copies=sender.in_background))
        return state.version

    def _receive(self, step: int | None, attempt: int) -> list[RolloutChunks]:
        """Return this actor's share of a step's rollout: all segments of all its environments."""
        config = self._config
        self._step = step = self._step + 1 if step is None else step
        expected = config.env.train.rollout_epoch * self._routes.total // self._routes.actors
        return self._channel.get_batch(expected, key=trajectory_key(self._rank, step, config.runner.staleness, attempt))


class PolicyActor(BaseActor[JobT]):
    """A worker that trains a policy, and keeps it in checkpoints."""

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Create the policy and the optimizer; all ranks start with the same weights."""
        torch.set_num_threads(1)
        if self.torch_device.type == "cpu":
            keep_freed_memory()
        config = self._config.actor
        policy, weights = self._first_policy(spec)
        if config.fsdp_config.gradient_checkpointing:
            policy.checkpoint_activations()
        self._prepare(layout, spec, policy, methods=("imitation_loss",), initial=weights)
        self._data = self._demonstrations(spec)
        if config.checkpoint_load_path is not None:
            load_trained(policy, config.model, spec, config.checkpoint_load_path)
        elif self._data is not None and policy.normalization == Normalization():
            # Statistics that came with the weights of `model_path` were used in their training, and stay.
            policy.normalization = self._data.normalization(policy)
        if self._data is not None:
            data = self._data.demonstrations
            counts = Difference(note=f"{len(data)} rows of {data.episodes} episodes")
            self._contact.keep("rows of `data`", "their description, and the sizes of the environment", counts)

    def _first_policy(self, spec: EnvSpec) -> tuple[BasePolicy, WeightSource | None]:
        """Return the policy with its initial weights, in float32. If ranks hold shards, return it without memory, and
        the source of weights: rank 0 alone holds them whole, on its host, until every rank has its shard.
        """
        config = self._config.actor
        torch.manual_seed(derive_seed(config.seed, Purpose.WEIGHTS))
        if not is_sharded(config.fsdp_config, self._world_size, None):
            return make_model(config.model, spec).to(self.torch_device, torch.float32), None
        # A custom policy may compute with its weights in its constructor.
        makes_whole = self._rank == 0 or ":" in config.model.model_type
        with nullcontext() if makes_whole else without_memory():
            policy = make_model(config.model, spec).to(torch.float32)
        hollow = hollow_copy(policy) if makes_whole else policy
        return hollow, WeightsOfRankZero(policy if self._rank == 0 else None)

    def _demonstrations(self, spec: EnvSpec) -> ImitationData | None:
        """Return the demonstrations for training; None without any."""
        raise NotImplementedError

    def data_facts(self) -> DataFacts | None:
        """Return the facts of the demonstrations for training; None without any, and on other ranks than the first."""
        if self._data is None or self._rank:
            return None
        return self._data.facts(reads_instructions=self._policy.reads_instructions)

    def first_pictures(self) -> list[PicturesShown]:
        """Return the first images of demonstrations, on the first rank; empty without demonstrations."""
        return [] if self._data is None or self._rank else self._data.first_pictures()

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees; env workers keep their episodes."""
        self._state.save(folder)
        if self._rank == 0:
            write_description(Path(folder), self._config.actor.model, self._spec, self._policy.normalization)
            if self._policy.normalization != Normalization():
                self._policy.normalization.save(Path(folder))

    def load_checkpoint(self, folder: str) -> int:
        """Load a checkpoint of `save_checkpoint`, by any number of ranks.

        Returns:
            The version of the weights.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model.
            NonFiniteError: a weight in it is NaN or infinite.
        """
        self._state.load(folder)
        self._policy.normalization = load_normalization(folder, self._spec)
        check_weights(self._policy, folder)
        return self._state.version


def memory(device: torch.device) -> dict[str, float]:
    """Return this process's peak memory on the host and on its accelerator, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss, in bytes
    used = {"memory/actor_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        used["memory/actor_accelerator_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return used


_COMPILERS: Final = ("g++", "clang++")
_COMPILE_KEY: Final = "actor.model.compile"


def compile_training(policy: nn.Module, methods: Sequence[str], device: torch.device) -> None:
    """Have torch.compile compile `forward` and other methods of a policy, in place, when they are first called.

    Args:
        policy: the policy, as training calls it, sharded or not; the names of its weights remain.
        methods: the methods that training calls besides `forward`.
        device: the training device.

    Raises:
        ConfigError: this machine lacks a compiler.
    """
    missing = missing_compiler(device)
    if missing is not None:
        raise ConfigError(
            f"`{_COMPILE_KEY}: true` needs {missing[0]}, which this machine lacks",
            where=_COMPILE_KEY,
            help=f"{missing[1]}, or remove `{_COMPILE_KEY}`",
        )
    policy.compile()
    for name in methods:
        setattr(policy, name, torch.compile(getattr(policy, name)))


def missing_compiler(device: torch.device) -> tuple[str, str] | None:
    """Return what torch.compile lacks on this machine, and the remedy; None if it lacks nothing.

    Host code needs a C++ compiler; GPU code needs Triton, whose launchers need a C compiler.
    """
    named = os.environ.get("CXX")
    if not any(map(shutil.which, (named,) if named else _COMPILERS)):
        return f"a C++ compiler ({named or ' or '.join(_COMPILERS)})", "install one, as by `apt install g++`"
    if device.type != "cpu" and find_spec("triton") is None:
        return "the package triton", "`pip install triton`"
    return None
