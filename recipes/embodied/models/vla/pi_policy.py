"""pi0 (Black et al., arXiv 2410.24164) and pi0.5 (Physical Intelligence, arXiv 2504.16054): a PaliGemma and an action
expert; the state is a separate token of the expert (pi0), or is spelled out in the prompt (pi0.5).
"""

# transformers is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import Pi0Options, Pi05Options
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.normalization import Scheme
from recipes.embodied.models.policy_folder import BACKBONE, backbone_of
from recipes.embodied.models.published_statistics import Layout, layout_of, load_statistics
from recipes.embodied.models.vla.flow_vla import (
    MASK,
    TOKENS,
    FlowVlaPolicy,
    ModelSizes,
    ReadObservation,
    check_observations,
)
from recipes.embodied.models.vla.pi_folder import built_pi0, load_pi0, load_pi05, saved_pi0
from recipes.embodied.models.vla.pi_network import Pi05Network, PiShape, built_shape, initialize_built, read_prefix
from recipes.embodied.models.vla.vision_language import ImagePipeline, adapted, load_policy_tokenizer
from recipes.sections.model_folders import SETTINGS, read_object
from recipes.training.huggingface import transformer_layers, with_lora

_BINS: Final = 256


class PiPolicy(FlowVlaPolicy):
    """A pi0 or pi0.5 with a value head, and with noise at denoising steps for reinforcement learning.

    Args:
        config: the section `actor.model`.
        spec: the spec of the environment.
        network: the network.
        vlm: the PaliGemma in it.
        tokenizer: its tokenizer.
        sizes: the sizes of the model.
        image: height and width of its input images.
        layout: the library that wrote its folder, or whose conventions a newly built network follows.
        scheme: the normalization scheme in openpi.
    """

    def __init__(
        self,
        config: EmbodiedModelConfig,
        spec: EnvSpec,
        network: Any,
        vlm: Any,
        tokenizer: Any,
        sizes: ModelSizes,
        image: int,
        layout: Layout,
        scheme: Scheme,
    ) -> None:
        super().__init__(config, spec, network, tokenizer, sizes)
        self._vlm = [vlm]  # in a list, as the network is
        self._images = ImagePipeline.load(backbone_of(config.model_path)[0], (image, image), layout)
        self.normalization = load_statistics(config.model_path, self.options.statistics, layout, spec, scheme=scheme)

    @property
    def trained_by(self) -> str:
        return self._images.resizing

    @property
    def blocks(self) -> list[nn.Module]:
        """See `BasePolicy`. Layers of the language model pass keys and values by a cache, not by their output:
        gradients reach their projections by another path than through the layer, so that the projections are parts by
        themselves.
        """
        reading = list(self._vlm[0].language_model.layers)
        parts = [layer for layer in transformer_layers(self) if all(layer is not other for other in reading)]
        for layer in reading:
            attention = layer.self_attn
            parts += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp]
        return parts

    def read(self, inputs: Inputs, states: Tensor) -> ReadObservation:
        images = [self._images.pixels(inputs[key]) for key in self._cameras]
        return read_prefix(self._vlm[0], images, inputs[TOKENS], inputs[MASK])

    def describe_images(self) -> dict[str, Any]:
        return self._images.describe()

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: the tokenizer, and the image preprocessing; a subclass adds the architecture."""
        inner = folder / BACKBONE
        inner.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(str(inner))
        self._images.save(inner)


class Pi0Policy(PiPolicy):
    """pi0, in the architecture of transformers."""

    options_model = Pi0Options

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        check_observations(config, spec)
        options = cast("Pi0Options", config.options)
        folder, is_own = backbone_of(config.model_path)
        words: Any = load_policy_tokenizer(folder)
        if folder is None:
            shape = built_shape(config, options, spec, len(words))
            model: Any = built_pi0(shape, max(1, spec.state_size), words.convert_tokens_to_ids("<image>"))
        else:
            model = saved_pi0(folder) if is_own else load_pi0(folder)
        about, vlm = model.config, model.config.vlm_config
        about.chunk_size = options.action_horizon or int(about.chunk_size)
        sizes = ModelSizes(
            int(vlm.text_config.hidden_size),
            int(about.max_state_dim),
            int(about.max_action_dim),
            about.chunk_size,
            int(vlm.text_config.vocab_size),
            int(about.num_inference_steps),
            (about.time_sampling_beta_alpha, about.time_sampling_beta_beta),
            about.time_sampling_scale,
            about.time_sampling_offset,
        )
        layout = _layout_of(folder) or "transformers"
        image = int(vlm.vision_config.image_size)
        super().__init__(config, spec, model, model.model.vlm, words, sizes, image, layout, "mean_std")
        # The expert has word embeddings that it never uses.
        model.model.dit.get_input_embeddings().requires_grad_(False)
        lora = config.adapter()
        self.pi0: Any = model if lora is None else with_lora(model, lora, None)

    def prompts(self, instructions: list[str], states: NDArray[np.float32] | None) -> list[str]:
        begin = str(self.tokenizer.bos_token or "")
        return [begin + prompt for prompt in super().prompts(instructions, states)]

    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        from transformers import DynamicCache

        # The expert appends to the cache, so every step gets a copy.
        memory = DynamicCache()
        for index, (keys, values) in enumerate(seen.memory):
            memory.update(keys, values, index)
        output = self.base(
            state=states, noise=chunk, timestep=1 - time, attention_mask=seen.mask.long(), past_key_values=memory
        )
        return -output.logits

    def save_files(self, folder: Path) -> None:
        super().save_files(folder)
        self.base.config.save_pretrained(folder / BACKBONE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pi0Policy:
        """Keep the frequencies of time in float32, whatever the dtype of the weights: bfloat16 would blur the steps."""
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownArgumentType]
        time = self.base.embed_action_time.sinusoid_embeds
        # The device of the weights, since transformers may have left the frequencies on the CPU while the rest is on
        # the meta device.
        time.sinusoid_freq = time.compute_freqs(self.base.config).to(next(self.parameters()).device)
        return self


class Pi05Policy(PiPolicy):
    """pi0.5, whose expert has norms that depend on time."""

    options_model = Pi05Options

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        check_observations(config, spec)
        options = cast("Pi05Options", config.options)
        folder, is_own = backbone_of(config.model_path)
        words: Any = load_policy_tokenizer(folder)
        if folder is not None and not is_own:
            network = load_pi05(folder, options.action_horizon)
        else:
            shape = built_shape(config, options, spec, len(words)) if folder is None else PiShape.load(Path(folder))
            network = Pi05Network(replace(shape, horizon=options.action_horizon or shape.horizon))
        if folder is None:
            initialize_built(network)
        shape = network.shape
        sizes = ModelSizes(
            shape.language.width,
            shape.prompt_states or spec.state_size,
            shape.actions,
            shape.horizon,
            shape.vocabulary,
            shape.steps,
            shape.beta,
            shape.scale,
            shape.offset,
        )
        layout = _layout_of(folder) or "lerobot"
        super().__init__(config, spec, network, network.vlm, words, sizes, shape.image, layout, "quantile")
        self.pi05 = adapted(network, config.adapter())

    def prompts(self, instructions: list[str], states: NDArray[np.float32] | None) -> list[str]:
        """See `FlowVlaPolicy`: the state is spelled out in the prompt, as integers."""
        begin, room = str(self.tokenizer.bos_token or ""), self.base.shape.prompt_states
        spelled = spelled_states(states, room) if states is not None else [""] * len(instructions)
        texts = [text.strip().replace("_", " ").replace("\n", " ") for text in instructions]
        return [
            begin + self.options.prompt.replace("{states}", numbers).replace("{instruction}", text)
            for text, numbers in zip(texts, spelled, strict=True)
        ]

    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        return -self.base.velocity(seen.memory, seen.mask, chunk, 1 - time)

    @property
    def blocks(self) -> list[nn.Module]:
        """See `PiPolicy`; in addition, each layer of the expert."""
        return [*super().blocks, *self.base.expert.layers]

    def save_files(self, folder: Path) -> None:
        super().save_files(folder)
        self.base.shape.save(folder / BACKBONE)


def _layout_of(folder: str | None) -> Layout | None:
    return None if folder is None else layout_of(read_object(Path(folder) / SETTINGS))


def spelled_states(states: NDArray[np.float32], room: int) -> list[str]:
    """Return normalized states [n, S] as texts: the index of each number among 256 equal parts of -1 to 1.

    Args:
        states: the normalized states; numbers below -1 become -1, and those of 1 or more 255.
        room: the count of numbers in a text; states are padded with 0.
    """
    padded = np.pad(states, ((0, 0), (0, max(0, room - states.shape[1]))))
    parts = np.digitize(padded, np.linspace(-1, 1, _BINS + 1)[:-1]) - 1
    return [" ".join(map(str, row)) for row in parts.tolist()]
