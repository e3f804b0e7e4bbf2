"""The agents' interface to the language model: conversations whose turns the engines sample.

Conversations are kept as tokens, unchanged, and never tokenized again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast, get_args

from recipes.agent.conversation.call_forms import CallForm
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest, Role, ToolOffer
from recipes.language.answers.answer_group import TurnRecord
from recipes.language.answers.sequences import FinishReason, undrawn
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.rewards.functions import finite
from recipes.language.text.text_tokens import mended
from rlinf_core.errors import RuntimeFailure


class ConversationError(RuntimeFailure):
    """A turn of an engine whose numbers of tokens and figures differ."""


class Conversation:
    """The tokens of a conversation in order, with log-probabilities, versions and rewards of sampled ones.

    Args:
        name: the name of the conversation, for messages.
        inherited: the tokens of the conversation from which this one branches off.

    Attributes:
        turns: the number of turns of the model.
    """

    def __init__(self, name: str, inherited: Sequence[int] = ()) -> None:
        self.name = name
        self.turns = 0
        self._tokens = list(inherited)
        # These have a value for each token, False or 0 unless the model sampled it in this conversation.
        self._drawn = [False] * len(self._tokens)
        self._logprobs = [0.0] * len(self._tokens)
        self._versions = [0] * len(self._tokens)
        self._rewards = [0.0] * len(self._tokens)
        self._finish: FinishReason = "stop"

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append input tokens; they are not trained on."""
        self._append(tokens, drawn=False, logprobs=[0.0] * len(tokens), versions=[0] * len(tokens))

    def draw(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], finish: FinishReason
    ) -> None:
        """Append a turn of the model.

        Args:
            tokens: the sampled tokens.
            logprobs: the log-probability of each token under the policy that drew it.
            versions: the version of the weights that drew each token.
            finish: the finish reason of the turn.

        Raises:
            ConversationError: the numbers of tokens, log-probabilities and versions differ.
        """
        if not len(tokens) == len(logprobs) == len(versions):
            raise ConversationError(
                f"turn {self.turns + 1} of conversation `{self.name}` has {len(tokens)} tokens,"
                f" {len(logprobs)} log-probabilities and {len(versions)} versions"
            )
        self._append(tokens, drawn=True, logprobs=logprobs, versions=versions)
        self._finish = finish
        self.turns += 1

    def _append(
        self, tokens: Sequence[int], *, drawn: bool, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self._tokens += tokens
        self._drawn += [drawn] * len(tokens)
        self._logprobs += logprobs
        self._versions += versions
        self._rewards += [0.0] * len(tokens)

    def fork(self, name: str) -> Conversation:
        """Return a copy that continues independently; tokens sampled so far are trained on only in the original."""
        return Conversation(name, self._tokens)

    def credit(self, reward: float) -> None:
        """Reward the model's last turn, in addition to the reward of the outcome.

        Raises:
            RuntimeError: the model has not spoken in this conversation.
        """
        if not self.turns:
            raise RuntimeError(f"conversation `{self.name}` has no model turn to reward: set the reward after a reply")
        last = max(number for number, drawn in enumerate(self._drawn) if drawn)
        self._rewards[last] += reward

    def segment(self, sample: int) -> Answer | None:
        """Return the training data: the prompt, and everything from the first sampled token to the last.

        Args:
            sample: the number of the trajectory within its group.

        Returns:
            The segment; None without sampled tokens.
        """
        if True not in self._drawn:
            return None
        first = self._drawn.index(True)
        end = len(self._drawn) - self._drawn[::-1].index(True)
        part = slice(first, end)
        return Answer(
            request_id=self.name,
            sample=sample,
            prompt=tuple(self._tokens[:first]),
            tokens=tuple(self._tokens[part]),
            logprobs=tuple(self._logprobs[part]),
            versions=tuple(self._versions[part]),
            finish_reason=self._finish,
            trained=tuple(self._drawn[part]),
            rewards=tuple(self._rewards[part]),
        )


def no_turn(sample: int) -> Answer:
    """Return an untrained segment, for a trajectory without a model turn."""
    return undrawn((0,), (0,), (False,), sample=sample, finish_reason="aborted")


class LimitReached(Exception):  # noqa: N818 - not an error: the run of the agent is over
    """A run has reached its limit of turns or of conversation tokens.

    Attributes:
        limit: `turns` or `tokens`.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(f"no {limit} are left")
        self.limit = limit


class MessagesRefused(Exception):  # noqa: N818 - an outcome of this run, as `LimitReached`
    """Messages that the model's chat template rejects; the text says why."""


class EngineUnavailable(Exception):  # noqa: N818 - as `ToolUnavailable`
    """A turn that the engine failed to sample through no fault of the model; the run has failed."""


class Engines(Protocol):
    """An interface to engines that sample turns."""

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        """Sample a turn."""
        ...


class DrawSettings(NamedTuple):
    """The settings of all turns of a run.

    Attributes:
        sample: the number of the run within its group.
        seed: the seed of sampling.
        temperature: the sampling temperature; 0: greedy.
        max_turns: the maximum turns of the model, over all conversations of the run.
        max_tokens: the maximum tokens of a conversation.
        max_new_tokens: the maximum new tokens of a turn.
        version: the oldest version of weights that may sample.
        agent: the rank of the agent process.
        top_p: the top-p of sampling.
        training_temperature: the temperature used in training, which requests may also name; None: `temperature`.
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
        finish: the finish reason of the turn.
        prompt_tokens: the number of tokens before the turn.
        raw: the text with special tokens, which may mark calls.
        form: the form of calls that the model's chat template teaches, if any.
        thinking: whether the turn begins within a thought that the prompt opened.
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
        engines: the engines that sample.
        settings: the settings of all turns.
        on_turn: called with every turn and its text.

    Attributes:
        turns: the number of the model's turns so far.
        failure: why the engine failed to sample a turn; "" if it never failed.
        limit: the limit that was reached, as in `LimitReached`; "" if none.
        mended: the number of messages so far with lone surrogates, which no tokenizer accepts.
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
            # An agent that tries forever must not keep its time limit from being seen.
            await asyncio.sleep(0)
            raise self.reached("turns")
        self.turns += 1
        most = settings.max_new_tokens if max_new_tokens is None else min(settings.max_new_tokens, max_new_tokens)
        # Do not count turns without samples: a full conversation, a refusal, or a cancelled request.
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
        """Record that a limit is reached, even if the agent ignores it, and return the exception for it."""
        self.limit = limit
        return LimitReached(limit)

    async def count(self, messages: Sequence[ChatMessage], tools: ToolOffer | None) -> int:
        """Return the number of tokens of a conversation, which is no part of the run.

        Raises:
            MessagesRefused: see there.
        """
        apart = LanguageModel(self._engines, self._settings)
        return len((await self._ask(apart.conversation(*messages, tools=tools), (), 0)).observed)

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
                # Branches with equal tokens must get different samples.
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
    """A conversation of an agent with the model, created by `LanguageModel.conversation` or `fork`.

    Attributes:
        number: the number of the conversation within its run.
        tokens: the tokens of the conversation.
        pending: the messages that the model has not seen yet.
        tools: the functions that the model may call.
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
        """Add a message before the model's next turn; U+FFFD replaces each lone surrogate in it.

        Raises:
            TypeError, ValueError: it is no message, or there is no such role.
        """
        if role not in get_args(Role):
            raise ValueError(f"the role of a message is {role!r}, not one of {', '.join(get_args(Role))}")
        value = cast("object", text)
        message = ChatMessage(role, value) if isinstance(value, str) else value
        if not isinstance(message, ChatMessage) or not isinstance(cast("object", message.text), str):
            raise TypeError(f"a message is {type(value).__name__}, not a text or a `ChatMessage` of a text")
        whole = mended(message.text)
        if whole != message.text:
            self._model.mended += 1
            message = message._replace(text=whole)
        self.pending.append(message)
        if message.role != "tool":
            self._model.say(TurnRecord("task", message.text, segment=self.number))

    async def reply(self, stop: str | Sequence[str] = (), max_new_tokens: int | None = None) -> ModelReply:
        """Let the model speak.

        Args:
            stop: a text or texts that end the turn, besides the model's stop tokens; they are part of the turn.
            max_new_tokens: a lower limit of the turn's tokens; None: the run's limit.

        Raises:
            ValueError: a stop text is empty or no text, or `max_new_tokens` is not an integer from 1.
            LimitReached: the turns of the run, or the tokens of the conversation, are used up. An agent need not catch
                it: the run ends then without an answer.
            MessagesRefused: the model's chat template rejects the pending messages, which are dropped.
            EngineUnavailable: the engine failed to sample the turn. The run has failed even if the agent catches it.
            RuntimeError: a reply is already in progress; `fork` is for parallel turns.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(cast("object", text), str) and text for text in stops):
            raise ValueError(f"`stop` is {stop!r}: write texts that are not empty")
        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
            raise ValueError(f"`max_new_tokens` is {max_new_tokens!r}, not an integer from 1")
        if self._speaking:
            raise RuntimeError("a reply is already in progress in this conversation: use `fork()` for parallel turns")
        self._speaking = True
        # Messages that are added meanwhile come after the turn.
        began, sent = time.perf_counter(), len(self.pending)
        try:
            turn = await self._model.draw(self, stops, max_new_tokens)
        except MessagesRefused:
            del self.pending[:sent]
            raise
        finally:
            self._speaking = False
        del self.pending[:sent]
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
        """Reward the model's last turn, in addition to the reward of the outcome.

        Raises:
            TypeError, ValueError: the reward is not a number, or not finite in float32.
            RuntimeError: the model has not spoken in this conversation.
        """
        number = finite("reward", reward)
        self.tokens.credit(number)
        self._model.say(TurnRecord("reward", f"{number:+g}", segment=self.number))
