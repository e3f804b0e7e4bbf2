"""Policy updates from answers, in packed micro-batches; the same on every rank, whatever share it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.language.batch import RolloutBatch, answer_sums, balanced, token_budget_parts, whole_groups
from recipes.language.packing import PackedRow, pack, packed_tokens
from recipes.language.policy import AnswerEval, LanguagePolicy
from recipes.training.sharding import ParallelStrategy
from recipes.training.updater import Figures, Updater
from rlinf_core import Loss, LossInputs, LossSettings
from rlinf_core.algorithms.aggregation import denominator

LossFunction = Callable[[LossInputs, LossSettings], Loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The settings by which a learner goes over a batch.

    Attributes:
        minibatches: optimizer steps of one pass.
        epochs: passes over the answers of a training step.
        max_tokens: packed tokens of one forward and backward pass; an answer with its prompt above it is one by itself.
        share_prompts: whether the prompt of a group stands once in a packed row.
        temperature: that answers were sampled at.
        clip_grad: largest norm of a gradient; 0: any.
        skip_nonfinite: leave an update with a loss or gradient that is not finite out, instead of raising.
    """

    minibatches: int = 1
    epochs: int = 1
    max_tokens: int = 4096
    share_prompts: bool = True
    temperature: float = 1.0
    clip_grad: float = 1.0
    skip_nonfinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTargets:
    """The targets of the answer tokens of a batch; all float32 [A].

    Attributes:
        advantages: of each token.
        old_logprobs: of the policy that ratios are taken against.
        ref_logprobs: of the reference model; None: no divergence in the loss.
        behaviour_logprobs: of the policy that drew the tokens, where that is another one; None else.
        returns, old_values: what values learn, and the values when the answers were judged; None without a critic.
    """

    advantages: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Return those that are there, by name."""
        names = ("advantages", "old_logprobs", "ref_logprobs", "behaviour_logprobs", "returns", "old_values")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class LanguageLearner:
    """Takes optimizer steps on answers.

    Args:
        policy: the model.
        strategy: how its weights are held by the ranks that share every batch.
        optimizer: of its weights.
        loss: by `algorithm.loss_type`.
        loss_settings: of the loss.
        settings: how batches are gone over.
        device: where the model is.
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
        self.policy = policy
        self._strategy = strategy
        self._updater = Updater(
            strategy, optimizer, clip_grad=settings.clip_grad, skip_nonfinite=settings.skip_nonfinite
        )
        self._loss = loss
        self._loss_settings = loss_settings
        self._settings = settings
        self._device = device

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch, policy: LanguagePolicy | None = None) -> AnswerEval:
        """Return what a policy thinks of a batch's answer tokens now, on the CPU. All ranks call it together.

        Args:
            batch: this rank's answers.
            policy: another one than that which learns, such as a reference; it is held whole by every rank.
        """
        parts = self._parts(batch, list(range(len(batch))))
        found = [(rows, self._forward(batch, rows, policy, entropy=False)) for rows in parts]
        order = [row for rows, _ in found for row in rows]
        if not order:
            nothing = torch.empty(0)
            return AnswerEval(nothing, None, None)
        back = torch.tensor(order).argsort()
        lengths = batch.answer_lengths[torch.tensor(order)]

        def restored(pieces: Sequence[Tensor]) -> Tensor:
            split = torch.cat([piece.cpu() for piece in pieces]).split(lengths.tolist())
            return torch.cat([split[index] for index in back.tolist()])

        values = [each.values for _, each in found if each.values is not None]
        return AnswerEval(restored([each.logprobs for _, each in found]), None, restored(values) if values else None)

    def train(self, batch: RolloutBatch, targets: TokenTargets, seed: int, step: int = 0) -> Figures:
        """Learn from a batch, and return figures of all micro-batches.

        Args:
            batch: this rank's answers; whole groups.
            targets: of their tokens.
            seed: of the order of groups; the same on every rank.
            step: the training step, for messages.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is not finite, and such updates are not skipped.
        """
        figures = Figures()
        for epoch in range(self._settings.epochs):
            for rows in self._minibatches(batch, seed + epoch):
                self._update(batch, targets, rows, step, figures)
        self._updater.check_weights(f"step {step}")
        return figures

    def _minibatches(self, batch: RolloutBatch, seed: int) -> Iterator[list[int]]:
        """Yield the answers of each optimizer step: whole groups, alike in tokens."""
        groups, count = whole_groups(batch), self._settings.minibatches
        if count == 1:
            yield list(range(len(batch)))
            return
        order: list[int] = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
        lengths = batch.lengths.tolist()
        weights = [sum(lengths[row] for row in groups[number]) for number in order]
        for part in balanced(weights, count):
            yield [row for index in part for row in groups[order[index]]]

    def _parts(self, batch: RolloutBatch, rows: list[int]) -> list[list[int]]:
        """Return answers in micro-batches of similar length; as many on every rank, some of them empty."""
        limit, share = self._settings.max_tokens, self._settings.share_prompts
        lengths = batch.lengths.tolist()
        chosen = set(rows)
        units: list[list[int]] = []
        for group in whole_groups(batch):
            mine = [row for row in group if row in chosen]
            if not mine:
                continue
            if share and packed_tokens(batch, mine, share_prompts=True) <= limit:
                units.append(mine)
            else:
                units += [[row] for row in mine]
        costs = [packed_tokens(batch, unit, share_prompts=share) for unit in units]
        if not share:
            costs = [sum(lengths[row] for row in unit) for unit in units]
        parts = [[row for index in part for row in units[index]] for part in token_budget_parts(costs, limit)]
        wanted = self._strategy.reduce_max(len(parts))
        return parts + [[] for _ in range(wanted - len(parts))]

    def _with_gradient(self, batch: RolloutBatch, targets: TokenTargets, rows: list[int]) -> list[int]:
        """Return the answers whose loss depends on the weights, one at least; the others need no pass.

        Under a policy loss alone, answers with advantages of 0 add nothing, such as those of a group in which all or
        none are right. A NaN stays, to be found.
        """
        if targets.ref_logprobs is not None or targets.returns is not None or self._loss_settings.entropy_bonus:
            return rows
        moved = answer_sums(targets.advantages.abs(), batch.answer_lengths)
        return [row for row in rows if moved[row] != 0] or rows[:1]

    def _update(self, batch: RolloutBatch, targets: TokenTargets, rows: list[int], step: int, figures: Figures) -> None:
        """Take one optimizer step."""
        parts = self._parts(batch, self._with_gradient(batch, targets, rows))
        totals = {name: total / len(parts) for name, total in self._totals(batch, rows).items()}
        self._updater.update(parts, lambda part: self._judge(batch, targets, part, totals), step, figures)

    def _totals(self, batch: RolloutBatch, rows: list[int]) -> dict[str, Tensor]:
        """Return what losses are divided by, over all ranks, by rank on average."""
        how = self._loss_settings.loss_agg_func
        mask = _padded(batch.trained, batch.answer_lengths)[torch.tensor(rows, dtype=torch.int64)]
        if rows:
            found = torch.stack([denominator(mask, mask.shape, how), denominator(mask, mask.shape, "token-mean")])
        else:
            found = torch.zeros(2)
        summed = self._strategy.reduce_sum(found.to(self._device)).clamp(min=1) / self._strategy.world_size
        return {"total": summed[0], "entropy_total": summed[0], "value_total": summed[1]}

    def _judge(self, batch: RolloutBatch, targets: TokenTargets, rows: list[int], totals: Mapping[str, Tensor]) -> Loss:
        entropy = bool(self._loss_settings.entropy_bonus)
        judged = self._forward(batch, rows, None, entropy=entropy)
        if not rows:
            return Loss(judged.logprobs.sum() * 0, {})
        chosen = torch.tensor(rows)
        lengths = batch.answer_lengths
        mine = lengths[chosen]
        given = {
            name: _padded(value, lengths)[chosen][:, : int(mine.max())].to(self._device)
            for name, value in {**targets.named(), "mask": batch.trained}.items()
        }
        critic = judged.values is not None and "returns" in given
        return self._loss(
            LossInputs(
                logprobs=_padded(judged.logprobs, mine),
                entropy=None if judged.entropy is None else _padded(judged.entropy, mine),
                values=_padded(judged.values, mine) if critic and judged.values is not None else None,
                value_mask=given["mask"] if critic else None,
                **given,
                **totals,
            ),
            self._loss_settings,
        )

    def _forward(
        self, batch: RolloutBatch, rows: list[int], policy: LanguagePolicy | None, *, entropy: bool
    ) -> AnswerEval:
        """Return what the policy thinks of some answers; of a stand-in where there are none, for the other ranks."""
        row: PackedRow = _row(batch, rows, self._settings.share_prompts, self._device)
        module: nn.Module = policy or self._strategy.module
        return module(row, self._settings.temperature, entropy=entropy)


def _row(batch: RolloutBatch, rows: list[int], share: bool, device: torch.device) -> PackedRow:
    if rows:
        return pack(batch.select(torch.tensor(rows)), share_prompts=share, device=device)
    one = torch.ones(1, dtype=torch.int64)
    flag, number = torch.zeros(1, dtype=torch.bool), torch.zeros(1)
    stand_in = RolloutBatch(
        tokens=torch.zeros(2, dtype=torch.int64),
        lengths=2 * one,
        prompt_lengths=one,
        trained=flag,
        logprobs=number,
        versions=one,
        groups=one,
        rewards=number,
        finished=flag,
    )
    return pack(stand_in, share_prompts=False, device=device)


def _padded(values: Tensor, lengths: Tensor) -> Tensor:
    """Return values of tokens, [A], as [n, longest], zero behind the end of each answer; differentiable."""
    device = values.device
    longest = int(lengths.max()) if len(lengths) else 0
    inside = (torch.arange(longest)[None] < lengths[:, None]).to(device)
    return torch.zeros(inside.shape, dtype=values.dtype, device=device).masked_scatter(inside, values)
