"""Token ids of what a model is told in a conversation: the first messages, and those between two of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from recipes.agent.conversation.turn_messages import ChatMessage
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for a turn of the model where a chat template is asked what it writes after one.
_TURN: Final = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"


class TurnEncoder:
    """Writes messages as the model expects them, without ever writing anew what it said.

    Args:
        tokenizer: of the model.
        apply_chat_template: whether messages are written by the tokenizer's chat template; their texts as they are
            else.

    Raises:
        ConfigError: a chat template is asked for, and the tokenizer has none that can be used turn by turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool) -> None:
        self._tokenizer: Any = tokenizer
        self._chat = apply_chat_template
        if apply_chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "`data.apply_chat_template` is on, and the tokenizer has no chat template",
                help="write `data.apply_chat_template: false`",
            )

    def encode(self, context: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the tokens of messages that come after a context; an empty one begins the conversation.

        Raises:
            ConfigError: the chat template does not write a turn of the model as it is.
        """
        if not self._chat:
            text = "".join(each.text for each in messages)
            return tuple(self._tokenizer.encode(text, add_special_tokens=not context))
        listed = [{"role": each.role, "content": each.text} for each in messages]
        if not context:
            return self._written(self._rendered(listed))
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, found, after = self._rendered([*before, *listed]).partition(_TURN)
        if not found:
            raise ConfigError(
                "the chat template does not write turns of the model as they are: a conversation of several turns"
                " cannot be kept token by token",
                help="write `data.apply_chat_template: false`, or use a tokenizer with another template",
            )
        written = self._written(after)
        # The model may have ended its turn itself, in the template's way.
        return written[1:] if written[:1] == (context[-1],) else written

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, those that have none left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def _written(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
