"""Configurations and processors of lerobot's policies, from a folder, or for a type built for an environment."""

# lerobot is largely untyped, and is not installed where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import DETERMINISTIC_SCHEDULER, NOISE_LEROBOT, LerobotOptions
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization, Scheme, Statistics
from recipes.training.arrays import Array
from recipes.training.huggingface import check_folder, first_line, refuse_settings
from rlinf_core import ConfigError

STATE: Final = "observation.state"
ENVIRONMENT_STATE: Final = "observation.environment_state"
IMAGES: Final = "observation.images"
ACTION: Final = "action"
PREPROCESSOR: Final = "policy_preprocessor.json"
POSTPROCESSOR: Final = "policy_postprocessor.json"
EPSILON: Final = 1e-8
# ImageNet's statistics, by which lerobot normalizes images of every data set unless configured otherwise.
_COLOURS: Final = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# By lerobot's mode: the share of rows below the lower bound, and above the upper one.
_OUTSIDE: Final = {"MIN_MAX": 0.0, "QUANTILES": 0.01, "QUANTILE10": 0.1}
# Settings of vision models that resize images: another size than in training is then no fault.
_RESIZES: Final = ("resize_imgs_with_padding", "image_resolution", "resize_shape")


def require_lerobot(
    model_type: str = "lerobot", module: str = "lerobot.policies.factory", package: str = "lerobot"
) -> None:
    """Check that lerobot is installed.

    Args:
        model_type: the model type that needs it.
        module: the required module of lerobot.
        package: the package, as pip installs it.

    Raises:
        ConfigError: lerobot is not installed in this interpreter.
    """
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"`{model_type}` needs the package lerobot in the interpreter of every actor and rollout worker",
            why=first_line(error),
            help=f"create an environment with `pip install '{package}'` and this rlinf, and name it as"
            " `python_interpreter_path` in `env_configs` of the node group of actor and rollout; to export, run"
            " the `rlinf` of that environment (docs/models.md)",
        ) from None


