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
from recipes.language.using.answer_scoring import step_of, write_evaluation
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


def loss_figures(total: Tensor) -> dict[str, float]:
    """Return mean loss, perplexity and number of tokens, given the result of `summed_loss`."""
    mean = float(total[0] / total[1].clamp(min=1))
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": float(total[1])}


def row_counts(examples: ExampleSet) -> dict[str, float]:
    """Return the numbers of evaluated, skipped and truncated rows."""
    names = {"rows": "rows", "prompts_skipped": "skipped", "cut_off": "truncated"}
    return {name: float(examples.figures[figure]) for name, figure in names.items()}


def make_writer(config: ChatConfig, tokenizer: Any) -> ExampleWriter:
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
    return write_evaluation(SCHEMA, job, step, named, folder, watch, parts)
