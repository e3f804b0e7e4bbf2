"""Validation rules for a language model's folders and chat template, without loading the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from recipes.language.config.described_models import ModelJobConfig
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.language_no_effect import OPTIONAL
from recipes.language.config.rollout_config import BACKENDS
from recipes.language.models.architecture import stretched
from recipes.language.rules.architecture_rules import fault_of_architecture, text_settings
from recipes.sections.checks import Report, blame
from recipes.sections.imports import lacks_packages, runs_in_this_interpreter
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
from rlinf_core.process.requirements import missing_modules
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from recipes.language.text.chat_template import ChatTemplate


MODEL: Path = ("actor", "model", "model_path")
_TOKENIZER: Path = ("actor", "tokenizer", "tokenizer_model")
_TEMPLATE: Path = ("data", "apply_chat_template")
_PACKAGES = ["torch", "transformers"]


class Fault(NamedTuple):
    """A fault of a model's or tokenizer's folder.

    Attributes:
        path: the key of the folder.
        message, help: the fault, and the advice.
        of_files: whether a complete copy of the folder may lack the fault.
    """

    path: Path
    message: str
    help: str
    of_files: bool = True


def lacks_folder(folder: str | None, at: Path, report: Report) -> bool:
    """Report a model's folder that is not on this machine; return whether one is named but missing."""
    if folder is None or os.path.isdir(folder):
        return False
    what = "a file" if os.path.exists(folder) else "not on this machine"
    report(
        at,
        "unusable-path",
        f"`{at[-1]}` names `{folder}`, which is {what}",
        "name a folder that `save_pretrained` wrote, or a model of the HuggingFace Hub, `ORG/NAME`",
        severity=Severity.WARNING,
    )
    return True


def check_model(config: LanguageConfig, report: Report) -> None:
    """Report missing packages, faults of folders of models and tokenizers, and a missing chat template.

    Folders on other machines are not checked. A folder that is missing here, or has settings but no weights, gives a
    warning, as the configuration may be for another machine. `require_model` makes it an error when a run starts.
    """
    if not runs_in_this_interpreter(config, "actor"):
        return
    check_packages(config, report)
    folder = config.actor.model.model_path
    if lacks_folder(folder, MODEL, report):
        return
    report_faults(config, faults(config), report)
    for fault in _faults_of_ties(config):
        report(blame(config, fault.path, MODEL), "conflicting-settings", fault.message, fault.help, about=[MODEL])
    for fault in _faults_of_sampling(config):
        report(fault.path, "conflicting-settings", fault.message, fault.help, about=[MODEL])
    if folder is None and config.data.apply_chat_template:
        report.conflict(
            "data.apply_chat_template",
            "the tokenizer of a model built from scratch has no chat template",
            "write `apply_chat_template: false`, or give `actor.model.model_path`",
            about="actor.model.model_path",
        )
    if folder is None and config.actor.model.adapter() is not None:
        report.conflict(
            "actor.model.lora",
            "there is no `model_path`: adapters of a model built from scratch sit on random weights, which are frozen",
            "give `actor.model.model_path`, or remove `lora`",
            severity=Severity.WARNING,
        )
    if folder is None and config.data.type == "reasoning_gym":
        report.conflict(
            "data.type actor.model.model_path",
            "there is no `model_path`, and a model built from scratch reads only digits and signs",
            "give `actor.model.model_path`, unless the problems are sums",
            severity=Severity.WARNING,
        )


def report_faults(config: ModelJobConfig, faults: Iterable[Fault], report: Report) -> None:
    """Report faults of a job's folders; those of files are warnings if the model's weights are elsewhere."""
    folder = FilePath(config.actor.model.model_path or os.devnull)
    elsewhere = bool(read_object(folder / SETTINGS)) and not list(folder.glob("*.safetensors"))
    # Only the first of several findings at one key is shown.
    for fault in sorted(faults, key=lambda fault: fault.of_files):
        severity = Severity.WARNING if elsewhere and fault.of_files else Severity.ERROR
        report(fault.path, "unusable-path", fault.message, fault.help, about=[MODEL], severity=severity)


def require_model(config: LanguageConfig) -> None:
    """Check, before a run starts, that its folders on this machine are usable.

    Raises:
        ConfigError: a folder is not usable.
    """
    folder = config.actor.model.model_path
    if folder is None or not runs_in_this_interpreter(config, "actor"):
        return
    require_folder(folder, "a folder that `save_pretrained` wrote")
    for fault in (*faults(config), *_faults_of_ties(config), *_faults_of_sampling(config)):
        raise ConfigError(fault.message, help=fault.help)


def _faults_of_ties(config: LanguageConfig) -> list[Fault]:
    """Return a fault if an engine that trusts config.json would compute another model than the actor's."""
    folder = config.actor.model.model_path
    if folder is None or BACKENDS[config.rollout.backend].name == "torch":
        return []
    fault = fault_of_ties(folder)
    return [] if fault is None else [Fault(("rollout", "backend"), *fault)]


