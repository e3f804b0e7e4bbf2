"""The workers that run the policy in the environments."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.algorithm_config import PolicyGradientConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.policy_precision import acting_type, checked_output, checked_values, computing
from recipes.embodied.learning.trajectory import RolloutBuffer, RolloutChunks
from recipes.embodied.loop.protocols import CHUNKS, FAILED, Layout, stacked
from recipes.embodied.loop.routing import Routes, Share, actor_ranks, make_routes, trajectory_key
from recipes.embodied.models.base_policy import BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.folder_facts import observed_steps
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.registry import make_model
from recipes.training.arrays import Array
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.host_memory import keep_freed_memory, release_host_memory
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.weights.weight_sync import FirstPiece, FlatWeights, receiver_ranks
from rlinf_core import ConfigError
from rlinf_core.errors import RuntimeFailure


class MultiStepRolloutWorker(ComparingWorker):
    """Answers observations with actions, and sends trajectories to the actors.

    Observations of a stage come from one or several env workers, in one message each, and form one batch for the
    policy. The steps of a rollout segment are kept until its end, and then go through the channel to the actors.
    """

    config_section = "rollout"

    def __init__(self, config: PolicyJob) -> None:
        super().__init__()
        self._config = config
        self._policy: BasePolicy | None = None
        self._version = -1

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Create the policy; its weights arrive with the first `sync_model_from_actor`."""
        torch.set_num_threads(1)
        if self.torch_device.type == "cpu":
            keep_freed_memory()
        self._layout = layout
        self._step = layout.step
        self._actor, self._env = self._config.actor.group_name, self._config.env.group_name
        # What a policy draws and no message or checkpoint holds is drawn as by the actor.
        torch.manual_seed(derive_seed(self._config.actor.seed, Purpose.WEIGHTS))
        policy = make_model(self._config.actor.model, spec).to(acting_type(self._config.actor))
        passed = observed_steps(self._config.actor.model)
        if policy.observed_steps != passed:
            raise ConfigError(
                f"`{type(policy).__name__}` acts on {policy.observed_steps} consecutive observations, and the"
                f" environments pass {passed}",
                where="actor.model.model_type",
                help="earlier observations are passed to policies of lerobot alone: let the environment return them as"
                " part of its observation, as `gymnasium.wrappers.FrameStackObservation` does",
            )
        self._idle_device = torch.device("cpu") if self._config.rollout.enable_offload else self.torch_device
        policy.eval()
        self._policy = policy
        # Laid out in host memory, since an accelerator may not have room for the weights twice.
        self._weights = FlatWeights.adopt(policy)
        self._weights.move(self.torch_device)
        policy.to(self.torch_device)
        self._channel = self.connect_channel(layout.trajectories)
        release_host_memory()

    def sync_model_from_actor(self) -> int:
        """Receive the weights from the actor, in place.

        Returns:
            The version of the weights.
        """
        source = self._rank % self._layout.actors
        groups = [(self._config.rollout.group_name, receiver_ranks(source, self._layout.actors, self._layout.rollouts))]

        def message() -> Any:
            return self.broadcast(None, groups, (self._actor, source))

        with self.worker_timer("sync/receive"):
            first: FirstPiece[tuple[int, Normalization]] = message()
            self._weights.load(first, iter(message, None))
        self._version, self.policy.normalization = first.about
        return self._version

    def generate(self, step: int | None = None, attempt: int = 0) -> None:
        """Act for one rollout, `EnvWorker.interact`, and put its trajectories into the channel.

        Args:
            step: the training step, on which drawn actions depend; by default the one after the last.
            attempt: see `trajectory_key`.

        Raises:
            RuntimeFailure: the weights of the actor have not arrived.
        """
        if self._version < 0:
            help = "call `sync_model_from_actor`, and `sync_model_to_rollout` of the actors, before the first rollout"
            raise RuntimeFailure("there are no weights of the actor to act with", help=help)
        self._step = step = self._step + 1 if step is None else step
        train = self._config.env.train
        routes = make_routes(self._layout, self._config, training=True)
        torch.manual_seed(derive_seed(self._config.actor.seed, Purpose.ACTIONS, step, self._rank))
        self._move(self.torch_device)
        for number in range(train.rollout_epoch):
            for stage, trajectories in self._pass(routes, training=True).items():
                for piece in routes.pieces(self._rank, stage):
                    first = number * routes.total + piece.first
                    part = trajectories.rows(piece.start, piece.stop, first)
                    for actor in actor_ranks(piece.actor, self._layout.actors, routes.actors):
                        key = trajectory_key(actor, step, self._config.runner.staleness, attempt)
                        self._channel.put(part, weight=part.batch, key=key)
        self._move(self._idle_device)

    def _move(self, device: torch.device) -> None:
        """Move the weights, unless they stay on the accelerator."""
        if self._idle_device != self.torch_device:
            with self.worker_timer("rollout/move"):
                self._weights.move(device)

    def evaluate(self) -> None:
        """Act greedily for `EnvWorker.evaluate`."""
        routes = make_routes(self._layout, self._config, training=False)
        torch.manual_seed(derive_seed(self._config.actor.seed, Purpose.EVALUATION, 0, self._rank))
        self._weights.move(self.torch_device)
        for _ in range(self._config.env.eval.rollout_epoch):
            self._pass(routes, training=False)
        self._weights.move(self._idle_device)

    @torch.no_grad()
    def _pass(self, routes: Routes, *, training: bool) -> dict[int, RolloutChunks]:
        """Act for one rollout segment of all stages; return the trajectories by stage, if they are for training.

        A policy of one's own may draw with gradients: their graph would grow with each step.
        """
        policy = self.policy
        shares = {stage: routes.of_rollout(self._rank, stage) for stage in range(routes.stages)}
        shares = {stage: share for stage, share in shares.items() if share}
        buffers: dict[int, RolloutBuffer] = {}
        finished: dict[int, RolloutChunks] = {}
        executed = self._config.actor.model.num_action_chunks
        ensembles = self._config.actor.model.options.get("ensemble") and not training
        means = {stage: TemporalEnsemble(executed) for stage in shares if ensembles}
        # The first messages of env workers tell the number of chunks; their last message needs no action.
        chunk = chunks = 0
        while shares and chunk <= chunks:
            for stage, peers in shares.items():
                with self.worker_timer("rollout/wait"):
                    message = self._receive(peers)
                if chunk == 0:
                    chunks = int(message[CHUNKS][0])
                    buffers[stage] = RolloutBuffer(chunks, self._version)
                acts = chunk < chunks
                timed = self.worker_timer("rollout/policy", peers[-1].stop) if acts else nullcontext()
                with timed, computing(self._config.actor, self.torch_device):
                    inputs = policy.prepare(message["observations"])
                    output = self._act(inputs) if acts and training else None
                    actions: Array | None = None
                    if acts and not training:
                        actions = greedy_actions(policy, inputs, executed, means.get(stage), _begun(message))
                    if output is not None:
                        # Moving actions to the host waits for the accelerator.
                        actions = policy.to_env(output.actions)
                if actions is not None:
                    self._answer(peers, actions)
                if not training:
                    continue
                # Recorded while the environments step.
                buffer = buffers[stage]
                if chunk:
                    self._add_outcome(buffer, chunk - 1, message, inputs)
                    if FAILED in message:
                        buffer.leave_out(chunk - 1, message[FAILED])
                if output is not None:
                    buffer.add_action(chunk, policy.recorded(inputs), output)
                else:
                    finished[stage] = buffer.finish(self._last_values(inputs))
            chunk += 1
        return finished

    def _act(self, inputs: Inputs) -> PolicyOutput:
        model = self._config.actor.model
        output = checked_output(self.policy.act(inputs), self.policy, rows_of(inputs), model.num_action_chunks)
        needs = {"logprobs": output.logprobs, **({"values": output.values} if model.add_value_head else {})}
        missing = next((name for name, tensor in needs.items() if tensor is None), None)
        if missing is not None and isinstance(getattr(self._config, "algorithm", None), PolicyGradientConfig):
            raise ConfigError(
                f"`act` of `{type(self.policy).__name__}` returned no `{missing}`",
                why="the loss needs those of every action that was drawn",
                help="return them" + ("" if missing == "logprobs" else ", or write `add_value_head: false`"),
            )
        return output

    def _add_outcome(self, buffer: RolloutBuffer, step: int, message: dict[str, Any], following: Inputs) -> None:
        """Record the result of a step; `following` are the observations after it."""
        buffer.add_outcome(step, message, self._finals(message))

    def _last_values(self, inputs: Inputs) -> Tensor | None:
        """Return the values of the observations after the last step, if the model estimates values."""
        return self._values(inputs) if self._config.actor.model.add_value_head else None

    def _receive(self, peers: tuple[Share, ...]) -> dict[str, Any]:
        parts: list[dict[str, Any]] = list(self.recv_from(self._env, (share.peer for share in peers)).values())
        if any("final_observations" in part for part in parts):
            # If no episode ended, the current observations serve as the final ones, as within a batch.
            parts = [{"final_observations": part["observations"], **part} for part in parts]
        if any(FAILED in part for part in parts):
            parts = [{FAILED: np.zeros(len(part["rewards"]), np.bool_), **part} for part in parts]
        return stacked(parts)

    def _answer(self, peers: tuple[Share, ...], actions: Array) -> None:
        self.send_to({share.peer: actions[share.start : share.stop] for share in peers}, self._env)

    def _finals(self, message: dict[str, Any]) -> Tensor | None:
        if "final_observations" not in message:
            return None
        return self._values(self.policy.prepare(message["final_observations"]))

    def _values(self, inputs: Inputs) -> Tensor:
        rows, chunk = rows_of(inputs), self._config.actor.model.num_action_chunks
        with self.worker_timer("rollout/values", rows), computing(self._config.actor, self.torch_device):
            return checked_values(self.policy.values(inputs), "values", self.policy, rows, chunk)

    @property
    def policy(self) -> BasePolicy:
        """The policy that acts."""
        if self._policy is None:
            raise RuntimeError("used before init_worker()")
        return self._policy


