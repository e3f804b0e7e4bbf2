"""The actors of recipe `sft_chat`, which train a language model on conversations: their work, evaluation and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from recipes.language.data.problems import training_order
from recipes.language.language_memory import gathered_parts, model_sizes
from recipes.language.models.load_model import load_model, make_tokenizer, stop_token_ids
from recipes.language.models.packing import PackedRows
from recipes.language.models.policy import AnswerEval, LanguagePolicy
from recipes.language.trained_models import computing_device, model_of, step_of, with_folder, write_evaluation
from recipes.language.weights.model_export import export_state
from recipes.language.workers.training_worker import TrainingWorker
from recipes.sft_chat.chat_runner import ExampleCounts
from recipes.sft_chat.config import ChatConfig
from recipes.sft_chat.conversations import load_conversations
from recipes.sft_chat.examples import (
    COMPARED_TURNS,
    ChatExample,
    ExampleSet,
    ExampleWriter,
    micro_batches,
    pack_examples,
)
from recipes.training.updater import Figures, Updater
from recipes.training.without_memory import TORCH, TRAINING, TRANSFORMERS, WORKER, shard_parts
from rlinf_core import ConfigError, Job, Loss
from rlinf_core.job.recipe import ProcessForecast
from rlinf_core.runners.step_clock import Stopwatch
from rlinf_core.runners.storage.first_contact import Difference

_SCHEMA: Final = "rlinf.eval_chat/1"


@torch.no_grad()
def _summed_loss(
    compute: Callable[[PackedRows], AnswerEval],
    examples: Sequence[ChatExample],
    parts: Iterable[Sequence[int]],
    device: torch.device,
    *,
    masks: bool,
) -> Tensor:
    """Return the summed loss over target tokens, in nats, and their number; float64 [2].

    Args:
        compute: a `LanguagePolicy`, possibly sharded.
        examples: all examples.
        parts: micro-batches, as numbers of examples.
        device: the device of the model.
        masks: whether the model accepts rows with a mask.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for part in parts:
        rows = pack_examples([examples[number] for number in part], device, masks=masks)
        loss = -float(compute(rows).logprobs.double().sum())
        total += torch.tensor([loss, len(rows.targets)], dtype=torch.float64)
    return total


def _loss_figures(total: Tensor) -> dict[str, float]:
    """Return mean loss, perplexity and number of tokens, given the result of `_summed_loss`."""
    mean = float(total[0] / total[1].clamp(min=1))
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": float(total[1])}


def row_counts(examples: ExampleSet) -> dict[str, float]:
    """Return the numbers of evaluated, skipped and truncated rows."""
    names = {"rows": "rows", "prompts_skipped": "skipped", "cut_off": "truncated"}
    return {name: float(examples.figures[figure]) for name, figure in names.items()}


def _make_writer(config: ChatConfig, tokenizer: Any) -> ExampleWriter:
    """Return the writer of examples that the configuration describes."""
    data = config.data
    return ExampleWriter(
        tokenizer,
        stop_token_ids(tokenizer, config.actor.model.model_path),
        longest=config.runner.seq_length,
        loss_on=data.loss_on,
        overlong=data.overlong,
        arguments=data.chat_template_kwargs,
    )


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
        writer = _make_writer(self._config, self._tokenizer)
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
        total = _summed_loss(module, source.examples, parts, self.torch_device, masks=self._masks)
        figures = _loss_figures(self._state.strategy.reduce_sum(total))
        self._offload()
        return {f"eval/{name}": value for name, value in (figures | row_counts(source)).items()}

    # Checkpoints

    def save_model(self, folder: str) -> None:
        """Write a folder that `from_pretrained` and engines load: config, tokenizer, and weights with adapters
        merged."""
        export_state(self._state, self._config.actor, self._tokenizer, folder, self._contact, writes=self._rank == 0)


def evaluate(
    job: Job,
    checkpoint: Path | None,
    folder: Path,
    *,
    episodes: int | None = None,
    allow_training_starts: bool = False,
    video: bool | None = None,
    emit: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Compute the loss on the evaluation conversations in this process, and write `eval.json`.

    Args:
        job: the validated job.
        checkpoint: a folder `global_step_N`; None: the model that the configuration names.
        folder: a new folder for the result.
        episodes: the number of conversations, from the first; None: all.
        allow_training_starts, video: options of policies that act.
        emit: receives progress lines.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, there are no conversations, or the template rejects one.
        CheckpointError: the checkpoint cannot be read.
    """
    config, watch, step = cast("ChatConfig", job.config), Stopwatch(), step_of(checkpoint)
    rows = load_conversations(config.data, evaluation=True)[:episodes]
    if not rows:
        raise ConfigError("there are no conversations to evaluate on", help="write `data.val_data_paths: FILE`")
    with model_of(config, checkpoint) as named:
        actor, device = with_folder(config.actor, named), computing_device()
        config = config.model_copy(update={"actor": actor})
        policy = LanguagePolicy(load_model(named)).to(device).eval()
        written = _make_writer(config, make_tokenizer(actor)).write(rows)
    examples = written.examples
    lengths = [len(example.tokens) for example in examples]
    masks = policy.takes_masks(config.runner.seq_length)
    parts = micro_batches(lengths, range(len(examples)), 1, 0, actor.max_tokens_per_micro_batch, masks=masks)
    figures = _loss_figures(_summed_loss(policy, examples, parts, device, masks=masks))
    folder.mkdir(parents=True)
    parts = {
        "data": {"paths": list(config.data.val_data_paths), "type": config.data.source, "loss_on": config.data.loss_on},
        "sets": {"all": {"problems": len(rows), **figures, **row_counts(written)}},
    }
    return write_evaluation(_SCHEMA, job, step, named, folder, watch, parts)


# Bytes in memory per byte of a conversation file: rows as objects, and their tokens.
_READ: Final = 6


def forecast(config: ChatConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory estimate of each process of a job, see `Recipe.memory`; raises as `model_sizes` does."""
    actor, count = config.actor, world_sizes.get("actor") or 1
    model, fsdp = model_sizes(actor), actor.fsdp_config
    files = (Path(name) for name in (*config.data.train_data_paths, *config.data.val_data_paths))
    longest = config.runner.seq_length
    tokens = min(max(actor.max_tokens_per_micro_batch, longest), actor.global_batch_size * longest)
    logits = model.logits(tokens)
    parts = {
        "base": WORKER + TORCH + TRANSFORMERS + TRAINING,
        **shard_parts(model.weights, model.trained, fsdp, count, state_dtype=actor.optim.state_dtype),
        "conversations": _READ * sum(file.stat().st_size for file in files if file.is_file()),
        "activations": tokens * model.learning + logits,
    }
    parts |= gathered_parts(model, actor.model.precision, fsdp, count, parts["activations"])
    there = {part: size for part, size in parts.items() if size}
    on_accelerator = {"activations": tokens * model.learning_on_accelerator + logits}
    return [ProcessForecast("actor", count, there, 0, actor.enable_offload, (), on_accelerator)]
