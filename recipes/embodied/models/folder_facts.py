"""Checks of the folder that `actor.model.model_path` names, without loading the policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import ValidationError

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.embodied_no_effect import SMALL_MODELS
from recipes.embodied.config.model_config import policy_model
from recipes.sections.checks import Report
from recipes.sections.imports import runs_in_this_interpreter
from recipes.sections.model_folders import (
    SETTINGS,
    FolderFault,
    fault_of_model,
    fault_of_weights,
    read_object,
    require_folder,
    weight_names,
)
from rlinf_core import ConfigError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.config.validating.validation_messages import refusals

if TYPE_CHECKING:
    from recipes.embodied.config import PolicyJob
    from recipes.embodied.envs.env_spec import EnvSpec

# Files of a saved policy, and of a run's checkpoint, whose weights have another format.
DESCRIPTION: Final = "policy.json"
WEIGHTS: Final = "model.safetensors"
STATISTICS: Final = "normalization.json"
SHARDS: Final = "actor"
# In the folder of a policy that steers another: the section `actor.model` of the steered policy.
FROZEN: Final = "frozen.json"
STEERED: Final = "steered_policy"
# Names of a folder's architecture in config.json: `model_type` of transformers, or `type` of lerobot.
ARCHITECTURES: Final = {
    "pi0": ("pi0", "openpi"),
    "pi05": ("pi05", "openpi"),
    "smolvla": ("smolvla",),
    "openvla": ("openvla",),
    "openvla_oft": ("openvla",),
}
# A layer that only weights of one kind have: openpi's folders name no kind, and settings may be copied.
TELLING_LAYERS: Final = {"pi0": "action_time_mlp_in", "pi05": "time_mlp_in"}
# Names of settings for the number of actions predicted together: in lerobot, openpi, and for diffusion and VQ-BeT.
_HORIZONS: Final = ("chunk_size", "action_horizon", "horizon", "action_chunk_size")
_MODEL: Path = ("actor", "model", "model_path")


def check_model_folder(config: PolicyJob, report: Report) -> None:
    """Report a folder that holds no policy of the kind that `model_type` names.

    Folders on other machines are not checked. A folder that is missing here gives a warning, since the file may be
    meant for another machine; `require_model_folder` makes it an error when a run starts.
    """
    folder = config.actor.model.model_path
    if folder is None or not runs_in_this_interpreter(config, "actor"):
        return
    if not os.path.isdir(folder):
        what = "a file" if os.path.exists(folder) else "not on this machine"
        report(
            _MODEL,
            "unusable-path",
            f"`model_path` names `{folder}`, which is {what}",
            "name the folder of a model, or a model of the HuggingFace Hub, `ORG/NAME`",
            severity=Severity.WARNING,
        )
        return
    fault = fault_of_policy(_kind_of_folder(config.actor.model), folder)
    if fault is not None:
        report(_MODEL, "unusable-path", *fault)


def require_model_folder(config: PolicyJob) -> None:
    """Check, before anything starts, that the folder of a single-machine run can be used.

    Raises:
        ConfigError: the folder cannot be used.
    """
    folder = config.actor.model.model_path
    if folder is None or not runs_in_this_interpreter(config, "actor"):
        return
    require_folder(folder, "the folder of a model")
    fault = fault_of_policy(_kind_of_folder(config.actor.model), folder)
    if fault is not None:
        raise ConfigError(fault.message, help=fault.help)


def fault_of_policy(model_type: str, folder: str) -> FolderFault | None:
    """Return why an existing folder cannot be the `model_path` of a kind of policy; None if it may be.

    Of a custom policy, only the saved format can be checked.
    """
    path = FilePath(folder)
    if os.path.isdir(path / SHARDS):
        return FolderFault(
            f"`{folder}` is a checkpoint of a run", "write it as `actor.checkpoint_load_path`, or export its policy"
        )
    saved = read_object(path / DESCRIPTION)
    if saved:
        return _fault_of_saved(model_type, path, saved.get("model"))
    if model_type in SMALL_MODELS:
        return FolderFault(
            f"`{folder}` holds no policy: it has no `{DESCRIPTION}`, which `{model_type}` needs",
            "name a folder that a policy was saved to",
        )
    known = ARCHITECTURES.get(model_type)
    about = read_object(path / SETTINGS)
    if model_type == "lerobot" and not isinstance(about.get("type"), str):
        return FolderFault(
            f"`{folder}` holds no policy of lerobot: there is no `type` in its {SETTINGS}",
            "name a folder that lerobot's `save_pretrained` wrote, or leave `model_path` out to build a policy",
        )
    if known is None:
        return fault_of_model(path) if model_type == "lerobot" else None
    # openpi's PyTorch folders name no kind; only the weights distinguish pi0 from pi0.5.
    kind = about.get("model_type", about.get("type", "openpi" if "action_horizon" in about else None))
    if about and kind not in known:
        named = " or ".join(f"`{kind_name}`" for kind_name in known)
        return FolderFault(
            f"`{model_type}` cannot use the `{kind}` in `{folder}`",
            f"name a folder whose {SETTINGS} says {named}, or the `model_type` that reads this one (docs/models.md)",
        )
    return fault_of_model(path) or _fault_of_kind(model_type, path)


def _fault_of_kind(model_type: str, folder: FilePath) -> FolderFault | None:
    """Return the fault if the weights are those of a pi0 instead of a pi05, or vice versa; None if not."""
    if model_type not in TELLING_LAYERS:
        return None
    layers = {name.split(".")[-2] for name in weight_names(folder) if "." in name}
    others = [kind for kind, layer in TELLING_LAYERS.items() if kind != model_type and layer in layers]
    if not others or TELLING_LAYERS[model_type] in layers:
        return None
    return FolderFault(
        f"`{model_type}` cannot use the {others[0]} in `{folder}`: its weights have `{TELLING_LAYERS[others[0]]}`",
        f"write `model_type: {others[0]}`",
    )


def saved_type(folder: str | None) -> str | None:
    """Return the `model_type` of the policy that `save_policy` wrote to a folder; None without one."""
    if folder is None:
        return None
    kind = _section(FilePath(folder), "model").get("model_type")
    return kind if isinstance(kind, str) else None


def frozen_section(model: EmbodiedModelConfig) -> EmbodiedModelConfig:
    """Return the section `actor.model` of the policy that a `steered_policy` steers: from its options, and otherwise
    its folder.

    Raises:
        ConfigError: no folder is named, or the two do not give a valid section.
    """
    if model.model_path is None:
        raise ConfigError(
            f"`{STEERED}` steers a trained policy, and none is named",
            where="actor.model.model_path",
            help="name the folder of one by diffusion or flow matching, such as of `rlinf export RUN`",
        )
    folder = FilePath(model.model_path)
    # As written in the file, or as validated.
    options: Any = model.options
    written: dict[str, Any] = options.policy if hasattr(options, "policy") else options.get("policy", {})
    said = read_object(folder / FROZEN) or _section(folder, "model")
    file = folder / (FROZEN if (folder / FROZEN).exists() else DESCRIPTION)
    own: dict[str, Any] = {
        **written,
        "model_path": model.model_path,
        "num_action_chunks": model.num_action_chunks,
    }
    try:
        return policy_model(own, said, str(file))
    except ValidationError as error:
        raise ConfigError(
            f"the policy in `{folder}` cannot be steered",
            where="actor.model.options.policy",
            why=refusals(error)[0],
            help="`options.policy` has the keys of `actor.model`",
        ) from None


def _kind_of_folder(model: EmbodiedModelConfig) -> str:
    """Return the `model_type` of the policy that `model_path` should hold: for a `steered_policy`, the steered one, if
    its options or the folder name it.
    """
    if model.model_type != STEERED or saved_type(model.model_path) == STEERED:
        return model.model_type
    frozen = frozen_section(model)
    return frozen.model_type if "model_type" in frozen.model_fields_set else STEERED


def published_horizon(folder: str) -> int | None:
    """Return the number of actions that the model of a published folder predicts together; None if unknown."""
    about = read_object(FilePath(folder) / SETTINGS)
    said = (about.get(name) for name in _HORIZONS)
    return next((number for number in said if isinstance(number, int) and not isinstance(number, bool)), None)


def lerobot_type(model: EmbodiedModelConfig) -> str | None:
    """Return lerobot's type name of a policy, from its folder, or else its options; None if neither has it."""
    if model.model_path is None:
        return str(model.options.get("type", "act"))
    kind = read_object(FilePath(model.model_path) / SETTINGS).get("type")
    return kind if isinstance(kind, str) else None


