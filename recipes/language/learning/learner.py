"""Updates of policies and values from answers, in packed micro-batches, in step on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch, answer_sums, token_budget_parts, whole_groups
from recipes.language.answers.sequences import undrawn
from recipes.language.learning.token_targets import TokenTargets
from recipes.language.models.packing import MOST_OTHERS, WIDEST, PackedRows, pack
from recipes.language.models.policy import AnswerEval, LanguagePolicy
from recipes.training.sharding import ParallelStrategy
from recipes.training.typed_tensors import floats, integers, pieces
from recipes.training.updater import Figures, UntrainedError, Updater
from rlinf_core import Loss, LossInputs, LossSettings, value_loss
from rlinf_core.algorithms.loss_inputs import denominator
from rlinf_core.algorithms.losses import as_loss
from rlinf_core.config.sections.values import LossAggregation
from rlinf_core.worker.timer import timer

LossFunction = Callable[[LossInputs, LossSettings], Loss | Tensor]
# A value of each answer token, float32 [A], by name.
Targets = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Settings of a learner.

    Attributes:
        minibatches: the number of optimizer steps of one pass.
        epochs: the number of passes over the answers of a training step.
        max_tokens: the maximum packed tokens of a micro-batch; a longer answer is a micro-batch by itself.
        max_answers: the maximum answers of a micro-batch; None: no limit.
        longest: the maximum tokens of an answer; None: the longest of a batch.
        masks: whether the model accepts rows with a mask, see `RowLayout`.
        temperature: the sampling temperature of the answers.
        clip_grad: the maximum norm of gradients; 0: no limit.
        skip_nonfinite: whether to skip an update with a loss or gradient that is not finite, instead of raising.
        leave_out: whether zero advantages give no gradient, so that answers with them need no pass.
    """

    minibatches: int = 1
    epochs: int = 1
    max_tokens: int = 4096
    max_answers: int | None = None
    longest: int | None = None
    masks: bool = True
    temperature: float = 1.0
    clip_grad: float = 1.0
    skip_nonfinite: bool = False
    leave_out: bool = True


