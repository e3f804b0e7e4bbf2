"""Recordings: episodes of an expert or a policy, written as demonstrations. `rlinf record` calls `record`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from pydantic import ValidationError

from recipes.demonstrations.columns import (
    ACTION,
    DONE,
    FRAME_AGE,
    IMAGES,
    INTERVENTION,
    REWARD,
    STATE,
    SUCCESS,
    TRUNCATED,
)
from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter, check_new
from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_config import EnvironmentConfig, InterventionConfig
from recipes.embodied.config.intervention_types import SOURCES
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key
from recipes.embodied.learning.data_reading import action_bounds
from recipes.embodied.loop.videos import FPS
from recipes.embodied.using.collection_job import collecting
from recipes.embodied.using.collector import (
    ACTIONS,
    FRAME_AGES,
    INTERVENED,
    REWARDS,
    SUCCESSES,
    TERMINATIONS,
    CollectedEpisode,
)
from recipes.training.arrays import Array
from rlinf_core import ConfigError, Job, RLinfError
from rlinf_core.config.validating.validation_messages import refusals
from rlinf_core.runners.storage.checkpoint import versions
from rlinf_core.suggest import did_you_mean

# When only successes are kept, the most attempts per wanted episode before recording gives up.
_TRIES: Final = 20


def record(
    job: Job,
    folder: Path,
    *,
    episodes: int,
    checkpoint: Path | None = None,
    device: str | None = None,
    device_options: Mapping[str, Any] | None = None,
    successes_only: bool = False,
    video: bool = False,
    fps: int | None = None,
    emit: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Record episodes of the environments of `env.train` into a new data set.

    An interrupted recording keeps the complete episodes.

    Args:
        job: the validated job.
        folder: the folder of the data set; must not exist.
        episodes: the number of episodes to keep.
        checkpoint: the checkpoint whose policy acts, greedily; None: the environment's scripted expert.
        device: an intervention source that takes over from the policy; without a checkpoint, a person who chooses all
            actions. None: no interventions.
        device_options: the options of the device, in addition to `env.train.intervention` if that names the same
            source.
        successes_only: whether to keep only episodes that are solved at their end.
        video: whether to write images as mp4 instead of PNG in the Parquet files.
        fps: rows per second; None: the environment's actions per second, or that of videos if unknown.
        emit: receives progress lines.

    Returns:
        `folder`, `episodes`, `frames`, `tried`, `successes` (None if success is unknown).

    Raises:
        DatasetError: the folder exists, or cannot be written.
        ConfigError: the task has no expert, or the environment cannot be made.
        RLinfError: too few episodes succeed.
    """
    check_new(folder)
    config = cast("PolicyJob", job.config)
    environments = config.env.train
    tried = kept = frames = successes = 0
    knows_success = False
    starts: list[dict[str, int]] = []
    origin = {**_origin(environments, checkpoint, device), "starts": starts}
    intervention = None if device is None else _intervention(environments.intervention, device, device_options or {})
    with collecting(config, environments, episodes, checkpoint, intervention) as collection:
        aged = collection.facts["aged_cameras"]
        features = features_of(collection.spec, video=video, interventions=device is not None, aged_cameras=aged)
        rate = fps or collection.facts["control_hz"] or FPS
        with DatasetWriter(folder, rate, features, origin=origin) as writer:
            for batch in collection.episodes("everything"):
                for episode in batch:
                    tried += 1
                    knows_success |= episode.success_at_end is not None
                    solved = bool(episode.success_at_end)
                    if kept == episodes or (successes_only and not solved) or not episode.length:
                        continue
                    texts = episode.columns.get(INSTRUCTIONS)
                    writer.add(to_columns(episode, collection.spec), episode.task if texts is None else texts.tolist())
                    starts.append({"env": episode.env, "reset": episode.reset})
                    kept, frames, successes = kept + 1, frames + episode.length, successes + solved
                emit(f"{kept} of {episodes} episodes, {frames} steps, {tried} tried")
                if kept == episodes:
                    break
                if tried >= _TRIES * episodes:
                    raise RLinfError(
                        f"only {kept} of {tried} episodes ended in success; {episodes} are wanted",
                        where=str(folder) if kept else None,
                        help="those are kept; ask for fewer, or leave out `--successes-only`",
                    )
    return {
        "folder": str(folder),
        "episodes": kept,
        "frames": frames,
        "tried": tried,
        "successes": successes if knows_success else None,
    }


