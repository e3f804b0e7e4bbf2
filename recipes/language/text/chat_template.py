"""Chat templates of tokenizers: rendering of messages, and checks of what a template refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from recipes.language.text.template_process import PROCESS, RenderingError, refuse_value
from rlinf_core import ConfigError
from rlinf_core.config.tree import Path
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE: Final = "rlinfprobe"
_ASKED: Final[Sequence[Mapping[str, Any]]] = ({"role": "user", "content": _PROBE},)
_WORDS: Final = "rlinfwords"
_TURNS: Final = ("user", "assistant")
# The advice if messages must be rendered and the tokenizer has no template.
WITHOUT_TEMPLATE: Final = (
    "use a chat model, or name its tokenizer in `actor.tokenizer.tokenizer_model`; or train on texts: rows of `prompt`"
    " and `completion` or `answer`, with `apply_chat_template: false`"
)
_HELP: Final = "write `data.apply_chat_template: false`, or use a tokenizer with another template"
# transformers uses the first of these files.
_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_NO_ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType({})


class ChatRoles(NamedTuple):
    """The roles of a conversation in order, and the configuration key that requires it.

    Attributes:
        path: the path of the key.
        roles: the roles of the messages.
        tools: functions for the template, as chat completions list them.
        help: the advice; "": the default for the roles.
    """

    path: Path
    roles: tuple[str, ...]
    tools: tuple[Any, ...] = ()
    help: str = ""


class TemplateRefusalError(ConfigError):
    """A chat template rejects messages. The error belongs to the prompt or run that has them."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the chat template rejects the messages: {why}",
            help="change the roles or their order, or write `data.apply_chat_template: false`",
        )
        self.reason = why


