"""SmolVLA (Shukor et al., arXiv 2506.01844) in lerobot's own implementation, with log-probabilities.

lerobot requires other versions of torch and transformers than the rest of a job: actor and rollout workers run in an
interpreter with lerobot, by `python_interpreter_path` of their node group.
"""

# lerobot is largely untyped, and is not installed where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast
from unittest import mock

import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import SmolVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.folder_facts import WEIGHTS
from recipes.embodied.models.policy_folder import BACKBONE, backbone_of
from recipes.embodied.models.published_statistics import load_statistics
from recipes.embodied.models.vla.flow_vla import (
    MASK,
    TOKENS,
    FlowVlaPolicy,
    ModelSizes,
    ReadObservation,
    check_observations,
)
from recipes.embodied.models.vla.lerobot_config import require_lerobot
from recipes.embodied.models.vla.vision_language import (
    HEAD,
    adapted,
    built_heads,
    built_image_size,
    initialize_narrow,
    load_policy_tokenizer,
    load_renamed,
)
from recipes.training.huggingface import check_folder, first_line, refuse_settings, transformer_layers
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError

# The folder of the vision-language model's configuration, within the policy's folder.
_VLM: Final = "vlm"
# Keys and values of each layer.
Memory: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
_KEYS, _VALUES = "key_states", "value_states"
_FAKE, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
_PROJECTIONS: Final = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out")


class SmolVlaPolicy(FlowVlaPolicy):
    """SmolVLA with a value head, and with noise at each denoising step for reinforcement learning."""

    options_model = SmolVlaOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        require_lerobot("smolvla", "lerobot.policies.smolvla.modeling_smolvla", "lerobot[smolvla]")
        check_observations(config, spec)
        options = cast("SmolVlaOptions", config.options)
        inner, is_own = backbone_of(config.model_path)
        vlm = str(Path(str(inner)) / _VLM) if is_own else options.vlm_path
        if inner is not None and vlm is None:
            raise ConfigError(
                "`smolvla` needs the configuration and the tokenizer of its vision-language model",
                why=f"`{inner}` refers to them on a hub, and nothing is downloaded",
                help="write `actor.model.options.vlm_path`, a folder of SmolVLM2 (its weights are not needed)",
            )
        words = _with_special_tokens(load_policy_tokenizer(vlm if inner is not None else None))
        shape = _built_config(config, options, spec) if inner is None else folder_config(inner)
        shape.chunk_size = options.action_horizon or int(shape.chunk_size)
        shape.n_action_steps = min(config.num_action_chunks, shape.chunk_size)
        network = _network(shape, words, vlm, config, options, spec)
        if inner is not None and not is_own and not are_shapes_only():
            _load_weights(network, inner)
        text = network.vlm_with_expert.config.text_config
        sizes = ModelSizes(
            int(text.hidden_size),
            int(shape.max_state_dim),
            int(shape.max_action_dim),
            shape.chunk_size,
            int(text.vocab_size),
            int(shape.num_steps),
        )
        super().__init__(config, spec, network, words, sizes)
        self._shape = shape
        # The model reads words and writes none.
        network.vlm_with_expert.vlm.lm_head.requires_grad_(False)
        self.smolvla = adapted(network, config.adapter())
        self.normalization = load_statistics(config.model_path, options.statistics, "lerobot", spec)

    @property
    def blocks(self) -> list[nn.Module]:
        """See `BasePolicy`: lerobot calls projections and networks within the layers, and never a whole layer."""
        both: Any = self.base.vlm_with_expert
        reading = both.get_vlm_model()
        layers = [*transformer_layers(reading.text_model), *transformer_layers(both.lm_expert)]
        parts: list[nn.Module] = [
            part for layer in cast("list[Any]", layers) for part in (*layer.self_attn.children(), layer.mlp)
        ]
        return [*transformer_layers(reading.vision_model), *parts]

    @property
    def trained_by(self) -> str:
        return "lerobot"

    def read(self, inputs: Inputs, states: Tensor) -> ReadObservation:
        """See `FlowVlaPolicy`; the states come last."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        base = self.base
        images = [self._pixels(inputs[key]) for key in self._cameras]
        present = [torch.ones(len(image), dtype=torch.bool, device=image.device) for image in images]
        embedded, mask, ahead = base.embed_prefix(images, present, inputs[TOKENS], inputs[MASK], state=states)
        hidden, pairs = _read_prefix(
            base.vlm_with_expert, embedded, make_att_2d_masks(mask, ahead), torch.cumsum(mask, dim=1) - 1
        )
        weights = (mask / mask.sum(dim=1, keepdim=True))[..., None].to(hidden.dtype)
        return ReadObservation((hidden * weights).sum(dim=1), pairs, mask)

    def denoise(self, seen: ReadObservation, states: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        memory = _prefix_cache(self.base.vlm_with_expert, seen.memory)
        return -self.base.denoise_step(seen.mask, memory, chunk, 1 - time)

    def describe_images(self) -> dict[str, Any]:
        width, height = self._shape.resize_imgs_with_padding
        half = [0.5] * 3
        return {"resized": [height, width], "resampling": "bilinear", "mean": half, "std": half, "scale": 1 / 255}

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: lerobot's configuration, and the architecture and tokenizer of the model in it."""
        inner = folder / BACKBONE
        inner.mkdir(parents=True, exist_ok=True)
        self._shape._save_pretrained(inner)
        self.base.vlm_with_expert.config.save_pretrained(inner / _VLM)
        self.tokenizer.save_pretrained(str(inner / _VLM))

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


