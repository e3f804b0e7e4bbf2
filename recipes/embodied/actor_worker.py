"""The workers that learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.embodied.checkpoint import load, save
from recipes.embodied.config import EmbodiedConfig, group_size
from recipes.embodied.envs.base import EnvSpec
from recipes.embodied.layout import rollouts_of, routes_of
from recipes.embodied.learning import Samples, samples_of
from recipes.embodied.models.registry import make_model
from recipes.embodied.optimizer import make_optimizer, move_state
from recipes.embodied.precision import computing, weight_type, widened_judgement
from recipes.embodied.seeding import Purpose, seed_of
from recipes.embodied.sharding import Holding, Sharded, hold
from recipes.embodied.trajectory import Trajectories, joined
from recipes.embodied.weights import FlatWeights
from rlinf_core import Worker
from rlinf_core.algorithms.aggregation import denominator
from rlinf_core.algorithms.levels import sum_to_level
from rlinf_core.algorithms.losses.inputs import Loss, LossInputs, LossSettings
from rlinf_core.algorithms.registry import get_policy_loss
from rlinf_core.runners.embodied_runner import Layout, trajectory_key


class EmbodiedFSDPActor(Worker):
    """Learns from trajectories. Several of them share every batch, and their weights, as `actor.fsdp_config` says."""

    def __init__(self, config: EmbodiedConfig) -> None:
        super().__init__()
        self._config = config
        self._version = 0
        self._copy: FlatWeights | None = None
        self._sending: list[Any] = []

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Make the policy and the optimizer; every rank begins with the same weights."""
        torch.set_num_threads(1)
        config = self._config.actor
        self._layout = layout
        torch.manual_seed(seed_of(config.seed, Purpose.WEIGHTS))
        policy = make_model(config.model, spec).to(self.torch_device, weight_type(config))
        self._outgoing = FlatWeights.adopt(policy)
        self._holding = hold(policy, self._rank, self._world_size, config.fsdp_config, self.torch_device)
        self._policy = policy
        self._optimizer = make_optimizer(policy, config.optim)
        self._loss = get_policy_loss(self._config.algorithm.loss_type)
        self._settings = LossSettings.of(self._config.algorithm)
        self._routes = routes_of(layout, self._config, training=True)
        self._channel = self.connect_channel(layout.trajectories)

    # Weights

    def sync_model_to_rollout(self) -> int:
        """Send the weights to the rollout workers; each actor serves its share of them.

        Returns when they are received; where rollouts go on meanwhile (`runner.max_staleness`) at once, with a copy of
        the weights on its way.

        Returns:
            Their version.
        """
        weights, group = self._gathered(), self._config.rollout.group_name
        self._finish_sending()
        if self._config.runner.max_staleness:
            if self._copy is None:
                self._copy = FlatWeights(weights.views)
            for mine, current in zip(self._copy.buffers, weights.buffers, strict=True):
                mine.copy_(current)
            weights = self._copy
        peers = rollouts_of(self._rank, self._layout)
        if peers:
            # One copy for all workers of a host: each takes the weights out of it.
            groups, source = [(group, peers)], (self._config.actor.group_name, self._rank)
            content = (self._version, weights.buffers)
            self._sending.append(self.broadcast(content, groups, source, async_op=True))
        if weights is not self._copy:
            self._finish_sending()
        return self._version

    def _finish_sending(self) -> None:
        for work in self._sending:
            work.wait()
        self._sending = []

    def _gathered(self) -> FlatWeights:
        """Return the weights as they are now, whole. Without shards they are where the policy computes with them."""
        if self._world_size > 1:
            state: dict[str, Tensor] = self._policy.state_dict()
            for name, view in self._outgoing.views.items():
                view.copy_(self._holding.whole(state[name]))
        return self._outgoing

    # A training step

    def recv_rollout_batch(self, step: int) -> int:
        """Take this actor's share of a rollout out of the channel: all passes of all its environments.

        Returns:
            How many versions older than the weights here those are that acted.
        """
        config = self._config
        expected = config.env.train.rollout_epoch * self._routes.total // self._world_size
        key = trajectory_key(self._rank, step, config.runner.max_staleness)
        pieces: list[Trajectories] = self._channel.get_batch(expected, key=key)
        self._trajectories = joined(pieces)
        return self._version - self._trajectories.version

    def compute_advantages_and_returns(self, step: int) -> dict[str, float]:
        """Make samples of the trajectories.

        Returns:
            Figures of them, by their full names.
        """
        holding = self._holding
        samples, metrics = samples_of(
            self._trajectories,
            self._config.algorithm,
            group_size(self._config, self._config.env.train),
            holding.reduce_sum if self._world_size > 1 else None,
        )
        del self._trajectories
        if self._world_size > 1:
            samples = _equally_masked(samples, holding)
        self._samples = samples.to(self.torch_device)
        return metrics

    def run_training(self, step: int) -> dict[str, float]:
        """Several passes over the samples in random batches.

        Returns:
            Figures of the training, means over all parts of its batches, by their full names.
        """
        config, samples = self._config.actor, self._samples
        torch.manual_seed(seed_of(config.seed, Purpose.BATCHES, step, self._rank))
        self._move(self.torch_device)
        share, micro = config.global_batch_size // self._world_size, config.micro_batch(self._world_size)
        seen: list[dict[str, Tensor]] = []
        for _ in range(self._config.algorithm.update_epoch):
            for batch in samples.batches(share):
                seen += self._update(batch, micro)
        self._version += 1
        del self._samples
        if config.enable_offload:
            self._move(torch.device("cpu"))
        figures = {f"train/{name}": value for name, value in _means(seen).items()}
        return {**figures, "train/actor/lr": self._optimizer.param_groups[0]["lr"]}

    def _move(self, device: torch.device) -> None:
        """Weights and optimizer to a device. Shards stay: `fsdp_config.cpu_offload` is what moves those."""
        if not isinstance(self._holding, Sharded):
            self._outgoing.move(device)
            move_state(self._optimizer, device)

    def _update(self, batch: Samples, micro: int) -> list[dict[str, Tensor]]:
        """Return one optimizer step on this rank's share of a batch, in parts of `micro` samples; figures of each
        part.
        """
        holding, totals = self._holding, self._totals(batch)
        parts = list(batch.parts(micro))
        # Totals by part on average: the loss of the batch, and every figure of it, is then the mean of its parts'.
        totals = {name: total / len(parts) for name, total in totals.items()}
        self._optimizer.zero_grad()
        figures: list[dict[str, Tensor]] = []
        for number, part in enumerate(parts):
            holding.accumulate(last=number == len(parts) - 1)
            found = self._judge(part, totals)
            (found.loss / len(parts)).backward()
            figures.append(found.metrics)
        holding.finish_gradients()
        norm = holding.clip_gradients(self._config.actor.optim.clip_grad)
        self._optimizer.step()
        return [{**each, "actor/grad_norm": norm.detach()} for each in figures]

    def _totals(self, batch: Samples) -> dict[str, Tensor]:
        """Return what counts in the whole batch, by rank on average; empty where everything does."""
        mask = batch.tensors.get("mask")
        if mask is None:
            return {}
        algorithm, tensors = self._config.algorithm, batch.tensors
        how, shape = algorithm.loss_agg_func, tensors["old_logprobs"].shape
        totals = {"total": denominator(mask, shape, how)}
        if algorithm.entropy_bonus:
            entropies = sum_to_level(tensors["actions"], algorithm.entropy_type).shape
            totals["entropy_total"] = denominator(_leading(mask, len(entropies)), entropies, how)
        if "returns" in tensors:
            totals["value_total"] = denominator(tensors["value_mask"], tensors["returns"].shape, "token-mean")
        summed = self._holding.reduce_sum(torch.stack(list(totals.values()))) / self._world_size
        return dict(zip(totals, summed.unbind(), strict=True))

    def _judge(self, part: Samples, totals: dict[str, Tensor]) -> Loss:
        algorithm, tensors = self._config.algorithm, part.tensors
        with computing(self._config.actor, self.torch_device):
            judged = widened_judgement(self._holding.module(part.inputs, tensors["actions"]))
        values = judged.values if "returns" in tensors else None
        if values is not None:
            values = values[:, : tensors["returns"].shape[1]]
        entropy = sum_to_level(judged.entropy, algorithm.entropy_type) if algorithm.entropy_bonus else None
        return self._loss(
            LossInputs(
                logprobs=sum_to_level(judged.logprobs, algorithm.logprob_type),
                old_logprobs=tensors["old_logprobs"],
                advantages=tensors["advantages"],
                entropy=entropy,
                mask=tensors.get("mask"),
                values=values,
                old_values=tensors.get("old_values"),
                returns=tensors.get("returns"),
                value_mask=tensors.get("value_mask"),
                **totals,
            ),
            self._settings,
        )

    # Checkpoints

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees; together, with torch.distributed.checkpoint.

        Random numbers are a function of the step, and environments begin anew with every rollout: there is no more.
        """
        save(Path(folder), self._policy, self._optimizer, self._version)

    def load_checkpoint(self, folder: str) -> int:
        """Read what `save_checkpoint` wrote, by any number of ranks.

        Returns:
            The version of the weights.
        """
        self._version = load(Path(folder), self._policy, self._optimizer)
        return self._version


def _leading(mask: Tensor, dimensions: int) -> Tensor:
    """Return `mask` with at most so many dimensions: a chunk counts when any of its actions does."""
    return mask if mask.dim() <= dimensions else mask.flatten(start_dim=dimensions).any(dim=-1) if dimensions else mask


def _equally_masked(samples: Samples, holding: Holding) -> Samples:
    """Return the samples with masks if any rank has some, so that all ranks compute alike."""
    tensors, masked = samples.tensors, "mask" in samples.tensors
    if not holding.reduce_sum(torch.tensor(float(masked))) or masked:
        return samples
    # What is of the level of actions or chunks: all of `old_logprobs` but the tokens.
    shape = tensors["old_logprobs"].shape[:2]
    tensors = {**tensors, "mask": torch.ones(shape, dtype=torch.bool)}
    if "returns" in tensors:
        tensors["value_mask"] = torch.ones(tensors["returns"].shape[:1], dtype=torch.bool)
    return Samples(samples.inputs, tensors)


def _means(seen: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Return the mean of every figure over all batches."""
    if not seen:
        return {}
    table = torch.stack([torch.stack([figures[name].float() for name in seen[0]]) for figures in seen])
    return dict(zip(seen[0], table.mean(dim=0).tolist(), strict=True))
