"""OpenVLA (Kim et al., arXiv 2406.09246) and OpenVLA-OFT (Kim et al., arXiv 2502.19645), with discrete actions.

    begin | patches of the cameras | padding, prompt, space | tokens of the chunk

OpenVLA writes one token after the other. OpenVLA-OFT predicts all tokens in one pass, each at the position before it;
their embeddings are zero, the end token follows, and attention is bidirectional.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import OpenVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, image_key
from recipes.embodied.models.base_policy import (
    ActionEval,
    BasePolicy,
    Inputs,
    PolicyOutput,
    value_head,
    with_value_head,
)
from recipes.embodied.models.policy_folder import BACKBONE, backbone_of
from recipes.embodied.models.published_statistics import load_statistics
from recipes.embodied.models.vla.flow_vla import check_observations
from recipes.embodied.models.vla.openvla_network import (
    OpenVlaNetwork,
    OpenVlaShape,
    TowerSizes,
    load_network,
    read_shape,
)
from recipes.embodied.models.vla.vision_language import (
    ImagePipeline,
    built_heads,
    built_image_size,
    centre_crop,
    encoded_prompts,
    initialize_narrow,
    load_policy_tokenizer,
)
from recipes.sections.model_folders import SETTINGS
from recipes.training.arrays import Array
from recipes.training.huggingface import checkpoint_layers, judging_model, require_transformers
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError

Gripper = Literal["as_is", "opening"]


def tokens_of(normalized: Array, bins: int) -> NDArray[np.int64]:
    """Return tokens int64 of normalized numbers, in the same shape: 0 to `bins` - 1, larger ones for smaller numbers.

    Numbers beyond -1 and 1 are clipped. Of B bins there are B edges, from -1 to 1 in even steps; token B - k represents
    numbers from edge k, counted from 1, up to the next edge.
    """
    edges = np.linspace(-1, 1, bins)
    return bins - np.digitize(np.clip(normalized, -1, 1), edges)


def numbers_of(tokens: Array, bins: int) -> NDArray[np.float64]:
    """Return the normalized numbers for tokens 0 to `bins` - 1: the middle between two edges.

    B edges have B - 1 middles: the number 1, at the last edge, is read as the last middle.
    """
    edges = np.linspace(-1, 1, bins)
    middles = (edges[:-1] + edges[1:]) / 2
    return middles[np.clip(bins - 1 - tokens, 0, bins - 2)]


def to_gripper(actions: Array, gripper: Gripper) -> Array:
    """Return actions [..., A] with the last number as the environment takes it.

    `opening`: the number is predicted from 0 (closed) to 1 (open), and converted to -1 (open) or 1 (closed).
    """
    if gripper == "as_is":
        return actions
    opening = actions[..., -1:]
    return np.concatenate((actions[..., :-1], -np.sign(2 * opening - 1)), axis=-1)


def from_gripper(actions: Array, gripper: Gripper) -> Array:
    """Return an environment's actions [..., A] with the last number as OpenVLA learns it; inverts `to_gripper`."""
    if gripper == "as_is":
        return actions
    return np.concatenate((actions[..., :-1], (1 - actions[..., -1:]) / 2), axis=-1)


_TOKENS, _MASK = "prompt.tokens", "prompt.mask"
# The token of a single space, which precedes OpenVLA's actions.
_SPACE: Final = "\u2581"
# Color statistics: ImageNet's for DINOv2, halves for SigLIP.
_IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALVES: Final = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_BINS, _PADDING = 256, 64


