"""Validation rules for problems and rewards: missing files, tasks, packages and functions."""

from __future__ import annotations

import os

from recipes.language.config.language_config import LanguageConfig
from recipes.language.data.problem_sources import FileProblems, check_file
from recipes.language.rewards.functions import detect_convention, missing_columns, signature_in_source
from recipes.language.rewards.scoring import PROGRAMS
from recipes.sections.checks import Report, report_absent, report_unusable
from recipes.sections.imports import check_import, check_sandbox, lacks_packages, runs_in_this_interpreter
from rlinf_core import ConfigError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path

_REWARD: Path = ("reward", "reward_type")
_SOURCES = {"reasoning_gym": ("reasoning_gym",), "parquet": ("pyarrow",)}


def check_data(config: LanguageConfig, report: Report) -> None:
    """Report a source of problems that lacks files, task or package, and a reward that does not fit the source."""
    _check_source(config, report)
    _check_reward(config, report)
    if runs_in_this_interpreter(config, "rollout"):
        packages = _SOURCES.get(config.data.type or "", ())
        if not lacks_packages(("data", "type"), "this needs", packages, report):
            _check_files(config, report)


def _check_source(config: LanguageConfig, report: Report) -> None:
    data = config.data
    if data.type == "reasoning_gym" and not data.settings.task:
        report.conflict(
            "data.options.task data.type",
            "`data.type: reasoning_gym` needs a task",
            "write `data.options: {task: chain_sum}`, or another name of that library",
        )
    evaluates = config.runner.only_eval and bool(data.val_data_paths)
    if data.type in ("jsonl", "parquet") and not data.train_data_paths and not evaluates:
        report.conflict("data.type", f"`data.type: {data.type}` needs files", "write `data.train_data_paths: FILE`")
    if data.type not in (None, "jsonl", "parquet") and (data.train_data_paths or data.val_data_paths):
        report.conflict(
            "data.train_data_paths data.val_data_paths",
            f"`data.type: {data.type}` generates its problems, but files are set too",
            "write `data.type: jsonl`, or remove the files",
            about="data.type",
        )
    if data.val_data_paths and not data.train_data_paths and not evaluates:
        report.conflict(
            "data.val_data_paths",
            "there are evaluation files, but no training files",
            "write `data.train_data_paths: FILE`, or `runner.only_eval: true`",
            about="data.train_data_paths",
        )
    if len(data.train_data_paths) == 1 and data.train_weights[0] is not None:
        report.conflict(
            "data.train_data_paths",
            "`weight` is a file's share among several, and there is one",
            "write the path alone, or add other files",
        )
    if data.curriculum is not None and data.curriculum.low >= data.curriculum.high:
        report.conflict(
            "data.curriculum.low data.curriculum.high",
            f"`low: {data.curriculum.low:g}` is not below `high: {data.curriculum.high:g}`: every problem that was"
            " asked would be passed over",
            "write `low: 0.05` and `high: 0.95`",
        )
    if data.system_prompt and not data.apply_chat_template:
        report.conflict(
            "data.system_prompt",
            "`system_prompt` needs a chat template",
            "write `data.apply_chat_template: true`, or put the text into `few_shot`",
        )


def check_rewards(config: LanguageConfig, report: Report) -> None:
    """Report rewards of a rule that do not prefer correct answers."""
    right, wrong = config.reward.correct_reward, config.reward.incorrect_reward
    if ":" not in config.reward.reward_type and right <= wrong:
        report.conflict(
            "reward.correct_reward reward.incorrect_reward",
            f"`correct_reward: {right:g}` is not above `incorrect_reward: {wrong:g}`: correct answers would not be"
            " learned",
            "write `correct_reward: 1` and `incorrect_reward: 0`",
        )


