"""A vision-language-action model: a vision-language model that predicts chunks of action tokens.

As OpenVLA (Kim et al., arXiv 2406.09246) does, every number of an action is one of `action_bins` tokens at the end of
the vocabulary. With `decoding: parallel` all tokens of a chunk come out of one pass, each from an embedding of its
place, as in OpenVLA-OFT (Kim et al., arXiv 2502.19645); with `autoregressive` one after the other.

    begin | images of every camera | states | padding, prompt | places of the chunk, or its tokens
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.config.model_options import VlmOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.heads import OrthogonalLinear
from recipes.embodied.models.policy_folder import BACKBONE, is_policy_folder, load_normalization
from recipes.embodied.models.vla.vision_language import (
    VisionLanguageModel,
    built_backbone,
    encoded_prompts,
    load_backbone,
    load_policy_tokenizer,
    shaped_backbone,
)
from recipes.training.huggingface import checkpoint_layers, with_lora
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

_TOKENS, _MASK = "prompt.tokens", "prompt.mask"


class VlmPolicy(BasePolicy):
    """A vision-language model as a policy: see the module. Values are one for each chunk, V = 1."""

    options_model = VlmOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        self._options = options = cast("VlmOptions", config.options)
        if not spec.cameras or spec.num_choices is not None:
            missing = "images" if not spec.cameras else "continuous actions"
            raise ConfigError(f"`vlm_policy` needs {missing}, but the environment has none", help="use `mlp_policy`")
        self._cameras = [image_key(camera) for camera in spec.cameras]
        self._has_instructions = spec.has_instructions
        self._shape = (config.num_action_chunks, spec.action_size)
        folder = config.model_path
        self.normalization = load_normalization(folder, spec)
        inner = str(Path(folder) / BACKBONE) if folder and is_policy_folder(folder) else folder
        self.tokenizer = load_policy_tokenizer(inner)
        self.vlm = VisionLanguageModel(_backbone(config, options, spec, inner, self.tokenizer), inner)
        width, count = self.vlm.width, self._shape[0] * self._shape[1]
        scale = 0.5 if folder is None else 0.02  # as the embeddings beside them
        self.places = nn.Parameter(scale * torch.randn(count, width)) if options.decoding == "parallel" else None
        self.project = nn.Linear(spec.state_size, width) if options.use_states and spec.state_size else None
        if self.project is not None and folder is None:
            nn.init.normal_(self.project.weight)  # states from -1 to 1 as large as the embeddings beside them
        self.critic: nn.Module | None = None
        if config.add_value_head:
            self.critic = nn.Sequential(OrthogonalLinear(width, width), nn.Tanh(), OrthogonalLinear(width, 1, 1.0))

    # Observations and actions

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: images as they are, states normalized, the prompt as tokens of one length."""
        first = observations[self._cameras[0]]
        texts = observations[INSTRUCTIONS].tolist() if self._has_instructions else [""] * len(first)
        prompts = [self._options.prompt.replace("{instruction}", text) for text in texts]
        tokens, mask = encoded_prompts(self.tokenizer, prompts, self._options.max_prompt_tokens, "left")
        named: dict[str, NDArray[Any]] = {
            _TOKENS: tokens,
            _MASK: mask,
            **{key: observations[key] for key in self._cameras},
        }
        if self.project is not None:
            named[STATES] = self.normalization.normalized_states(observations[STATES])
        return super().prepare(named)

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`."""
        return self.vlm.images.describe()

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        """See `BasePolicy`: bins [n, C, A] as numbers, with the scale of the data that the policy was trained on."""
        numbers = actions.cpu().numpy() * (2 / (self._options.action_bins - 1)) - 1
        return self.normalization.actions_of(numbers).astype(np.float32)

    def from_env(self, actions: NDArray[Any]) -> Tensor:
        """See `BasePolicy`: the nearest bins."""
        last = self._options.action_bins - 1
        numbers = np.clip(self.normalization.normalized_actions(actions), -1, 1)
        return super().from_env(np.rint((numbers + 1) * (last / 2)).astype(np.int64))

    # The model

    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`."""
        with torch.no_grad():
            prefix, mask = self._prefix(inputs)
            if self.places is not None:
                logits, last = self._read(prefix, mask, self.places.expand(len(prefix), -1, -1))
                tokens = _drawn(logits, greedy, generator)
            else:
                tokens, logits, last = self._write(prefix, mask, greedy, generator)
            logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
            values = None if self.critic is None else self._judged(self.critic, last)
            return PolicyOutput(tokens.view(-1, *self._shape), logprobs.view(-1, *self._shape), values)

    def greedy(self, observations: Inputs) -> Tensor:
        """Refuse, see `BasePolicy`."""
        raise ConfigError(
            "`vlm_policy` cannot be exported as a tensor graph",
            why="its instructions need a tokenizer, and it generates actions token by token",
            help="export it with `--format safetensors`: a folder with its tokenizer, which `load_policy` reads",
        )

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`."""
        prefix, mask = self._prefix(inputs)
        tokens = actions.flatten(1)
        after = self._embed_actions(tokens) if self.places is None else self.places.expand(len(prefix), -1, -1)
        logits, last = self._read(prefix, mask, after)
        log_softmax = logits.log_softmax(dim=-1)
        logprobs = log_softmax.gather(-1, tokens[..., None])[..., 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        values = None if self.critic is None else self._judged(self.critic, last)
        return ActionEval(logprobs.view(-1, *self._shape), entropy.view(-1, *self._shape), values)

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`."""
        if self.critic is None:
            raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
        prefix, mask = self._prefix(inputs)
        return self._judged(self.critic, self.vlm.states(prefix, mask)[0][:, -1])

    def checkpoint_activations(self) -> None:
        """See `BasePolicy`."""
        checkpoint_layers(self.vlm.layers, type(self.vlm.base).__name__)

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: the architecture, the tokenizer, and how images are scaled."""
        inner = folder / BACKBONE
        self.vlm.base.config.save_pretrained(inner)
        self.tokenizer.save_pretrained(str(inner))
        self.vlm.images.save(inner)

    def _judged(self, critic: nn.Module, last: Tensor) -> Tensor:
        return critic(last if self._options.value_gradient else last.detach())

    def _prefix(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return embeddings [n, P, W] of the prefix before the actions, and its padding mask, bool [n, P], true for
        real tokens."""
        vlm, prompt = self.vlm, inputs[_TOKENS]
        parts = [vlm.embed_images(inputs[key]) for key in self._cameras]
        begin = cast("Any", self.tokenizer).bos_token_id
        if begin is not None:
            parts.insert(0, vlm.embed_tokens(prompt.new_full((len(prompt), 1), begin)))
        if self.project is not None:
            parts.append(self.project(inputs[STATES].to(self.project.weight.dtype))[:, None])
        seen = torch.ones(len(prompt), sum(part.shape[1] for part in parts), dtype=torch.bool, device=prompt.device)
        words = vlm.embed_tokens(prompt)
        embedded = torch.cat([*(part.to(words.dtype) for part in parts), words], dim=1)
        return embedded, torch.cat((seen, inputs[_MASK]), dim=1)

    def _read(self, prefix: Tensor, mask: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, C * D, bins] of a chunk in one pass, and the last hidden state before it, [n, W].

        Args:
            prefix: of `_prefix`.
            mask: of `_prefix`.
            after: embeddings of the chunk, [n, C * D, W]: its tokens, or its places.
        """
        # A token is read where the one before it stands, a place where it stands itself.
        shift = int(self.places is None)
        after = after[:, : after.shape[1] - shift].to(prefix.dtype)
        whole = torch.cat((mask, mask.new_ones(after.shape[:2])), dim=1)
        hidden = self.vlm.states(torch.cat((prefix, after), dim=1), whole)[0]
        start = prefix.shape[1]
        return self.vlm.logits(hidden[:, start - shift :], self._options.action_bins), hidden[:, start - 1]

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
        for index in range(self._shape[0] * self._shape[1]):
            logits.append(self.vlm.logits(hidden[:, -1:], self._options.action_bins))
            tokens.append(_drawn(logits[-1], greedy, generator))
            if index + 1 < self._shape[0] * self._shape[1]:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
                hidden, memory = self.vlm.states(self._embed_actions(tokens[-1]), mask, memory)
        return torch.cat(tokens, dim=1), torch.cat(logits, dim=1), last

    def _embed_actions(self, tokens: Tensor) -> Tensor:
        return self.vlm.embed_tokens(tokens + (self.vlm.vocabulary - self._options.action_bins))


def _drawn(logits: Tensor, greedy: bool, generator: torch.Generator | None) -> Tensor:
    """Return tokens int64 [n, T] of logits [n, T, bins]."""
    if greedy:
        return logits.argmax(dim=-1)
    # The largest of logits plus Gumbel noise is a sample; exponential noise is where that noise comes from.
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(dim=-1)


def _backbone(config: EmbodiedModelConfig, options: VlmOptions, spec: EnvSpec, folder: str | None, words: Any) -> Any:
    """Return the model that `actor.model` describes, loaded from a folder or built from scratch, with adapters if
    configured."""
    if folder is None:
        largest = max(max(height, width) for height, width, _ in spec.cameras.values())
        model = built_backbone(
            len(words) + options.action_bins,
            width=config.hidden_dim,
            layers=options.num_layers,
            image_size=-(-largest // options.patch_size) * options.patch_size,
            patch_size=options.patch_size,
        )
    elif config.model_path != folder:
        model = shaped_backbone(folder)  # weights follow, with those of the whole policy
    else:
        model = load_backbone(folder, trust_remote_code=options.trust_remote_code)
    lora = config.adapter()
    return model if lora is None else with_lora(model, lora, None)
