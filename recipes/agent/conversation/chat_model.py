"""The agents' interface to the language model: conversations whose turns the engines sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from recipes.agent.call_forms import CallForm
from recipes.agent.conversation.conversation import Conversation, no_turn
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest, Role, ToolOffer
from recipes.language.answers.answer_group import TurnRecord
from recipes.language.answers.sequences import FinishReason
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.data.text_tokens import mended


class LimitReached(Exception):  # noqa: N818 - not an error: the run of the agent is over
    """A run has reached its limit of turns or of conversation tokens.

    Attributes:
        limit: `turns` or `tokens`.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(f"no {limit} are left")
        self.limit = limit


class MessagesRefused(Exception):  # noqa: N818 - an outcome of this run, as `LimitReached`
    """Messages that the model's chat template does not write; the text says why."""


class EngineUnavailable(Exception):  # noqa: N818 - as `ToolUnavailable`
    """A turn that the engine did not draw. The model is not to blame; the run has failed."""


class Engines(Protocol):
    """Whatever draws turns."""

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        """Return a turn."""
        ...


class DrawSettings(NamedTuple):
    """The settings of all turns of a run.

    Attributes:
        sample: number of the run within its group.
        seed: the seed of the draws.
        temperature: the temperature of the draws; 0 takes the likeliest token.
        max_turns: the most turns of the model, over all conversations of the run.
        max_tokens: the maximum tokens of a conversation.
        max_new_tokens: the most new tokens of a turn.
        version: the version of the oldest weights that may draw.
        agent: rank of the process.
        top_p: the top-p of the draws.
        training_temperature: the training temperature of the draws in training; None: `temperature`.
    """

    sample: int
    seed: int
    temperature: float
    max_turns: int
    max_tokens: int
    max_new_tokens: int
    version: int = 0
    agent: int = 0
    top_p: float = 1.0
    training_temperature: float | None = None


class ModelReply(NamedTuple):
    """A turn of the model.

    Attributes:
        text, tokens: the text and tokens of the turn.
        finish: why it ended.
        prompt_tokens: tokens before it.
        raw: text with tokens that only mark something; calls may stand among those.
        form: the form of calls, where the model's chat template teaches one.
        thinking: whether the turn begins within a thought, which the prompt opens.
    """

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    prompt_tokens: int = 0
    raw: str = ""
    form: CallForm | None = None
    thinking: bool = False


