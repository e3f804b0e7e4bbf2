"""Problems, problem sets, the order of training, and the encoding of prompts as token ids."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from recipes.language.text.chat_template import ChatTemplate, TemplateRefusalError
from recipes.language.text.text_tokens import TextTokens
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.language.config.problem_config import LanguageDataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and its right answer.

    Attributes:
        prompt: text of the question.
        answer: text of the right answer.
        source_answer: the right answer as its source has it, such as a number; None: the text.
        row: all fields of the problem in its source, for reward functions.
        difficulty: the label by which evaluations are reported separately, or "".
        source: name of the data set.
        messages: the question as chat messages, each with `role` and `content`; empty if it is a text.
    """

    prompt: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    difficulty: str = ""
    source: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    source_answer: Any = None


def require_text(problem: Problem) -> None:
    """Check that a question can be written without a chat template.

    Raises:
        ConfigError: the question is given as messages.
    """
    if problem.messages:
        raise ConfigError(
            "the prompts are messages of a chat, and `data.apply_chat_template` is off",
            help="write `data.apply_chat_template: true`, or give texts as prompts",
        )


class ProblemSet(Protocol):
    """Numbered problems; the same number is always the same problem."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Problem: ...


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    numbers = list(range(size))
    random.Random(f"{seed} {epoch}").shuffle(numbers)
    return tuple(numbers)


def problem_number(size: int, position: int, *, seed: int, shuffle: bool) -> int:
    """Return the number of the training problem at a position of the endless order of `size` problems.

    Every epoch uses each problem once, in an order that depends only on seed and epoch: a resumed run needs only the
    position.
    """
    epoch, index = divmod(position, size)
    return _order(size, seed, epoch)[index] if shuffle else index


def training_order(size: int, start: int, count: int, *, seed: int, shuffle: bool) -> list[int]:
    """Return the numbers of `count` training problems, from position `start` on."""
    return [problem_number(size, position, seed=seed, shuffle=shuffle) for position in range(start, start + count)]


class PromptEncoder:
    """An encoder of questions as the model expects them.

    Args:
        tokenizer: the tokenizer of the model.
        apply_chat_template: whether a question becomes a user message in the tokenizer's chat template.
        system_prompt: text of the system message; needs the template.
        few_shot: text before every question: examples with their answers.
        max_prompt_length: longest prompt in tokens.
        template_arguments: arguments of the template.

    Attributes:
        template: the chat template; None if questions are plain texts.

    Raises:
        ConfigError: the tokenizer lacks a usable chat template, or `system_prompt` is given without
            `apply_chat_template`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool = False,
        system_prompt: str = "",
        few_shot: str = "",
        max_prompt_length: int = 0,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if system_prompt and not apply_chat_template:
            raise ConfigError(
                "`data.system_prompt` needs `data.apply_chat_template: true`",
                help="without a template, write the text into `data.few_shot`",
            )
        self._tokenizer: Any = tokenizer
        self._texts = TextTokens(tokenizer)
        self.template = ChatTemplate(tokenizer, template_arguments or {}) if apply_chat_template else None
        self._system = system_prompt
        self._few_shot = few_shot
        self._longest = max_prompt_length

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: LanguageDataConfig) -> PromptEncoder:
        """Return the encoder that section `data` describes."""
        return cls(
            tokenizer,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            few_shot=data.few_shot,
            max_prompt_length=data.max_prompt_length,
            template_arguments=data.chat_template_kwargs,
        )

    def encode(self, problem: Problem) -> tuple[int, ...] | None:
        """Return the tokens of a problem's question; None if they exceed `max_prompt_length`.

        Raises:
            TemplateRefusalError: the chat template rejects the question.
            ConfigError: the question is messages, and there is no chat template.
        """
        if self.template is not None:
            messages = self._messages(problem)
            self.template.check_roles(messages)
            tokens = self._texts.plain(self.template.render(messages))
        else:
            require_text(problem)
            tokens = self._texts.opened(self._few_shot + problem.prompt)
        if self._longest and len(tokens) > self._longest:
            return None
        return tuple(tokens)

    def _messages(self, problem: Problem) -> list[Mapping[str, str]]:
        """Return a question as messages, with few-shot text in the last, and a system message first."""
        *before, last = problem.messages or ({"role": "user", "content": problem.prompt},)
        messages = [*before, {**last, "content": self._few_shot + last["content"]}]
        if self._system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def text(self, tokens: Sequence[int], stops: Collection[int] = ()) -> str:
        """Return the text of an answer without its ending token, one of `stops`, but with thought marks; see
        `TextTokens`.
        """
        return self._texts.text(tokens[:-1] if tokens and tokens[-1] in stops else tokens)

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token of an answer."""
        return tuple(str(self._tokenizer.decode([token])) for token in tokens)


def prompt_tokens(
    encoder: PromptEncoder, problem: Problem, new_tokens: int, longest: int
) -> tuple[tuple[int, ...] | None, str]:
    """Return the tokens of a problem's question, or None if it is skipped, with the reason.

    Args:
        encoder: the encoder of questions.
        problem: the problem.
        new_tokens: the maximum tokens of an answer.
        longest: the maximum tokens of question and answer together that the engine takes; 0: unlimited.

    Returns:
        The tokens, and "" or why the question cannot be asked, unless it only exceeds `max_prompt_length`.
    """
    try:
        tokens = encoder.encode(problem)
    except TemplateRefusalError as refusal:
        return None, refusal.reason
    if tokens and 0 < longest < len(tokens) + new_tokens:
        why = f"its {len(tokens)} tokens and `max_new_tokens` {new_tokens} exceed the engine's limit of {longest}"
        return None, why
    return tokens, ""
