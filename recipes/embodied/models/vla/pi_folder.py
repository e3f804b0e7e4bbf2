"""Networks of pi0 and pi0.5: built, or read from a folder of transformers, lerobot or openpi."""

# transformers is largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from recipes.embodied.models.folder_facts import fault_of_policy
from recipes.embodied.models.published_statistics import layout_of
from recipes.embodied.models.vla.pi_network import GemmaSizes, Pi05Network, PiShape, paligemma_config
from recipes.embodied.models.vla.vision_language import initialize_narrow, judging_folder, load_renamed
from recipes.sections.model_folders import SETTINGS, read_object, whole_number
from recipes.training.huggingface import check_folder, config_of, judging_model, load_pretrained, require_transformers
from recipes.training.tensor_files import stored_shapes
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from transformers import PI0ForConditionalGeneration

# Prefixes of names in a folder, and those in the network here. The first match counts; None: the weight is unused.
_NAMES: Final[tuple[tuple[str, str | None], ...]] = (
    ("paligemma_with_expert.paligemma.lm_head.", "vlm.language_model.embed_tokens."),
    ("paligemma_with_expert.paligemma.model.vision_tower.vision_model.", "vlm.vision_tower."),
    ("paligemma_with_expert.paligemma.model.", "vlm."),
    ("paligemma_with_expert.gemma_expert.lm_head.", None),
    ("paligemma_with_expert.gemma_expert.model.embed_tokens.", None),
    ("paligemma_with_expert.gemma_expert.model.", "expert."),
)
# Prefixes of those names, and of names in transformers' pi0.
_OF_PI0: Final = (
    ("vlm.", "model.vlm."),
    ("expert.", "model.dit."),
    ("action_out_proj.", "action_out_proj."),
    ("", "embed_action_time."),
)
_TEXT, _VISION, _EXPERT = "vlm.language_model", "vlm.vision_tower", "expert"
# Sizes of SigLIP So400m, which all of them use: weight shapes do not reveal the heads.
_SO400M: Final = (1152, 4304, 27, 16)
_VISION_HEADS: Final = _SO400M[-1]
# The sizes of the two Gemmas by their names in settings.
_VARIANTS: Final = {
    "gemma_2b": GemmaSizes(2048, 16_384, 18, 8, 256),
    "gemma_300m": GemmaSizes(1024, 4096, 18, 8, 256),
}
_STEPS: Final = "num_inference_steps"
# The largest plausible horizon and number of denoising steps.
_MOST_STEPS: Final = 10_000
Shapes = Mapping[str, tuple[int, ...]]


def translated(name: str) -> str | None:
    """Return the name here of a weight in a folder of lerobot or openpi; None if it is unused."""
    name = name.removeprefix("model.")
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            return None if ours is None else ours + name.removeprefix(theirs)
    return name


def _shape_of_folder(folder: str, kind: str) -> PiShape:
    """Return the sizes of the `pi0` or `pi05` in a folder of lerobot or openpi, by the shapes of its weights.

    Raises:
        ConfigError: the folder holds none.
    """
    with judging_folder(folder, kind, f"lerobot or openpi with a {kind}"):
        about = load_json_object(read_bounded(Path(folder) / SETTINGS), non_finite=True)
        shapes = _shapes(Path(folder))
        return _shape(about, shapes) if shapes or not are_shapes_only() else _published_shape(about)


def load_pi05(folder: str, horizon: int | None = None) -> Pi05Network:
    """Return the pi0.5 in a folder of lerobot or openpi.

    Args:
        folder: the folder.
        horizon: the number of actions to predict together; None: as many as it learned.

    Raises:
        ConfigError: the folder holds none.
    """
    _check("pi05", folder)
    shape = _shape_of_folder(folder, "pi05")
    network = Pi05Network(replace(shape, horizon=horizon or shape.horizon))
    _load_network(network, folder)
    return network


def built_pi0(shape: PiShape, states: int, image_token: int) -> PI0ForConditionalGeneration:
    """Return a pi0 with new weights.

    Args:
        shape: its sizes.
        states: the size of a state.
        image_token: the token for a patch of an image.
    """
    model = _pi0_of(shape, states, shape.vocabulary, image_token_id=image_token)
    initialize_narrow(model)
    return model


def load_pi0(folder: str) -> PI0ForConditionalGeneration:
    """Return the pi0 in a folder of transformers, lerobot or openpi.

    Raises:
        ConfigError: the folder holds none.
    """
    require_transformers()
    from transformers import PI0ForConditionalGeneration

    about = read_object(Path(folder) / SETTINGS)
    layout = layout_of(about)
    if layout == "transformers" and are_shapes_only():
        return saved_pi0(folder)
    _check("pi0", folder)
    if layout == "transformers":
        model: Any = load_pretrained(PI0ForConditionalGeneration, folder)
        with judging_model(folder):
            for name in ("chunk_size", "num_inference_steps"):
                whole_number(model.config.to_dict(), name, _MOST_STEPS)
        return model
    shape = _shape_of_folder(folder, "pi0")
    # lerobot may pad states to more numbers than actions; the expert reads no words.
    model = _pi0_of(shape, int(about.get("max_state_dim", shape.actions)), 1)
    _load_network(model, folder, _OF_PI0, "model.dit.embed_tokens.weight")
    return model


def saved_pi0(folder: str) -> PI0ForConditionalGeneration:
    """Return the pi0 that a transformers folder configures, with new weights.

    Raises:
        ConfigError: the folder configures none.
    """
    require_transformers()
    from transformers import PI0Config, PI0ForConditionalGeneration

    check_folder(folder)
    config = config_of(PI0Config, folder)
    with judging_model(folder):
        return PI0ForConditionalGeneration(config)