class LanguageModel:
    """The language model in one run of an agent. All its conversations are trained on.

    Args:
        engines: the engines that draw.
        settings: the settings of all turns.
        on_turn: called with every turn and its text.

    Attributes:
        turns: the turns of the model so far.
        failure: why the engine did not draw a turn; "" where it drew all.
        limit: the limit that was reached, as in `LimitReached`; "" where none was.
        mended: messages so far that had half of a character, which no tokenizer takes.
    """

    def __init__(
        self, engines: Engines, settings: DrawSettings, on_turn: Callable[[TurnRecord], None] = lambda turn: None
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._on_turn = on_turn
        self._chats: list[Chat] = []
        self.turns = self.mended = 0
        self.failure = self.limit = ""

    @property
    def settings(self) -> DrawSettings:
        """Settings of all turns."""
        return self._settings

    def conversation(self, *messages: str | ChatMessage, tools: ToolOffer | None = None) -> Chat:
        """Start a conversation. A string is a user message; `tools` are functions that the model may call."""
        opening = [ChatMessage("user", message) if isinstance(message, str) else message for message in messages]
        return self._chat(Conversation(str(len(self._chats))), opening, tools)

    def _chat(self, conversation: Conversation, messages: Sequence[ChatMessage], tools: ToolOffer | None) -> Chat:
        chat = Chat(self, conversation, len(self._chats), messages, tools)
        self._chats.append(chat)
        return chat

    def segments(self) -> list[Answer]:
        """Return the training segments: one per conversation with a model turn, at least one in total."""
        sample = self._settings.sample
        segments = [segment for chat in self._chats if (segment := chat.tokens.segment(sample)) is not None]
        return segments or [no_turn(sample)]

    def say(self, turn: TurnRecord) -> None:
        """Record a turn."""
        self._on_turn(turn)

    async def draw(self, chat: Chat, stop: tuple[str, ...], max_new_tokens: int | None) -> DrawnTurn:
        """Draw the next turn of a conversation.

        Raises:
            LimitReached: see there.
            MessagesRefused: see there.
            EngineUnavailable: see there.
        """
        settings = self._settings
        if self.turns >= settings.max_turns:
            raise self.reached("turns")
        self.turns += 1
        most = settings.max_new_tokens if max_new_tokens is None else min(settings.max_new_tokens, max_new_tokens)
        # What is not drawn is not a turn: a conversation that is full, a refusal, a client that has gone.
        try:
            turn = await self._ask(chat, stop, most)
        except BaseException:
            self.turns -= 1
            raise
        if not turn.tokens:
            self.turns -= 1
            raise self.reached("tokens")
        return turn

    def reached(self, limit: str) -> LimitReached:
        """Note that a limit is reached, whatever the agent makes of it, and return the exception that says so."""
        self.limit = limit
        return LimitReached(limit)

    async def count(self, chat: Chat) -> int:
        """Return the tokens of a conversation with the messages that are not encoded yet.

        Raises:
            MessagesRefused: see there.
        """
        turn = await self._ask(chat, (), 0)
        return len(chat.tokens) + len(turn.observed)

    async def _ask(self, chat: Chat, stop: tuple[str, ...], max_new_tokens: int) -> DrawnTurn:
        settings = self._settings
        turn = await self._engines.draw(
            DrawRequest(
                request_id=0,
                agent=settings.agent,
                context=chat.tokens.tokens,
                messages=tuple(chat.pending),
                max_tokens=settings.max_tokens,
                max_new_tokens=max_new_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                # Branches with equal tokens draw other ones.
                sample=settings.sample + (chat.number << 24),
                version=settings.version,
                stop=stop,
                tools=chat.tools,
            )
        )
        if turn.failure:
            self.failure = turn.failure
            raise EngineUnavailable(turn.failure)
        if turn.refusal:
            raise MessagesRefused(turn.refusal)
        return turn


class Chat:
    """A conversation of an agent with the model; made by `LanguageModel.conversation`, and by `fork`.

    Attributes:
        number: the number of the conversation within its run.
        tokens: the tokens of the conversation.
        pending: messages that the model has not seen yet.
        tools: functions that the model may call.
    """

    def __init__(
        self,
        model: LanguageModel,
        conversation: Conversation,
        number: int,
        messages: Sequence[ChatMessage],
        tools: ToolOffer | None = None,
    ) -> None:
        self._model = model
        self.number = number
        self.tokens = conversation
        self.pending: list[ChatMessage] = []
        self.tools = tools
        self._speaking = False
        for message in messages:
            self.add(message)

    def add(self, text: str | ChatMessage, role: Role = "user") -> None:
        """Add a message before the model's next turn; U+FFFD stands for each half of a character in it."""
        message = ChatMessage(role, text) if isinstance(text, str) else text
        whole = mended(message.text)
        if whole != message.text:
            self._model.mended += 1
            message = message._replace(text=whole)
        self.pending.append(message)
        if message.role != "tool":
            self._model.say(TurnRecord("task", message.text, segment=self.number))

    async def reply(self, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> ModelReply:
        """Let the model speak.

        Args:
            stop: texts that end the turn, besides the model's own end; they are part of it.
            max_new_tokens: fewer tokens than a turn may have anyway.

        Raises:
            LimitReached: the turns of the run, or the tokens of the conversation, are used up. An agent need not catch
                it: the run ends then without an answer.
            MessagesRefused: the model's chat template does not write the messages. They are dropped; what came before
                stays as it was.
            EngineUnavailable: the engine did not draw the turn. The run has failed, whatever the agent makes of it.
            RuntimeError: a reply is already in progress; `fork` is for parallel turns.
        """
        if self._speaking:
            raise RuntimeError("a reply is already in progress in this conversation: use `fork()` for parallel turns")
        self._speaking = True
        began = time.perf_counter()
        try:
            turn = await self._model.draw(self, tuple(stop), max_new_tokens)
        except MessagesRefused:
            self.pending.clear()
            raise
        finally:
            self._speaking = False
        self.pending.clear()
        self.tokens.observe(turn.observed)
        before = len(self.tokens)
        self.tokens.draw(turn.tokens, turn.logprobs, turn.versions, turn.finish)
        seconds = time.perf_counter() - began
        self._model.say(TurnRecord("model", turn.text, seconds=seconds, segment=self.number))
        raw = turn.raw or turn.text
        return ModelReply(turn.text, turn.tokens, turn.finish, before, raw, turn.form, turn.thinking)

    def fork(self) -> Chat:
        """Return an independent copy of the conversation, for parallel calls and sub-agents."""
        name = f"{self.tokens.name}.{self.number}"
        chat = self._model._chat(self.tokens.fork(name), (), self.tools)  # pyright: ignore[reportPrivateUsage]
        chat.pending = list(self.pending)
        return chat

    def credit(self, reward: float) -> None:
        """Give the model's last turn its own reward, in addition to that of the outcome."""
        self.tokens.credit(reward)
        self._model.say(TurnRecord("reward", f"{reward:+g}", segment=self.number))
