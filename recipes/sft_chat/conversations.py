"""Conversations to learn from, read from files or generated, and the validation rules of recipe `sft_chat`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from recipes.language.data.problem_sources import Sums, located_rows
from recipes.language.rules.job_rules import facts
from recipes.language.rules.model_rules import (
    MODEL,
    Fault,
    check_packages,
    faults_of_folder,
    has_chat_template,
    lacks_folder,
    report_faults,
    tokenizer_faults,
)
from recipes.language.text.chat_messages import ALIGNED_SUFFIX, Message, read_messages, read_tools, without_nulls
from recipes.language.text.chat_template import WITHOUT_TEMPLATE
from recipes.sections.checks import Report, WorldSizes, check_sections, report_absent, report_unusable
from recipes.sections.imports import lacks_packages, runs_in_this_interpreter
from recipes.sections.model_folders import require_folder
from recipes.sft_chat.config import ChatConfig, ChatDataConfig
from rlinf_core import ConfigError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.suggest import excerpt

ASSISTANT: Final = "assistant"
_WEIGHT: Final = "weight"
# Keys that other programs use to say whether a message is trained on.
_MASKS: Final = ("train", "training", "loss")
# The key of prompts in Alpaca's format, whose column `input` continues the prompt.
_ALPACA: Final = "instruction"
# The maximum turns of a generated conversation, and the number of generated conversations for evaluation.
_MOST_SUMS: Final = 3
_VAL_SUMS: Final = 100
# The number of rows of a file that validation reads.
_FIRST_ROWS: Final = 200
_TRAIN: Final[KeyPath] = ("data", "train_data_paths")
_VAL: Final[KeyPath] = ("data", "val_data_paths")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """A row with messages or with texts.

    Attributes:
        place: the place of the row, such as `FILE:12`.
        messages: the messages in order; empty if the row has texts.
        first: the index of the first message that may be trained on; earlier messages are the prompt.
        untrained: the indices of messages with `weight: 0`, which are not trained on.
        tools: the functions for the chat template.
        prompt, completion: the texts of the row.
    """

    place: str
    messages: tuple[Mapping[str, Any], ...] = ()
    first: int = 0
    untrained: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    completion: str = ""


def load_conversations(config: ChatDataConfig, *, evaluation: bool) -> list[ChatRow]:
    """Return the conversations for training or for evaluation; there may be none for evaluation.

    Raises:
        ConfigError: a file cannot be read, or a row is not a conversation; it names file and line.
    """
    if config.source == "sums":
        return generated(config, _VAL_SUMS, "evaluation") if evaluation else generated(config, config.train_size, "")
    if config.val_data_paths:
        paths = config.val_data_paths if evaluation else config.train_data_paths
        return [row for path in paths for row in _read(path, config)]
    if evaluation and not config.val_size:
        return []
    whole = [row for path in config.train_data_paths for row in _read(path, config)]
    cut = len(whole) - config.val_size
    if cut < 1:
        raise ConfigError(
            f"`data.val_size` is {config.val_size}, and there are only {len(whole)} rows",
            help="write a smaller number, or set `data.val_data_paths`",
        )
    return whole[cut:] if evaluation else whole[:cut]


def _read(path: str, config: ChatDataConfig, most: int | None = None) -> Iterator[ChatRow]:
    """Yield the conversations of a file, or of its first `most` rows; raises as `load_conversations` does."""
    aligned = Path(path).suffix == ALIGNED_SUFFIX
    for place, row in located_rows(path, most):
        yield _conversation(_Row(place, row, aligned), config)


def generated(config: ChatDataConfig, count: int, part: str) -> list[ChatRow]:
    """Return conversations of one to three questions about sums of one digit."""
    sums, rng = Sums(1), random.Random(f"chat {config.seed} {part}")
    made: list[ChatRow] = []
    for number in range(count):
        problems = [sums[rng.randrange(len(sums))] for _ in range(rng.randint(1, _MOST_SUMS))]
        turns = [(("user", problem.prompt), (ASSISTANT, problem.answer)) for problem in problems]
        messages = tuple({"role": role, "content": text} for turn in turns for role, text in turn)
        made.append(ChatRow(place=f"generated conversation {number}", messages=messages))
    return made


class _Row(NamedTuple):
    """A row of a file: its place, its fields, and whether its structs are aligned, see `read_messages`."""

    place: str
    fields: Mapping[str, Any]
    aligned: bool

    def messages(self, key: str, value: object) -> tuple[Message, ...]:
        """Return the messages under a key."""
        return read_messages(value, self.place, key, aligned=self.aligned)


def _conversation(row: _Row, config: ChatDataConfig) -> ChatRow:
    fields, place = row.fields, row.place
    tools = read_tools(fields.get("tools"), place, aligned=row.aligned)
    if fields.get(config.messages_key) is not None:
        messages = row.messages(config.messages_key, fields[config.messages_key])
        _refuse_unread(row, messages, config)
        return _checked(ChatRow(place=place, messages=messages, tools=tools))
    if fields.get(config.prompt_key) is not None and fields.get(config.completion_key) is not None:
        return _pair(row, tools, config)
    if fields.get(config.text_key) is not None:
        text = fields[config.text_key]
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{place}: the text under `{config.text_key}` is empty or no text", help=_REMOVE)
        _refuse_unread(row, ({"content": text},), config)
        return ChatRow(place=place, completion=text)
    known = ", ".join(f"`{name}`" for name in fields)
    help = "set `data.messages_key`, or `data.prompt_key` and `data.completion_key`"
    if "conversations" in fields:
        help += "; turns of `from` and `value` have to be written as `role` and `content`"
    raise ConfigError(
        f"{place}: the row has neither `{config.messages_key}`, nor `{config.prompt_key}` and"
        f" `{config.completion_key}`, nor `{config.text_key}`",
        why=f"it has {known or 'no keys'}",
        help=help,
    )


def _refuse_unread(row: _Row, messages: Sequence[Message], config: ChatDataConfig) -> None:
    """Refuse columns that should change the model's input, but are not read here.

    Raises:
        ConfigError: the row has a system prompt, or Alpaca's input, that no message contains, or its own chat template
            arguments.
    """
    for column in ("system", "system_prompt", *(("input",) if config.prompt_key == _ALPACA else ())):
        text = row.fields.get(column)
        if isinstance(text, str) and text.strip() and not any(text in message["content"] for message in messages):
            help = 'write it as the first message, {"role": "system", "content": ...}, or remove it'
            raise ConfigError(
                f"{row.place}: `{column}` is no message, and would not be trained on",
                help=f"write it into `{_ALPACA}`, or remove it" if column == "input" else help,
            )
    arguments = row.fields.get("chat_template_kwargs")
    arguments = without_nulls(arguments) if row.aligned else arguments
    if arguments and arguments != config.chat_template_kwargs:
        raise ConfigError(
            f"{row.place}: the row has its own `chat_template_kwargs`, but they must be the same for all rows",
            help="write them as `data.chat_template_kwargs`, or remove them",
        )


_REMOVE: Final = "remove the row, or complete it"


def _pair(row: _Row, tools: tuple[Mapping[str, Any], ...], config: ChatDataConfig) -> ChatRow:
    prompt, completion = row.fields[config.prompt_key], row.fields[config.completion_key]
    texts = isinstance(prompt, str), isinstance(completion, str)
    if not all(texts) and any(texts):
        raise ConfigError(
            f"{row.place}: one of prompt and completion is a text, the other a list of messages",
            help="write both as texts, or both as messages",
        )
    if all(texts):
        prompt, completion = (
            [{"role": role, "content": text}] for role, text in (("user", prompt), (ASSISTANT, completion))
        )
    before, after = row.messages(config.prompt_key, prompt), row.messages(config.completion_key, completion)
    _refuse_unread(row, before, config)
    if all(texts) and not after[0]["content"].strip():
        raise ConfigError(f"{row.place}: the completion is empty", help=_REMOVE)
    if all(texts) and not config.apply_chat_template:
        if tools:
            raise ConfigError(
                f"{row.place}: `tools` are written by a chat template, and prompt and completion are texts",
                help="write `data.apply_chat_template: true`, or remove `tools`",
            )
        return ChatRow(place=row.place, prompt=before[0]["content"], completion=after[0]["content"])
    return _checked(ChatRow(place=row.place, messages=before + after, first=len(before), tools=tools))


def _checked(conversation: ChatRow) -> ChatRow:
    """Return a conversation with the `weight` keys of its messages moved into `untrained`."""
    for number, message in enumerate(conversation.messages):
        if message["role"] == ASSISTANT and not message["content"].strip() and "tool_calls" not in message:
            raise ConfigError(f"{conversation.place}: message {number}, of the assistant, is empty", help=_REMOVE)
    weights = [_weight(message, conversation.place, number) for number, message in enumerate(conversation.messages)]
    messages = tuple(
        {key: value for key, value in message.items() if key != _WEIGHT} for message in conversation.messages
    )
    untrained = tuple(number for number, weight in enumerate(weights) if not weight)
    conversation = replace(conversation, messages=messages, untrained=untrained)
    if not any(
        message["role"] == ASSISTANT and number >= conversation.first and number not in untrained
        for number, message in enumerate(messages)
    ):
        roles = ", ".join(str(message["role"]) for message in conversation.messages)
        raise ConfigError(
            f"{conversation.place}: there is no assistant message to train on", why=f"roles: {roles}", help=_REMOVE
        )
    return conversation


def _weight(message: Mapping[str, Any], place: str, number: int) -> bool:
    """Return whether a message is trained on by its `weight`, 0 or 1 as in OpenAI's fine-tuning."""
    weight = message.get(_WEIGHT, 1)
    if weight not in (0, 1):
        raise ConfigError(
            f"{place}: the `weight` of message {number} is `{excerpt(repr(weight), 40)}`",
            why="a message is trained on, or it is not",
            help="write 0 or 1",
        )
    other = next((key for key in _MASKS if message.get(key) in (0, "false", "False")), None)
    if other is not None:
        raise ConfigError(
            f"{place}: message {number} has `{other}: {message[other]}`, which is not read",
            help=f"write `{_WEIGHT}: 0` for a message that is not to be trained on",
        )
    return bool(weight)