def reason_of(error: BaseException) -> str:
    """Return the reason of a lerobot exception in one line: that of its cause, since draccus's message has none."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def policy_config(config: EmbodiedModelConfig, options: LerobotOptions, spec: EnvSpec) -> Any:
    """Return lerobot's configuration of a policy, for the executed chunks.

    Args:
        config: the section `actor.model`.
        options: the options of the policy.
        spec: the spec of the environment.

    Raises:
        ConfigError: the folder has no configuration, a setting is unknown, or the policy averages actions over steps.
    """
    import draccus
    from lerobot.configs.policies import PreTrainedConfig

    folder = config.model_path
    settings: dict[str, Any] = {"device": "cpu"}
    if folder is not None:
        check_folder(folder)
        refuse_settings(folder)
    try:
        with draccus.config_type("json"):
            if folder is None:
                kind = PreTrainedConfig.get_choice_class(str(options.type))
                settings |= _built(kind, options, spec)
            else:
                shape = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
                kind, settings = type(shape), {**draccus.encode(shape), **settings}
                settings.pop("type", None)
            # lerobot would download weights of vision models that the folder holds.
            if hasattr(kind, "pretrained_backbone_weights"):
                settings["pretrained_backbone_weights"] = None
            if hasattr(kind, "n_action_steps"):
                settings["n_action_steps"] = config.num_action_chunks
            shape = draccus.decode(kind, {**settings, **options.config})
            shape.validate_features()
    except Exception as error:  # noqa: BLE001 - of draccus, json, and what each configuration checks
        named = f"the policy in `{folder}`" if folder else f"a `{options.type}`"
        raise ConfigError(
            f"lerobot cannot configure {named}",
            why=reason_of(error),
            help="`actor.model.options.config` holds settings of lerobot's configuration of this type (docs/models.md)",
        ) from None
    _check_steps(shape, config.num_action_chunks, folder)
    return shape


def cameras_of(shape: Any, options: LerobotOptions, spec: EnvSpec) -> dict[str, str]:
    """Return the environment's camera for each image that a policy takes, by the image's key in lerobot's batches.

    Raises:
        ConfigError: a camera is missing, or its images have another size than in training.
    """
    keys = list(shape.image_features)
    names = {key: key.removeprefix(f"{IMAGES}.").removeprefix("observation.") for key in keys}
    only = next(iter(spec.cameras), None) if len(keys) == len(spec.cameras) == 1 else None
    chosen = {key: options.cameras.get(name, name if name in spec.cameras else only) for key, name in names.items()}
    for key, camera in chosen.items():
        if camera is None or camera not in spec.cameras:
            known = ", ".join(f"`{name}`" for name in spec.cameras) or "none"
            raise ConfigError(
                f"the policy takes the image `{names[key]}`, for which the environment has no camera",
                why=f"cameras of the environment: {known}",
                help=f"write which one it is: `actor.model.options.cameras: {{{names[key]}: CAMERA}}`",
            )
        height, width, _ = spec.cameras[camera]
        trained = tuple(shape.image_features[key].shape)[-2:]
        if trained != (height, width) and not any(getattr(shape, name, None) for name in _RESIZES):
            raise ConfigError(
                f"the policy was trained on images of {trained[0]}x{trained[1]} pixels, but camera `{camera}` has"
                f" {height}x{width}",
                why=f"a `{shape.type}` does not resize what it sees",
                help="give the environment's cameras that size",
            )
    return {key: camera for key, camera in chosen.items() if camera is not None}


def check_sizes(shape: Any, spec: EnvSpec, folder: str | None) -> None:
    """Check the sizes of states and actions.

    Raises:
        ConfigError: the policy was trained on other sizes.
    """
    states = shape.robot_state_feature or shape.env_state_feature
    for name, feature, needed in (
        ("state", states, spec.state_size),
        ("action", shape.action_feature, spec.action_size),
    ):
        if feature is not None and feature.shape[0] != needed:
            raise ConfigError(
                f"the policy has {feature.shape[0]} numbers per {name}; the environment has {needed}",
                where=folder,
                help="it was trained in another environment, or in another control mode of the robot",
            )


def _built(kind: Any, options: LerobotOptions, spec: EnvSpec) -> dict[str, Any]:
    """Return settings of a new policy as plain data: its observations and horizons."""
    inputs = {f"{IMAGES}.{name}": _feature("VISUAL", (3, *shape[:2])) for name, shape in spec.cameras.items()}
    if spec.state_size:
        inputs[STATE] = _feature("STATE", (spec.state_size,))
        if not spec.cameras:
            # lerobot requires an observation besides the robot's own state.
            inputs[ENVIRONMENT_STATE] = _feature("ENV", (spec.state_size,))
    settings: dict[str, Any] = {
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {ACTION: _feature("ACTION", (spec.action_size,))},
    }
    if options.action_horizon is not None:
        settings["horizon" if hasattr(kind, "horizon") else "chunk_size"] = options.action_horizon
    return settings


def _feature(kind: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
    return {"type": kind, "shape": list(shape)}


def _check_steps(shape: Any, executed: int, folder: str | None) -> None:
    """Check that a policy's observations end with the current one, and that it predicts as many actions as are
    executed.

    Raises:
        ConfigError: one of these does not hold.
    """
    where = str(Path(folder)) if folder else None
    indices, observed = shape.action_delta_indices, observed_indices(shape)
    if indices is None or observed != list(range(1 - shape.n_obs_steps, 1)) or indices[0] != observed[0]:
        raise ConfigError(
            f"a `{shape.type}` is trained on observations and actions of other steps than are known here",
            where=where,
            why=f"steps of observations: {observed}; of actions: {indices and indices[:3]}, ...",
            help="use `act` or `diffusion`",
        )
    if getattr(shape, "temporal_ensemble_coeff", None) is not None:
        raise ConfigError(
            "the policy averages actions of several observations (`temporal_ensemble_coeff`)",
            where=where,
            why="here each observation is answered by itself",
            help="write `actor.model.options.config: {temporal_ensemble_coeff: null}`, and to evaluate so"
            " `actor.model.options: {ensemble: true}`",
        )
    ahead = len(indices) + indices[0]
    selected = min(ahead, getattr(shape, "n_action_steps", getattr(shape, "action_chunk_size", ahead)))
    if executed > selected:
        raise ConfigError(
            f"the policy selects {selected} actions at once, but `num_action_chunks` is {executed}",
            where=where,
            help=f"write `num_action_chunks: {selected}` or less",
        )


def is_steerable(shape: Any) -> bool:
    """Return whether actions are a function of the initial noise, which can be chosen."""
    return shape.type in NOISE_LEROBOT and shape.noise_scheduler_type == DETERMINISTIC_SCHEDULER


def observed_indices(shape: Any) -> list[int]:
    """Return the steps of the observations that a policy acts on, relative to the current one."""
    return list(shape.observation_delta_indices or [0])


class Processors(NamedTuple):
    """The pipelines from observations to a policy's inputs, and from its outputs to actions."""

    before: Any
    after: Any