class ChatTemplate:
    """The chat template of a tokenizer, with its arguments.

    Args:
        tokenizer: the tokenizer of the model.
        arguments: arguments of the template, such as `enable_thinking`.

    Raises:
        ConfigError: the tokenizer has no template, or the template ignores an argument, cannot render a user message,
            or begins the model's turn twice.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> None:
        self._tokenizer: Any = tokenizer
        self._arguments = dict(arguments)
        # Templates of vision models read lists of parts, and silently drop plain text.
        self._parts = False
        # Whether messages of a role are dropped, for the roles that were tried.
        self._dropped: dict[str, bool] = dict.fromkeys(_TURNS, False)
        source: Any = getattr(tokenizer, "chat_template", None)
        if not source:
            raise ConfigError(
                "messages are written by a chat template, but the tokenizer has no chat template",
                help=WITHOUT_TEMPLATE,
            )
        for name in arguments:
            if not re.search(rf"\b{re.escape(name)}\b", str(source)):
                raise ConfigError(
                    f"`data.chat_template_kwargs` has `{name}`, which the chat template does not read",
                    help="correct the name, or remove it",
                )
        self._check_texts()

    def _check_texts(self) -> None:
        reasons: list[str] = []
        for self._parts in (False, True):
            reason = self.fault(_ASKED)
            if reason is None:
                break
            reasons.append(reason)
        else:
            raise ConfigError("the chat template cannot write a user's message", why=reasons[0], help=_HELP)
        prompt = self.render(_ASKED).removeprefix(self.write(_ASKED))
        half = len(prompt) // 2
        if prompt and prompt[:half] == prompt[half:]:
            raise ConfigError(
                "the chat template writes the beginning of the model's turn twice",
                why=f"with `add_generation_prompt` the prompt ends with {prompt!r}",
                help=_HELP,
            )

    def missing_prompt(self) -> str | None:
        """Return the text that precedes the model's turn in a conversation, but is missing in prompts; None: no such
        text.

        Some templates write thoughts there, so only a text with a special token counts.
        """
        asked = self.render(_ASKED)
        with suppress(TemplateRefusalError):
            before, words, _ = self.write([*_ASKED, {"role": "assistant", "content": _WORDS}]).partition(_WORDS)
            missing = before.removeprefix(asked) if words and before.startswith(asked) else ""
            if any(mark in missing for mark in self._tokenizer.all_special_tokens):
                return missing
        return None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render messages as text, up to the start of the model's turn.

        Args:
            messages: the messages with `role`, `content`, and `tool_calls` if there are any.
            tools: functions that the model may call, as chat completions list them.

        Raises:
            TemplateRefusalError: the template rejects the messages.
        """
        return self._text(messages, tools, asks=True)

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render messages as text, without starting the model's turn; arguments and errors are those of `render`."""
        return self._text(messages, tools, asks=False)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, asks: bool) -> str:
        functions = list(tools) or None
        try:
            listed = [self._written(message) for message in messages]
            # Do the same as transformers' `apply_chat_template`.
            return PROCESS.render(
                {
                    "template": self._tokenizer.get_chat_template(None, functions),
                    "messages": [
                        {key: item for key, item in message.items() if item is not None} for message in listed
                    ],
                    "tools": functions,
                    "asks": asks,
                    "arguments": {**self._tokenizer.special_tokens_map, **self._arguments},
                }
            )
        except RenderingError as error:
            place = "" if error.line is None else f" (line {error.line} of {self._file})"
            raise TemplateRefusalError(error.reason + place) from None
        except ValueError as error:
            raise TemplateRefusalError(excerpt(str(error), 300)) from None

    @cached_property
    def _file(self) -> str:
        """The name of the template's file, for messages."""
        folder = str(getattr(self._tokenizer, "name_or_path", ""))
        name = next((name for name in _FILES if os.path.isfile(os.path.join(folder, name))), None)
        return "the template" if name is None else f"`{os.path.join(folder, name)}`"

    def fault(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """Return why a conversation cannot be rendered with all its texts; None if it can."""
        try:
            lost = self.lost_role(messages, tools)
        except TemplateRefusalError as refusal:
            return refusal.reason
        return None if lost is None else f"the prompt does not contain the text of the `{lost}` message"

    def lost_role(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """Return the role of a message whose text the template drops; None if it keeps all of them.

        Raises:
            TemplateRefusalError: the template rejects the messages.
        """
        text = self.render(messages, tools)
        return next((message["role"] for message in messages if message["content"].strip() not in text), None)

    def check_roles(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Check that the template does not silently drop the text of messages of some role.

        Raises:
            TemplateRefusalError: it drops that of one of the messages.
        """
        for message in messages:
            if self._drops(message["role"]):
                raise TemplateRefusalError(f"it omits the text of a `{message['role']}` message")

    def _drops(self, role: str) -> bool:
        if role not in self._dropped:
            user, model, other = ({"role": name, "content": f"Words of {name}."} for name in (*_TURNS, role))
            self._dropped[role] = False
            # A role that the template refuses raises an error when there is such a message.
            with suppress(TemplateRefusalError):
                self._dropped[role] = self.lost_role([user, model, other] if role == "tool" else [other, user]) == role
        return self._dropped[role]

    def _written(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in the form that the template reads."""
        if self._parts:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        calls: Any = message.get("tool_calls")
        return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls and self._texts else message

    @cached_property
    def _texts(self) -> bool:
        """Whether the template needs arguments as JSON text: it refuses an object, or renders it like a Python dict."""
        self.__dict__["_texts"] = False  # the value during the test
        call = {"id": "probeid00", "type": "function", "function": {"name": _WORDS, "arguments": {_PROBE: 1}}}
        turn = [*_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
        with suppress(TemplateRefusalError):
            if repr(_PROBE) not in self.write(turn):
                return False
        turn[-1] = {**turn[-1], "tool_calls": [_with_text(call)]}
        with suppress(TemplateRefusalError):
            return f'"{_PROBE}"' in self.write(turn)
        return False


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text; they may be nested under `function`."""
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    arguments: Any = call.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=refuse_value)
    return {**call, "arguments": arguments}
