"""Messages between agents and engines, and their token ids: the initial messages, and those between two model turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from recipes.agent.call_forms import HERMES, CallForm, FunctionCall, taught_form, written_call
from recipes.language.answers.sequences import FinishReason
from recipes.language.data.text_tokens import TextTokens, opens_thought
from recipes.language.templates.chat_template import ChatTemplate, TemplateRefusalError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Role = Literal["system", "user", "assistant", "tool"]


class ChatMessage(NamedTuple):
    """A message of a chat.

    Attributes:
        role, text: the role and text of the message.
        calls: the calls of functions, in a message of the assistant that the model did not draw.
        call_id: the id of the call that a tool's message answers.
        name: the name of that function, or of the person who writes.
    """

    role: Role
    text: str
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""
    name: str = ""


class ToolOffer(NamedTuple):
    """Functions that the model may call in a conversation.

    Attributes:
        functions: each as chat completions list it, as JSON.
        instructions: how to call them, for the system message, where the chat template does not say.
        single: whether a turn ends after one call.
    """

    functions: tuple[str, ...]
    instructions: str
    single: bool = False


class DrawRequest(NamedTuple):
    """A turn that an engine is to draw.

    Attributes:
        request_id: comes back with the turn; given by the process that asks.
        agent: rank of the process that asks.
        context: tokens of the conversation so far.
        messages: the messages that follow them; the engine renders them as tokens.
        max_tokens: the maximum tokens of the conversation, this turn included.
        max_new_tokens: the most new tokens of this turn; 0: the messages are counted, and nothing is drawn.
        temperature: the temperature of the draws; 0 takes the likeliest token.
        seed: the seed of the draws.
        sample: number of the draws, which distinguishes equal conversations.
        version: the version of the oldest weights that may draw the turn.
        stop: texts that end the turn, besides the model's own end.
        tools: the tools that the model may call.
    """

    request_id: int
    agent: int
    context: tuple[int, ...]
    messages: tuple[ChatMessage, ...]
    max_tokens: int
    max_new_tokens: int
    temperature: float
    seed: int
    sample: int
    version: int = 0
    stop: tuple[str, ...] = ()
    tools: ToolOffer | None = None


class DrawnTurn(NamedTuple):
    """A turn that an engine drew.

    Attributes:
        request_id: the id of the request.
        observed: tokens of the messages, which come before those drawn.
        tokens: token ids, the one that ends the turn included; none where the conversation has no room for any.
        logprobs: the log-probabilities of each.
        versions: the versions of the weights that drew each.
        text: the text, without the token that ends the turn.
        finish: why the turn ended.
        raw: text with tokens that have no meaning as text, where calls may stand among those; empty: `text`.
        form: the form of calls, where the chat template teaches one.
        thinking: whether the turn begins within a thought, which the prompt opens.
        refusal: why the messages cannot be written; there are no tokens then.
        failure: why the engine has not drawn it; there are no tokens then.
    """

    request_id: int
    observed: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: FinishReason
    raw: str = ""
    form: CallForm | None = None
    thinking: bool = False
    refusal: str = ""
    failure: str = ""


def engine_key(rank: int) -> str:
    """Return the channel key of turn requests to an engine."""
    return f"turns:{rank}"


def agent_key(rank: int) -> str:
    """Return the key under which an agent process gets them."""
    return f"drawn:{rank}"


# Tokens at the end of a prompt that hold the mark of a thought, and blanks behind it.
_LONGEST_MARK: Final = 32
# Placeholder of a model turn, to find out what a chat template writes after one.
_TURN: Final = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"


class TurnEncoder:
    """Encodes messages for the model without re-encoding its own turns.

    Args:
        tokenizer: the tokenizer of the model.
        apply_chat_template: whether messages are written by the tokenizer's chat template; their texts as they are
            else.
        template_arguments: arguments of the template.

    Attributes:
        template: None where texts are written as they are.
        form: the form of calls, as the template teaches it; None where it knows no functions.

    Raises:
        ConfigError: a chat template is asked for, and the tokenizer has none that can be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = ChatTemplate(tokenizer, template_arguments or {}) if apply_chat_template else None
        self.form = None if self.template is None else taught_form(self.template)
        form = self.form or HERMES
        self._texts = TextTokens(tokenizer, (form.begin, form.middle, form.end, form.key, form.value, form.close))
        self._lost = frozenset(self._lost_roles())

    def _lost_roles(self) -> Iterator[str]:
        """Yield the roles whose messages the template silently drops."""
        user, model, system, tool = (
            {"role": role, "content": f"Words of {role}."} for role in ("user", "assistant", "system", "tool")
        )
        for role, conversation in (("system", [system, user]), ("tool", [user, model, tool])):
            # That a template refuses a role is found when there is a message to be written.
            with suppress(TemplateRefusalError):
                if self.template is not None and self.template.lost_role(conversation) == role:
                    yield role

    def encode(
        self, context: Sequence[int], messages: Sequence[ChatMessage], tools: ToolOffer | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of messages that follow a context; an empty context starts the conversation.

        Raises:
            TemplateRefusalError: the chat template does not write them, or not after a turn of the model as it is.
        """
        if tools is not None and self.form is None and messages and not context:
            messages = _with_instructions(messages, tools.instructions)
        if self.template is None:
            text = "".join(message.text + "".join(map(written_call, message.calls)) for message in messages)
            return tuple(self._texts.behind(text) if context else self._texts.opened(text))
        for message in messages:
            if message.role in self._lost:
                raise TemplateRefusalError(f"it omits the text of a `{message.role}` message")
        functions = [json.loads(function) for function in tools.functions] if tools is not None and self.form else []
        listed = [self._entry(message) for message in messages]
        if not context:
            return tuple(self._texts.plain(self.template.render(listed, functions)))
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, turn, after = self.template.render([*before, *listed], functions).partition(_TURN)
        if not turn:
            raise TemplateRefusalError("it rewrites the model's turns, so a conversation cannot be kept token by token")
        written = tuple(self._texts.behind(after))
        # The model may have ended its turn itself, in the template's way.
        return written[1:] if written[:1] == (context[-1],) else written

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, those that have none left out; marks of thoughts and calls have one."""
        return self._texts.text(tokens)

    def raw_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with those that only mark something."""
        return self._texts.raw(tokens)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends within a thought, which the model continues."""
        return opens_thought(self._texts.raw(prompt[-_LONGEST_MARK:]))

    def _entry(self, message: ChatMessage) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.calls and self.form is None:
            entry["content"] += "".join(map(written_call, message.calls))
        elif message.calls:
            entry["tool_calls"] = [_call_entry(call) for call in message.calls]
        names = {"tool_call_id": message.call_id, "name": message.name}
        return entry | {key: value for key, value in names.items() if value}


def _call_entry(call: FunctionCall) -> dict[str, Any]:
    """Return a call as chat templates read it: with its arguments as an object."""
    return {**call.entry(), "function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _with_instructions(messages: Sequence[ChatMessage], instructions: str) -> tuple[ChatMessage, ...]:
    """Return messages with the tool instructions in the system message, adding one if needed."""
    first, rest = messages[0], messages[1:]
    if first.role != "system":
        return (ChatMessage("system", instructions), *messages)
    return (first._replace(text=f"{first.text}\n\n{instructions}"), *rest)