def _faults_of_sampling(config: LanguageConfig) -> list[Fault]:
    """Return a fault for answers longer than the model's positions, and for each stop token that it does not have."""
    sampling, at = config.rollout.sampling_params, ("rollout", "sampling_params")
    text = text_settings(read_object(FilePath(config.actor.model.model_path or os.devnull) / SETTINGS))
    known, positions = (text.get(name) for name in ("vocab_size", "max_position_embeddings"))
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    positions = stretched(positions, rope) if isinstance(positions, int) else 0
    reported = [
        Fault(
            (*at, "stop_token_ids", number),
            f"the model has no token {token}, only 0 to {known - 1}: no answer would end by it",
            "name a token of the model's tokenizer",
        )
        for number, token in enumerate(sampling.stop_token_ids)
        if isinstance(known, int) and token >= known
    ]
    if 0 < positions <= sampling.max_new_tokens:
        message = (
            f"an answer of {sampling.max_new_tokens} tokens and its prompt exceed the model's {positions} positions"
        )
        reported.append(Fault((*at, "max_new_tokens"), message, f"write {max(1, positions // 2)}, or less"))
    return reported


def faults(config: LanguageConfig) -> list[Fault]:
    """Return the faults of the existing folders of the job's models and tokenizer."""
    folders: dict[Path, str | None] = {
        MODEL: config.actor.model.model_path,
        ("critic", "model_path"): config.critic.model_path,
        ("reference", "model_path"): config.reference.model_path,
        ("teacher", "model_path"): config.teacher.model_path,
    }
    reported: list[Fault] = []
    for path, folder in folders.items():
        if path[0] in OPTIONAL and OPTIONAL[path[0]].unneeded(config):
            continue  # nothing reads it
        answers = path == MODEL
        writes = path[0] != "critic"
        reported += faults_of_folder(path, folder, config.runner.seq_length, answers=answers, writes=writes)
    return reported + tokenizer_faults(config, chat=config.data.apply_chat_template)


def faults_of_folder(
    at: Path,
    folder: str | None,
    seq_length: int | None,
    *,
    length: Path = ("runner", "seq_length"),
    answers: bool = False,
    writes: bool = True,
) -> list[Fault]:
    """Return the faults of a model's folder; none if it is not on this machine.

    Args:
        at: the key that names the folder.
        folder: the folder.
        seq_length: the length of the longest sequence in tokens; None: another package computes the model.
        length: the key of `seq_length`.
        answers: whether the folder names the tokens that end answers.
        writes: see `fault_of_architecture`.
    """
    if folder is None or not os.path.isdir(folder):
        return []
    where = FilePath(folder)
    settings, fault = read_object(where / SETTINGS), fault_of_model(where)
    reported = [] if fault is None else [Fault(at, *fault)]
    if answers:
        try:
            named_stops(where)
        except ConfigError as error:
            reported.append(Fault(at, f"{error.message}: {error.why}", error.help or ""))
    unlike = None if seq_length is None else fault_of_architecture(settings, seq_length, writes=writes)
    if unlike is not None:
        reported.append(Fault(length if unlike.limits_length else at, unlike.message, unlike.help, of_files=False))
    return reported


def tokenizer_faults(config: ModelJobConfig, *, chat: bool) -> list[Fault]:
    """Return the faults of the folder of the actor's tokenizer; see `faults_of_tokenizer`."""
    model, own = config.actor.model.model_path, config.actor.tokenizer.tokenizer_model
    folder = own or model
    if folder is None:
        return []
    settings: Mapping[str, Any] = read_object(FilePath(model) / SETTINGS) if model is not None else {}
    return faults_of_tokenizer(FilePath(folder), _TOKENIZER if own else MODEL, settings, chat=chat)


def faults_of_tokenizer(
    folder: FilePath, at: Path, settings: Mapping[str, Any], *, chat: bool, template: Path = _TEMPLATE
) -> list[Fault]:
    """Return the faults of a tokenizer's folder.

    Args:
        folder: the existing folder.
        at: the key that names the folder.
        settings: config.json of the model; empty without one.
        chat: whether a chat template is needed.
    """
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any(os.path.isfile(folder / file) for file in files):
        help = "copy tokenizer.json there, or set `actor.tokenizer.tokenizer_model`"
        return [Fault(at, f"`{folder}` has no tokenizer", help)]
    reported: list[Fault] = []
    if chat and not has_chat_template(folder):
        help = "write `apply_chat_template: false`, and examples in `data.few_shot`"
        reported.append(Fault(template, f"the tokenizer in `{folder}` has no chat template", help))
    needed, known = max(_stored_vocabulary(folder).values(), default=-1) + 1, settings.get("vocab_size")
    if isinstance(known, int) and needed > known:
        help = "use the tokenizer that the model was trained with"
        reported.append(Fault(at, f"the tokenizer in `{folder}` has {needed} tokens, but the model only {known}", help))
    return reported


