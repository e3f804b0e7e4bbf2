"""A vision-language-action model: a vision-language model that predicts chunks of action tokens.

As OpenVLA (Kim et al., arXiv 2406.09246) does, every number of an action is one of `action_bins` tokens at the end of
the vocabulary. With `decoding: parallel` all tokens of a chunk come out of one pass, each from an embedding of its
place, as in OpenVLA-OFT (Kim et al., arXiv 2502.19645); with `autoregressive` one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.config.model_options import VlmOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.policy_folder import BACKBONE, is_policy_folder, load_normalization
from recipes.embodied.models.vla.token_policy import TokenPolicy
from recipes.embodied.models.vla.vision_language import (
    VisionLanguageModel,
    built_backbone,
    encoded_prompts,
    load_backbone,
    load_policy_tokenizer,
    shaped_backbone,
)
from recipes.training.arrays import Array
from recipes.training.huggingface import with_lora
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

_TOKENS, _MASK = "prompt.tokens", "prompt.mask"


class VlmPolicy(TokenPolicy):
    """A vision-language model as a policy: see the module. Values are one for each chunk, V = 1."""

    options_model = VlmOptions
    reads_instructions = True

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        self._options = options = cast("VlmOptions", config.options)
        if not spec.cameras or spec.num_choices is not None:
            missing = "images" if not spec.cameras else "continuous actions"
            raise ConfigError(f"`vlm_policy` needs {missing}, but the environment has none", help="use `mlp_policy`")
        self._cameras = [image_key(camera) for camera in spec.cameras]
        self._has_instructions = spec.has_instructions
        self._shape = (config.num_action_chunks, spec.action_size)
        self._bins, self._is_parallel = options.action_bins, options.decoding == "parallel"
        self._value_gradient = options.value_gradient
        folder = config.model_path
        self.normalization = load_normalization(folder, spec)
        inner = str(Path(folder) / BACKBONE) if folder and is_policy_folder(folder) else folder
        self.tokenizer = load_policy_tokenizer(inner)
        self.vlm = VisionLanguageModel(_backbone(config, options, spec, inner, self.tokenizer), inner)
        width, count = self.vlm.width, self._shape[0] * self._shape[1]
        scale = 0.5 if folder is None else 0.02  # as the embeddings beside them
        self.places = nn.Parameter(scale * torch.randn(count, width)) if self._is_parallel else None
        self.project = nn.Linear(spec.state_size, width) if options.use_states and spec.state_size else None
        if self.project is not None and folder is None:
            nn.init.normal_(self.project.weight)  # states from -1 to 1 as large as the embeddings beside them
        self.critic = None
        if config.add_value_head:
            self._add_critic()

    # Observations and actions

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: images as they are, states normalized, the prompt as tokens of one length."""
        first = observations[self._cameras[0]]
        texts = observations[INSTRUCTIONS].tolist() if self._has_instructions else [""] * len(first)
        prompts = [self._options.prompt.replace("{instruction}", text) for text in texts]
        longest, vocabulary = self._options.max_prompt_tokens, self.vlm.vocabulary
        tokens, mask = encoded_prompts(self.tokenizer, prompts, longest, "left", vocabulary)
        named: dict[str, Array] = {
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

    def to_env(self, actions: Tensor) -> Array:
        """See `BasePolicy`: bins [n, C, A] as numbers, with the scale of the data that the policy was trained on."""
        numbers = actions.cpu().numpy() * (2 / (self._options.action_bins - 1)) - 1
        return self.normalization.actions_of(numbers).astype(np.float32)

    def from_env(self, actions: Array) -> Tensor:
        """See `BasePolicy`: the nearest bins."""
        last = self._options.action_bins - 1
        numbers = np.clip(self.normalization.normalized_actions(actions), -1, 1)
        return super().from_env(np.rint((numbers + 1) * (last / 2)).astype(np.int64))

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: the architecture, the tokenizer, and how images are scaled."""
        inner = folder / BACKBONE
        self.vlm.base.config.save_pretrained(inner)
        self.tokenizer.save_pretrained(str(inner))
        self.vlm.images.save(inner)

    def _prefix(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return embeddings [n, P, W] of the prefix before the actions, and its padding mask, bool [n, P], true for
        real tokens."""
        vlm, prompt = self.vlm, inputs[_TOKENS]
        parts = [vlm.embed_images(inputs[key]) for key in self._cameras]
        begin = self.tokenizer.bos_token_id
        if begin is not None:
            parts.insert(0, vlm.embed_tokens(prompt.new_full((len(prompt), 1), begin)))
        if self.project is not None:
            parts.append(self.project(inputs[STATES].to(self.project.weight.dtype))[:, None])
        seen = torch.ones(len(prompt), sum(part.shape[1] for part in parts), dtype=torch.bool, device=prompt.device)
        words = vlm.embed_tokens(prompt)
        embedded = torch.cat([*(part.to(words.dtype) for part in parts), words], dim=1)
        return embedded, torch.cat((seen, inputs[_MASK]), dim=1)

    def _read_parallel(self, prefix: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenPolicy`: each token is read where its place stands."""
        places = cast("Tensor", self.places)
        after = places.expand(len(prefix), -1, -1).to(prefix.dtype)
        whole = torch.cat((mask, mask.new_ones(after.shape[:2])), dim=1)
        hidden = self.vlm.states(torch.cat((prefix, after), dim=1), whole)[0]
        start = prefix.shape[1]
        return self.vlm.logits(hidden[:, start:], self._bins), hidden[:, start - 1]


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