class AnswerLearner(ABC):
    """A learner that takes optimizer steps on answers.

    Args:
        strategy: the model, spread over the ranks that share every batch.
        optimizer: the optimizer of its weights.
        loss_settings: the settings of the loss.
        settings: the settings of the learner.
        device: the device of the model.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        loss_settings: LossSettings,
        settings: LearnerSettings,
        device: torch.device,
    ) -> None:
        self._strategy = strategy
        self._updater = Updater(
            strategy, optimizer, clip_grad=settings.clip_grad, skip_nonfinite=settings.skip_nonfinite
        )
        self._loss_settings = loss_settings
        self._settings = settings
        self._device = device
        # The number of optimizer steps taken in the current training step.
        self._updates = 0
        self._micro = MicroBatches(
            strategy,
            device,
            max_tokens=settings.max_tokens,
            masks=settings.masks,
            max_answers=settings.max_answers,
        )

    def _learn(self, batch: RolloutBatch, targets: Targets, seed: int, step: int) -> Figures:
        """Take the optimizer steps of a training step, and return metrics of all micro-batches.

        Args:
            batch: this rank's answers; whole groups.
            targets: the targets of their tokens.
            seed: the seed of the order of optimizer steps; the same on every rank.
            step: the training step, for messages.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is not finite, and such updates are not skipped.
        """
        figures = Figures()
        self._updates = 0
        for epoch in range(self._settings.epochs):
            for rows in self._minibatches(batch, seed + epoch):
                active = self._with_gradient(batch, targets, rows)
                parts = self._micro.divide(batch, active)
                totals = {name: total / len(parts) for name, total in self._totals(batch, rows, active).items()}

                def part_loss(part: list[int], totals: Mapping[str, Tensor] = totals) -> Loss:
                    lengths = batch.answer_lengths[torch.tensor(part)] if part else STAND_IN.answer_lengths
                    rows = self._micro.pack(batch, part)
                    return self._loss_of(rows, lengths, self._padded_targets(batch, targets, part), totals)

                tokens = int(batch.answer_lengths[torch.tensor(active, dtype=torch.int64)].sum())
                with timer("training/update", tokens):
                    self._updater.update(parts, part_loss, step, figures)
                self._updates += 1
        self._updater.check_weights(f"step {step}")
        self._check_reached(batch, f"step {step}")
        return figures

    def _check_reached(self, batch: RolloutBatch, where: str) -> None:  # noqa: B027 - the loss of values leaves none out
        """Raise an error after the first step if the loss does not reach weights that it should train."""

    @abstractmethod
    def _loss_of(self, rows: PackedRows, lengths: Tensor, targets: Targets, totals: Mapping[str, Tensor]) -> Loss:
        """Return the loss of a micro-batch.

        Args:
            rows: the answers of the micro-batch.
            lengths: int64 [n], tokens of each answer.
            targets: [n, longest answer], zero after the end of each answer, with a bool `mask` of trained tokens.
            totals: see `LossInputs`.
        """

    def _minibatches(self, batch: RolloutBatch, seed: int) -> Iterator[list[int]]:
        """Yield this rank's answers of each optimizer step, possibly none."""
        rows: list[list[int]] = [[] for _ in range(self._settings.minibatches)]
        for row, number in enumerate(integers(batch.minibatches)):
            rows[number].append(row)
        for number in integers(torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))):
            yield rows[number]

    def _with_gradient(self, batch: RolloutBatch, targets: Targets, rows: list[int]) -> list[int]:
        """Return the answers whose loss depends on the weights, as others need no pass."""
        return rows

    def _totals(self, batch: RolloutBatch, rows: list[int], active: list[int]) -> dict[str, Tensor]:
        """Return the denominators of losses and metrics, summed over ranks and divided by their number; metrics count
        `active`."""
        how = self._loss_settings.loss_agg_func
        mask = padded(batch.trained, batch.answer_lengths)
        totals: list[Tensor] = []
        counts: tuple[tuple[LossAggregation, list[int]], ...] = ((how, rows), (how, active), ("token-mean", active))
        for kind, counted in counts:
            part = mask[torch.tensor(counted, dtype=torch.int64)]
            totals.append(
                denominator(part, part.shape, kind, least=0, longest=self._settings.longest)
                if counted
                else torch.zeros(())
            )
        summed = self._strategy.reduce_sum(torch.stack(totals).to(self._device)).clamp(min=1)
        names = ("total", "entropy_total", "token_total")
        return dict(zip(names, (summed / self._strategy.world_size).unbind(), strict=True))

    def _padded_targets(self, batch: RolloutBatch, targets: Targets, rows: list[int]) -> dict[str, Tensor]:
        named = {**targets, "mask": batch.trained}
        if not rows:
            return {name: torch.zeros(1, 1, dtype=value.dtype, device=self._device) for name, value in named.items()}
        chosen, lengths = torch.tensor(rows), batch.answer_lengths
        longest = int(lengths[chosen].max())
        return {name: padded(value, lengths)[chosen][:, :longest].to(self._device) for name, value in named.items()}