def observed_steps(model: EmbodiedModelConfig) -> int:
    """Return how many consecutive observations a policy acts on, from its options or folder; 1 except for lerobot."""
    if model.model_type == STEERED and model.model_path is not None:
        model = frozen_section(model)
    if model.model_type != "lerobot":
        return 1
    overrides = model.options.get("config")
    steps = cast("Mapping[str, Any]", overrides).get("n_obs_steps") if isinstance(overrides, dict) else None
    if steps is None and model.model_path is not None:
        steps = read_object(FilePath(model.model_path) / SETTINGS).get("n_obs_steps")
    return steps if isinstance(steps, int) and steps > 1 else 1


def _fault_of_saved(model_type: str, folder: FilePath, model: object) -> FolderFault | None:
    saved = cast("Mapping[str, Any]", model).get("model_type") if isinstance(model, dict) else None
    if saved != model_type:
        return FolderFault(
            f"the policy in `{folder}` is a `{saved}`, but `model_type` is `{model_type}`",
            f"write `actor.model.model_type: {saved}`, or name another folder",
        )
    if not os.path.isfile(folder / WEIGHTS):
        return FolderFault(
            f"the policy folder `{folder}` has no weights: it lacks `{WEIGHTS}`", "copy the whole folder"
        )
    return fault_of_weights(folder / WEIGHTS) or fault_of_statistics(folder)


