"""Conversations as tokens, which are kept unchanged and never tokenized again."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.language.answers.sequences import FinishReason, undrawn
from recipes.language.answers.sequences import Sequence as Answer
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
