"""Conversations as tokens, with the ones that are trained on.

What the model is to write in a turn is the difference of two texts of the chat template: the conversation up to that
turn as a prompt, and the conversation with the turn. Nothing in the template has to mark it. Where a template writes an
earlier turn otherwise once a later one follows, as those do that drop reasoning, a turn becomes a separate example,
with the prompt that the model would be asked with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import balanced, token_budget_parts
from recipes.language.data.chat_messages import Message
from recipes.language.data.text_tokens import TextTokens
from recipes.language.models.packing import WIDEST, PackedRows, RowLayout
from recipes.language.templates.chat_template import ChatTemplate, TemplateRefusalError
from recipes.sft_chat.conversations import ASSISTANT, ChatRow
from recipes.training.typed_tensors import integers
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Turns whose prompts are compared with what an engine would get.
COMPARED_TURNS: Final = 100


class ChatExample(NamedTuple):
    """A sequence of tokens.

    Attributes:
        tokens: int32 [n].
        trained: bool [n], which of them are trained on; never the first, which nothing predicts.
    """

    tokens: Tensor
    trained: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], trained: Sequence[bool]) -> ChatExample:
        """Return an example with these tokens."""
        mask = torch.tensor(trained, dtype=torch.bool)
        mask[:1] = False
        return cls(torch.tensor(tokens, dtype=torch.int32), mask)


class _Turns(NamedTuple):
    """A text with the ranges of its characters that the model is to write, and its last turn."""

    text: str
    ranges: list[tuple[int, int]]
    last: Message


@dataclass
class ExampleSet:
    """Examples, and what became of the rows.

    Attributes:
        examples: the examples, in the order of the rows.
        figures: `skipped` (rows longer than allowed), `truncated`, `split` (further examples of rows whose earlier
            turns the template rewrites), and `endless` (turns after which the template writes no token that ends an
            answer).
    """

    examples: list[ChatExample] = field(default_factory=list[ChatExample])
    figures: Counter[str] = field(default_factory=Counter[str])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        return [len(example.tokens) for example in self.examples]


class ExampleWriter:
    """Writes conversations as examples.

    Args:
        tokenizer: the tokenizer of the model.
        stops: tokens that end an answer.
        longest: most tokens of an example.
        loss_on: `completions` or `all`.
        overlong: `skip` or `truncate`.
        arguments: the arguments of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Iterable[int],
        *,
        longest: int,
        loss_on: str = "completions",
        overlong: str = "skip",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._texts = TextTokens(tokenizer)
        self._stops = frozenset(stops)
        self._longest = longest
        self._all = loss_on == "all"
        self._truncates = overlong == "truncate"
        self._arguments = dict(arguments or {})
        self._template: ChatTemplate | None = None
        # What follows a turn without, and with, calls of functions.
        self._followers: dict[bool, list[int]] = {}

    def write(self, conversations: Iterable[ChatRow]) -> ExampleSet:
        """Return the examples of conversations.

        Raises:
            ConfigError: the chat template drops or refuses a message; it names the row. Or no row is left.
        """
        written = ExampleSet()
        for conversation in conversations:
            if conversation.messages:
                examples = self._of_messages(conversation, written.figures)
            else:
                examples = [self._of_texts(conversation)]
            written.figures["split"] += len(examples) - 1
            for example in examples:
                self._add(example, written)
        if not written.examples and written.figures["skipped"]:
            raise ConfigError(
                f"every row has more than {self._longest} tokens, or nothing to learn from within them",
                help="raise `runner.seq_length`, or write `data.overlong: truncate`",
            )
        return written

    def _add(self, example: ChatExample, written: ExampleSet) -> None:
        if len(example.tokens) > self._longest:
            cut = ChatExample(example.tokens[: self._longest], example.trained[: self._longest])
            if not self._truncates or not bool(cut.trained.any()):
                written.figures["skipped"] += 1
                return
            written.figures["truncated"] += 1
            example = cut
        written.examples.append(example)

    def _of_texts(self, conversation: ChatRow) -> ChatExample:
        """Return a prompt with its completion, or a text, followed by the end of the answer."""
        before, behind = self._texts.around
        prompt, completion = self._texts.parts([conversation.prompt, conversation.completion])
        prompt, completion = [*before, *prompt], [*completion, *behind]
        end = self._tokenizer.eos_token_id
        if end is not None and completion[-1:] != [end]:
            completion.append(end)
        learned = self._all or not conversation.prompt
        return ChatExample.of(prompt + completion, [learned] * len(prompt) + [True] * len(completion))

    # Messages

    def _of_messages(self, conversation: ChatRow, figures: Counter[str]) -> list[ChatExample]:
        template = self.template
        if self._all and conversation.untrained:
            raise ConfigError(
                f"{conversation.place}: message {conversation.untrained[0]} has `weight: 0`, but `data.loss_on` is"
                " `all`",
                help="write `data.loss_on: completions`, or remove the weights",
            )
        try:
            turns = self._turns(template, conversation)
            if self._all:
                whole = template.write(conversation.messages, conversation.tools)
                start = len(whole) - len(turns[-1].text[turns[-1].ranges[-1][0] :])
                turns = [turns[-1]._replace(text=whole, ranges=[(start, len(whole))])]
        except TemplateRefusalError as error:
            raise ConfigError(f"{conversation.place}: {error.message}", help="change the row, or remove it") from None
        return [self._tokens(part, figures) for part in turns]

    @property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            ConfigError: the tokenizer has none that can be used.
        """
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._arguments)
        return self._template

    def _turns(self, template: ChatTemplate, conversation: ChatRow) -> list[_Turns]:
        """Return the texts of a conversation's examples, most often one, with what the model is to write in each."""
        messages, tools, place = conversation.messages, conversation.tools, conversation.place
        parts: list[_Turns] = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or number < conversation.first or number in conversation.untrained:
                continue
            before = template.render(messages[:number], tools)
            after = template.write(messages[: number + 1], tools)
            if not after.startswith(before):
                raise ConfigError(
                    f"{place}: the chat template does not write message {number} behind the prompt that asks for it",
                    why=f"the prompt ends with {_end(before)}, and the conversation has {_behind(after, before)}",
                    help="set arguments in `data.chat_template_kwargs`, or use a tokenizer with another template",
                )
            if message["content"].strip() not in after[len(before) :]:
                raise ConfigError(
                    f"{place}: the chat template drops text of message {number}, of the assistant",
                    why=f"it writes {_end(after[len(before) :])}",
                    help="change the row, or use a tokenizer with another template",
                )
            turn = (len(before), len(after))
            if parts and before.startswith(parts[-1].text):
                parts[-1] = _Turns(after, [*parts[-1].ranges, turn], message)
            else:
                parts.append(_Turns(after, [turn], message))
        return parts

    def _tokens(self, turns: _Turns, figures: Counter[str]) -> ChatExample:
        """Return the tokens of a text; a turn is trained on up to the token that ends the answer.

        In some templates that is the mark of the next message, which an engine stops at; the last turn gets the one
        that would follow it.
        """
        pieces = self._pieces(turns)
        tokens: list[int] = []
        trained: list[bool] = []
        ending = 0
        for number, (piece, is_turn) in enumerate(pieces):
            learned = len(piece) if self._all else ending
            ending = 0
            if is_turn:
                last = max((place for place, token in enumerate(piece) if token in self._stops), default=-1)
                learned = last + 1 if last >= 0 and not self._all else len(piece)
                if last < 0:
                    following = pieces[number + 1][0] or self._following(bool(turns.last.get("tool_calls")))
                    ending = self._ending(following)
                    pieces[number + 1] = pieces[number + 1][0] or following[:ending], False
                    figures["endless"] += not ending
            tokens += piece
            trained += [place < learned for place in range(len(piece))]
        return ChatExample.of(tokens, trained)

    def _ending(self, following: Sequence[int]) -> int:
        """Return how many of the tokens after a turn are those that end it: blanks, and a stop token."""
        for place, token in enumerate(following):
            if token in self._stops:
                return place + 1
            if self._texts.raw([token]).strip():
                break
        return 0

    def _following(self, calls: bool) -> list[int]:
        """Return the tokens that the template writes after a turn when a message follows it: a result, or a user's."""
        if calls not in self._followers:
            call: dict[str, Any] = {
                "id": "probeid00",
                "type": "function",
                "function": {"name": "probe", "arguments": {}},
            }
            turn: dict[str, Any] = {"role": ASSISTANT, "content": "probe", **({"tool_calls": [call]} if calls else {})}
            result: dict[str, Any] = {"role": "tool", "name": "probe", "tool_call_id": call["id"], "content": "probe"}
            asked = {"role": "user", "content": "probe"}
            self._followers[calls] = []
            with suppress(TemplateRefusalError):
                before = self.template.write([asked, turn])
                after = self.template.write([asked, turn, result if calls else asked])
                if after.startswith(before):
                    self._followers[calls] = self._texts.behind(after[len(before) :])
        return self._followers[calls]

    def _pieces(self, turns: _Turns) -> list[tuple[list[int], bool]]:
        """Return the tokens of a text in pieces, each with whether the model is to write it."""
        borders = [0, *chain.from_iterable(turns.ranges), len(turns.text)]
        pieces = self._texts.parts([turns.text[start:end] for start, end in pairwise(borders)])
        return [(piece, bool(number % 2)) for number, piece in enumerate(pieces)]

    def compare_prompts(self, conversations: Iterable[ChatRow]) -> Difference | None:
        """Compare what stands before turns with the tokens of their prompts, as an engine would get them."""
        turns = same = 0
        for conversation in conversations:
            if not conversation.messages or turns >= COMPARED_TURNS:
                continue
            for part in self._turns(self.template, conversation):
                pieces = [piece for piece, _ in self._pieces(part)]
                for number, (start, _) in enumerate(part.ranges):
                    before = [token for piece in pieces[: 2 * number + 1] for token in piece]
                    turns += 1
                    same += before == self._texts.plain(part.text[:start])
        if not turns:
            return None
        note = f"{turns} turns of the assistant" if same == turns else f"{turns - same} of {turns} turns differ"
        return Difference(note=note, agrees=same == turns)


