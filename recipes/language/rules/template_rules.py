"""Checks of a job's conversations against the chat template, and of tokenizers against each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final, cast

from recipes.sections.model_folders import read_object
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from recipes.language.config.language_config import LanguageConfig
    from recipes.language.templates.chat_template import ChatTemplate

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


def stored_vocabulary(folder: FilePath) -> Mapping[str, int]:
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
