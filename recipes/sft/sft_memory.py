"""The memory estimate of a job of recipe `sft`, computed from its file and what its data sets declare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from recipes.demonstrations.columns import DatasetError, DatasetShape
from recipes.demonstrations.lerobot.set_info import DATA_FILES, HDF5_ENDINGS, read_info
from recipes.embodied.embodied_memory import (
    env_forecast,
    environment_spec,
    learner_parts,
    policy_sizes,
    rollout_forecast,
)
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.sft.config import SftConfig, evaluates
from rlinf_core import ConfigError
from rlinf_core.job.recipe import ProcessForecast

# Bytes of the packages that read data sets (pyarrow, and av or PIL), measured.
_READERS: Final = 45 * 2**20
# Copies of the rows while they are read: the table of a file, and the arrays made of it.
_READING_COPIES: Final = 2


def forecast(config: SftConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, see `Recipe.memory`.

    Raises:
        ConfigError: the policy cannot be made for the environment, or the sizes of the rows are not known.
    """
    sizes = {name: count or 1 for name, count in world_sizes.items()}
    shape, rows, notes = _demonstrations(config)
    acts = evaluates(config)
    spec, of_env = environment_spec(config.env.eval) if acts else (_spec_of_rows(config, shape), ())
    policy, count = policy_sizes(config.actor, spec), sizes.get("actor", 1)
    share = max(1, (config.actor.global_batch_size or 1) // count)
    micro = min(config.actor.micro_batch_size or share, share)
    parts = learner_parts(config, policy, count, sends=acts)
    parts |= {
        "base": parts["base"] + _READERS,
        "batch": micro * policy.sample,  # batches are drawn in parts
        "activations": micro * policy.learning,
        "demonstrations": _READING_COPIES * rows,
    }
    actor = ProcessForecast("actor", count, parts, 0, config.actor.enable_offload, notes)
    if not acts:
        return [actor]
    rollout = rollout_forecast(config, config.env.eval, policy, sizes.get("rollout", 1), 0)
    return [actor, rollout, env_forecast(config.env.eval, spec, sizes.get("env", 1), of_env)]


def _demonstrations(config: SftConfig) -> tuple[DatasetShape | None, int, tuple[str, ...]]:
    """Return the sizes of the first data set's rows (None if it declares none), the bytes of all rows, and notes.

    Numbers count as float32, images as they are encoded; videos stay files and count nothing.
    """
    shape, size, notes = None, 0, list[str]()
    for path in config.data.paths:
        if path.endswith(HDF5_ENDINGS):
            notes.append(f"the rows of `{path}` are not counted: their number is known only after reading the file")
            continue
        try:
            info = read_info(Path(path))
            shape = shape or info.shape(path, config.data.state_columns, config.data.role_columns)
        except DatasetError as error:
            raise ConfigError("the size of the demonstrations is not known", why=str(error)) from error
        numbers = sum(math.prod(feature.shape) for feature in info.features.values() if not feature.is_camera)
        size += 4 * numbers * info.total_frames
        if any(camera.dtype == "image" for camera in info.cameras.values()):
            size += sum(file.stat().st_size for file in Path(path).glob(DATA_FILES))
    return shape, size, tuple(notes)


def _spec_of_rows(config: SftConfig, shape: DatasetShape | None) -> EnvSpec:
    """Return the spec of a policy that learns from rows alone, without environments."""
    if shape is None:
        why = "HDF5 files do not declare them without being read"
        help = "place `rollout` and `env`: their environments define the sizes"
        raise ConfigError("the sizes of the demonstrations' rows are not known", why=why, help=help)
    if config.data.target == "success":
        return EnvSpec(0, 1, num_choices=2, cameras=shape.cameras)
    # Only the rows tell the number of choices; it affects no more than a policy's last layer.
    choices, cameras = 2 if shape.choices else None, shape.cameras
    return EnvSpec(shape.state_size, shape.action_size, num_choices=choices, cameras=cameras, has_instructions=True)
