"""The SmolVLA of lerobot, built from scratch or with the weights of a lerobot folder."""

# lerobot has few types, and is not installed where these are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from unittest import mock

from torch import Tensor

from recipes.embodied.config.model_options import SmolVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.vla.vision_language import initialize_narrow
from recipes.training.huggingface import check_folder, first_line, refuse_settings
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

# Folder of the vision-language model's configuration, in the one of the policy.
VLM: Final = "vlm"
_HEAD = 32
# Keys and values of each layer.
Memory: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
_KEYS, _VALUES = "key_states", "value_states"
_FAKE, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


def with_special_tokens(words: Any) -> Any:
    """Return a tokenizer with SmolVLM's image tokens."""
    unknown = [token for token in (_FAKE, _GLOBAL, _IMAGE) if token not in words.get_vocab()]
    if unknown:
        words.add_special_tokens({"additional_special_tokens": unknown})
    return words


def built_config(config: EmbodiedModelConfig, options: SmolVlaOptions, spec: EnvSpec) -> Any:
    """Return lerobot's configuration of a small model, all of which is trained."""
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    size = _image_size(options, spec)
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
        ConfigError: there is none, or it is of another kind of policy.
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


def make_network(
    shape: Any,
    words: Any,
    vlm: str | None,
    config: EmbodiedModelConfig,
    options: SmolVlaOptions,
    spec: EnvSpec,
) -> Any:
    """Return lerobot's network with fresh weights.

    Args:
        shape: its configuration.
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
    # lerobot asks the processor for two tokens alone; images and texts are prepared here.
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


def read_prefix(model: Any, embedded: Tensor, attention: Tensor, positions: Tensor) -> tuple[Tensor, Memory]:
    """Let lerobot's two models read an observation.

    Args:
        model: its `SmolVLMWithExpertModel`.
        embedded: what is read, [n, L, width].
        attention: which of it sees which, bool [n, L, L].
        positions: the positions of the tokens that are read, [n, L].

    Returns:
        What the vision-language model makes of it, [n, L, width], and keys and values of each layer.
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


def prefix_cache(model: Any, pairs: Memory) -> Any:
    """Return the keys and values of `read_prefix` as lerobot's `denoise_step` takes them."""
    if _keeps_dictionaries(model):
        return {index: {_KEYS: keys, _VALUES: values} for index, (keys, values) in enumerate(pairs)}
    from transformers import DynamicCache

    memory = DynamicCache()
    for index, (keys, values) in enumerate(pairs):
        memory.update(keys, values, index)
    return memory


def _keeps_dictionaries(model: Any) -> bool:
    """Return whether keys and values are in dictionaries: lerobot before 0.6, where a flag says when to fill them."""
    return "fill_kv_cache" in inspect.signature(model.forward).parameters


def load_weights(network: Any, folder: str) -> None:
    """Load the weights in a lerobot folder into the network.

    Raises:
        ConfigError: they are missing, or of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / "model.safetensors"
    try:
        weights = {name.removeprefix("model."): weight for name, weight in load_file(path).items()}
        missing, _ = network.load_state_dict(weights, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"the weights `{path}` cannot be loaded", why=first_line(error)) from None
    if missing:
        raise ConfigError(
            f"the weights `{path}` do not belong to a SmolVLA of this shape",
            why=f"they lack `{missing[0]}`",
            help="copy the complete folder again; `vlm_path` names the vision-language model that it was made with",
        )


def _image_size(options: SmolVlaOptions, spec: EnvSpec) -> int:
    """Return height and width of the small model's images: whole pairs of patches, each of which becomes one token."""
    largest = max(max(height, width) for height, width, _ in spec.cameras.values())
    return -(-largest // (2 * options.patch_size)) * 2 * options.patch_size


def _small_vlm(
    vocabulary: int, image_token: int, config: EmbodiedModelConfig, options: SmolVlaOptions, spec: EnvSpec
) -> Any:
    """Return the configuration of a small SmolVLM: a SigLIP, a projection and a Llama.

    Raises:
        ConfigError: the sizes do not divide.
    """
    from transformers import SmolVLMConfig

    width, layers = config.hidden_dim, options.num_layers
    if width % _HEAD:
        raise ConfigError(
            "the sizes of the vision-language model do not divide evenly",
            why=f"hidden_dim {width} / {_HEAD} = {width / _HEAD:g}",
            help=f"write a `hidden_dim` that is a multiple of {_HEAD}",
        )
    shape = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // _HEAD,
    }
    text = {
        **shape,
        "model_type": "llama",
        "vocab_size": vocabulary,
        "num_key_value_heads": width // _HEAD,
        "head_dim": _HEAD,
        "pad_token_id": 0,
    }
    size = _image_size(options, spec)
    vision = {**shape, "image_size": size, "patch_size": options.patch_size}
    return SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, image_token_id=image_token)
