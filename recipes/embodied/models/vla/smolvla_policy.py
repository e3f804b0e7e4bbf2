"""SmolVLA (Shukor et al., arXiv 2506.01844) in lerobot's own implementation, with log-probabilities.

lerobot asks for other versions of torch and transformers than the rest of a job: actor and rollout workers run in an
interpreter that has it, by `python_interpreter_path` of their node group.
"""

# lerobot has few types, and is not installed where these are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_options import SmolVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.lerobot.lerobot_config import require_lerobot
from recipes.embodied.models.policy_folder import BACKBONE, is_policy_folder
from recipes.embodied.models.published_statistics import load_statistics
from recipes.embodied.models.vla.flow_vla import (
    MASK,
    TOKENS,
    FlowVlaPolicy,
    ModelSizes,
    ReadObservation,
    check_observations,
)
from recipes.embodied.models.vla.smolvla_backbone import (
    VLM,
    built_config,
    folder_config,
    load_weights,
    make_network,
    prefix_cache,
    read_prefix,
    with_special_tokens,
)
from recipes.embodied.models.vla.vision_language import load_policy_tokenizer
from recipes.training.huggingface import transformer_layers, with_lora
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError

_PROJECTIONS: Final = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out")
_LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# As lerobot trains it: the share of noise, and the least of it.
_BETA: Final = (1.5, 1.0)
_SCALE, _OFFSET = 0.999, 0.001


class SmolVlaPolicy(FlowVlaPolicy):
    """SmolVLA with a value head, and with noise at each denoising step for reinforcement learning.

    lerobot counts time the other way round: 1 is noise there, and velocities point to it.
    """

    options_model = SmolVlaOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        require_lerobot("smolvla", "lerobot.policies.smolvla.modeling_smolvla", "lerobot[smolvla]")
        check_observations(config, spec)
        options = cast("SmolVlaOptions", config.options)
        folder = config.model_path
        is_own = bool(folder) and is_policy_folder(str(folder))
        inner = str(Path(str(folder)) / BACKBONE) if is_own else folder
        vlm = str(Path(str(inner)) / VLM) if is_own else options.vlm_path
        if inner is not None and vlm is None:
            raise ConfigError(
                "`smolvla` needs the configuration and the tokenizer of its vision-language model",
                why=f"`{folder}` refers to them on a hub, and nothing is downloaded",
                help="write `actor.model.options.vlm_path`, a folder of SmolVLM2 (its weights are not needed)",
            )
        words = with_special_tokens(load_policy_tokenizer(vlm if inner is not None else None))
        if inner is None:
            shape = built_config(config, options, spec)
        else:
            shape = folder_config(inner)
        shape.chunk_size = options.action_horizon or int(shape.chunk_size)
        shape.n_action_steps = min(config.num_action_chunks, shape.chunk_size)
        network = make_network(shape, words, vlm, config, options, spec)
        if inner is not None and not is_own and not are_shapes_only():
            load_weights(network, inner)
        text = network.vlm_with_expert.config.text_config
        sizes = ModelSizes(
            int(text.hidden_size),
            int(shape.max_state_dim),
            int(shape.max_action_dim),
            shape.chunk_size,
            int(text.vocab_size),
        )
        super().__init__(config, spec, sizes, options.steps or int(shape.num_steps))
        self._shape, self._words = shape, words
        self._base = [network]
        # Words are read, and none is written.
        network.vlm_with_expert.vlm.lm_head.requires_grad_(False)
        lora = config.adapter()
        if lora is None:
            self.smolvla: Any = network
        else:
            # peft takes the configuration of a whole policy for that of a model; it sees none of a module list.
            targets = lora if lora.target_modules else lora.model_copy(update={"target_modules": _LORA_TARGETS})
            self.smolvla = with_lora(cast("Any", nn.ModuleList([network])), targets, None)
        self.normalization = load_statistics(folder, options.statistics, "lerobot", spec)

    @property
    def blocks(self) -> list[nn.Module]:
        """See `BasePolicy`: of layers that read and act lerobot calls projections and networks, and no layer whole."""
        both: Any = self.base.vlm_with_expert
        reading = both.get_vlm_model()
        layers = [*transformer_layers(reading.text_model), *transformer_layers(both.lm_expert)]
        parts: list[nn.Module] = [
            part for layer in cast("list[Any]", layers) for part in (*layer.self_attn.children(), layer.mlp)
        ]
        return [*transformer_layers(reading.vision_model), *parts]

    @property
    def trained_by(self) -> str:
        """See `FlowVlaPolicy`."""
        return "lerobot"

    def read(self, inputs: Inputs, states: Tensor) -> ReadObservation:
        """See `FlowVlaPolicy`; the states are the last of what is read."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        base = self.base
        images = [self._pixels(inputs[key]) for key in self._cameras]
        present = [torch.ones(len(image), dtype=torch.bool, device=image.device) for image in images]
        embedded, mask, ahead = base.embed_prefix(images, present, inputs[TOKENS], inputs[MASK], state=states)
        hidden, pairs = read_prefix(
            base.vlm_with_expert, embedded, make_att_2d_masks(mask, ahead), torch.cumsum(mask, dim=1) - 1
        )
        weights = (mask / mask.sum(dim=1, keepdim=True))[..., None].to(hidden.dtype)
        return ReadObservation((hidden * weights).sum(dim=1), pairs, mask)

    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        """See `FlowVlaPolicy`."""
        memory = prefix_cache(self.base.vlm_with_expert, seen.memory)
        return -self.base.denoise_step(seen.mask, memory, chunk, 1 - time)

    def times(self, count: int) -> Tensor:
        """See `FlowMatchingPolicy`: as lerobot draws them."""
        noisy = torch.distributions.Beta(*_BETA).sample((count,)) * _SCALE + _OFFSET
        return (1 - noisy).to(next(self.parameters()).device)

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`."""
        width, height = self._shape.resize_imgs_with_padding
        half = [0.5] * 3
        return {"resized": [height, width], "resampling": "bilinear", "mean": half, "std": half, "scale": 1 / 255}

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: lerobot's configuration, and the architecture and tokenizer of the model in it."""
        inner = folder / BACKBONE
        inner.mkdir(parents=True, exist_ok=True)
        self._shape._save_pretrained(inner)
        self.base.vlm_with_expert.config.save_pretrained(inner / VLM)
        self._words.save_pretrained(str(inner / VLM))

    def _pixels(self, images: Tensor) -> Tensor:
        from lerobot.policies.smolvla.modeling_smolvla import resize_with_pad

        pixels = images.permute(0, 3, 1, 2).float() / 255
        return resize_with_pad(pixels, *self._shape.resize_imgs_with_padding, pad_value=0) * 2 - 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SmolVlaPolicy:
        """Keep the projections of states, actions and time in float32, in which lerobot computes them."""
        kept = [
            (parameter, parameter.detach().clone())
            for name in _PROJECTIONS
            for parameter in getattr(self.base, name).parameters()
        ]
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownArgumentType]
        for weight, exact in kept:
            weight.data = exact.to(weight.device)
        return self
