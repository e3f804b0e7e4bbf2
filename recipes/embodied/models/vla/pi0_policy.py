"""pi0 (Black et al., arXiv 2410.24164): a PaliGemma and an expert of actions, in the architecture of transformers."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_options import Pi0Options
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.policy_folder import BACKBONE, is_policy_folder
from recipes.embodied.models.published_statistics import layout_of, load_statistics
from recipes.embodied.models.vla.flow_vla import (
    MASK,
    TOKENS,
    FlowVlaPolicy,
    ModelSizes,
    ReadObservation,
    check_observations,
)
from recipes.embodied.models.vla.image_pipeline import ImagePipeline
from recipes.embodied.models.vla.pi0_backbone import built_pi0, load_pi0, shaped_pi0
from recipes.embodied.models.vla.pi05_network import built_shape, read_prefix, reading_blocks
from recipes.embodied.models.vla.vision_language import image_size, load_policy_tokenizer
from recipes.sections.model_folders import SETTINGS, read_object
from recipes.training.huggingface import with_lora


class Pi0Policy(FlowVlaPolicy):
    """pi0 with a value head, and with noise at each denoising step for reinforcement learning.

    transformers counts time the other way round: 1 is noise there, and velocities point to it.
    """

    options_model = Pi0Options

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        check_observations(config, spec)
        options = cast("Pi0Options", config.options)
        folder = config.model_path
        is_own = bool(folder) and is_policy_folder(str(folder))
        inner = str(Path(str(folder)) / BACKBONE) if is_own else folder
        words = load_policy_tokenizer(inner)
        model = _model(config, options, spec, inner, words, is_own=is_own)
        shape: Any = model.config
        shape.chunk_size = options.action_horizon or int(shape.chunk_size)
        sizes = ModelSizes(
            int(shape.vlm_config.text_config.hidden_size),
            int(shape.max_state_dim),
            int(shape.max_action_dim),
            shape.chunk_size,
            int(shape.vlm_config.text_config.vocab_size),
        )
        super().__init__(config, spec, sizes, options.steps or int(shape.num_inference_steps))
        self._words = words
        layout = "transformers" if inner is None else layout_of(read_object(Path(inner) / SETTINGS))
        self._images = ImagePipeline.load(inner, image_size(shape.vlm_config), layout)
        # The expert has embeddings of words that it never reads.
        model.model.dit.get_input_embeddings().requires_grad_(False)
        lora = config.adapter()
        self.pi0 = model if lora is None else with_lora(model, lora, None)
        self._base = [model]
        self.normalization = load_statistics(folder, options.statistics, layout, spec)

    def prompts(self, instructions: list[str], states: NDArray[np.float32] | None) -> list[str]:
        """See `FlowVlaPolicy`."""
        begin = str(self._words.bos_token or "")
        return [begin + prompt for prompt in super().prompts(instructions, states)]

    @property
    def blocks(self) -> list[nn.Module]:
        """See `BasePolicy`. Layers that read leave keys and values in a memory, and not in what they return: gradients
        come to their projections by another way than through the layer, so that these are parts by themselves.
        """
        return reading_blocks(self, self.base.model.vlm)

    @property
    def trained_by(self) -> str:
        """See `FlowVlaPolicy`."""
        return self._images.resizing

    def read(self, inputs: Inputs, states: Tensor) -> ReadObservation:
        """See `FlowVlaPolicy`."""
        images = [self._images.pixels(inputs[key]) for key in self._cameras]
        return read_prefix(self.base.model.vlm, images, inputs[TOKENS], inputs[MASK])

    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        """See `FlowVlaPolicy`."""
        from transformers import DynamicCache

        # The expert appends to the cache, so every step gets a copy.
        memory = DynamicCache()
        for index, (keys, values) in enumerate(seen.memory):
            memory.update(keys, values, index)
        output = self.base(
            state=states, noise=chunk, timestep=1 - time, attention_mask=seen.mask.long(), past_key_values=memory
        )
        return -output.logits

    def times(self, count: int) -> Tensor:
        """See `FlowMatchingPolicy`: pi0 learns more from what is nearly noise."""
        shape = self.base.config
        shares = torch.distributions.Beta(shape.time_sampling_beta_alpha, shape.time_sampling_beta_beta)
        noisy = shares.sample((count,)) * shape.time_sampling_scale + shape.time_sampling_offset
        return (1 - noisy).to(next(self.parameters()).device)

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`."""
        return self._images.describe()

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: the architecture, the tokenizer, and how images are scaled."""
        inner = folder / BACKBONE
        self.base.config.save_pretrained(inner)
        self._words.save_pretrained(str(inner))
        self._images.save(inner)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pi0Policy:
        """Keep the frequencies of time in float32, whatever the weights become: bfloat16 would blur the steps."""
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownArgumentType]
        time = self.base.embed_action_time.sinusoid_embeds
        # Not to where they are: transformers may have left them on the CPU, and the rest be on the meta device.
        time.sinusoid_freq = time.compute_freqs(self.base.config).to(next(self.parameters()).device)
        return self


def _model(
    config: EmbodiedModelConfig, options: Pi0Options, spec: EnvSpec, folder: str | None, words: Any, *, is_own: bool
) -> Any:
    """Return the model that `actor.model` describes, loaded from a folder or built from scratch."""
    if folder is None:
        shape = built_shape(config, options, spec, len(words))
        return built_pi0(shape, max(1, spec.state_size), words.convert_tokens_to_ids("<image>"))
    # Weights of a policy follow, with its value head.
    return shaped_pi0(folder) if is_own else load_pi0(folder)
