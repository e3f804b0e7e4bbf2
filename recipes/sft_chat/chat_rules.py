"""Validation rules of recipe `sft_chat`, and checks of rows and folders."""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import Final

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
from recipes.language.templates.chat_template import WITHOUT_TEMPLATE
from recipes.sections.checks import Report, WorldSizes, check_sections, report_absent, report_unusable
from recipes.sections.imports import lacks_packages, runs_in_this_interpreter
from recipes.sections.model_folders import require_folder
from recipes.sft_chat.config import ChatConfig
from recipes.sft_chat.conversations import FIRST_ROWS, check_rows, has_messages, load_conversations
from rlinf_core import ConfigError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path

_TRAIN: Final[Path] = ("data", "train_data_paths")
_VAL: Final[Path] = ("data", "val_data_paths")


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
                check_rows(config.data, [path], FIRST_ROWS)
            except ConfigError as error:
                report_unusable(key, error, report)


def _faults(config: ChatConfig) -> list[Fault]:
    """Return the faults of the existing folders of the model and the tokenizer."""
    folder = config.actor.model.model_path
    faults = faults_of_folder(MODEL, folder, config.runner.seq_length) + tokenizer_faults(config, chat=False)
    tokenizer = config.actor.tokenizer.tokenizer_model or folder
    if tokenizer is not None and os.path.isdir(tokenizer) and not has_chat_template(FilePath(tokenizer)):
        for key, paths in ((_TRAIN, config.data.train_data_paths), (_VAL, config.data.val_data_paths)):
            if any(os.path.exists(path) and has_messages(path, config.data) for path in paths):
                message = f"its rows are messages of a chat, but the tokenizer in `{tokenizer}` has no chat template"
                faults.append(Fault(key, message, WITHOUT_TEMPLATE))
    return faults


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
