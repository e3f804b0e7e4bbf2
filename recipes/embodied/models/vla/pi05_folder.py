"""Folders of pi0 and pi0.5 that lerobot and openpi wrote: their sizes, and their weights by names of transformers."""

# safetensors has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from recipes.embodied.models.folder_facts import TELLING_LAYERS
from recipes.embodied.models.vla.pi05_network import GemmaSizes, PiShape
from recipes.sections.model_folders import SETTINGS, whole_number
from recipes.training.huggingface import check_folder, first_line
from recipes.training.tensor_files import stored_shapes
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.suggest import excerpt

# Beginnings of names there, and those of the network here. The first that fits is taken; None: it is not used.
_NAMES: Final[tuple[tuple[str, str | None], ...]] = (
    ("paligemma_with_expert.paligemma.lm_head.", "vlm.language_model.embed_tokens."),
    ("paligemma_with_expert.paligemma.model.vision_tower.vision_model.", "vlm.vision_tower."),
    ("paligemma_with_expert.paligemma.model.", "vlm."),
    ("paligemma_with_expert.gemma_expert.lm_head.", None),
    ("paligemma_with_expert.gemma_expert.model.embed_tokens.", None),
    ("paligemma_with_expert.gemma_expert.model.", "expert."),
)
_TEXT, _VISION, _EXPERT = "vlm.language_model", "vlm.vision_tower", "expert"
# Of SigLIP So400m, which all of them have: its heads cannot be seen in the shapes of weights.
_SO400M: Final = (1152, 4304, 27, 16)
_VISION_HEADS: Final = _SO400M[-1]
# What settings call the sizes of the two Gemmas.
_VARIANTS: Final = {
    "gemma_2b": GemmaSizes(2048, 16_384, 18, 8, 256),
    "gemma_300m": GemmaSizes(1024, 4096, 18, 8, 256),
}
_STEPS: Final = "num_inference_steps"
# Of a horizon, and from noise to actions: more are a mistake.
MOST_STEPS: Final = 10_000
Shapes = Mapping[str, tuple[int, ...]]


def translated(name: str) -> str | None:
    """Return the name here of a weight in a folder of lerobot or openpi; None: it is not used."""
    name = name.removeprefix("model.")
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            return None if ours is None else ours + name.removeprefix(theirs)
    return name


def shape_of_folder(folder: str, kind: str) -> PiShape:
    """Return the sizes of the `pi0` or `pi05` in a folder of lerobot or openpi, by the shapes of its weights.

    Raises:
        ConfigError: there is none.
    """
    check_folder(folder)
    try:
        about = load_json_object(read_bounded(Path(folder) / SETTINGS), non_finite=True)
        shapes = _shapes(Path(folder))
        if not shapes and are_shapes_only():
            return _published_shape(about)
        another = "pi0" if kind == "pi05" else "pi05"
        own, other = (f"{TELLING_LAYERS[name]}.weight" for name in (kind, another))
        if own not in shapes and other in shapes:
            raise ConfigError(
                f"`{kind}` cannot use the {another} in `{folder}`",
                why=f"its weights are those of a {another}: they have `{other}`",
                help=f"write `model_type: {another}`",
            )
        return _shape(about, shapes)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"`{folder}` has no {kind}", why=first_line(error), help="copy the folder again") from None
    except KeyError as error:
        raise ConfigError(
            f"`{folder}` has no {kind}",
            why=f"it lacks {error}",
            help=f"name a folder of lerobot or openpi with a {kind}",
        ) from None


def load_network(network: nn.Module, folder: str, names: Sequence[tuple[str, str]] = (), unread: str = "") -> None:
    """Load the weights in a folder of lerobot or openpi into a network; every one has to be used.

    Args:
        network: takes them.
        folder: the folder of lerobot or openpi.
        names: beginnings of the names of `translated`, and those of the network, where they differ.
        unread: a weight of the network that the folder may lack.

    Raises:
        ConfigError: they are of another model, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    try:
        for file in _files(Path(folder)):
            for name, weight in load_file(file).items():
                ours = translated(name)
                if ours is not None:
                    begin = next(((here, there) for here, there in names if ours.startswith(here)), ("", ""))
                    weights[begin[1] + ours.removeprefix(begin[0])] = weight
        wrong = network.load_state_dict(weights, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"the weights in `{folder}` cannot be loaded", why=str(error)) from None
    missing = [name for name in wrong.missing_keys if name != unread]
    if missing or wrong.unexpected_keys:
        name = (*missing, *wrong.unexpected_keys)[0]
        raise ConfigError(
            f"the weights in `{folder}` do not belong to this kind of model",
            why=f"they {'lack' if missing else 'also have'} `{name}`",
            help="copy the complete folder again, or name a folder of such a model",
        )


def _files(folder: Path) -> list[Path]:
    """Return the files of weights; lerobot's processors keep statistics in others."""
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
        kept["steps"] = whole_number(about, _STEPS, MOST_STEPS)
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
    return whole_number(about, "chunk_size" if "type" in about else "action_horizon", MOST_STEPS)


def _share(about: Mapping[str, Any], name: str) -> float:
    """Return a number between 0 and 1."""
    number = about[name]
    if isinstance(number, bool) or not isinstance(number, float | int) or not 0 <= number <= 1:
        raise ValueError(f"`{name}` is `{excerpt(repr(number), 40)}`, and should be between 0 and 1")
    return number


def _published_shape(about: Mapping[str, Any]) -> PiShape:
    """Return the sizes that settings name, for a forecast where there are no weights."""
    language, expert = (about[f"{name}_variant"] for name in ("paligemma", "action_expert"))
    return PiShape(
        language=_VARIANTS[language],
        expert=_VARIANTS[expert],
        vision=_SO400M,
        image=224,
        patch=14,
        vocabulary=257_152,
        actions=whole_number(about, "max_action_dim" if "type" in about else "action_dim", MOST_STEPS),
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
