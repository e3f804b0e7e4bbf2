"""The pi0 of transformers, loaded from a folder or built from scratch."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.embodied.models.published_statistics import layout_of
from recipes.embodied.models.vla.pi05_folder import MOST_STEPS, load_network, shape_of_folder
from recipes.embodied.models.vla.pi05_network import PiShape, paligemma_config
from recipes.embodied.models.vla.vision_language import initialize_narrow
from recipes.sections.model_folders import SETTINGS, read_object, whole_number
from recipes.training.huggingface import (
    check_folder,
    config_of,
    first_line,
    judging_model,
    load_pretrained,
    require_transformers,
)
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

if TYPE_CHECKING:
    from transformers import PI0ForConditionalGeneration

# Beginnings of names in `pi05_folder`, and those of transformers.
_OPENPI = (
    ("vlm.", "model.vlm."),
    ("expert.", "model.dit."),
    ("action_out_proj.", "action_out_proj."),
    ("", "embed_action_time."),
)


def built_pi0(shape: PiShape, states: int, image_token: int) -> PI0ForConditionalGeneration:
    """Return a pi0 with fresh weights.

    Args:
        shape: its sizes.
        states: numbers of a state.
        image_token: the token that stands for a patch of an image.
    """
    model = _pi0_of(shape, states, shape.vocabulary, image_token_id=image_token)
    initialize_narrow(model)
    return model


def openpi_pi0(folder: str) -> PI0ForConditionalGeneration:
    """Return the pi0 in a PyTorch folder of openpi or lerobot, whose weights determine its sizes.

    Raises:
        ConfigError: there is none.
    """
    about = read_object(Path(folder) / SETTINGS)
    if layout_of(about) == "lerobot":
        check_pi0(folder)
    shape = shape_of_folder(folder, "pi0")
    # lerobot may leave room for more numbers of a state than of an action; the expert reads no words.
    model = _pi0_of(shape, int(about.get("max_state_dim", shape.actions)), 1)
    if not are_shapes_only():
        load_network(model, folder, _OPENPI, "model.dit.embed_tokens.weight")
    return model


def _pi0_of(shape: PiShape, states: int, words: int, **reading: int) -> PI0ForConditionalGeneration:
    """Return the model of some sizes, whose expert knows so many words; `reading` are settings of its PaliGemma."""
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


def load_pi0(folder: str) -> PI0ForConditionalGeneration:
    """Return the pi0 in a folder of HuggingFace.

    Raises:
        ConfigError: there is none.
    """
    require_transformers()
    from transformers import PI0ForConditionalGeneration

    if layout_of(read_object(Path(folder) / SETTINGS)) != "transformers":
        return openpi_pi0(folder)
    if are_shapes_only():
        return shaped_pi0(folder)
    check_pi0(folder)
    model: Any = load_pretrained(PI0ForConditionalGeneration, folder)
    with judging_model(folder):
        for name in ("chunk_size", "num_inference_steps"):
            whole_number(model.config.to_dict(), name, MOST_STEPS)
    return model


def shaped_pi0(folder: str) -> PI0ForConditionalGeneration:
    """Return the pi0 that a folder has the configuration of, with fresh weights.

    Raises:
        ConfigError: there is none.
    """
    require_transformers()
    from transformers import PI0Config, PI0ForConditionalGeneration

    check_pi0(folder)
    config = config_of(PI0Config, folder)
    with judging_model(folder):
        return PI0ForConditionalGeneration(config)


def check_pi0(folder: str) -> None:
    """Check that the `config.json` in a folder names a pi0, as transformers or lerobot write it.

    Raises:
        ConfigError: it does not.
    """
    check_folder(folder)
    path = Path(folder) / "config.json"
    try:
        about: dict[str, Any] = load_json_object(read_bounded(path), non_finite=True)
        kind = about.get("model_type", about.get("type"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"`{folder}` has no model", why=first_line(error)) from None
    if kind != "pi0":
        raise ConfigError(
            f"`pi0` cannot use the `{kind}` in `{folder}`",
            why=f"`{path}` names another architecture",
            help="name a folder with a pi0, or the `model_type` that reads this one (docs/models.md)",
        )
