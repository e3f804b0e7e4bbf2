"""The loss of a model on conversations: in a run, and as `rlinf eval` of recipe `sft_chat`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from recipes.language.models.load_model import load_model, make_tokenizer, stop_token_ids
from recipes.language.models.packing import PackedRows
from recipes.language.models.policy import AnswerEval, LanguagePolicy
from recipes.language.using.answer_scoring import write_evaluation
from recipes.language.using.model_exporting import computing_device, model_of, with_folder
from recipes.sft_chat.config import ChatConfig
from recipes.sft_chat.conversations import load_conversations
from recipes.sft_chat.examples import ChatExample, ExampleSet, ExampleWriter, micro_batches, pack_examples
from rlinf_core import ConfigError, Job
from rlinf_core.runners.step_clock import Stopwatch

SCHEMA: Final = "rlinf.eval_chat/1"


@torch.no_grad()
def summed_loss(
    compute: Callable[[PackedRows], AnswerEval],
    examples: Sequence[ChatExample],
    parts: Iterable[Sequence[int]],
    device: torch.device,
    *,
    masks: bool,
) -> Tensor:
    """Return the summed loss of the target tokens of examples, in nats, and how many there are; float64 [2].

    Args:
        compute: a `LanguagePolicy`, or one that is sharded.
        examples: all of them.
        parts: micro-batches, by the numbers of examples.
        device: the device of the model.
        masks: whether it takes rows with a mask.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for part in parts:
        rows = pack_examples([examples[number] for number in part], device, masks=masks)
        loss = -float(compute(rows).logprobs.double().sum())
        total += torch.tensor([loss, len(rows.targets)], dtype=torch.float64)
    return total


def loss_figures(total: Tensor) -> dict[str, float]:
    """Return the mean loss, its exponential, and the number of tokens, of what `summed_loss` returns."""
    mean = float(total[0] / total[1].clamp(min=1))
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": float(total[1])}


def row_counts(examples: ExampleSet) -> dict[str, float]:
    """Return how many rows a loss is of, how many were too long to be, and how many were cut to the limit."""
    figures = examples.figures
    rows = len(examples.examples) - figures["split"]
    return {"rows": float(rows), "prompts_skipped": float(figures["skipped"]), "cut_off": float(figures["truncated"])}


def make_writer(config: ChatConfig, tokenizer: Any) -> ExampleWriter:
    """Return the writer of a file's conversations."""
    data = config.data
    return ExampleWriter(
        tokenizer,
        stop_token_ids(tokenizer, config.actor.model.model_path),
        longest=config.runner.seq_length,
        loss_on=data.loss_on,
        overlong=data.overlong,
        arguments=data.chat_template_kwargs,
    )


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
    """Compute the loss on the conversations of evaluation in this process, and write `eval.json`.

    Args:
        job: the checked file.
        checkpoint: a folder `global_step_N`; None: the model that the file names.
        folder: a new folder for the result.
        episodes: the number of conversations, from the first; None: all.
        allow_training_starts, video: options of policies that act.
        emit: receives progress lines.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, there are no conversations, or one cannot be written.
        CheckpointError: the checkpoint cannot be read.
    """
    config, watch = cast("ChatConfig", job.config), Stopwatch()
    rows = load_conversations(config.data, evaluation=True)[:episodes]
    if not rows:
        raise ConfigError("there are no conversations to evaluate on", help="write `data.val_data_paths: FILE`")
    with model_of(config, checkpoint) as named:
        actor, device = with_folder(config.actor, named), computing_device()
        config = config.model_copy(update={"actor": actor})
        policy = LanguagePolicy(load_model(named)).to(device).eval()
        written = make_writer(config, make_tokenizer(actor)).write(rows)
    examples = written.examples
    lengths = [len(example.tokens) for example in examples]
    masks = policy.takes_masks(config.runner.seq_length)
    parts = micro_batches(lengths, range(len(examples)), 1, 0, actor.max_tokens_per_micro_batch, masks=masks)
    figures = loss_figures(summed_loss(policy, examples, parts, device, masks=masks))
    folder.mkdir(parents=True)
    parts = {
        "data": {"paths": list(config.data.val_data_paths), "type": config.data.source, "loss_on": config.data.loss_on},
        "sets": {"all": {"problems": len(rows), **figures, **row_counts(written)}},
    }
    return write_evaluation(SCHEMA, job, checkpoint, named, folder, watch, parts)