def check(config: ChatConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report inconsistent settings of this recipe."""
    check_sections(config, config.runner, facts(config), ("actor",), report)
    _check_source(config, report)
    if not runs_in_this_interpreter(config, "actor"):
        return
    check_packages(config, report)
    _check_files(config, report)
    if not lacks_folder(config.actor.model.model_path, MODEL, report):
        report_faults(config, _faults(config), report)


def _check_source(config: ChatConfig, report: Report) -> None:
    data = config.data
    if data.type == "chat" and not data.train_data_paths:
        report(
            _TRAIN,
            "missing-key",
            "`data.type: chat` learns from files, but none are named",
            "write `data.train_data_paths: FILE`, of JSONL or Parquet; or `type: sums` for generated conversations",
        )
    if data.source == "sums" and (data.train_data_paths or data.val_data_paths):
        report.conflict(
            "data.train_data_paths data.val_data_paths",
            "the conversations are generated sums, but files are set too",
            "write `data.type: chat`, or remove the files",
            about="data.type",
        )
    if config.runner.only_eval and not data.evaluates:
        report.conflict("runner.only_eval", "there is nothing to evaluate on", "write `data.val_data_paths: FILE`")
    if data.source == "chat" and config.actor.model.model_path is None:
        report.conflict(
            "data.train_data_paths actor.model.model_path",
            "there is no `model_path`, and a model built from scratch reads only digits and signs",
            "give `actor.model.model_path`, unless the conversations are of sums",
            severity=Severity.WARNING,
        )


def _check_files(config: ChatConfig, report: Report) -> None:
    """Report files that cannot be read, or whose first rows are invalid."""
    files = (*config.data.train_data_paths, *config.data.val_data_paths)
    parquet = ["pyarrow"] if any(path.endswith(".parquet") for path in files) else []
    if lacks_packages(_TRAIN, "Parquet files need", parquet, report):
        return
    for key, paths in ((_TRAIN, config.data.train_data_paths), (_VAL, config.data.val_data_paths)):
        for path in paths:
            if not os.path.exists(path):
                report_absent(key, path, report)
                continue
            try:
                for _ in _read(path, config.data, _FIRST_ROWS):
                    pass
            except ConfigError as error:
                report_unusable(key, error, report)


def _faults(config: ChatConfig) -> list[Fault]:
    """Return the faults of the existing folders of the model and the tokenizer."""
    folder = config.actor.model.model_path
    faults = faults_of_folder(MODEL, folder, config.runner.seq_length) + tokenizer_faults(config, chat=False)
    tokenizer = config.actor.tokenizer.tokenizer_model or folder
    if tokenizer is not None and os.path.isdir(tokenizer) and not has_chat_template(Path(tokenizer)):
        for key, paths in ((_TRAIN, config.data.train_data_paths), (_VAL, config.data.val_data_paths)):
            if any(os.path.exists(path) and _has_messages(path, config.data) for path in paths):
                message = f"its rows are messages of a chat, but the tokenizer in `{tokenizer}` has no chat template"
                faults.append(Fault(key, message, WITHOUT_TEMPLATE))
    return faults


def _has_messages(path: str, config: ChatDataConfig) -> bool:
    """Return whether one of the first rows of a file has messages; False if the file cannot be read."""
    try:
        return any(row.messages for row in _read(path, config, _FIRST_ROWS))
    except ConfigError:
        return False


def require_inputs(config: ChatConfig) -> None:
    """Check, before a run on this machine starts, all rows and the model's folder.

    Raises:
        ConfigError: a row is not a conversation, or a folder is not usable.
    """
    if not runs_in_this_interpreter(config, "actor"):
        return
    folder = config.actor.model.model_path
    if folder is not None:
        require_folder(folder, "a folder that `save_pretrained` wrote")
    for fault in _faults(config):
        raise ConfigError(fault.message, help=fault.help)
    for evaluation in (False, True):
        load_conversations(config.data, evaluation=evaluation)