def _pi0_of(shape: PiShape, states: int, words: int, **reading: int) -> PI0ForConditionalGeneration:
    """Return a model of the given sizes, whose expert knows `words` tokens; `reading` sets up its PaliGemma."""
    vlm: dict[str, Any] = {**paligemma_config(shape).to_dict(), **reading}
    from transformers import PI0Config, PI0ForConditionalGeneration

    expert = {
        **vlm["text_config"],
        "hidden_size": shape.expert.width,
        "intermediate_size": shape.expert.hidden,
        "vocab_size": words,
    }
    config = PI0Config(
        vlm_config=vlm,
        dit_config=expert,
        chunk_size=shape.horizon,
        max_state_dim=states,
        max_action_dim=shape.actions,
        num_inference_steps=shape.steps,
        time_sampling_scale=shape.scale,
        time_sampling_offset=shape.offset,
    )
    return PI0ForConditionalGeneration(config)


def _check(kind: str, folder: str) -> None:
    """Check that a folder may hold a `pi0` or `pi05`; if only shapes are needed, check only that it exists.

    Raises:
        ConfigError: the folder holds another model, or its weights are incomplete.
    """
    check_folder(folder)
    fault = None if are_shapes_only() else fault_of_policy(kind, folder)
    if fault is not None:
        raise ConfigError(fault.message, help=fault.help)


def _load_network(
    network: nn.Module, folder: str, names: Sequence[tuple[str, str]] = (("", ""),), unread: str = ""
) -> None:
    """Load the weights in a folder of lerobot or openpi into a network, unless only its shapes are needed.

    Args:
        network: takes the weights.
        folder: the folder of lerobot or openpi.
        names: prefixes of the names of `translated`, and those of the network. The first match counts.
        unread: a weight of the network that the folder may lack.

    Raises:
        ConfigError: the weights are of another model, or cannot be read.
    """

    def renamed(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        ours = translated(name)
        if ours is not None:
            begin, own = next(pair for pair in names if ours.startswith(pair[0]))
            yield own + ours.removeprefix(begin), weight

    if not are_shapes_only():
        load_renamed(network, folder, _files(Path(folder)), renamed, unread.__eq__, kind="this kind of model")


def _files(folder: Path) -> list[Path]:
    """Return the files of weights, without the statistics of lerobot's processors."""
    return [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("policy_")]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by names of the network here; no weight is read."""
    stored = stored_shapes(_files(folder)).items()
    return {ours: shape for name, shape in stored if (ours := translated(name)) is not None}


def _shape(about: Mapping[str, Any], shapes: Shapes) -> PiShape:
    patches = shapes[f"{_VISION}.embeddings.patch_embedding.weight"]
    expert = _gemma(shapes, _EXPERT)
    kept: dict[str, Any] = {
        name: _share(about, key)
        for name, key in (("scale", "time_sampling_scale"), ("offset", "time_sampling_offset"))
        if key in about
    }
    if _STEPS in about:
        kept["steps"] = whole_number(about, _STEPS, _MOST_STEPS)
    return PiShape(
        language=_gemma(shapes, _TEXT),
        expert=expert,
        vision=(
            patches[0],
            shapes[f"{_VISION}.encoder.layers.0.mlp.fc1.weight"][0],
            _layers(shapes, f"{_VISION}.encoder"),
            _VISION_HEADS,
        ),
        image=patches[2] * isqrt(shapes[f"{_VISION}.embeddings.position_embedding.weight"][0]),
        patch=patches[2],
        vocabulary=shapes[f"{_TEXT}.embed_tokens.weight"][0],
        actions=shapes["action_in_proj.weight"][1],
        horizon=_horizon(about),
        **kept,
    )


def _horizon(about: Mapping[str, Any]) -> int:
    return whole_number(about, "chunk_size" if "type" in about else "action_horizon", _MOST_STEPS)


def _share(about: Mapping[str, Any], name: str) -> float:
    """Return a number between 0 and 1."""
    number = about[name]
    if isinstance(number, bool) or not isinstance(number, float | int) or not 0 <= number <= 1:
        raise ValueError(f"`{name}` is `{excerpt(repr(number), 40)}`, and should be between 0 and 1")
    return number


def _published_shape(about: Mapping[str, Any]) -> PiShape:
    """Return the sizes that settings name, for an estimate without weights."""
    language, expert = (about[f"{name}_variant"] for name in ("paligemma", "action_expert"))
    return PiShape(
        language=_VARIANTS[language],
        expert=_VARIANTS[expert],
        vision=_SO400M,
        image=224,
        patch=14,
        vocabulary=257_152,
        actions=whole_number(about, "max_action_dim" if "type" in about else "action_dim", _MOST_STEPS),
        horizon=_horizon(about),
    )


def _gemma(shapes: Shapes, where: str) -> GemmaSizes:
    hidden, width = shapes[f"{where}.layers.0.mlp.gate_proj.weight"]
    head_dim = shapes[f"{where}.layers.0.self_attn.k_proj.weight"][0]
    heads = shapes[f"{where}.layers.0.self_attn.q_proj.weight"][0] // head_dim
    return GemmaSizes(width, hidden, _layers(shapes, where), heads, head_dim)


def _layers(shapes: Shapes, where: str) -> int:
    pattern = re.compile(re.escape(where) + r"\.layers\.(\d+)\.")
    return 1 + max(int(match[1]) for match in map(pattern.match, shapes) if match)