def _with_special_tokens(words: Any) -> Any:
    unknown = [token for token in (_FAKE, _GLOBAL, _IMAGE) if token not in words.get_vocab()]
    if unknown:
        words.add_special_tokens({"additional_special_tokens": unknown})
    return words


def _built_config(config: EmbodiedModelConfig, options: SmolVlaOptions, spec: EnvSpec) -> Any:
    """Return lerobot's configuration of a small model, all of which is trained."""
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    size = built_image_size(spec, 2 * options.patch_size)  # pairs of patches become one token
    return SmolVLAConfig(
        device="cpu",
        chunk_size=options.action_horizon or config.num_action_chunks,
        n_action_steps=config.num_action_chunks,
        max_state_dim=max(1, spec.state_size),
        max_action_dim=spec.action_size,
        resize_imgs_with_padding=(size, size),
        freeze_vision_encoder=False,
        train_expert_only=False,
        num_vlm_layers=options.num_layers,
        num_steps=4,
        expert_width_multiplier=0.5,
    )


def folder_config(folder: str) -> Any:
    """Return the configuration in a folder of lerobot.

    Raises:
        ConfigError: the configuration is missing, or of another kind of policy.
    """
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    check_folder(folder)
    refuse_settings(folder)
    try:
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - of draccus, json, the hub: each has its own
        raise ConfigError(
            f"`{folder}` has no lerobot policy", why=first_line(error), help="name a folder of SmolVLA"
        ) from None
    if not isinstance(config, SmolVLAConfig):
        raise ConfigError(
            f"`smolvla` cannot use the `{config.type}` in `{folder}`",
            why="its config.json names another kind of policy",
            help="name a folder of SmolVLA, or the `model_type` that reads the folder (docs/models.md)",
        )
    config.device = "cpu"
    return config