def _begun(message: dict[str, Any]) -> NDArray[np.bool_] | None:
    """Return the environments whose episode has just begun, bool [n]; None: only after a reset of all."""
    if "terminations" not in message:
        return None
    return (message["terminations"] | message["truncations"]).any(axis=1)


def rows_of(inputs: Inputs) -> int:
    """Return the number of observations in inputs."""
    return len(next(iter(inputs.values())))


def greedy_actions(
    policy: BasePolicy,
    inputs: Inputs,
    chunk: int,
    ensemble: TemporalEnsemble | None = None,
    begun: NDArray[np.bool_] | None = None,
) -> Array:
    """Return the likeliest actions of the next steps, [n, C, A]; with an ensemble, means over the chunks so far.

    Args:
        policy: the policy.
        inputs: the inputs of `prepare`.
        chunk: C.
        ensemble: the chunks so far.
        begun: bool [n], environments whose episode has just begun; None: only at the first call.
    """
    if ensemble is None:
        output = policy.act(inputs, greedy=True)
        return policy.to_env(checked_output(output, policy, rows_of(inputs), chunk).actions)
    return policy.to_env(ensemble.add(policy.predicted(inputs).float(), begun))


class TemporalEnsemble:
    """Weighted sums of the chunks so far, for each step that they cover.

    Zhao et al. 2023, "Learning fine-grained bimanual manipulation with low-cost hardware" (arXiv 2304.13705, algorithm
    2): the i-th oldest prediction of a step has weight exp(-m i), with m = 0.01 as in the paper.

    Args:
        executed: C, the actions between the starts of two chunks.
        coefficient: m; at 0 all predictions have equal weight, above 0 older ones have more.
    """

    def __init__(self, executed: int, coefficient: float = 0.01) -> None:
        self._executed, self._coefficient = executed, coefficient
        # For the next steps: sums of weighted actions [n, H, M] and of weights, and the number of predictions, [n, H,
        # 1].
        self._sums: Tensor | None = None
        self._weights = self._counts = torch.zeros(())

    def add(self, chunk: Tensor, begun: NDArray[np.bool_] | None = None) -> Tensor:
        """Return the next actions [n, C, M].

        Args:
            chunk: the newest chunk, [n, H, M].
            begun: bool [n], environments whose episode has just begun; None: only at the first call.
        """
        if self._sums is None:
            self._sums = torch.zeros_like(chunk)
            self._weights = self._counts = torch.zeros_like(chunk[..., :1])
        kept = torch.ones_like(chunk[:, :1, :1])
        if begun is not None:
            kept[torch.from_numpy(begun).to(chunk.device)] = 0  # pyright: ignore[reportUnknownMemberType]
        weight = torch.exp(-self._coefficient * self._counts * kept)
        self._sums = self._sums * kept + weight * chunk
        self._weights = self._weights * kept + weight
        self._counts = self._counts * kept + 1
        mean = (self._sums / self._weights)[:, : self._executed]
        self._sums, self._weights, self._counts = map(self._later, (self._sums, self._weights, self._counts))
        return mean

    def _later(self, steps: Tensor) -> Tensor:
        """Return per-step values [n, H, ...] shifted forward by C steps, padded with zeros."""
        return torch.cat((steps[:, self._executed :], torch.zeros_like(steps[:, : self._executed])), dim=1)
