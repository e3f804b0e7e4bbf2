"""Rules of the section `judge`, the model behind `reward_type: judge`."""

from __future__ import annotations

from pathlib import Path as FilePath

from recipes.language.answers.sequences import SamplingParams
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.rollout_config import VERDICTS
from recipes.language.rules.engine_rules import check_backend
from recipes.language.rules.model_rules import faults_of_folder, faults_of_tokenizer, lacks_folder
from recipes.sections.checks import Report, blame
from recipes.sections.imports import check_import, runs_in_this_interpreter
from recipes.sections.model_folders import SETTINGS, read_object
from recipes.sections.shared_accelerators import share_accelerators
from rlinf_core.config.tree import Path

_MODEL: Path = ("judge", "model_path")
_REWARD: Path = ("reward", "reward_type")


def check_judge(config: LanguageConfig, report: Report) -> None:
    """Report a judge without a model or a question; and one whose engine does not fit beside another."""
    if not config.reward.asks_judge:
        return
    _check_question(config, report)
    _check_model(config, report)
    if "judge" in config.cluster.component_placement:
        _check_room(config, report)


def _check_question(config: LanguageConfig, report: Report) -> None:
    """Report a template, a verdict or lengths by which nothing could be judged."""
    judge = config.judge
    if judge.template is not None and "{text}" not in judge.template:
        report(
            ("judge", "template"),
            "conflicting-settings",
            "`judge.template` has no `{text}`, the place of the answer",
            "write `{text}` where the answer is to stand, and `{prompt}` and `{answer}` for question and right answer",
        )
    try:
        SamplingParams(temperature=judge.temperature)
    except ValueError as error:
        report(("judge", "temperature"), "bad-value", str(error))
    if judge.template is None and judge.verdict not in VERDICTS:
        report(
            blame(config, ("judge", "template"), ("judge", "verdict")),
            "conflicting-settings",
            f"`judge.verdict: {judge.verdict}` reads replies to a question that only you know",
            "write `judge.template`, with `{prompt}`, `{text}` and `{answer}`",
        )
    if ":" in judge.verdict:
        check_import(config, ("judge", "verdict"), judge.verdict, "judge", report)
    if judge.max_new_tokens >= judge.seq_length:
        report(
            blame(config, ("judge", "max_new_tokens"), ("judge", "seq_length")),
            "conflicting-settings",
            f"a reply of {judge.max_new_tokens} tokens leaves no room for a question in `judge.seq_length`"
            f" {judge.seq_length}",
            f"raise `judge.seq_length`, or write `judge.max_new_tokens: {max(1, judge.seq_length // 4)}`",
        )
    if judge.system_prompt and not judge.apply_chat_template:
        report(
            ("judge", "system_prompt"),
            "conflicting-settings",
            "`judge.system_prompt` needs a chat template",
            "write `judge.apply_chat_template: true`, or put the text into `judge.template`",
        )


def _check_model(config: LanguageConfig, report: Report) -> None:
    """Report a folder that does not exist or cannot be used, and an engine whose package is missing."""
    judge = config.judge
    if judge.model_path is None:
        report(
            blame(config, _MODEL, _REWARD),
            "conflicting-settings",
            "`reward_type: judge` needs a model that judges: there is no `judge.model_path`",
            "write `judge.model_path: FOLDER`, or `ORG/NAME` of the HuggingFace Hub",
        )
        return
    if not runs_in_this_interpreter(config, "judge"):
        return
    check_backend(config, "judge", config.judge.backend, report)
    if lacks_folder(judge.model_path, _MODEL, report):
        return
    length = judge.seq_length if judge.backend == "torch" else None
    faults = faults_of_folder(_MODEL, judge.model_path, length, length=("judge", "seq_length"))
    folder, template = FilePath(judge.model_path), ("judge", "apply_chat_template")
    settings = read_object(folder / SETTINGS)
    faults += faults_of_tokenizer(folder, _MODEL, settings, chat=judge.apply_chat_template, template=template)
    for fault in sorted(faults, key=lambda fault: fault.of_files):
        report(fault.path, "unusable-path", fault.message, fault.help, about=[_MODEL])


def _check_room(config: LanguageConfig, report: Report) -> None:
    """Report engines that together reserve more than the memory of the accelerators they share."""
    judge, rollout = config.judge, config.rollout
    reserve = judge.backend == rollout.backend == "vllm"
    share = judge.gpu_memory_utilization + rollout.gpu_memory_utilization
    if reserve and share > 1 and share_accelerators(config, "judge", "rollout"):
        report(
            blame(config, ("judge", "gpu_memory_utilization"), ("rollout", "gpu_memory_utilization")),
            "conflicting-settings",
            f"judge and rollout share accelerators, and reserve {judge.gpu_memory_utilization:g} and"
            f" {rollout.gpu_memory_utilization:g} of their memory: both answer at the same time",
            "lower `judge.gpu_memory_utilization` and `rollout.gpu_memory_utilization` to at most 1 together, or place"
            " `judge` on its own accelerators",
        )