def make_processors(shape: Any, folder: str | None, normalization: Normalization) -> Processors:
    """Return the processors of a policy.

    Args:
        shape: the configuration of the policy.
        folder: the folder with the processors; None: a newly built policy.
        normalization: the normalization of states and actions, which replaces the folder's.

    Raises:
        ConfigError: lerobot cannot make them.
    """
    from lerobot.policies.factory import make_pre_post_processors

    stats = _statistics(shape, folder, normalization)
    overrides = {
        "preprocessor_overrides": {"device_processor": {"device": "cpu"}, "normalizer_processor": {"stats": stats}},
        "postprocessor_overrides": {"unnormalizer_processor": {"stats": stats}},
    }
    try:
        if folder is None:
            before, after = make_pre_post_processors(shape, dataset_stats=stats)
        else:
            before, after = make_pre_post_processors(shape, pretrained_path=folder, **overrides)
    except Exception as error:  # noqa: BLE001 - of draccus, json, tokenizers: each step has its own
        raise ConfigError(
            f"lerobot cannot make the processors of a `{shape.type}`",
            why=reason_of(error),
            help="nothing is downloaded: the folder must hold its processors, and tokenizers that they name be folders",
        ) from None
    relative = next((step for step in before.steps if "Relative" in type(step).__name__ and step.enabled), None)
    if relative is not None:
        raise ConfigError(
            f"the policy in `{folder}` predicts actions relative to the state (`{type(relative).__name__}`)",
            help="write `model_type: pi0` or `pi05`, which have `options.relative_actions`",
        )
    return Processors(before, after)


def normalization_of(shape: Any, states: Array | None, actions: Array) -> Normalization:
    """Return the statistics of a data set's rows, [N, S] and [N, A], in the form that lerobot's configuration requires.

    Raises:
        ConfigError: the configuration uses an unknown normalization.
    """
    of_states, scheme = _numbers(shape, "STATE", states)
    of_actions, action_scheme = _numbers(shape, "ACTION", actions)
    if of_states is None and of_actions is None:
        return Normalization()
    return Normalization(scheme, of_states, of_actions, EPSILON, action_scheme)


def _numbers(shape: Any, kind: Literal["STATE", "ACTION"], rows: Array | None) -> tuple[Statistics | None, Scheme]:
    """Return the statistics of rows [N, D] (None without normalization), and how they are applied."""
    mode = _mode(shape, kind)
    if rows is None or mode == "IDENTITY":
        return None, "mean_std"
    if mode == "MEAN_STD":
        return Statistics.of(rows), "mean_std"
    if mode not in _OUTSIDE:
        raise ConfigError(f"lerobot normalizes `{kind}` of a `{shape.type}` by `{mode}`, which is not known here")
    outside = _OUTSIDE[mode]
    low, high = np.quantile(np.asarray(rows, np.float64), (outside, 1 - outside), axis=0)
    return Statistics.of_bounds(low.tolist(), high.tolist()), "quantile"


def _mode(shape: Any, kind: Literal["STATE", "ACTION"]) -> str:
    mode = {str(getattr(name, "value", name)): way for name, way in shape.normalization_mapping.items()}.get(kind)
    return "IDENTITY" if mode is None else str(mode.value)


def _statistics(shape: Any, folder: str | None, normalization: Normalization) -> dict[str, dict[str, Any]]:
    """Return statistics in lerobot's form, by feature and by name."""
    stats = _of_folder(folder) if folder else {}
    for key in shape.image_features:
        stats.setdefault(key, {name: torch.tensor(values)[:, None, None] for name, values in _COLOURS.items()})
    for key, own in ((STATE, normalization.states), (ACTION, normalization.actions)):
        stats.pop(key, None)
        if own is not None:
            columns = {
                "mean": own.mean,
                "std": own.std,
                **dict.fromkeys(("min", "q01", "q10"), own.low),
                **dict.fromkeys(("max", "q99", "q90"), own.high),
            }
            stats[key] = {name: torch.tensor(values) for name, values in columns.items()}
    if ENVIRONMENT_STATE in shape.input_features and STATE in stats:
        # safetensors does not write shared memory under two names.
        stats[ENVIRONMENT_STATE] = {name: values.clone() for name, values in stats[STATE].items()}
    return stats


def _of_folder(folder: str) -> dict[str, dict[str, Any]]:
    """Return all statistics in a folder, including those of images."""
    from safetensors.torch import load_file

    stats: dict[str, dict[str, Any]] = {}
    for file in sorted(Path(folder).glob("policy_preprocessor_step_*_normalizer_processor.safetensors")):
        for name, values in load_file(file).items():
            key, _, statistic = name.rpartition(".")
            stats.setdefault(key, {})[statistic] = values
    return stats
