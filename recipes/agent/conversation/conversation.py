"""Conversations as tokens: input and sampled tokens are kept as they were and never tokenized again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recipes.language.answers.sequences import FinishReason, undrawn
from recipes.language.answers.sequences import Sequence as Answer
from rlinf_core.errors import RuntimeFailure


class ConversationError(RuntimeFailure):
    """Tokens or a reward do not fit the current state of a conversation."""


class Conversation:
    """Tokens of a conversation in order, with the data of those that the model sampled.

    Args:
        name: the name of the conversation, for messages.
        inherited: tokens of the conversation that this one branches off from.

    Attributes:
        turns: the number of turns of the model.
    """

    def __init__(self, name: str, inherited: Sequence[int] = ()) -> None:
        self.name = name
        self.turns = 0
        self._tokens = list(inherited)
        # Of each token; False, 0 for those that the model did not draw in this conversation.
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
            tokens: it drew.
            logprobs: log-probability of each under the policy that drew it.
            versions: the versions of the weights that drew each.
            finish: why the turn ended.

        Raises:
            ConversationError: there are not as many log-probabilities or versions as tokens.
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
        """Return a copy that continues independently; the tokens sampled so far are trained on in this one only."""
        return Conversation(name, self._tokens)

    def credit(self, reward: float) -> None:
        """Give the model's last turn its own reward, in addition to that of the outcome.

        Raises:
            ConversationError: the model has not spoken in this conversation.
            ValueError: the reward is not finite.
        """
        if not math.isfinite(reward):
            raise ValueError(f"a turn's reward is {reward}, not a finite number")
        if not self.turns:
            raise ConversationError(
                f"conversation `{self.name}` has no model turn to reward",
                help="set the reward after a reply",
            )
        last = max(number for number, drawn in enumerate(self._drawn) if drawn)
        self._rewards[last] += reward

    def segment(self, sample: int) -> Answer | None:
        """Return the training data: the prompt, and everything from the first sampled token to the last.

        Args:
            sample: number of the trajectory within its group.

        Returns:
            None where nothing was drawn.
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
    """Return a segment that nothing is trained on, of a trajectory in which the model never spoke."""
    return undrawn((0,), (0,), (False,), sample=sample, finish_reason="aborted")