def _end(text: str, longest: int = 30) -> str:
    return repr(text if len(text) <= longest else f"...{text[-longest:]}")


def _behind(after: str, before: str) -> str:
    """Return what a conversation has where it stops being like a prompt."""
    same = next((place for place, pair in enumerate(zip(after, before, strict=False)) if pair[0] != pair[1]), 0)
    return repr(after[same : same + 30])


def pack_examples(
    examples: Sequence[ChatExample], device: torch.device | str = "cpu", *, masks: bool = True
) -> PackedRows:
    """Lay examples into rows, whose targets are the tokens that are trained on.

    The last token of an example predicts nothing and is left out. Without examples there is a token without targets, so
    that a rank computes as many passes as the others.

    Args:
        examples: the examples.
        device: the device of the result.
        masks: whether the model takes rows with a mask, see `RowLayout`.
    """
    shown = [example for example in examples if len(example.tokens) > 1]
    nothing = torch.zeros(0, dtype=torch.int64)
    layout = RowLayout([integers(example.tokens[:-1]) for example in shown] or [[0]], masks=masks)
    trained = [example.trained[1:] for example in shown]
    predictors = [layout.places(number)[learned] for number, learned in enumerate(trained)]
    targets = [example.tokens[1:][learned].long() for example, learned in zip(shown, trained, strict=True)]
    return layout.rows(torch.cat([nothing, *predictors]), torch.cat([nothing, *targets]), device)


def micro_batches(
    lengths: Sequence[int], chosen: Sequence[int], world_size: int, rank: int, max_tokens: int, *, masks: bool
) -> list[list[int]]:
    """Return the micro-batches of a rank's share of a batch, by the numbers of examples; some are empty.

    Shares have about as many tokens, and every rank has as many micro-batches: ranks compute that without a message.

    Args:
        lengths: tokens of all examples.
        chosen: the batch of all ranks together.
        world_size, rank: the number of ranks, and the rank of this process.
        max_tokens: the maximum tokens of a micro-batch; a longer example forms its own.
        masks: whether the model takes rows with a mask.
    """
    costs = [lengths[number] for number in chosen]
    shares = balanced(costs, world_size)
    shares_row = WIDEST if masks else 0
    divided = [
        token_budget_parts([costs[place] for place in share], max_tokens, shares_row=shares_row) for share in shares
    ]
    count = max(1, *(len(parts) for parts in divided))
    mine = [[chosen[shares[rank][place]] for place in part] for part in divided[rank]]
    return mine + [[] for _ in range(count - len(mine))]