class LanguageLearner(AnswerLearner):
    """A learner of policies.

    Args:
        policy: the model.
        loss: the loss function of `algorithm.loss_type`.
        strategy, optimizer, loss_settings, settings, device: see `AnswerLearner`.

    Attributes:
        differences: float32 [m], log-probabilities by the weights before the last `train` minus `old_logprobs`, for the
            `comparable` tokens of its first optimizer step.
        learned: the share of the last batch's answers that had a pass; metrics are means over them.
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        strategy: ParallelStrategy,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        loss_settings: LossSettings,
        settings: LearnerSettings,
        device: torch.device,
    ) -> None:
        super().__init__(strategy, optimizer, loss_settings, settings, device)
        self.policy = policy
        self.differences = torch.empty(0)
        self.learned = 0.0
        self._loss = loss

    def train(self, batch: RolloutBatch, targets: TokenTargets, seed: int, step: int = 0) -> Figures:
        """Learn from a batch, and return metrics of all micro-batches. Collective: all ranks call it together.

        Args:
            batch: this rank's answers; whole groups.
            targets: the targets of their tokens.
            seed: the seed of the order of optimizer steps; the same on every rank.
            step: the training step, for messages.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is not finite, and such updates are not skipped.
        """
        self.differences = torch.empty(0)
        self.learned = len(self._with_gradient(batch, targets.as_dict(), list(range(len(batch))))) / max(1, len(batch))
        return self._learn(batch, targets.as_dict(), seed, step)

    def evaluate(self, batch: RolloutBatch) -> Tensor:
        """Return the log-probabilities of answer tokens, float32 [A], on the CPU. Collective: all ranks call it."""
        return self._micro.logprobs(batch, self._strategy.module, self._settings.temperature)

    def _with_gradient(self, batch: RolloutBatch, targets: Targets, rows: list[int]) -> list[int]:
        """See `AnswerLearner`. Without KL or entropy terms, answers with zero advantages have no gradient, such as
        those of a group in which all or none are right.
        """
        if not self._settings.leave_out or "ref_logprobs" in targets or self._loss_settings.entropy_bonus:
            return rows
        weights = floats(answer_sums(targets["advantages"].abs(), batch.answer_lengths))
        return [row for row in rows if weights[row] != 0]  # NaN is found in the pass

    def _check_reached(self, batch: RolloutBatch, where: str) -> None:
        """See `AnswerLearner`. Tensors that no token depends on, such as those for images, do not count."""
        names = self._updater.untouched()
        if names is None or not self._strategy.reduce_max(len(names)):
            return

        def logprobs() -> Tensor:
            evaluated: AnswerEval = self._strategy.module(
                self._micro.pack(batch, [0] if len(batch) else []), self._settings.temperature
            )
            return evaluated.logprobs

        missed = names & self._updater.reached(logprobs)
        if missed:
            raise UntrainedError(
                missed,
                where,
                "log-probabilities of tokens depend on it, and `algorithm.loss_type` does not train them",
                "use `inputs.logprobs` in the loss without detaching it",
            )

    def _loss_of(self, rows: PackedRows, lengths: Tensor, targets: Targets, totals: Mapping[str, Tensor]) -> Loss:
        evaluated: AnswerEval = self._strategy.module(rows, self._settings.temperature, entropy=True)
        entropy = evaluated.entropy
        if entropy is not None and not self._loss_settings.entropy_bonus:
            entropy = entropy.detach()  # a metric only
        logprobs = padded(evaluated.logprobs, lengths)
        inputs = dict(targets)
        comparable = inputs.pop("comparable", None)
        if comparable is not None and self._updates == 0:
            gap = (logprobs.detach() - inputs["old_logprobs"])[comparable].cpu()
            self.differences = torch.cat((self.differences, gap))
        entropies = None if entropy is None else padded(entropy, lengths)
        samples = LossInputs(logprobs=logprobs, entropy=entropies, **inputs, **totals)
        return as_loss(self._loss(samples, self._loss_settings), samples, self._loss_settings)


class ValueLearner(AnswerLearner):
    """A learner of the values of the states before answer tokens."""

    def evaluate(self, batch: RolloutBatch) -> Tensor:
        """Return the value before each answer token, float32 [A], on the CPU. Collective: all ranks call it."""
        return self._micro.evaluate(batch, self._strategy.module)

    def train(self, batch: RolloutBatch, returns: Tensor, old_values: Tensor, seed: int, step: int = 0) -> Figures:
        """Learn from a batch, as `LanguageLearner.train` does.

        Args:
            batch: this rank's answers; whole groups.
            returns: float32 [A], value targets.
            old_values: float32 [A], values before the update.
            seed: the seed of the order of optimizer steps; the same on every rank.
            step: the training step, for messages.
        """
        return self._learn(batch, {"returns": returns, "old_values": old_values}, seed, step)

    def _loss_of(self, rows: PackedRows, lengths: Tensor, targets: Targets, totals: Mapping[str, Tensor]) -> Loss:
        values = padded(self._strategy.module(rows), lengths)
        old, returns = targets["old_values"], targets["returns"]
        return value_loss(values, old, returns, self._loss_settings, targets["mask"], totals["token_total"])


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """Return values of tokens, [A], as [n, longest], zero after the end of each answer; differentiable."""
    device = values.device
    longest = int(lengths.max()) if len(lengths) else 0
    inside = (torch.arange(longest)[None] < lengths[:, None]).to(device)
    return torch.zeros(inside.shape, dtype=values.dtype, device=device).masked_scatter(inside, values)


class MicroBatches:
    """A divider of a rank's answers into packed micro-batches.

    Args:
        strategy: the ranks, which get equally many micro-batches.
        device: the device of packed rows.
        max_tokens: the maximum packed tokens of a micro-batch; a longer answer is a micro-batch by itself.
        masks: whether the model accepts rows with a mask, see `RowLayout`.
        max_answers: the maximum answers of a micro-batch; None: no limit.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        device: torch.device,
        *,
        max_tokens: int,
        masks: bool,
        max_answers: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._device = device
        self._max_tokens = max_tokens
        self._masks = masks
        self._max_answers = max_answers

    def divide(self, batch: RolloutBatch, rows: list[int]) -> list[list[int]]:
        """Return answers in micro-batches of similar length, equally many on every rank, at least one; some may be
        empty.

        Collective: all ranks call it together.
        """
        limit, most = self._max_tokens, self._max_answers or max(1, len(rows))
        chosen = set(rows)
        units: list[list[int]] = []
        for group in whole_groups(batch):
            mine = [row for row in group if row in chosen]
            for start in range(0, len(mine), most):
                candidates = mine[start : start + most]
                fits = self._masks and _packed_tokens(batch, candidates) <= limit
                units += [candidates] if fits else [[row] for row in candidates]
        costs = [_packed_tokens(batch, unit) for unit in units]
        counts, shares_row = [len(unit) for unit in units], WIDEST if self._masks else 0
        budgets = token_budget_parts(costs, limit, counts, most, shares_row=shares_row)
        parts = [[row for index in part for row in units[index]] for part in budgets]
        wanted = self._strategy.reduce_max(max(1, len(parts)))
        return parts + [[] for _ in range(wanted - len(parts))]

    def pack(self, batch: RolloutBatch, rows: list[int]) -> PackedRows:
        """Return answers in packed rows; without answers, a dummy token that keeps ranks in step."""
        chosen = batch.select(torch.tensor(rows)) if rows else STAND_IN
        return pack(chosen, masks=self._masks, device=self._device)

    def logprobs(self, batch: RolloutBatch, policy: Callable[..., AnswerEval], temperature: float) -> Tensor:
        """Return a policy's log-probability of each answer token; see `evaluate`."""
        return self.evaluate(batch, lambda rows: policy(rows, temperature).logprobs)

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch, compute: Callable[[PackedRows], Tensor]) -> Tensor:
        """Return a value of each answer token, float32 [A], on the CPU. Collective: all ranks call it together.

        Args:
            batch: this rank's answers.
            compute: returns the values of packed answer tokens, float [A'].
        """
        parts = self.divide(batch, list(range(len(batch))))
        logprobs = [compute(self.pack(batch, rows)).float().cpu()[: None if rows else 0] for rows in parts]
        order = torch.tensor([row for rows in parts for row in rows], dtype=torch.int64)
        if not len(order):
            return torch.empty(0)
        split = pieces(torch.cat(logprobs), integers(batch.answer_lengths[order]))
        return torch.cat([split[index] for index in integers(order.argsort())])


def _packed_tokens(batch: RolloutBatch, rows: list[int]) -> int:
    """Return the approximate tokens of packed answers of one group, where several answers share a copy of the prompt.

    Segments of a trajectory have different prompts; prompts of equal length are taken for equal.
    """
    chosen = torch.tensor(rows)
    lengths, prompts = integers(batch.lengths[chosen]), integers(batch.prompt_lengths[chosen])
    own: Counter[int] = Counter()
    for length, prompt in zip(lengths, prompts, strict=True):
        own[prompt] += length - prompt
    packed = sum(prompt * -(-drawn // (MOST_OTHERS * prompt)) + drawn for prompt, drawn in own.items())
    return min(packed, sum(lengths))


# An answer of one token that is not trained on.
STAND_IN = RolloutBatch.of([undrawn((0,), (0,), (False,), finish_reason="length")], 1, [0.0])
