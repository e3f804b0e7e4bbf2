"""Policy updates from environment samples: batches, losses and their denominators.

Needs tensors and a policy but no worker: the actor feeds it, and tests call it directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.algorithm_config import policy_gradient_of, warmup_steps
from recipes.embodied.learning.batch import Samples
from recipes.embodied.learning.policy_precision import checked_evaluation, computing
from recipes.embodied.learning.trajectory import leading, sum_to_level
from recipes.sections.algorithm import own_names, refuse_unknown_options
from recipes.training.arrays import REMEDY, NonFiniteError
from recipes.training.optimizer import of_values
from recipes.training.sharding import ParallelStrategy
from recipes.training.updater import Figures, UntrainedError, Updater, first_nonfinite
from rlinf_core import ConfigError, Loss, LossInputs, LossSettings, broadcast_mask, broadcast_trailing
from rlinf_core.algorithms.loss_inputs import denominator
from rlinf_core.algorithms.losses import as_loss
from rlinf_core.algorithms.options import checked_options, get_policy_loss
from rlinf_core.worker.timer import timer

if TYPE_CHECKING:
    from recipes.embodied.learning.imitation import ImitationData
    from recipes.embodied.models.base_policy import ActionEval, BasePolicy


class Learner:
    """Takes optimizer steps on batches of samples, together with the learners of the other ranks.

    Args:
        config: the configuration of the job.
        strategy: the policy, as distributed over ranks.
        optimizer: the optimizer of the policy's weights.
        device: the device that computes.
        data: demonstrations that are also trained on, with the weight `algorithm.bc_weight`.

    Attributes:
        passes: the number of passes over the samples in the last `learn`.
        drawn_gap: the largest difference, in the first batch of `learn`, between the log-probability of an action and
            the one recorded when it was drawn, relative to the latter if that exceeds 1; None for a built-in policy.
    """

    passes: int = 0
    drawn_gap: float | None = None

    def __init__(
        self,
        config: EmbodiedConfig,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        data: ImitationData | None = None,
    ) -> None:
        self._data = data
        self._config = config
        self._algorithm = algorithm = policy_gradient_of(config.algorithm)
        self._strategy = strategy
        self._device = device
        self._loss = get_policy_loss(algorithm.loss_type)
        refuse_unknown_options(algorithm.own_options, own_names(algorithm), "algorithm.options")
        options = checked_options(self._loss, algorithm.options, "algorithm.options")
        self._settings = replace(LossSettings.of(algorithm.inputs), huber_delta=None, options=options)
        self._is_own = ":" in config.actor.model.model_type
        self._gaps: list[Tensor] | None = None
        self._skips = config.runner.on_nonfinite == "skip"
        if self._is_own:
            self._check_values_named()
        self._updater = Updater(strategy, optimizer, clip_grad=config.actor.optim.clip_grad, skip_nonfinite=self._skips)

    def _check_values_named(self) -> None:
        """Refuse keys about weights of values, which are known by their names, for a policy without such names.

        Raises:
            ConfigError: a key is set, and no trained weight has such a name.
        """
        named: dict[str, object] = {
            "actor.optim.value_lr": self._config.actor.optim.value_lr,
            "algorithm.options.critic_warmup_steps": warmup_steps(self._algorithm),
        }
        key = next((key for key, value in named.items() if value), None)
        weights = self._strategy.module.named_parameters()
        if key is not None and not any(weight.requires_grad and of_values(name) for name, weight in weights):
            raise ConfigError(
                f"`{key}` is set, and no trained weight of the policy is known to belong to its values",
                where=key,
                why="these are known by their name, `critic` or `value_head`",
                help="call the value head `self.critic`, or remove the key",
            )

    def learn(self, samples: Samples, share: int, micro: int, step: int) -> Figures:
        """Take `algorithm.update_epoch` passes over the samples, in random batches; fewer by `algorithm.target_kl`.

        Args:
            samples: the samples of this rank.
            share: this rank's number of samples in a batch.
            micro: the number of samples in one forward and backward pass.
            step: the training step, for messages.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is not finite, under `runner.on_nonfinite: stop`.
            UntrainedError: no update gave a tensor a gradient that should have one.
        """
        figures = Figures()
        algorithm = self._algorithm
        self._gaps = [] if self._is_own else None
        for self.passes in range(1, algorithm.update_epoch + 1):
            before = 0
            for batch in samples.batches(share):
                before = len(figures.parts)
                self.update(batch, micro, step, figures)
                if self._gaps is not None:
                    self.drawn_gap = float(torch.stack(self._gaps).amax())
                    self._gaps = None
                del batch  # frees it before the next batch exists
            if algorithm.target_kl is not None and self._divergence(figures.parts[before:]) > algorithm.target_kl:
                break
        self.check_weights(f"step {step}")
        self._check_reached(samples, micro, f"step {step}")
        return figures

    def _check_reached(self, samples: Samples, micro: int, where: str) -> None:
        """Refuse, after the first step, a loss that misses tensors that it should train.

        In a built-in model, which has heads for other uses, a tensor counts if the needed values or log-probabilities
        depend on it. In a custom policy every tensor counts, except those of unneeded values.
        """
        names = self._updater.untouched()
        if names is None or not self._strategy.reduce_max(len(names)):
            return
        algorithm = self._algorithm
        part = next(iter(samples.microbatches(micro)))
        of_states = self._updater.reached(lambda: self._evaluated(part).values)
        of_actions = self._updater.reached(lambda: self._evaluated(part).logprobs)
        if "returns" in samples.tensors and names & of_states:
            raise UntrainedError(
                names & of_states,
                where,
                f"`adv_type: {algorithm.adv_type}` takes advantages from values, and `loss_type: {algorithm.loss_type}`"
                " does not train them",
                "add `value_loss` of `inputs.values` to the loss (docs/embodied.md, An algorithm of your own), or"
                " write `adv_type: grpo`, which needs none",
            )
        if names & of_actions:
            raise UntrainedError(
                names & of_actions,
                where,
                f"log-probabilities depend on it, and `loss_type: {algorithm.loss_type}` does not train them",
                "use `inputs.logprobs` in the loss without detaching it",
            )
        unused = names - of_states - of_actions
        model_type = self._config.actor.model.model_type
        if ":" in model_type and unused:
            raise UntrainedError(
                unused,
                where,
                f"neither actions nor values of `model_type: {model_type}` depend on it",
                "use it in `forward`, remove it, or freeze it by `requires_grad_(False)`",
            )

    def _evaluated(self, part: Samples) -> ActionEval:
        with computing(self._config.actor, self._device):
            policy = cast("BasePolicy", self._strategy.module)
            evaluation = policy(part.inputs, part.tensors["actions"])
            return checked_evaluation(evaluation, policy, len(part), self._config.actor.model.num_action_chunks)

    def _divergence(self, parts: Sequence[Mapping[str, float]]) -> float:
        """Return the KL divergence from the policy that acted, averaged over a batch and all ranks.

        Computed after each pass, as in CleanRL's PPO; 0 for a skipped batch.
        """
        kept = [part["actor/approx_kl"] for part in parts if "actor/approx_kl" in part]
        if parts and not kept:
            raise ConfigError(
                f"`algorithm.target_kl` needs a divergence, which `{self._algorithm.loss_type}` does not report",
                help="remove it, or return `actor/approx_kl` among the metrics of the loss",
            )
        total = torch.tensor(sum(kept) / max(1, len(kept)))
        return float(self._strategy.reduce_sum(total)) / self._strategy.world_size

    def update(self, batch: Samples, micro: int, step: int, figures: Figures) -> None:
        """Take one optimizer step on this rank's share of a batch, in parts of `micro` samples."""
        parts = list(batch.microbatches(micro))
        totals = self._totals(batch, uneven=len(batch) > micro and len(batch) % micro > 0)
        # Averaged totals per part: the loss and all figures of the batch are then the means over its parts.
        totals = {name: total / len(parts) for name, total in totals.items()}
        # An untrained value head misleads a trained policy.
        warms_up = step <= warmup_steps(self._algorithm)
        trains = of_values if warms_up else None
        with timer("training/update", len(batch)):
            self._updater.update(parts, lambda part: self._evaluate(part, totals), step, figures, trains)

    def check_samples(self, samples: Samples, step: int) -> None:
        """Refuse samples with non-finite values; with `skip`, their batches are skipped later.

        Raises:
            NonFiniteError: naming the tensor.
        """
        if self._skips:
            return
        named = {**{f"observation {name}": tensor for name, tensor in samples.inputs.items()}, **samples.tensors}
        for name, tensor in named.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                source, remedy = self._algorithm.adv_type, REMEDY
                if name in ("advantages", "returns") and ":" in source:
                    remedy = f"`adv_type: {source}` returns it: look there for a division by zero"
                raise NonFiniteError(name, first_nonfinite(tensor), f"step {step}", remedy)

    def check_weights(self, where: str) -> None:
        """Refuse weights that are not finite; see `Updater.check_weights`."""
        self._updater.check_weights(where)

    def _totals(self, batch: Samples, *, uneven: bool) -> dict[str, Tensor]:
        """Return the loss denominators of the whole batch, averaged over ranks; empty if all parts weigh equally."""
        if "mask" not in batch.tensors and not uneven:
            return {}
        mask = batch.tensors.get("mask")
        algorithm, tensors = self._algorithm, batch.tensors
        how, shape = algorithm.loss_agg_func, tensors["old_logprobs"].shape
        totals = {
            "total": denominator(mask, shape, how, least=0),
            "token_total": denominator(mask, shape, "token-mean", least=0),
        }
        tokens = torch.empty(len(batch), *batch.tokens, device="meta")
        entropies = sum_to_level(tokens, algorithm.logprob_type).shape
        counted = mask if mask is None else leading(mask, len(entropies))
        totals["entropy_total"] = denominator(counted, entropies, how, least=0)
        if "returns" in tensors:
            totals["value_total"] = denominator(
                tensors.get("value_mask"), tensors["returns"].shape, "token-mean", least=0
            )
        strategy = self._strategy
        # A rank may hold only padding of a batch, which counts nothing.
        summed = strategy.reduce_sum(torch.stack(list(totals.values()))).clamp(min=1) / strategy.world_size
        return dict(zip(totals, summed.unbind(), strict=True))

    def _evaluate(self, part: Samples, totals: dict[str, Tensor]) -> Loss:
        algorithm, tensors = self._algorithm, part.tensors
        evaluated = self._evaluated(part)
        values = evaluated.values if "returns" in tensors else None
        if values is not None:
            values = values[:, : tensors["returns"].shape[1]]
        entropy = sum_to_level(evaluated.entropy, algorithm.logprob_type)
        if not algorithm.entropy_bonus:
            entropy = entropy.detach()  # a metric only
        logprobs = sum_to_level(evaluated.logprobs, algorithm.logprob_type)
        if self._gaps is not None:
            old = tensors["old_logprobs"]
            gaps = (logprobs.detach() - old).abs() / old.abs().clamp(min=1)
            self._gaps.append(torch.where(broadcast_mask(tensors.get("mask"), gaps), gaps, 0).amax())
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=tensors["old_logprobs"],
            advantages=broadcast_trailing(tensors["advantages"], logprobs.shape),
            entropy=entropy,
            mask=tensors.get("mask"),
            values=values,
            old_values=tensors.get("old_values"),
            returns=tensors.get("returns"),
            value_mask=tensors.get("value_mask"),
            **totals,
        )
        loss = as_loss(self._loss(inputs, self._settings), inputs, self._settings)
        return loss if self._data is None else self._with_demonstrations(loss, self._data, len(part))

    def _with_demonstrations(self, policy_loss: Loss, data: ImitationData, rows: int) -> Loss:
        with computing(self._config.actor, self._device):
            loss = data.loss(cast("BasePolicy", self._strategy.module), rows)
        metrics = {**policy_loss.metrics, "actor/bc_loss": loss.detach()}
        return Loss(policy_loss.loss + self._algorithm.bc_weight * loss, metrics)