def _network(
    shape: Any,
    words: Any,
    vlm: str | None,
    config: EmbodiedModelConfig,
    options: SmolVlaOptions,
    spec: EnvSpec,
) -> Any:
    """Return lerobot's network with new weights.

    Args:
        shape: the configuration of the network.
        words: the tokenizer.
        vlm: folder of the vision-language model's configuration; None: a small one.
        config: the section `actor.model`.
        options: the options of the policy.
        spec: the spec of the environment.

    Raises:
        ConfigError: the vision-language model's configuration cannot be read.
    """
    from lerobot.policies.smolvla import smolvlm_with_expert
    from lerobot.policies.smolvla.modeling_smolvla import VLAFlowMatching

    shape.load_vlm_weights = False
    # lerobot uses only two tokens of the processor; images and texts are prepared here.
    tokens = SimpleNamespace(
        fake_image_token_id=words.convert_tokens_to_ids(_FAKE),
        global_image_token_id=words.convert_tokens_to_ids(_GLOBAL),
    )

    def from_pretrained(_: str) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=tokens)

    processor = SimpleNamespace(from_pretrained=from_pretrained)
    named = shape.vlm_model_name
    with tempfile.TemporaryDirectory() as folder:
        if vlm is None:
            _small_vlm(len(words), words.convert_tokens_to_ids(_IMAGE), config, options, spec).save_pretrained(folder)
        else:
            check_folder(vlm)
            refuse_settings(vlm)
        shape.vlm_model_name = vlm or folder
        try:
            with mock.patch.object(smolvlm_with_expert, "AutoProcessor", processor):
                network = VLAFlowMatching(shape)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"`{vlm}` has no SmolVLM", why=first_line(error)) from None
        finally:
            shape.vlm_model_name = named
    if vlm is None:
        initialize_narrow(network)
    return network


def _read_prefix(model: Any, embedded: Tensor, attention: Tensor, positions: Tensor) -> tuple[Tensor, Memory]:
    """Encode an observation by lerobot's two models.

    Args:
        model: its `SmolVLMWithExpertModel`.
        embedded: the embedded observation, [n, L, width].
        attention: the attention mask, bool [n, L, L].
        positions: the positions of the tokens, [n, L].

    Returns:
        The output of the vision-language model, [n, L, width], and keys and values of each layer.
    """
    filled = {"fill_kv_cache": True} if _keeps_dictionaries(model) else {}
    hidden, memory = model.forward(
        attention_mask=attention,
        position_ids=positions,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
        **filled,
    )
    if filled:
        return hidden[0], tuple((memory[index][_KEYS], memory[index][_VALUES]) for index in range(len(memory)))
    return hidden[0], tuple((layer.keys, layer.values) for layer in memory.layers)


def _prefix_cache(model: Any, pairs: Memory) -> Any:
    """Return the keys and values of `read_prefix` as lerobot's `denoise_step` takes them."""
    if _keeps_dictionaries(model):
        return {index: {_KEYS: keys, _VALUES: values} for index, (keys, values) in enumerate(pairs)}
    from transformers import DynamicCache

    memory = DynamicCache()
    for index, (keys, values) in enumerate(pairs):
        memory.update(keys, values, index)
    return memory


def _keeps_dictionaries(model: Any) -> bool:
    """Return whether keys and values are in dictionaries: before lerobot 0.6, a flag controls filling them."""
    return "fill_kv_cache" in inspect.signature(model.forward).parameters


def _load_weights(network: nn.Module, folder: str) -> None:
    """Load the weights in a lerobot folder into the network.

    Raises:
        ConfigError: the weights are missing, or of another model.
    """
    own = network.state_dict().keys()

    def renamed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        # The folder also holds layers that the model leaves out.
        if name.removeprefix("model.") in own:
            yield name.removeprefix("model."), weight

    kind = "a SmolVLA of this shape (`vlm_path` names the vision-language model that it was made with)"
    load_renamed(network, folder, [Path(folder) / WEIGHTS], renamed, lambda _: False, kind=kind)


def _small_vlm(
    vocabulary: int, image_token: int, config: EmbodiedModelConfig, options: SmolVlaOptions, spec: EnvSpec
) -> Any:
    """Return the configuration of a small SmolVLM: a SigLIP, a projection and a Llama.

    Raises:
        ConfigError: the sizes do not divide evenly.
    """
    from transformers import SmolVLMConfig

    width, heads = config.hidden_dim, built_heads(config.hidden_dim)
    shape = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": heads,
    }
    text = {
        **shape,
        "model_type": "llama",
        "vocab_size": vocabulary,
        "num_key_value_heads": heads,
        "head_dim": HEAD,
        "pad_token_id": 0,
    }
    size = built_image_size(spec, 2 * options.patch_size)
    vision = {**shape, "image_size": size, "patch_size": options.patch_size}
    return SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, image_token_id=image_token)
