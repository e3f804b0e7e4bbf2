"""Tokenization of conversations, with masks of the trained tokens.

The text of a turn is the difference of two renderings: the conversation before the turn as a prompt, and the
conversation with the turn. The template needs no marks of turns. If a template changes earlier turns when later ones
follow, such as by dropping reasoning, a turn becomes a separate example with the prompt that the model would get.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import balanced, token_budget_parts
from recipes.language.models.packing import WIDEST, PackedRows, RowLayout
from recipes.language.text.chat_messages import Message
from recipes.language.text.chat_template import ChatTemplate, TemplateRefusalError
from recipes.language.text.text_tokens import TextTokens
from recipes.sft_chat.conversations import ASSISTANT, ChatRow
from recipes.training.typed_tensors import integers
from rlinf_core import ConfigError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OTHER_TEMPLATE: Final = "change the row, or use a tokenizer with another template"
# The number of turns whose prompts are compared with those of an engine.
COMPARED_TURNS: Final = 100


class ChatExample(NamedTuple):
    """A sequence of tokens.

    Attributes:
        tokens: int32 [n], token ids.
        trained: bool [n], whether a token is trained on; never the first, which nothing predicts.
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
    """A text with the character ranges of the model's turns, and the message of the last one."""

    text: str
    ranges: list[tuple[int, int]]
    last: Message


@dataclass
class ExampleSet:
    """Examples, with counts of the treatment of rows.

    Attributes:
        examples: the examples, in the order of the rows.
        figures: counts: `rows` with examples, several where the template rewrites earlier turns; rows of which examples
            are `skipped` for their length, or `truncated`; and `endless` turns, without an ending token.
    """

    examples: list[ChatExample] = field(default_factory=list[ChatExample])
    figures: Counter[str] = field(default_factory=Counter[str])

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example."""
        return [len(example.tokens) for example in self.examples]


class ExampleWriter:
    """A writer of conversations as examples.

    Args:
        tokenizer: the tokenizer of the model.
        stops: tokens that end an answer.
        longest: the maximum tokens of an example.
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
        # The tokens after a turn, by whether it has calls.
        self._followers: dict[bool, list[int]] = {}

    def write(self, conversations: Iterable[ChatRow]) -> ExampleSet:
        """Return the examples of conversations.

        Raises:
            ConfigError: the chat template drops or refuses a message of a named row, or no row is left.
        """
        written = ExampleSet()
        for conversation in conversations:
            if conversation.messages:
                examples = self._of_messages(conversation, written.figures)
            else:
                examples = [self._of_texts(conversation)]
            written.figures.update({count for example in examples for count in self._added(example, written)})
        if not written.examples and written.figures["skipped"]:
            raise ConfigError(
                f"every row has more than {self._longest} tokens, or nothing to learn from within them",
                help="raise `runner.seq_length`, or write `data.overlong: truncate`",
            )
        return written

    def _added(self, example: ChatExample, written: ExampleSet) -> set[str]:
        """Add an example, unless it is too long, and return the counts that its row belongs to."""
        if len(example.tokens) <= self._longest:
            written.examples.append(example)
            return {"rows"}
        cut = ChatExample(example.tokens[: self._longest], example.trained[: self._longest])
        if not self._truncates or not bool(cut.trained.any()):
            return {"skipped"}
        written.examples.append(cut)
        return {"rows", "truncated"}

    def _of_texts(self, conversation: ChatRow) -> ChatExample:
        """Return the example of a prompt with its completion, or of a text, followed by the end of the answer.

        Special tokens that the texts have already are not added again.
        """
        before, behind = map(list, self._texts.around)
        prompt, completion = self._texts.parts([conversation.prompt, conversation.completion])
        if (prompt or completion)[: len(before)] != before:
            prompt = before + prompt
        if completion[len(completion) - len(behind) :] != behind:
            completion = completion + behind
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
            ConfigError: the tokenizer has no usable template.
        """
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._arguments)
        return self._template

    def _turns(self, template: ChatTemplate, conversation: ChatRow) -> list[_Turns]:
        """Return the texts of a conversation's examples, usually one, with the ranges of the model's turns."""
        messages, tools, place = conversation.messages, conversation.tools, conversation.place
        parts: list[_Turns] = []
        template.check_roles(messages)
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
            said = after[len(before) :]
            # A template may trim a turn, or write a thought's marks on lines of their own.
            if "".join(message["content"].split()) not in "".join(said.split()):
                raise ConfigError(
                    f"{place}: the chat template drops text of message {number}, of the assistant",
                    why=f"it writes {_end(said)}",
                    help=_OTHER_TEMPLATE,
                )
            for entries, text, what in ((tools, before, "`tools`"), (message.get("tool_calls", ()), said, "a call")):
                unwritten = next((name for name in map(_name, entries) if name not in text), None)
                if unwritten is not None:
                    raise ConfigError(
                        f"{place}: the chat template drops the function `{unwritten}` of {what}, at message {number}",
                        help=_OTHER_TEMPLATE,
                    )
            turn = (len(before), len(after))
            if parts and before.startswith(parts[-1].text):
                parts[-1] = _Turns(after, [*parts[-1].ranges, turn], message)
            else:
                parts.append(_Turns(after, [turn], message))
        return parts

    def _tokens(self, turns: _Turns, figures: Counter[str]) -> ChatExample:
        """Return the example of a text; a turn is trained on up to the token that ends the answer.

        In some templates, that token is the mark of the next message; the last turn gets the mark that would follow it.
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
        """Return how many of the tokens after a turn end it: blanks, and a stop token."""
        for place, token in enumerate(following):
            if token in self._stops:
                return place + 1
            if self._texts.raw([token]).strip():
                break
        return 0

    def _following(self, calls: bool) -> list[int]:
        """Return the tokens that the template writes after a turn if a tool result or user message follows."""
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
        """Return the tokens of a text in pieces, each with whether it is a model's turn."""
        borders = [0, *chain.from_iterable(turns.ranges), len(turns.text)]
        pieces = self._texts.parts([turns.text[start:end] for start, end in pairwise(borders)])
        return [(piece, bool(number % 2)) for number, piece in enumerate(pieces)]

    def compare_prompts(self, conversations: Iterable[ChatRow]) -> Difference | None:
        """Compare the tokens before turns with the prompts that an engine would get."""
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