def has_chat_template(folder: FilePath) -> bool:
    """Return whether the tokenizer in a folder has a chat template."""
    files = ("tokenizer_config.json", "chat_template.json")
    return os.path.isfile(folder / "chat_template.jinja") or any(
        read_object(folder / name).get("chat_template") for name in files
    )


def check_packages(config: ModelJobConfig, report: Report) -> None:
    """Report packages that this interpreter lacks."""
    lacks_packages(("recipe",), "recipes of language models need", ["transformers"], report)
    if config.actor.model.adapter() is not None:
        lacks_packages(("actor", "model", "lora"), "LoRA needs", ["peft"], report)


def fault_of_ties(folder: str) -> FolderFault | None:
    """Return why an engine that trusts config.json would compute another model than the folder's; None if it would not,
    or the folder cannot be read.
    """
    if not os.path.isdir(folder) or missing_modules(_PACKAGES):
        return None
    from recipes.training.tensor_files import stored_tensors

    size = text_settings(read_object(FilePath(folder) / SETTINGS)).get("vocab_size")
    tensors = stored_tensors(FilePath(folder)) or {}
    # The folder must have separate tensors for embeddings and output.
    if sum(len(tensor.shape) > 1 and tensor.shape[0] == size for tensor in tensors.values()) < 2:
        return None
    from transformers import AutoConfig

    from recipes.language.models.load_model import hollow_causal
    from recipes.training.huggingface import config_of

    try:
        said, held = config_of(AutoConfig, folder), cast("Any", hollow_causal(folder).config)
    except Exception:  # noqa: BLE001 - whatever transformers raises; other rules report the folder
        return None
    if not said.tie_word_embeddings or held.tie_word_embeddings:
        return None
    return FolderFault(
        f"`tie_word_embeddings` of config.json in `{folder}` is true, and the weights of the output layer differ from"
        " the embeddings: this engine would compute with the embeddings",
        f"write `tie_word_embeddings: false` in {SETTINGS} of the folder, or `backend: torch`",
    )


_TEXTS: Final = {
    "system": "Words of the system.",
    "user": "Words of the user.",
    "assistant": "Words of the model.",
    "tool": "Words of a tool.",
}


_HELP: Final = {
    "system": "remove `data.system_prompt`, or put its text into `data.few_shot`",
    "tool": "use a model whose chat template takes messages of tools, or write `data.apply_chat_template: false`",
}


_OTHER_HELP: Final = "use a tokenizer with another template, or write `data.apply_chat_template: false`"


def require_conversations(config: LanguageConfig, template: ChatTemplate | None) -> Difference | None:
    """Check that the chat template renders every conversation of a job, and return these; None without a template.

    Raises:
        ConfigError: the template rejects a conversation.
    """
    if template is None:
        return None
    asked = config.chat_roles(template)
    for path, roles, tools, help in asked:
        why = template.fault([{"role": role, "content": _TEXTS[role]} for role in roles], tools)
        if why is not None:
            raise ConfigError(
                f"the tokenizer's chat template cannot render a conversation of {', '.join(roles)}: {why}",
                where=".".join(map(str, path)),
                help=help or next((text for role, text in _HELP.items() if role in roles), _OTHER_HELP),
            )
    note = "; ".join(", ".join(item.roles) for item in asked)
    missing = template.missing_prompt()
    if missing is None:
        return Difference(note=note)
    lacking = f"prompts do not end with {missing!r}, which stands before the model's words in a conversation"
    return Difference(note=f"{note}; {lacking}", agrees=False)


def vocabulary_difference(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return how the token ids of two tokenizers differ, with an example; None if they are equal."""
    unlike = [token for token in {**one, **other} if one.get(token) != other.get(token)]
    if not unlike:
        return None
    first = min(unlike, key=lambda token: (one.get(token, len(one)), token))
    ids = ["none" if token_id is None else str(token_id) for token_id in (one.get(first), other.get(first))]
    return f"{len(unlike)} tokens have other ids; the first, {first!r}, has {ids[0]} and {ids[1]}"


def _stored_vocabulary(folder: FilePath) -> Mapping[str, int]:
    """Return the tokens in a folder's tokenizer.json with their ids; empty if they cannot be read."""
    written = read_object(folder / "tokenizer.json")
    model, added = written.get("model"), written.get("added_tokens")
    vocabulary = cast("Mapping[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, Any] = {}
    if isinstance(vocabulary, dict):
        tokens |= cast("dict[str, Any]", vocabulary)
    elif isinstance(vocabulary, list):
        # A unigram model lists tokens with scores in the order of ids.
        for number, entry in enumerate(cast("list[list[Any]]", vocabulary)):
            if isinstance(entry, list) and entry:  # pyright: ignore[reportUnnecessaryIsInstance] - read from outside
                tokens[str(entry[0])] = number
    for token in cast("list[Any]", added) if isinstance(added, list) else ():
        if isinstance(token, dict):
            fields = cast("dict[str, Any]", token)
            tokens[str(fields.get("content"))] = fields.get("id")
    return {token: number for token, number in tokens.items() if type(number) is int}
