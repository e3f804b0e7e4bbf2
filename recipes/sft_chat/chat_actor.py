"""The actors of recipe `sft_chat`, which train a language model on conversations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from recipes.language.data.problems import training_order
from recipes.language.models.load_model import make_tokenizer
from recipes.language.models.policy import AnswerEval
from recipes.language.weights.model_export import export_state
from recipes.language.workers.training_worker import TrainingWorker
from recipes.sft_chat.chat_evaluation import loss_figures, make_writer, row_counts, summed_loss
from recipes.sft_chat.chat_runner import ExampleCounts
from recipes.sft_chat.config import ChatConfig
from recipes.sft_chat.conversations import load_conversations
from recipes.sft_chat.examples import COMPARED_TURNS, ExampleSet, micro_batches, pack_examples
from recipes.training.updater import Figures, Updater
from rlinf_core import Loss
from rlinf_core.runners.storage.first_contact import Difference


class _Pass(NamedTuple):
    """A forward and backward pass: numbers of its examples, and the divisor of the summed loss."""

    examples: list[int]
    divisor: float


class ChatActor(TrainingWorker):
    """An actor that learns from conversations. Ranks share every batch, and the weights as `actor.fsdp_config` says."""

    config_section = "actor"
    _config: ChatConfig

    def init_worker(self) -> ExampleCounts:
        """Read the conversations, and load or build the model; all ranks start with the same weights.

        Raises:
            ConfigError: a row cannot be trained on, or the model cannot be loaded.
        """
        config = self._config.actor
        torch.set_num_threads(config.threads)
        self._tokenizer = make_tokenizer(config)
        counts = self._read()
        policy = self._begin_training(self._tokenizer)
        self._masks = policy.takes_masks(self._config.runner.seq_length)
        self._updater = Updater(
            self._state.strategy,
            self._state.optimizer,
            clip_grad=config.optim.clip_grad,
            skip_nonfinite=self._config.runner.on_nonfinite == "skip",
        )
        return counts

    def _read(self) -> ExampleCounts:
        data = self._config.data
        writer = make_writer(self._config, self._tokenizer)
        rows = [load_conversations(data, evaluation=evaluation) for evaluation in (False, True)]
        self._contact.compare(
            "tokens before the assistant's turns",
            "the prompts that an engine would get",
            lambda: writer.compare_prompts(rows[0][:COMPARED_TURNS]),
        )
        self._examples, self._evaluation = (writer.write(part) for part in rows)
        counts = Difference(note=f"{len(rows[0])} rows for training, {len(rows[1])} for evaluation")
        self._contact.keep("rows of `data`", "their keys and roles", counts)
        if self._rank == 0:
            self._tell(self._examples)
        return ExampleCounts(len(self._examples.examples), len(self._evaluation.examples))

    def _tell(self, examples: ExampleSet) -> None:
        """Warn of rows that are skipped, truncated or lack an ending token."""
        figures, longest = examples.figures, self._config.runner.seq_length
        if figures["skipped"]:
            self.log_warning("skipped %d rows of more than %d tokens (`data.overlong`)", figures["skipped"], longest)
        if figures["truncated"]:
            self.log_warning("truncated %d rows to %d tokens (`data.overlong`)", figures["truncated"], longest)
        if figures["endless"]:
            self.log_warning(
                "behind %d turns of the assistant the chat template writes no token that ends an answer: the model does"
                " not learn to stop. Name the token that it writes there, or before the next message, in"
                " generation_config.json or as eos_token of the tokenizer; without one, use a template that ends turns",
                figures["endless"],
            )

    # Learning

    def learn(self, step: int, last_step: int | None) -> dict[str, float]:
        """Take one optimizer step, whose examples depend only on its number.

        Args:
            step: the training step.
            last_step: the last step of the run; None: unlimited.

        Returns:
            Metrics by their full names, to be averaged over ranks.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite (`runner.on_nonfinite`).
        """
        began, data = time.perf_counter(), self._config.data
        rate = self._begin_step(step, last_step)
        size, count = self._config.actor.global_batch_size, len(self._examples.examples)
        chosen = training_order(count, (step - 1) * size, size, seed=data.seed, shuffle=data.shuffle)
        passes, figures = self._passes(self._examples, chosen), Figures()
        self._updater.update(passes, self._loss, step, figures)
        self._updater.check_weights(f"step {step}")
        tokens = sum(self._examples.lengths[number] for number in chosen)
        seconds = time.perf_counter() - began
        return {
            **self._end_step(step, figures),
            "train/epoch": step * size / count,
            "train/actor/tokens": tokens,
            "train/actor/tokens_per_second": tokens / seconds,
            "train/actor/lr": rate,
        }

    def _passes(self, source: ExampleSet, chosen: Sequence[int]) -> list[_Pass]:
        """Return this rank's passes over examples, with divisors such that the mean loss over passes and ranks is the
        mean over all target tokens.
        """
        targets = sum(int(source.examples[number].trained.sum()) for number in chosen)
        parts = micro_batches(
            source.lengths,
            chosen,
            self._world_size,
            self._rank,
            self._config.actor.max_tokens_per_micro_batch,
            masks=self._masks,
        )
        return [_Pass(part, max(1, targets) / (len(parts) * self._world_size)) for part in parts]

    def _loss(self, part: _Pass) -> Loss:
        examples = [self._examples.examples[number] for number in part.examples]
        rows = pack_examples(examples, self.torch_device, masks=self._masks)
        evaluated: AnswerEval = self._state.strategy.module(rows)
        loss = -evaluated.logprobs.sum() / part.divisor
        return Loss(loss, {"actor/loss": loss.detach()})

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss over the target tokens of evaluation, in nats, and the perplexity."""
        self._state.onload()
        source = self._evaluation
        parts = [part.examples for part in self._passes(source, range(len(source.examples)))]
        module = self._state.strategy.module
        total = summed_loss(module, source.examples, parts, self.torch_device, masks=self._masks)
        figures = loss_figures(self._state.strategy.reduce_sum(total))
        self._offload()
        return {f"eval/{name}": value for name, value in (figures | row_counts(source)).items()}

    # Checkpoints

    def save_model(self, folder: str) -> None:
        """Write a folder that `from_pretrained` and engines load: config, tokenizer, and weights with adapters
        merged."""
        export_state(self._state, self._config.actor, self._tokenizer, folder, self._contact, writes=self._rank == 0)
