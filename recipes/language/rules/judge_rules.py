"""Validation rules for the section `judge`, the model of `reward_type: judge`, and its options."""

from __future__ import annotations

from pathlib import Path as FilePath

from recipes.language.answers.sequences import SamplingParams
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.problem_config import VERDICTS
from recipes.language.rules.engine_rules import check_backend
from recipes.language.rules.model_rules import faults_of_folder, faults_of_tokenizer, lacks_folder
from recipes.sections.checks import Report, share_accelerators
from recipes.sections.imports import check_import, runs_in_this_interpreter
from recipes.sections.model_folders import SETTINGS, read_object
from rlinf_core.config.tree import Path

_MODEL: Path = ("judge", "model_path")
_REWARD: Path = ("reward", "reward_type")
_OPTIONS: Path = ("reward", "options")
_SHARE: Path = ("engine_options", "gpu_memory_utilization")


def check_judge(config: LanguageConfig, report: Report) -> None:
    """Report a judge without a usable model or question, or whose engine does not fit beside another."""
    if not config.reward.asks_judge:
        return
    _check_question(config, report)
    _check_model(config, report)
    if "judge" in config.cluster.component_placement:
        _check_room(config, report)


def _check_question(config: LanguageConfig, report: Report) -> None:
    """Report a template, verdict or lengths with which the judge cannot work."""
    asked = config.reward.judging
    if asked.template is not None and "{text}" not in asked.template:
        report.conflict(
            "reward.options.template",
            "`reward.options.template` has no `{text}`, the place of the answer",
            "write `{text}` where the answer is to stand, and `{prompt}` and `{answer}` for question and right answer",
        )
    try:
        SamplingParams(temperature=asked.temperature)
    except ValueError as error:
        report((*_OPTIONS, "temperature"), "bad-value", str(error))
    if asked.template is None and asked.verdict not in VERDICTS:
        report.conflict(
            "reward.options.template reward.options.verdict",
            f"`reward.options.verdict: {asked.verdict}` reads replies to a question that only you know",
            "write `reward.options.template`, with `{prompt}`, `{text}` and `{answer}`",
        )
    if ":" in asked.verdict:
        check_import(config, (*_OPTIONS, "verdict"), asked.verdict, "judge", report)
    if asked.max_new_tokens >= asked.seq_length:
        report.conflict(
            "reward.options.max_new_tokens reward.options.seq_length",
            f"a reply of {asked.max_new_tokens} tokens leaves no room for a question: `seq_length: {asked.seq_length}`",
            f"raise `reward.options.seq_length`, or write `max_new_tokens: {max(1, asked.seq_length // 4)}`",
        )
    if asked.system_prompt and not asked.apply_chat_template:
        report.conflict(
            "reward.options.system_prompt",
            "`reward.options.system_prompt` needs a chat template",
            "write `reward.options.apply_chat_template: true`, or put the text into `reward.options.template`",
        )


def _check_model(config: LanguageConfig, report: Report) -> None:
    """Report a folder that does not exist or cannot be used, and an engine whose package is missing."""
    judge = config.judge
    if judge.model_path is None:
        report.conflict(
            "judge.model_path reward.reward_type",
            "`reward_type: judge` needs a model that judges: there is no `judge.model_path`",
            "write `judge.model_path: FOLDER`, or `ORG/NAME` of the HuggingFace Hub",
        )
        return
    if not runs_in_this_interpreter(config, "judge"):
        return
    check_backend(config, "judge", config.judge.backend, report)
    if lacks_folder(judge.model_path, _MODEL, report):
        return
    asked = config.reward.judging
    length = asked.seq_length if judge.backend == "torch" else None
    faults = faults_of_folder(_MODEL, judge.model_path, length, length=(*_OPTIONS, "seq_length"))
    folder, template = FilePath(judge.model_path), (*_OPTIONS, "apply_chat_template")
    settings = read_object(folder / SETTINGS)
    faults += faults_of_tokenizer(folder, _MODEL, settings, chat=asked.apply_chat_template, template=template)
    for fault in sorted(faults, key=lambda fault: fault.of_files):
        report(fault.path, "unusable-path", fault.message, fault.help, about=[_MODEL])


def _check_room(config: LanguageConfig, report: Report) -> None:
    """Report engines that together reserve more than the memory of the accelerators they share."""
    judge, rollout = config.judge.vllm.gpu_memory_utilization, config.rollout.vllm.gpu_memory_utilization
    reserve = config.judge.backend == config.rollout.backend == "vllm"
    if reserve and judge + rollout > 1 and share_accelerators(config, "judge", "rollout"):
        report.conflict(
            "judge.engine_options.gpu_memory_utilization rollout.engine_options.gpu_memory_utilization",
            f"judge and rollout share accelerators, and reserve {judge:g} and {rollout:g} of their memory: both answer"
            " at the same time",
            "lower `engine_options.gpu_memory_utilization` of `judge` and `rollout` to at most 1 together, or place"
            " `judge` on its own accelerators",
        )
