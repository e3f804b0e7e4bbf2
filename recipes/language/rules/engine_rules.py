"""Validation rules for engines, of `rollout` and of `judge` for `reward_type: judge`."""

from __future__ import annotations

import ipaddress
from pathlib import Path as FilePath
from typing import Literal
from urllib.parse import urlsplit

from recipes.language.answers.sequences import SamplingParams
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.problem_config import VERDICTS
from recipes.language.config.rollout_config import BACKENDS, RESERVED_OPTIONS
from recipes.language.rules.model_rules import faults_of_folder, faults_of_tokenizer, lacks_folder
from recipes.sections.checks import Report, WorldSizes, share_accelerators
from recipes.sections.imports import check_import, lacks_packages, runs_in_this_interpreter
from recipes.sections.model_folders import SETTINGS, read_object
from rlinf_core import JobConfig
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path


def check_engine(config: LanguageConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report settings that the engine in `rollout.backend` does not support."""
    rollout = config.rollout
    backend = BACKENDS[rollout.backend]
    check_backend(config, "rollout", rollout.backend, report)
    if config.runner.max_staleness and config.runner.partial_rollout and not backend.keeps_partial:
        report.conflict(
            "runner.partial_rollout rollout.backend runner.max_staleness",
            f"engine `{backend.name}` cannot continue unfinished answers under new weights",
            "write `runner.partial_rollout: false`, which finishes them under the old weights first",
        )
    if rollout.enable_offload and config.runner.max_staleness:
        report.conflict(
            "rollout.enable_offload",
            "with `runner.max_staleness` the engine runs all the time, and cannot release its memory while the actor"
            " trains",
            "write `enable_offload: false`, or `runner.max_staleness: 0`",
            about="runner.max_staleness",
        )
    answer, longest = config.longest_answer, config.runner.seq_length
    needed = min(answer + 1, longest)
    if 0 < rollout.max_running_tokens < needed:
        report.conflict(
            "rollout.max_running_tokens rollout.sampling_params.max_new_tokens",
            f"an answer with its prompt may have {needed} tokens, but `max_running_tokens` is"
            f" {rollout.max_running_tokens}",
            f"write at least `max_running_tokens: {min(config.data.max_prompt_length + answer, longest)}`, or 0",
        )
    for key in rollout.engine_options:
        if key in RESERVED_OPTIONS.get(backend.name, ()):
            report.conflict(
                f"rollout.engine_options.{key}",
                f"the recipe sets `{key}` of {backend.name}",
                "remove it; use `actor.model.precision` and `tensor_parallel_size`",
            )
    _check_shared_accelerators(config, report)
    _check_logprobs(config, report)
    if backend.name == "server":
        _check_server(config, world_sizes.get("rollout") or 1, report)


def check_backend(config: JobConfig, component: Literal["rollout", "judge"], name: str, report: Report) -> None:
    """Report an engine whose package is missing in a component's interpreter."""
    if runs_in_this_interpreter(config, component):
        further = f", or name a `python_interpreter_path` that has it for the node group of `{component}`"
        lacks_packages((component, "backend"), f"`backend: {name}` needs", BACKENDS[name].modules, report, further)


def _check_shared_accelerators(config: LanguageConfig, report: Report) -> None:
    """Warn of actors and engines that would work on the same accelerators at the same time."""
    placed = config.cluster.component_placement
    if not config.runner.max_staleness or not {"actor", "rollout"} <= set(placed):
        return
    if share_accelerators(config, "actor", "rollout"):
        report.conflict(
            "cluster.component_placement.rollout runner.max_staleness",
            "with `runner.max_staleness`, actor and rollout run at the same time; here they share accelerators, which"
            " must hold both and speed up neither",
            "give `rollout` its own accelerators, or write `runner.max_staleness: 0` to take turns",
            about="runner.max_staleness",
            severity=Severity.WARNING,
        )


def _check_logprobs(config: LanguageConfig, report: Report) -> None:
    """Report sampling settings for which the engine cannot give the log-probabilities that training needs."""
    rollout = config.rollout
    params, backend = rollout.sampling_params, BACKENDS[rollout.backend]
    cut = [
        name
        for name, is_set in (
            ("top_k", params.top_k != -1),
            ("top_p", params.top_p < 1),
            ("min_new_tokens", params.min_new_tokens > 0),
        )
        if is_set
    ]
    at = "rollout.sampling_params"
    if backend.name == "vllm" and params.temperature not in (0, 1) and cut:
        report.conflict(
            f"{at}.{cut[0]} {at}.temperature",
            f"vLLM returns log-probabilities before or after both `temperature` and `{cut[0]}`; training needs those"
            " between the two",
            f"write `temperature: 1`, or remove `{cut[0]}`",
        )
    elif backend.name == "server" and rollout.server.logprobs == "processed" and cut:
        report.conflict(
            f"{at}.{cut[0]} rollout.engine_options.logprobs",
            f"`logprobs: processed` are taken after `{cut[0]}`; training needs those before it",
            f"remove `{cut[0]}`",
        )
    elif backend.name == "server" and rollout.server.logprobs == "raw" and params.temperature not in (0, 1):
        report.conflict(
            f"{at}.temperature rollout.engine_options.logprobs",
            "`logprobs: raw` are taken before `temperature`; training needs those after it",
            "write `temperature: 1`, or start the server with processed log-probabilities and set `logprobs:"
            " processed`",
        )


def _check_server(config: LanguageConfig, workers: int, report: Report) -> None:
    server, at = config.rollout.server, "rollout.engine_options"
    if server.url is None:
        report.conflict(
            f"{at}.url rollout.backend",
            "`backend: server` needs the server's address",
            "write `rollout.engine_options.url: http://127.0.0.1:8000`",
        )
    elif server.token_env and not _is_private(server.url):
        report.conflict(
            f"{at}.url",
            "a token is not sent over plain http to another machine, where anyone on the network could read it",
            "write `https://`, or remove `token_env`",
            about=f"{at}.token_env",
        )
    if server.weights_dir is None and not config.runner.only_eval:
        report.conflict(
            f"{at}.weights_dir rollout.backend",
            "training sends the engine new weights in every step, but a plain server takes none",
            "write `rollout.engine_options.weights_dir: FOLDER`, a folder that a vLLM server also reads, or"
            " `runner.only_eval: true`",
        )
    if server.weights_dir is not None and workers > 1:
        report.conflict(
            "cluster.component_placement.rollout",
            f"{workers} rollout workers would send one server new weights while the others use it",
            "place `rollout: 0`; `rollout.engine_options.max_concurrent` sets the concurrency of one worker",
            about=f"{at}.weights_dir",
        )
    if config.actor.model.model_path is None:
        report.conflict(
            "actor.model.model_path rollout.backend",
            "a server has its own model, but this one is built from scratch",
            "write `actor.model.model_path: FOLDER`, the model that the server serves",
        )


def _is_private(url: str) -> bool:
    """Return whether traffic to the server stays on this machine or is encrypted."""
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


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