def _origin(environments: EnvironmentConfig, checkpoint: Path | None, device: str | None) -> dict[str, Any]:
    """Return the provenance that a data set records, without the starts of its episodes."""
    return {
        "recorded_by": device or "expert" if checkpoint is None else str(checkpoint),
        **({} if device is None else {"interventions_by": device}),
        "env": {
            "env_type": environments.env_type,
            "task": environments.task,
            "options": dict(environments.options),
            "seed": environments.seed,
        },
        "versions": dict(versions()),
    }


def _intervention(written: InterventionConfig, device: str, overrides: Mapping[str, Any]) -> InterventionConfig:
    """Return the settings of a device.

    Raises:
        ConfigError: the source does not exist, or an option is wrong or missing.
    """
    if device not in SOURCES and ":" not in device:
        names = list(SOURCES)
        listed = "known: " + ", ".join(f"`{name}`" for name in names)
        raise ConfigError(f"unknown intervention source `{device}`", help=did_you_mean(device, names) or listed)
    options = {**(written.options if written.source == device else {}), **overrides}
    if device in SOURCES:
        try:
            SOURCES[device].options.model_validate(options)
        except ValidationError as error:
            raise ConfigError(
                f"`--device {device}`: {refusals(error)[0]}",
                help="set it with `--option KEY=VALUE`",
            ) from error
    return InterventionConfig(source=device, options=options)


def features_of(
    spec: EnvSpec, *, video: bool = False, interventions: bool = False, aged_cameras: Sequence[str] = ()
) -> dict[str, Feature]:
    """Return the features of a data set of an environment."""
    features: dict[str, Feature] = {}
    if spec.state_size:
        features[STATE] = Feature("float32", (spec.state_size,))
    for camera, shape in spec.cameras.items():
        features[f"{IMAGES}{camera}"] = Feature("video" if video else "image", shape, ["height", "width", "channels"])
    features[ACTION] = Feature(spec.action_dtype, (spec.action_size,))
    return {
        **features,
        REWARD: Feature("float32", (1,)),
        DONE: Feature("bool", (1,)),
        TRUNCATED: Feature("bool", (1,)),
        SUCCESS: Feature("bool", (1,)),
        **({INTERVENTION: Feature("bool", (1,))} if interventions else {}),
        **{f"{FRAME_AGE}{camera}": Feature("float32", (1,)) for camera in aged_cameras},
    }


def to_columns(episode: CollectedEpisode, spec: EnvSpec) -> Mapping[str, Array]:
    """Return the columns of an episode by the names of its features.

    Actions are the executed ones, clipped to the environment's bounds.
    """
    columns = {name: column for name, column in episode.columns.items() if name != INSTRUCTIONS}
    terminated = columns.pop(TERMINATIONS)
    renamed = {STATES: STATE, ACTIONS: ACTION, REWARDS: REWARD, SUCCESSES: SUCCESS, INTERVENED: INTERVENTION}
    named = {renamed.get(name, name): array for name, array in columns.items()}
    for prefix, feature in ((image_key(""), IMAGES), (FRAME_AGES, FRAME_AGE)):
        named = {
            f"{feature}{name.removeprefix(prefix)}" if name.startswith(prefix) else name: array
            for name, array in named.items()
        }
    if ACTION in named and spec.num_choices is None:
        named[ACTION] = np.clip(named[ACTION], *action_bounds(spec)).astype(np.float32)
    # If its last step was invalid, an episode ends before it, truncated.
    done = np.arange(episode.length) == episode.length - 1
    return {**named, DONE: done, TRUNCATED: done & ~terminated}
