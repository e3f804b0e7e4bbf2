"""Checks of a language model's folders, without loading the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

from recipes.language.config.described_models import ModelJobConfig
from recipes.language.config.engine_facts import BACKENDS
from recipes.language.config.language_config import LanguageConfig
from recipes.language.rules.architecture_rules import fault_of_architecture, fault_of_sampling
from recipes.language.rules.template_rules import stored_vocabulary
from recipes.sections.checks import Report, blame
from recipes.sections.imports import runs_in_this_interpreter
from recipes.sections.model_folders import (
    SETTINGS,
    FolderFault,
    fault_of_model,
    named_stops,
    read_object,
    require_folder,
)
from rlinf_core import ConfigError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, install_command, missing_modules

_MODEL: Path = ("actor", "model", "model_path")
_LENGTH: Path = ("runner", "seq_length")
_TOKENIZER: Path = ("actor", "tokenizer", "tokenizer_model")
_TEACHER: Path = ("teacher", "model_path")
_TEMPLATE: Path = ("data", "apply_chat_template")
_PACKAGES = ["torch", "transformers"]


class Fault(NamedTuple):
    """A fault of a folder.

    Attributes:
        path: the key it is about.
        message, help: what is wrong, and what to do.
    """

    path: Path
    message: str
    help: str


def lacks_folder(config: ModelJobConfig, report: Report) -> bool:
    """Report a folder of a model that is not on this machine; return whether there is none to look at."""
    folder = config.actor.model.model_path
    if folder is None or os.path.isdir(folder):
        return False
    what = "a file" if os.path.exists(folder) else "not on this machine"
    report(
        _MODEL,
        "unusable-path",
        f"`model_path` names `{folder}`, which is {what}",
        "name a folder that `save_pretrained` wrote, or a model of the HuggingFace Hub, `ORG/NAME`",
        severity=Severity.WARNING,
    )
    return True


def check_model(config: LanguageConfig, report: Report) -> None:
    """Report packages, folders of models and tokenizers, and a chat template, that do not exist.

    Nothing is reported of folders on other machines. One that is missing here, or has settings and no weights, is a
    warning: the file may be meant for another machine. `require_model` makes it an error where a run starts.
    """
    if not runs_in_this_interpreter(config, "actor"):
        return
    check_packages(config, report)
    if lacks_folder(config, report):
        return
    folder = config.actor.model.model_path
    for fault in architecture_faults(config):
        report(fault.path, "unusable-path", fault.message, fault.help, about=[_MODEL])
    for fault in faults_of_ties(config):
        report(blame(config, fault.path, _MODEL), "conflicting-settings", fault.message, fault.help, about=[_MODEL])
    described = folder is not None and not list(FilePath(folder).glob("*.safetensors")) and _has_settings(folder)
    severity = Severity.WARNING if described else Severity.ERROR
    for fault in faults(config):
        report(fault.path, "unusable-path", fault.message, fault.help, severity=severity)
    if folder is None and config.data.apply_chat_template:
        report(
            _TEMPLATE,
            "conflicting-settings",
            "the tokenizer of a model built from scratch has no chat template",
            "write `apply_chat_template: false`, or give `actor.model.model_path`",
            about=[_MODEL],
        )
    if folder is None and config.actor.model.adapter() is not None:
        report(
            ("actor", "model", "lora"),
            "conflicting-settings",
            "there is no `model_path`: adapters of a model built from scratch sit on random weights, which are frozen",
            "give `actor.model.model_path`, or remove `lora`",
            severity=Severity.WARNING,
        )
    if folder is None and config.data.type == "reasoning_gym":
        report(
            blame(config, ("data", "type"), _MODEL),
            "conflicting-settings",
            "there is no `model_path`, and a model built from scratch reads only digits and signs",
            "give `actor.model.model_path`, unless the problems are sums",
            severity=Severity.WARNING,
        )


def require_model(config: LanguageConfig) -> None:
    """Check, before anything is started, that the folders of a run on this machine alone can be used.

    Raises:
        ConfigError: they cannot.
    """
    folder = config.actor.model.model_path
    if folder is None or not runs_in_this_interpreter(config, "actor"):
        return
    require_folder(folder, "a folder that `save_pretrained` wrote")
    for fault in (*faults(config), *architecture_faults(config), *faults_of_ties(config)):
        raise ConfigError(fault.message, help=fault.help)


def _has_settings(folder: str) -> bool:
    return bool(read_object(FilePath(folder) / SETTINGS))


def architecture_faults(config: LanguageConfig) -> list[Fault]:
    """Return why the models in the folders of actor, critic and reference cannot be trained or evaluated."""
    reported: list[Fault] = []
    length = config.runner.seq_length
    for path, folder in _folders(config).items():
        settings = read_object(FilePath(folder) / SETTINGS)
        fault = fault_of_architecture(settings, length, writes=path[0] != "critic")
        if fault is not None:
            reported.append(Fault(_LENGTH if fault.limits_length else path, fault.message, fault.help))
        elif path == _MODEL and BACKENDS[config.rollout.backend].name == "torch":
            unsampled = fault_of_sampling(settings)
            reported += [Fault(path, unsampled.message, unsampled.help)] if unsampled is not None else []
    return reported


def faults_of_ties(config: LanguageConfig) -> list[Fault]:
    """Return that an engine which goes by config.json alone would compute another model than the actor's."""
    folder = config.actor.model.model_path
    if folder is None or BACKENDS[config.rollout.backend].name == "torch":
        return []
    fault = fault_of_ties(folder)
    return [] if fault is None else [Fault(("rollout", "backend"), *fault)]