class OpenVlaPolicy(BasePolicy):
    """OpenVLA: a token for each number of the chunk, each conditioned on those before it. There is one value per chunk,
    V = 1.

    Attributes:
        vlm: the network.
        tokenizer: its tokenizer.
        critic: the value head; None: no value head.
    """

    options_model = OpenVlaOptions
    reads_instructions = True
    _without_greedy = "its instructions need a tokenizer, and it generates actions token by token"

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        require_transformers()
        check_observations(config, spec)
        self._options = options = cast("OpenVlaOptions", config.options)
        self._cameras = [image_key(camera) for camera in _cameras(options, spec)]
        self._has_instructions = spec.has_instructions
        self._shape = (config.num_action_chunks, spec.action_size)
        inner, is_own = backbone_of(config.model_path)
        self.tokenizer: Any = load_policy_tokenizer(inner)
        if self.tokenizer.bos_token_id is None:
            raise ConfigError(
                f"the tokenizer in `{inner}` is not that of an OpenVLA",
                why="none of its tokens begins a text (`bos_token`)",
                help="copy its `tokenizer_config.json` again from its source",
            )
        shape = _built_shape(config, options, spec, len(self.tokenizer)) if inner is None else read_shape(inner)
        self._bins = shape.bins
        with judging_model(inner):
            self.vlm = OpenVlaNetwork(shape, config.adapter())
        if inner is None:
            initialize_narrow(self.vlm)
        elif not is_own and not are_shapes_only():
            load_network(self.vlm, inner)
        self.vlm.add_adapters()
        self._pipelines = [
            ImagePipeline((tower.image, tower.image), "openvla", *colours)
            for tower, colours in ((shape.dino, _IMAGENET), (shape.siglip, _HALVES))
        ]
        self.critic: nn.Module | None = None
        if config.add_value_head:
            self.critic = value_head(self.vlm.width, self.vlm.width)
        self.normalization = load_statistics(
            config.model_path, options.statistics, "openvla", spec, data_set=options.data_set
        )

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: images unchanged, the prompt as tokens of fixed length with a space last."""
        first = observations[self._cameras[0]]
        texts = observations[INSTRUCTIONS].tolist() if self._has_instructions else [""] * len(first)
        prompts = [self._options.prompt.replace("{instruction}", text.lower()) for text in texts]
        longest, vocabulary = self._options.max_prompt_tokens, int(self.vlm.base.config.vocab_size)
        tokens, mask = encoded_prompts(self.tokenizer, prompts, longest, "left", vocabulary)
        space = self.tokenizer.convert_tokens_to_ids(_SPACE)
        if space is not None and space != self.tokenizer.unk_token_id:
            tokens = np.concatenate((tokens, np.full_like(tokens[:, :1], space)), axis=1)
            mask = np.concatenate((mask, np.ones_like(mask[:, :1])), axis=1)
        named: dict[str, Array] = {key: observations[key] for key in self._cameras}
        return super().prepare({_TOKENS: tokens, _MASK: mask, **named})

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`: for DINOv2; SigLIP's differs only in mean and standard deviation, 0.5."""
        return {**self._pipelines[0].describe(), "centre_crop": self._options.centre_crop}

    def to_env(self, actions: Tensor) -> Array:
        """See `BasePolicy`: converts tokens [n, C, A] to numbers in the scale of the data, with the gripper's sign."""
        numbers = self.normalization.actions_of(numbers_of(actions.cpu().numpy(), self._bins))
        return to_gripper(numbers, self._options.gripper).astype(np.float32)

    def from_env(self, actions: Array) -> Tensor:
        """See `BasePolicy`: the tokens of the bins."""
        numbers = self.normalization.normalized_actions(from_gripper(actions, self._options.gripper))
        return super().from_env(tokens_of(numbers, self._bins))

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: the sizes, and the tokenizer."""
        inner = folder / BACKBONE
        inner.mkdir(parents=True, exist_ok=True)
        (inner / SETTINGS).write_text(json.dumps(self.vlm.shape.plain(), indent=1) + "\n")
        self.tokenizer.save_pretrained(str(inner))

    def pixels(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of DINOv2 and SigLIP, float32 [n, 3, H, W] each, for images uint8 [n, h, w, 3]."""
        first, second = self._pipelines
        if self._options.centre_crop == 1:
            return first.pixels(images), second.pixels(images)
        return tuple(  # pyright: ignore[reportReturnType]
            pipeline.normalized(centre_crop(pipeline.resized(images), self._options.centre_crop))
            for pipeline in (first, second)
        )

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        tokens, logits, last = self._write(*self._prefix(inputs), greedy, generator)
        logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
        return PolicyOutput(tokens.view(-1, *self._shape), logprobs.view(-1, *self._shape), self._judged(last))

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        return self._evaluated(inputs, actions, self._options.temperature)

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """See `BasePolicy`: from the model's own probabilities, without `temperature`."""
        return -self._evaluated(inputs, actions, 1.0).logprobs

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        return with_value_head(None if self.critic is None else self._judged(self._summary(*self._prefix(inputs))))

    def checkpoint_activations(self) -> None:
        checkpoint_layers(self.vlm.layers, type(self.vlm.base).__name__)

    def _summary(self, prefix: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden state [n, W] for values, without following actions."""
        return self.vlm.states(prefix, mask)[0][:, -1]

    def _evaluated(self, inputs: Inputs, actions: Tensor, temperature: float) -> ActionEval:
        prefix, mask = self._prefix(inputs)
        tokens = actions.flatten(1)
        logits, last = self._read(prefix, mask, tokens)
        log_softmax = (logits / temperature).log_softmax(dim=-1)
        logprobs = log_softmax.gather(-1, tokens[..., None])[..., 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        return ActionEval(logprobs.view(-1, *self._shape), entropy.view(-1, *self._shape), self._judged(last))

    def _judged(self, last: Tensor) -> Tensor | None:
        """Return the values of hidden states [n, W]; None without a value head."""
        return None if self.critic is None else self.critic(last if self._options.value_gradient else last.detach())

    def _read(self, prefix: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, C * D, bins] of a chunk's tokens, each conditioned on those before it, and the last
        hidden
        state before them, [n, W].
        """
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
            logits.append(self.vlm.logits(hidden[:, -1:], self._bins) / self._options.temperature)
            tokens.append(_drawn(logits[-1], greedy, generator))
            if index + 1 < count:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
                hidden, memory = self.vlm.states(self._embed_actions(tokens[-1]), mask, memory)
        return torch.cat(tokens, dim=1), torch.cat(logits, dim=1), last

    def _embed_actions(self, tokens: Tensor) -> Tensor:
        return self.vlm.embed_tokens(tokens + (self.vlm.vocabulary - self._bins))

    def _prefix(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return embeddings [n, P, W] of everything before the actions, and what is not padding, bool [n, P]."""
        vlm, prompt = self.vlm, inputs[_TOKENS]
        words = vlm.embed_tokens(prompt)
        begin = vlm.embed_tokens(prompt.new_full((len(prompt), 1), self.tokenizer.bos_token_id))
        patches = [vlm.embed_pictures(*self.pixels(inputs[key])).to(words.dtype) for key in self._cameras]
        before = torch.cat((begin, *patches), dim=1)
        seen = torch.ones(before.shape[:2], dtype=torch.bool, device=prompt.device)
        return torch.cat((before, words), dim=1), torch.cat((seen, inputs[_MASK]), dim=1)


class OpenVlaOftPolicy(OpenVlaPolicy):
    """OpenVLA-OFT with discrete actions: all tokens of the chunk in one pass."""

    def _summary(self, prefix: Tensor, mask: Tensor) -> Tensor:
        """See `OpenVlaPolicy`: here the prefix also attends to the tokens after it."""
        return self._read(prefix, mask)[1]

    def _write(
        self, prefix: Tensor, mask: Tensor, greedy: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, last = self._read(prefix, mask)
        logits = logits / self._options.temperature
        return _drawn(logits, greedy, generator), logits, last

    def _read(self, prefix: Tensor, mask: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `OpenVlaPolicy`: each token is predicted at the position before it, whatever `tokens` holds."""
        vlm, count, start = self.vlm, self._shape[0] * self._shape[1], prefix.shape[1]
        nothing = prefix.new_zeros(len(prefix), count, prefix.shape[2])
        tokenizer = self.tokenizer
        end = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        mark = vlm.embed_tokens(torch.full((len(prefix), 1), end, device=prefix.device)).to(prefix.dtype)
        whole = torch.cat((mask, mask.new_ones(len(mask), count + 1)), dim=1)
        hidden = vlm.states(torch.cat((prefix, nothing, mark), dim=1), whole, both_ways=True)[0]
        return vlm.logits(hidden[:, start - 1 : start - 1 + count], self._bins), hidden[:, start - 1]


def _drawn(logits: Tensor, greedy: bool, generator: torch.Generator | None) -> Tensor:
    """Return tokens int64 [n, T] of logits [n, T, bins]."""
    if greedy:
        return logits.argmax(dim=-1)
    # The argmax of logits plus Gumbel noise is a sample; minus the log of exponential noise is Gumbel noise.
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(dim=-1)


def _cameras(options: OpenVlaOptions, spec: EnvSpec) -> tuple[str, ...]:
    """Return the cameras that the model sees: those of the options, or the first.

    Raises:
        ConfigError: the environment lacks a camera.
    """
    chosen = tuple(options.cameras) or (next(iter(spec.cameras)),)
    missing = next((name for name in chosen if name not in spec.cameras), None)
    if missing is not None:
        known = ", ".join(f"`{name}`" for name in spec.cameras)
        raise ConfigError(
            f"the environment has no camera `{missing}`",
            why=f"its cameras: {known}",
            help="write those that the model was trained with as `actor.model.options.cameras`",
        )
    return chosen


def _built_shape(config: EmbodiedModelConfig, options: OpenVlaOptions, spec: EnvSpec, words: int) -> OpenVlaShape:
    """Return the sizes of a small model with fresh weights.

    Raises:
        ConfigError: the sizes do not divide evenly.
    """
    width, layers, heads = config.hidden_dim, options.num_layers, built_heads(config.hidden_dim)
    image = built_image_size(spec, options.patch_size)
    tower = TowerSizes(width, 2 * width, layers, heads, image, options.patch_size)
    text = {
        "vocab_size": words + _BINS + _PADDING,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    return OpenVlaShape(tower, tower, text, _PADDING, _BINS)