def _check_reward(config: LanguageConfig, report: Report) -> None:
    kind, longest = config.reward.reward_type, config.longest_answer
    if config.reward.overlong_margin > longest:
        report.conflict(
            "reward.soft_overlong",
            f"`soft_overlong: {config.reward.overlong_margin}` exceeds `max_new_tokens` {longest}: every answer, even"
            " of one token, would get a penalty",
            f"write `soft_overlong: {max(1, longest // 4)}`",
            about="rollout.sampling_params.max_new_tokens",
        )
    if kind == "reasoning_gym" and config.data.type != "reasoning_gym":
        report.conflict(
            "reward.reward_type",
            "`reward_type: reasoning_gym` scores problems of that library, but `data.type` is another source",
            "write `reward_type: number`",
        )
    if ":" in kind:
        check_import(config, _REWARD, kind, "reward", report)
        if runs_in_this_interpreter(config, "reward"):
            _check_signature(kind, report)
    elif kind == PROGRAMS:
        check_sandbox(config, _REWARD, "reward_type: code", "reward", report)
    elif kind == "math" and runs_in_this_interpreter(config, "reward"):
        lacks_packages(_REWARD, "this needs", ["math_verify"], report)


def _check_signature(kind: str, report: Report) -> None:
    """Report a reward function with unsupported arguments, by parsing its source."""
    signature = signature_in_source(kind)
    if signature is None:
        return
    try:
        detect_convention(signature, kind)
    except ConfigError as error:
        report.conflict("reward.reward_type", f"{error.message}: {error.why}", error.help)


def _check_symbols(config: LanguageConfig, key: str, path: str, problems: FileProblems, report: Report) -> None:
    """Warn of problems with characters that a model built from scratch cannot read or write."""
    actor = config.actor
    if actor.model.model_path is not None:
        return
    for number in range(len(problems)):
        text = f"{problems[number].prompt}{problems[number].answer}"
        for word in actor.built_words:
            text = text.replace(word, "")
        unread = next((character for character in text if character not in actor.built_symbols), None)
        if unread is not None:
            report.conflict(
                f"data.{key}",
                f"there is no `model_path`, and a model built from scratch reads only `{actor.built_symbols}`: problem"
                f" {number + 1} of `{path}` has {unread!r}",
                "give `actor.model.model_path`",
                severity=Severity.WARNING,
            )
            return


def _check_files(config: LanguageConfig, report: Report) -> None:
    """Report problem files that cannot be read, or whose first rows are invalid.

    A missing file gives a warning, as the configuration may be for another machine.
    """
    data = config.data
    for key, paths in (("train_data_paths", data.train_files), ("val_data_paths", data.val_data_paths)):
        for path in paths:
            if not os.path.exists(path):
                report_absent(("data", key), path, report)
                continue
            try:
                problems = check_file(path, data.prompt_key, data.answer_key)
            except ConfigError as error:
                report_unusable(("data", key), error, report)
                continue
            if not data.apply_chat_template and any(problems[number].messages for number in range(len(problems))):
                report.conflict(
                    "data.apply_chat_template",
                    f"the prompts of `{path}` are messages of a chat, and `apply_chat_template` is off",
                    "write `data.apply_chat_template: true`, or give texts as prompts",
                    about=f"data.{key}",
                )
            _check_symbols(config, key, path, problems, report)
            _check_columns(config, key, path, problems, report)


def _check_columns(config: LanguageConfig, key: str, path: str, problems: FileProblems, report: Report) -> None:
    """Report a TRL reward function that requires a column which no row has."""
    kind = config.reward.reward_type
    signature = signature_in_source(kind) if ":" in kind and runs_in_this_interpreter(config, "reward") else None
    if signature is None or "completions" not in signature.names:
        return
    missing = missing_columns(signature, [problems[number].row for number in range(len(problems))])
    if missing:
        report.conflict(
            "reward.reward_type",
            f"the reward function `{kind}` requires the column `{missing[0]}`, and no row of `{path}` has it",
            "give the argument a default, or add the column to the data",
            about=f"data.{key}",
        )
