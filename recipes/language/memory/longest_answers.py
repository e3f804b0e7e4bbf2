"""Answers of a training step at their longest: what a forecast of memory takes for what will be learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.config import LanguageConfig
from recipes.language.data.load_problems import load_problems
from recipes.language.data.problems import training_order
from recipes.language.data.prompts import PromptEncoder
from recipes.language.learning.warm_start import example
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A number of each token of a batch, in bytes: itself; and of an answer also whether it is trained, log-probability,
# version and reward, advantage, and the log-probability that ratios are taken against.
_TOKEN: Final = 8
_ANSWER_TOKEN: Final = 1 + 4 + 8 + 4 + 4 + 4
# Batches while they are handed on: as their parts came, and joined.
BATCH_COPIES: Final = 2
# Bytes of a token that has been drawn, as Python's objects: three pointers, a log-probability, and where it is not one
# of the small numbers that Python keeps, the token.
_DRAWN: Final = 3 * 8 + 24
_LARGE_NUMBER: Final = 28
_SMALL_NUMBERS: Final = 257

Prompts = tuple[tuple[int, ...], ...]
# Returns the prompts of training's first problems, so many of them.
PromptReader = Callable[[LanguageConfig, "PreTrainedTokenizerBase", int], Prompts]


class StepAnswers(NamedTuple):
    """The answers of a training step at their longest.

    Attributes:
        prompts: token ids of the prompt of each group.
        group_size: answers to each.
        longest: tokens of prompt and answer together, at most.
        most_new: tokens of an answer at most.
        notes: what is not known.
    """

    prompts: Prompts
    group_size: int
    longest: int
    most_new: int
    notes: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """Answers of a step."""
        return len(self.prompts) * self.group_size

    def drawn(self, prompt: tuple[int, ...]) -> int:
        """Return the tokens of the longest answer to a prompt."""
        return max(1, min(self.most_new, self.longest - len(prompt)))

    @property
    def widest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(each) + self.drawn(each) for each in self.prompts)

    @property
    def batch_bytes(self) -> int:
        """Bytes of all answers as they are learned from."""
        numbers = ((len(each) + self.drawn(each)) * _TOKEN + self.drawn(each) * _ANSWER_TOKEN for each in self.prompts)
        return self.group_size * sum(numbers)

    def objects(self, vocabulary: int) -> int:
        """Return the bytes of all answers as they are drawn, before they become a batch."""
        each = _DRAWN + (_LARGE_NUMBER if vocabulary > _SMALL_NUMBERS else 0)
        return self.group_size * each * sum(map(self.drawn, self.prompts))

    def batch(self, groups: int, most_tokens: int) -> RolloutBatch:
        """Return the answers to the first of the prompts, as many as are needed to fill passes of so many tokens."""
        pieces: list[RolloutBatch] = []
        tokens = 0
        for number, prompt in enumerate(self.prompts[:groups]):
            # Whatever tokens: all answers are as long as they can be.
            answer = example(prompt, (0,) * self.drawn(prompt))
            pieces.append(RolloutBatch.of([answer] * self.group_size, number, [0.0] * self.group_size))
            tokens += len(prompt) + self.group_size * self.drawn(prompt)
            # Two full passes, and what may be left over of either.
            if tokens > 4 * most_tokens:
                break
        return RolloutBatch.joined(pieces)


def step_answers(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase | None, read: PromptReader) -> StepAnswers:
    """Return the answers of a training step, of the prompts that the first one has where they can be read.

    Args:
        config: the whole file.
        tokenizer: writes prompts as tokens; None: there is none here.
        read: returns the prompts.
    """
    count = config.data.rollout_batch_size
    algorithm, longest = config.algorithm, config.runner.seq_length
    notes: tuple[str, ...] = ()
    prompts: Prompts = ()
    if tokenizer is not None:
        try:
            prompts = read(config, tokenizer, count)
        except ConfigError as error:
            notes = (f"the problems are not read, and prompts are taken to be as long as they may be: {error.message}",)
    else:
        notes = ("without a tokenizer prompts are taken to be as long as `data.max_prompt_length` lets them be",)
    if not prompts:
        length = min(config.data.max_prompt_length, longest - 1)
        prompts = tuple((number,) * length for number in range(count))
    repeated = tuple(prompts[number % len(prompts)] for number in range(count))
    return StepAnswers(repeated, algorithm.group_size, longest, config.longest_answer, notes)


def first_prompts(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase, count: int) -> Prompts:
    """Return the prompts of the first training step; those that are too long are left out.

    Raises:
        ConfigError: the problems cannot be read.
    """
    data = config.data
    encoder = PromptEncoder(
        tokenizer,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
        few_shot=data.few_shot,
        max_prompt_length=data.max_prompt_length,
        template_arguments=data.chat_template_kwargs,
    )
    problems = load_problems(data, evaluation=False)
    numbers = training_order(len(problems), 0, count, seed=data.seed, shuffle=data.shuffle)
    encoded = [encoder.encode(problems[number]) for number in numbers]
    return tuple(each for each in encoded if each)
