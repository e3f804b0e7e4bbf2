"""Messages between agents and engines, the encoding of chat messages before and between model turns, and the client of
the engines in an agent process, which batches the requests of concurrent turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from recipes.agent.conversation.call_forms import HERMES, CallForm, FunctionCall, taught_form, written_call
from recipes.language.answers.sequences import FinishReason
from recipes.language.text.chat_template import ChatTemplate, TemplateRefusalError
from recipes.language.text.text_tokens import TextTokens, opens_thought
from rlinf_core import Channel, CommunicationTimeoutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Role = Literal["system", "user", "assistant", "tool"]


class ChatMessage(NamedTuple):
    """A message of a chat.

    Attributes:
        role, text: the role and text of the message.
        calls: the function calls of an assistant's message that the model did not sample.
        call_id: the id of the call whose result this message is.
        name: the name of the called function, or of the author.
    """

    role: Role
    text: str
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""
    name: str = ""


class ToolOffer(NamedTuple):
    """Functions that the model may call in a conversation.

    Attributes:
        functions: the functions in the JSON of chat completions.
        instructions: instructions for calls, added to the system message if the chat template has none.
        single: whether a turn ends after one call.
    """

    functions: tuple[str, ...]
    instructions: str
    single: bool = False


class DrawRequest(NamedTuple):
    """A request for a turn, to an engine.

    Attributes:
        request_id: chosen by the agent process, and returned with the turn.
        agent: the rank of the agent process.
        context: the tokens of the conversation so far.
        messages: the messages after the context, which the engine encodes.
        max_tokens: the maximum tokens of the conversation, this turn included.
        max_new_tokens: the maximum new tokens of this turn; 0: only encode the messages.
        temperature: the sampling temperature; 0: greedy.
        seed: the seed of sampling.
        sample: a number that gives equal conversations different samples.
        version: the oldest version of weights that may sample the turn.
        stop: texts that end the turn, besides the model's stop tokens.
        tools: the functions that the model may call.
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
    """A turn that an engine sampled.

    Attributes:
        request_id: the id of the request.
        observed: the tokens of the messages, which precede the turn.
        tokens: the token ids with the ending token; empty if the conversation has no room.
        logprobs: the log-probability of each token.
        versions: the version of the weights that drew each token.
        text: the text without the ending token.
        finish: the finish reason of the turn.
        raw: the text with special tokens, which may mark calls; "": the same as `text`.
        form: the form of calls that the chat template teaches, if any.
        thinking: whether the turn begins within a thought that the prompt opened.
        refusal: why the template rejects the messages, so that there are no tokens.
        failure: why the engine failed, so that there are no tokens.
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
    """Return the channel key of turns for an agent process."""
    return f"drawn:{rank}"


# The tokens at the end of a prompt to search for the mark of a thought, which blanks may follow.
_LONGEST_MARK: Final = 32
# A placeholder of a model turn, to find out what a chat template writes after the turn.
_TURN: Final = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"


class TurnEncoder:
    """An encoder of messages that never encodes the model's turns again.

    Args:
        tokenizer: the tokenizer of the model.
        apply_chat_template: whether to render messages by the tokenizer's chat template, or as plain texts.
        template_arguments: arguments of the template.

    Attributes:
        template: the chat template; None for plain texts.
        form: the form of calls that the template teaches; None if it knows no functions.

    Raises:
        ConfigError: a chat template is asked for, but the tokenizer has no usable one.
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

    def encode(
        self, context: Sequence[int], messages: Sequence[ChatMessage], tools: ToolOffer | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of messages that follow a context; an empty context starts the conversation.

        Raises:
            TemplateRefusalError: the chat template rejects the messages, or rewrites the model's turns.
        """
        if tools is not None and self.form is None and messages and not context:
            messages = _with_instructions(messages, tools.instructions)
        if self.template is None:
            text = "".join(message.text + "".join(map(written_call, message.calls)) for message in messages)
            return tuple(self._texts.behind(text) if context else self._texts.opened(text))
        functions = [json.loads(function) for function in tools.functions] if tools is not None and self.form else []
        listed = [self._entry(message) for message in messages]
        self.template.check_roles(listed)
        if not context:
            return tuple(self._texts.plain(self.template.render(listed, functions)))
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, turn, after = self.template.render([*before, *listed], functions).partition(_TURN)
        if not turn:
            raise TemplateRefusalError("it rewrites the model's turns, so a conversation cannot be kept token by token")
        written = tuple(self._texts.behind(after))
        # The model may already have sampled the template's end of the turn.
        return written[1:] if written[:1] == (context[-1],) else written

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens, except marks of thoughts and calls."""
        return self._texts.text(tokens)

    def raw_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with all special tokens."""
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
    """Return a call for chat templates, with its arguments as an object."""
    return {**call.entry(), "function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _with_instructions(messages: Sequence[ChatMessage], instructions: str) -> tuple[ChatMessage, ...]:
    """Return messages with the tool instructions in the system message, adding one if needed."""
    first, rest = messages[0], messages[1:]
    if first.role != "system":
        return (ChatMessage("system", instructions), *messages)
    return (first._replace(text=f"{first.text}\n\n{instructions}"), *rest)


async def next_item(channel: Channel, key: str) -> Any:
    """Return the next item of a channel, with no time limit, as tools and trainers may be slow."""
    while True:
        with suppress(CommunicationTimeoutError):
            return await channel.get(key=key, async_op=True).async_wait()


class EngineRoute:
    """The engine of one run, kept for the whole run so that shared prefixes are computed once."""

    def __init__(self, client: EngineClient, engine: int) -> None:
        self._client = client
        self.engine = engine

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        """Return a turn."""
        return await self._client.draw(self.engine, request)


class EngineClient:
    """Requests turns from engines through a channel.

    Args:
        channel: the channel to the engines and back.
        rank: the rank of this process.
        engines: the number of engines.
    """

    def __init__(self, channel: Channel, rank: int, engines: int) -> None:
        self._channel = channel
        self._rank = rank
        self._load = [0] * engines
        # Numbers that no dead predecessor of this process used, as answers to it may still arrive.
        self._numbers = itertools.count(time.monotonic_ns())
        self._waiting: dict[int, asyncio.Future[DrawnTurn]] = {}
        self._outgoing: defaultdict[int, list[DrawRequest]] = defaultdict(list)
        self._reading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Read answers while the context is open."""
        self._reading = asyncio.create_task(self._read())
        try:
            yield
        finally:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading

    def route(self, runs: int) -> EngineRoute:
        """Return the engine with the fewest runs of this process, and count the new runs.

        Args:
            runs: the number of runs that will use it.
        """
        # Processes start with different engines.
        count = len(self._load)
        engine = min(range(count), key=lambda rank: (self._load[rank], (rank - self._rank) % count))
        self._load[engine] += runs
        return EngineRoute(self, engine)

    def leave(self, route: EngineRoute) -> None:
        """Count the end of a run."""
        self._load[route.engine] -= 1

    async def draw(self, engine: int, request: DrawRequest) -> DrawnTurn:
        """Return a turn of an engine."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        result = self._waiting[number] = loop.create_future()
        if not self._outgoing[engine]:
            # Sent after all runs have continued as far as possible, so that their requests share one message.
            loop.call_soon(self._send, engine)
        self._outgoing[engine].append(request._replace(request_id=number, agent=self._rank))
        try:
            return await result
        finally:
            self._waiting.pop(number, None)

    def _send(self, engine: int) -> None:
        requests = self._outgoing.pop(engine)
        self._channel.put(tuple(requests), key=engine_key(engine))

    async def _read(self) -> None:
        try:
            while True:
                for turn in await next_item(self._channel, agent_key(self._rank)):
                    self._settle(turn)
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)

    def _settle(self, turn: DrawnTurn) -> None:
        result = self._waiting.get(turn.request_id)
        # A run that hit its time limit no longer waits.
        if result is not None and not result.done():
            result.set_result(turn)
