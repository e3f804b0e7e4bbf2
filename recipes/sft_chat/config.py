"""The configuration of recipe `sft_chat`: its sections and defaults.

The defaults build a Qwen2 of 0.3 M parameters, and teach it to answer sums in a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, cast

from pydantic import Field, model_validator

from recipes.language.config.language_config import (
    LanguageActorConfig,
    LanguageOptimConfig,
    ModelRunnerConfig,
    adapts,
    mapping,
    with_default,
)
from recipes.language.config.language_no_effect import has_no_end, keeps_masters
from recipes.sections.actor import checkpoints_of, of_one_rank, without_shards
from recipes.sections.values import TestFiles, TrainFiles
from rlinf_core import ConfigModel, Count, IgnoredKeys, JobConfig, Seed
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import NonNegativeInt, PositiveFloat, StepsOrNever
from rlinf_core.scalars import Bool, Data, Text

# Learning rates for all weights of a pretrained model (as in TRL), for adapters, and for a model built from scratch.
WHOLE_RATE: Final = 2e-5
ADAPTER_RATE: Final = 2e-4
BUILT_RATE: Final = 2e-3

_SYSTEM, _USER, _ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ChatRunnerConfig(ModelRunnerConfig):
    """Settings of the run."""

    max_epochs: StepsOrNever = 1


class ChatOptimConfig(LanguageOptimConfig):
    """AdamW and the clipping of gradients."""

    lr: PositiveFloat = Field(
        default=BUILT_RATE,
        description="Learning rate. Default: 2e-5 for all weights of `model_path`, 2e-4 for adapters (`lora`), 2e-3"
        " for a model built from scratch.",
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        default="linear",
        description="Learning-rate schedule after warmup: constant, linear or cosine; the last two decay to"
        " `min_lr_ratio` of `lr`.",
    )


class ChatActorConfig(LanguageActorConfig):
    """The workers that train."""

    built_words: ClassVar[tuple[str, ...]] = (_SYSTEM, _USER, _ASSISTANT)
    built_template: ClassVar[str | None] = _TEMPLATE

    global_batch_size: Count = Field(default=32, description="Conversations per optimizer step, over all ranks.")
    optim: ChatOptimConfig = Field(default_factory=ChatOptimConfig, description="Optimizer: lr, betas, clipping.")


class ChatDataConfig(ConfigModel):
    """Conversations, or prompts with completions."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("messages_key", "prompt_key", "completion_key", "text_key", "val_size", "apply_chat_template"),
            lambda data, sizes: data.source == "sums",
            "conversations are generated, not read from files",
            "remove it, or write `train_data_paths: FILE`",
            because=("type", "train_data_paths"),
        ),
        IgnoredKeys(
            ("train_size",),
            lambda data, sizes: data.source != "sums",
            "conversations come from files",
            because=("type", "train_data_paths"),
        ),
        IgnoredKeys(
            ("val_size",),
            lambda data, sizes: bool(data.val_data_paths),
            "`val_data_paths` has the rows of evaluation",
            because=("val_data_paths",),
        ),
        IgnoredKeys(
            ("seed",),
            lambda data, sizes: data.source != "sums" and not data.shuffle,
            "rows from files are used in order: `shuffle` is false",
            because=("shuffle",),
        ),
    )

    type: Literal["chat", "sums"] | None = Field(
        default=None,
        description="Source: chat, JSONL or Parquet files; sums, generated conversations. Default: chat if"
        " `train_data_paths` is set, else sums.",
    )
    train_data_paths: TrainFiles = Field(
        default=(),
        description="JSONL or Parquet files: one path or a list. A row has `messages`, or `prompt` and `completion`,"
        " or `text`.",
    )
    val_data_paths: TestFiles = Field(
        default=(), description="JSONL or Parquet files for evaluation, one path or a list."
    )
    val_size: NonNegativeInt = Field(
        default=0, description="Rows at the end of the training files that are held out for evaluation; 0: none."
    )
    train_size: Count = Field(default=2000, description="Number of generated conversations.")
    messages_key: Text = Field(default="messages", description="Key of a row's messages: a list of role and content.")
    prompt_key: Text = Field(default="prompt", description="Key of a row's prompt: a text, or messages.")
    completion_key: Text = Field(default="completion", description="Key of the completion: a text, or messages.")
    text_key: Text = Field(default="text", description="Key of a row's plain text, all of which is trained on.")
    loss_on: Literal["completions", "all"] = Field(
        default="completions",
        description="Tokens that are trained on: completions, every turn of the assistant or the completion; or all.",
    )
    apply_chat_template: Bool = Field(
        default=False,
        description="Format a prompt and completion that are texts as messages. Messages always are.",
    )
    chat_template_kwargs: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Arguments of the chat template, by its own names, such as `{enable_thinking: false}`.",
    )
    overlong: Literal["skip", "truncate"] = Field(
        default="skip",
        description="A conversation of more than `runner.seq_length` tokens: skip it, or truncate it at the end. Both"
        " are counted.",
    )
    shuffle: Bool = Field(default=True, description="Reshuffle the conversations in every epoch.")
    seed: Seed = Field(default=0, description="Seed of the order, and of generated conversations.")

    @property
    def train_files(self) -> tuple[str, ...]:
        """The paths of `train_data_paths`."""
        return self.train_data_paths

    @property
    def source(self) -> str:
        """The source of the conversations: `chat` or `sums`."""
        return self.type or ("chat" if self.train_data_paths else "sums")

    @property
    def evaluates(self) -> bool:
        """Whether there are conversations for evaluation."""
        return bool(self.val_data_paths or self.val_size or self.source == "sums")


class ChatConfig(JobConfig):
    """Configuration of the sft_chat recipe."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("actor.optim", "actor.global_batch_size"),
            lambda config, sizes: config.runner.only_eval,
            "`only_eval` trains nothing",
            "it takes effect again without `runner.only_eval`",
            because=("runner.only_eval",),
            severity=Severity.NOTE,
        ),
        IgnoredKeys(
            ("runner.val_check_interval", "runner.val_before_train"),
            lambda config, sizes: not config.data.evaluates,
            "there is nothing to evaluate on",
            "write `data.val_data_paths: FILE` or `data.val_size: 100`",
            because=("data.val_size",),
            severity=Severity.NOTE,
        ),
        has_no_end("actor"),
        of_one_rank("actor", reads=lambda config: keeps_masters(config.actor.model)),
        without_shards("actor", lambda config: keeps_masters(config.actor.model)),
        checkpoints_of("actor"),
    )

    runner: ChatRunnerConfig = Field(
        default_factory=ChatRunnerConfig, description="Run length, what is saved, and where results go."
    )
    actor: ChatActorConfig = Field(
        default_factory=ChatActorConfig, description="The model that learns, its optimizer and its sharding."
    )
    data: ChatDataConfig = Field(default_factory=ChatDataConfig, description="The conversations.")

    @model_validator(mode="before")
    @classmethod
    def _rate_by_what_is_trained(cls, written: Any) -> Any:
        """Set the default learning rate according to what is trained."""
        if not isinstance(written, Mapping):
            return written
        job = dict(cast("Mapping[str, Any]", written))
        actor = job.get("actor")
        if isinstance(actor, dict | None):
            model, optim = mapping(mapping(actor).get("model")), mapping(actor).get("optim")
            # An empty text names no model.
            rate = ADAPTER_RATE if adapts(model) else WHOLE_RATE if model.get("model_path") else BUILT_RATE
            job["actor"] = {**mapping(actor), "optim": with_default(optim, "lr", rate)}
        return job