def _folders(config: LanguageConfig) -> Mapping[Path, str]:
    """Return the folders of models that the file names, with their keys."""
    folders: dict[Path, str | None] = {
        _MODEL: config.actor.model.model_path,
        ("critic", "model", "model_path"): config.critic.model.model_path if config.critic.model else None,
        ("reference", "model_path"): config.reference.model_path,
        _TEACHER: config.teacher.model_path,
    }
    return {path: folder for path, folder in folders.items() if folder is not None}


def faults(config: LanguageConfig) -> list[Fault]:
    """Return the faults of the existing folders of the model and the tokenizer."""
    model = config.actor.model.model_path
    tokenizer = config.actor.tokenizer.tokenizer_model or model
    reported: list[Fault] = []
    settings: Mapping[str, Any] = {}
    if model is not None:
        settings = read_object(FilePath(model) / SETTINGS)
        fault = fault_of_model(FilePath(model))
        reported += [] if fault is None else [Fault(_MODEL, *fault)]
        try:
            named_stops(FilePath(model))
        except ConfigError as error:
            reported.append(Fault(_MODEL, f"{error.message}: {error.why}", error.help or ""))
    if tokenizer is not None:
        at = _TOKENIZER if config.actor.tokenizer.tokenizer_model else _MODEL
        faults = faults_of_tokenizer(FilePath(tokenizer), at, settings, chat=config.data.apply_chat_template)
        reported += faults
    teacher = config.teacher.model_path
    if teacher is not None and os.path.isdir(teacher):
        fault = fault_of_model(FilePath(teacher))
        reported += [] if fault is None else [Fault(_TEACHER, *fault)]
    return reported


def faults_of_tokenizer(
    folder: FilePath, at: Path, settings: Mapping[str, Any], *, chat: bool, template: Path = _TEMPLATE
) -> list[Fault]:
    """Return the faults of a tokenizer's folder.

    Args:
        folder: a folder that exists.
        at: the key that names it.
        settings: config.json of the model; empty where there is none.
        chat: whether a chat template is needed.
    """
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any(os.path.isfile(folder / file) for file in files):
        help = "copy tokenizer.json there, or set `actor.tokenizer.tokenizer_model`"
        return [Fault(at, f"`{folder}` has no tokenizer", help)]
    reported: list[Fault] = []
    templates = os.path.isfile(folder / "chat_template.jinja") or any(
        read_object(folder / name).get("chat_template") for name in ("tokenizer_config.json", "chat_template.json")
    )
    if chat and not templates:
        help = "write `apply_chat_template: false`, and examples in `data.few_shot`"
        reported.append(Fault(template, f"the tokenizer in `{folder}` has no chat template", help))
    needed, known = max(stored_vocabulary(folder).values(), default=-1) + 1, settings.get("vocab_size")
    if isinstance(known, int) and needed > known:
        help = "use the tokenizer that the model was trained with"
        reported.append(Fault(at, f"the tokenizer in `{folder}` has {needed} tokens, but the model only {known}", help))
    return reported


def check_packages(config: ModelJobConfig, report: Report) -> None:
    """Report packages that this Python lacks."""
    needs: list[tuple[Path, str, str]] = [(("recipe",), "recipes of language models need", "transformers")]
    if config.actor.model.adapter() is not None:
        needs.append((("actor", "model", "lora"), "LoRA needs", "peft"))
    for at, what, module in needs:
        if missing_modules([module]):
            report(
                at,
                "missing-extra",
                f"{what} the package `{module}`, {absence(module)}",
                f"run `{install_command(module)}`",
            )


def fault_of_ties(folder: str) -> FolderFault | None:
    """Return why an engine that goes by config.json alone computes another model than the folder holds; None: it does
    not, or the folder cannot be looked at.
    """
    if not os.path.isdir(folder) or missing_modules(_PACKAGES):
        return None
    from recipes.training.reading.tensor_files import stored_tensors

    settings = read_object(FilePath(folder) / SETTINGS)
    text = settings.get("text_config", settings)
    size = cast("dict[str, Any]", text).get("vocab_size") if isinstance(text, dict) else None
    tensors = stored_tensors(FilePath(folder)) or {}
    # One for the embeddings, and one for the output.
    if sum(len(tensor.shape) > 1 and tensor.shape[0] == size for tensor in tensors.values()) < 2:
        return None
    from transformers import AutoConfig

    from recipes.language.models.load_model import hollow_causal
    from recipes.training.huggingface import config_of

    try:
        said, held = config_of(AutoConfig, folder), cast("Any", hollow_causal(folder).config)
    except Exception:  # noqa: BLE001 - as above
        return None
    if not said.tie_word_embeddings or held.tie_word_embeddings:
        return None
    return FolderFault(
        f"`tie_word_embeddings` of config.json in `{folder}` is true, and the weights of the output layer differ from"
        " the embeddings: this engine would compute with the embeddings",
        f"write `tie_word_embeddings: false` in {SETTINGS} of the folder, or `backend: torch`",
    )