def _name(entry: Mapping[str, Any]) -> str:
    """Return the name of a function, or of a call of one, which may be nested under `function`."""
    inner: object = entry.get("function", entry)
    return str(cast("dict[str, Any]", inner).get("name", "")) if isinstance(inner, dict) else ""


def _end(text: str, longest: int = 30) -> str:
    return repr(text if len(text) <= longest else f"...{text[-longest:]}")


def _behind(after: str, before: str) -> str:
    """Return the text of a conversation from where it differs from a prompt."""
    same = next((place for place, pair in enumerate(zip(after, before, strict=False)) if pair[0] != pair[1]), 0)
    return repr(after[same : same + 30])


def pack_examples(
    examples: Sequence[ChatExample], device: torch.device | str = "cpu", *, masks: bool = True
) -> PackedRows:
    """Pack examples into rows whose targets are the trained tokens.

    The last token of an example predicts nothing and is left out. Without examples, a dummy token without targets keeps
    ranks in step.

    Args:
        examples: the examples.
        device: the device of the result.
        masks: whether the model accepts rows with a mask, see `RowLayout`.
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
    """Return the micro-batches of a rank's share of a batch, as numbers of examples; some may be empty.

    Ranks get about equally many tokens and equally many micro-batches, without any communication.

    Args:
        lengths: the number of tokens of each example.
        chosen: the batch of all ranks, as numbers of examples.
        world_size, rank: the number of ranks, and the rank of this process.
        max_tokens: the maximum tokens of a micro-batch; a longer example forms its own.
        masks: whether the model accepts rows with a mask.
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