def fault_of_statistics(folder: FilePath) -> FolderFault | None:
    """Return the fault if a policy was trained with statistics and they are missing; None if not."""
    if read_object(folder / DESCRIPTION).get("statistics") is None or os.path.isfile(folder / STATISTICS):
        return None
    return FolderFault(
        f"the policy's statistics are missing: `{folder}` has no `{STATISTICS}`, but it was trained on normalized"
        " states and actions",
        "copy the complete folder again from where the policy was trained",
    )


def fault_of_fit(folder: FilePath, model: EmbodiedModelConfig, spec: EnvSpec | None) -> FolderFault | None:
    """Return how the policy described in a folder differs from the configured one; None if no difference is known.

    Args:
        folder: a checkpoint, or a policy's.
        model: the policy that takes its weights.
        spec: the spec of the environment; sizes of 0 are not checked. None: unknown.
    """
    theirs = _section(folder, "model")
    # The width of a loaded model is its folder's; how a custom model uses the setting is unknown.
    ours = model.model_path is None and ":" not in model.model_type
    for name in ("model_type", "num_action_chunks", *(("hidden_dim",) if ours else ())):
        mine = getattr(model, name)
        if theirs.get(name, mine) != mine:
            return FolderFault(
                f"the checkpoint's policy has `{name}: {theirs[name]}`, but `actor.model.{name}` is {mine}",
                f"write `actor.model.{name}: {theirs[name]}`, or name another checkpoint",
            )
    sizes = _section(folder, "observations_and_actions")
    for name, what in (("action_size", "numbers in an action"), ("state_size", "numbers in a state")):
        needed = getattr(spec, name, 0)
        if needed and sizes.get(name, needed) != needed:
            return FolderFault(
                f"the checkpoint's policy has {sizes[name]} {what}; the environment has {needed}",
                "name a checkpoint of this environment, or the checkpoint's environment",
            )
    return None


def _section(folder: FilePath, name: str) -> Mapping[str, Any]:
    section = read_object(folder / DESCRIPTION).get(name)
    return cast("Mapping[str, Any]", section) if isinstance(section, dict) else {}
