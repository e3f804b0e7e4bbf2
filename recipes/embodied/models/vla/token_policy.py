"""Base of the policies that spell actions as tokens of a language model: drawing them, judging them, values.

    begin | images of every camera | states | padding, prompt | what the chunk is read from

Token by token (autoregressive) each is conditioned on those before it. In parallel all tokens of a chunk come out of
one pass; what they are read from differs from policy to policy.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.heads import OrthogonalLinear
from recipes.training.huggingface import checkpoint_layers
from rlinf_core import ConfigError


class TokenPolicy(BasePolicy):
    """A language model as a policy: see the module. Values are one for each chunk, V = 1.

    A subclass makes the model, and says what is read before the actions.

    Attributes:
        vlm: the model, such as an `OpenVlaNetwork`.
        tokenizer: its tokenizer.
        critic: the value head; None: there is none.
    """

    vlm: Any
    tokenizer: Any
    critic: nn.Module | None
    _shape: tuple[int, int]  # C and D
    _bins: int
    _is_parallel: bool
    _value_gradient: bool = True
    # What logits are divided by before tokens are drawn by them; their probabilities are then of the same ones.
    _temperature: float = 1.0

    @abstractmethod
    def _prefix(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return embeddings [n, P, W] of the prefix before the actions, and its padding mask, bool [n, P], true for
        real tokens."""

    def _read_parallel(self, prefix: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, C * D, bins] of a chunk in one pass, and the hidden state [n, W] that values are of.

        A policy that reads in parallel implements it.
        """
        raise NotImplementedError

    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`."""
        with torch.no_grad():
            prefix, mask = self._prefix(inputs)
            if self._is_parallel:
                logits, last = self._read_parallel(prefix, mask)
                logits = logits / self._temperature
                tokens = _drawn(logits, greedy, generator)
            else:
                tokens, logits, last = self._write(prefix, mask, greedy, generator)
            logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
            values = None if self.critic is None else self._judged(self.critic, last)
            return PolicyOutput(tokens.view(-1, *self._shape), logprobs.view(-1, *self._shape), values)

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`."""
        return self._evaluated(inputs, actions, self._temperature)

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """See `BasePolicy`: of the model's own probabilities, without `temperature`."""
        return -self._evaluated(inputs, actions, 1.0).logprobs

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`."""
        if self.critic is None:
            raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
        return self._judged(self.critic, self._summary(*self._prefix(inputs)))

    def greedy(self, observations: Inputs) -> Tensor:
        """Refuse, see `BasePolicy`."""
        raise ConfigError(
            f"`{type(self).__name__}` cannot be exported as a tensor graph",
            why="its instructions need a tokenizer, and it generates actions token by token",
            help="export it with `--format safetensors`: a folder with its tokenizer, which `load_policy` reads",
        )

    def checkpoint_activations(self) -> None:
        """See `BasePolicy`."""
        checkpoint_layers(self.vlm.layers, type(self.vlm.base).__name__)

    def _add_critic(self) -> None:
        width = self.vlm.width
        self.critic = nn.Sequential(OrthogonalLinear(width, width), nn.Tanh(), OrthogonalLinear(width, 1, 1.0))

    def _summary(self, prefix: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden state [n, W] that values are of, where no actions follow."""
        return self.vlm.states(prefix, mask)[0][:, -1]

    def _evaluated(self, inputs: Inputs, actions: Tensor, temperature: float) -> ActionEval:
        prefix, mask = self._prefix(inputs)
        tokens = actions.flatten(1)
        logits, last = self._read_parallel(prefix, mask) if self._is_parallel else self._read(prefix, mask, tokens)
        log_softmax = (logits / temperature).log_softmax(dim=-1)
        logprobs = log_softmax.gather(-1, tokens[..., None])[..., 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        values = None if self.critic is None else self._judged(self.critic, last)
        return ActionEval(logprobs.view(-1, *self._shape), entropy.view(-1, *self._shape), values)

    def _judged(self, critic: nn.Module, last: Tensor) -> Tensor:
        return critic(last if self._value_gradient else last.detach())

    def _read(self, prefix: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, C * D, bins] of the tokens of a chunk, each conditioned on those before it, and the
        last hidden state before them, [n, W]."""
        after = self._embed_actions(tokens)[:, :-1].to(prefix.dtype)
        whole = torch.cat((mask, mask.new_ones(after.shape[:2])), dim=1)
        hidden = self.vlm.states(torch.cat((prefix, after), dim=1), whole)[0]
        start = prefix.shape[1]
        return self.vlm.logits(hidden[:, start - 1 :], self._bins), hidden[:, start - 1]

    def _write(
        self, prefix: Tensor, mask: Tensor, greedy: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [n, C * D], their logits, and the last hidden state before them, decoded one by one."""
        from transformers import DynamicCache

        memory: Any = DynamicCache()
        hidden, memory = self.vlm.states(prefix, mask, memory)
        last = hidden[:, -1]
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        count = self._shape[0] * self._shape[1]
        for index in range(count):
            logits.append(self.vlm.logits(hidden[:, -1:], self._bins) / self._temperature)
            tokens.append(_drawn(logits[-1], greedy, generator))
            if index + 1 < count:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
                hidden, memory = self.vlm.states(self._embed_actions(tokens[-1]), mask, memory)
        return torch.cat(tokens, dim=1), torch.cat(logits, dim=1), last

    def _embed_actions(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.vlm.embed_tokens(tokens + (self.vlm.vocabulary - self._bins)))


def _drawn(logits: Tensor, greedy: bool, generator: torch.Generator | None) -> Tensor:
    """Return tokens int64 [n, T] of logits [n, T, bins]."""
    if greedy:
        return logits.argmax(dim=-1)
    # The largest of logits plus Gumbel noise is a sample; exponential noise is where that noise comes from.
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(dim=-1)
