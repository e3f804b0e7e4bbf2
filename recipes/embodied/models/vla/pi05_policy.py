"""pi0.5 (Physical Intelligence, arXiv 2504.16054): a PaliGemma that reads the state in its prompt, and an expert of
actions whose norms depend on time.
"""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_options import Pi05Options
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
from recipes.embodied.models.vla.pi05_folder import load_network, shape_of_folder
from recipes.embodied.models.vla.pi05_network import (
    Pi05Network,
    PiShape,
    built_shape,
    initialize_built,
    read_prefix,
    reading_blocks,
)
from recipes.embodied.models.vla.vision_language import load_policy_tokenizer
from recipes.sections.model_folders import SETTINGS, read_object
from recipes.training.huggingface import with_lora
from recipes.training.without_memory import are_shapes_only

_BINS: Final = 256
_LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Pi05Policy(FlowVlaPolicy):
    """pi0.5 with a value head, and with noise at denoising steps for reinforcement learning.

    It counts time the other way round: 1 is noise there, and velocities point to it.
    """

    options_model = Pi05Options

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        check_observations(config, spec)
        options = cast("Pi05Options", config.options)
        folder = config.model_path
        is_own = bool(folder) and is_policy_folder(str(folder))
        inner = str(Path(str(folder)) / BACKBONE) if is_own else folder
        words = load_policy_tokenizer(inner)
        if inner is None:
            shape = built_shape(config, options, spec, len(words))
        else:
            shape = PiShape.load(Path(inner)) if is_own else shape_of_folder(inner, "pi05")
        shape = replace(shape, horizon=options.action_horizon or shape.horizon)
        network = Pi05Network(shape)
        if inner is None:
            initialize_built(network)
        elif not is_own and not are_shapes_only():
            load_network(network, inner)
        states = shape.prompt_states or spec.state_size
        sizes = ModelSizes(shape.language.width, states, shape.actions, shape.horizon, shape.vocabulary)
        super().__init__(config, spec, sizes, options.steps or shape.steps)
        self._shape, self._words = shape, words
        self._base = [network]
        layout = "lerobot" if inner is None else layout_of(read_object(Path(inner) / SETTINGS))
        self._images = ImagePipeline.load(inner, (shape.image, shape.image), layout)
        lora = config.adapter()
        if lora is None:
            self.pi05: Any = network
        else:
            # peft takes the attribute `config` for that of a model; it sees none of a module list.
            targets = lora if lora.target_modules else lora.model_copy(update={"target_modules": _LORA_TARGETS})
            self.pi05 = with_lora(cast("Any", nn.ModuleList([network])), targets, None)
        self.normalization = load_statistics(folder, options.statistics, layout, spec, scheme="quantile")

    def prompts(self, instructions: list[str], states: NDArray[np.float32] | None) -> list[str]:
        """See `FlowVlaPolicy`: the state is spelled in the prompt, as whole numbers."""
        begin = str(self._words.bos_token or "")
        spelled = spelled_states(states, self._shape.prompt_states) if states is not None else [""] * len(instructions)
        texts = [text.strip().replace("_", " ").replace("\n", " ") for text in instructions]
        return [
            begin + self.options.prompt.replace("{states}", numbers).replace("{instruction}", text)
            for text, numbers in zip(texts, spelled, strict=True)
        ]

    @property
    def trained_by(self) -> str:
        """See `FlowVlaPolicy`."""
        return self._images.resizing

    def read(self, inputs: Inputs, states: Tensor) -> ReadObservation:
        """See `FlowVlaPolicy`; states are part of the prompt."""
        images = [self._images.pixels(inputs[key]) for key in self._cameras]
        return read_prefix(self.base.vlm, images, inputs[TOKENS], inputs[MASK])

    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        """See `FlowVlaPolicy`."""
        return -self.base.velocity(seen.memory, seen.mask, chunk, 1 - time)

    def times(self, count: int) -> Tensor:
        """See `FlowMatchingPolicy`: pi0.5 learns more from what is nearly noise."""
        noisy = torch.distributions.Beta(*self._shape.beta).sample((count,)) * self._shape.scale + self._shape.offset
        return (1 - noisy).to(next(self.parameters()).device)

    @property
    def blocks(self) -> list[nn.Module]:
        """See `BasePolicy`."""
        return [*reading_blocks(self, self.base.vlm), *self.base.expert.layers]

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`."""
        return self._images.describe()

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: the architecture, the tokenizer, and what happens to images."""
        inner = folder / BACKBONE
        inner.mkdir(parents=True, exist_ok=True)
        self._shape.save(inner)
        self._words.save_pretrained(str(inner))
        self._images.save(inner)


def spelled_states(states: NDArray[np.float32], room: int) -> list[str]:
    """Return normalized states [n, S] as texts: of each number, which of 256 equal parts of -1 to 1 it is in.

    Args:
        states: numbers below -1 are -1, and those of 1 or more 255.
        room: numbers of a text; states are padded with 0.
    """
    padded = np.pad(states, ((0, 0), (0, max(0, room - states.shape[1]))))
    parts = np.digitize(padded, np.linspace(-1, 1, _BINS + 1)[:-1]) - 1
    return [" ".join(map(str, row)) for row in parts.tolist()]
