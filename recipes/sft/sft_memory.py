"""A forecast of the memory of a job of recipe `sft`, of its file and of what its data sets say of themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.lerobot.set_info import DATA_FILES, HDF5_ENDINGS, DatasetInfo, read_info
from recipes.demonstrations.shape import DatasetShape
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.memory.env_memory import EnvironmentSizes, env_forecast, environment_sizes
from recipes.embodied.memory.job_forecast import HOST_ONLY, OBSERVATION_COPIES, empty_process, known_gaps, sent_weights
from recipes.embodied.memory.policy_memory import PolicyMemory
from recipes.sft.config import SftConfig, evaluates
from rlinf_core import ConfigError
from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast

_ACTOR: Final = ("recipes.sft.sft_actor",)
# What readers of a format import when there is something to read.
_LEROBOT: Final = ("pyarrow.parquet",)
_READERS: Final = {"image": "PIL.Image", "video": "av"}
# Rows while they are read: the table of a file, and the arrays made of it.
_READING_COPIES: Final = 2


class _Data(NamedTuple):
    """Sizes of data sets, known before they are read.

    Attributes:
        shape: sizes of the rows of the first one; None: none could be told.
        size: bytes of all of them in memory.
        modules: what their readers import.
        notes: what is not known.
    """

    shape: DatasetShape | None
    size: int
    modules: tuple[str, ...]
    notes: tuple[str, ...]


def forecast(config: SftConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, by component and phase.

    Args:
        config: the whole file.
        world_sizes: processes of each component; None where that is not known: 1.

    Raises:
        ConfigError: the policy cannot be made for the environment, or the sizes of the rows are not known.
    """
    sizes = {name: count or 1 for name, count in world_sizes.items()}
    data, acts = _data_of(config), evaluates(config)
    environment = environment_sizes(config.env.eval) if acts else EnvironmentSizes(_spec_of_rows(config, data))
    policy = PolicyMemory(config.actor, environment.spec, imitates=True)
    model = config.actor.model.model_type
    base = empty_process("actor", model, (*_ACTOR, *data.modules))
    actor = _actor(config, policy, environment.spec, base, sizes.get("actor", 1), data, sends=acts)
    if not acts:
        return [actor]
    acting = PolicyMemory(config.actor, environment.spec, acts=True)
    rollout = _rollout(config, acting, empty_process("rollout", model), sizes.get("rollout", 1))
    base = empty_process("env", model, environment.modules)
    return [actor, rollout, env_forecast(config.env.eval, "evaluate", environment, base, sizes.get("env", 1))]


def _actor(
    config: SftConfig,
    policy: PolicyMemory,
    spec: EnvSpec,
    base: Mapping[str, int],
    count: int,
    data: _Data,
    *,
    sends: bool,
) -> ProcessForecast:
    """Return the forecast of one actor, which sends its weights where there are environments that evaluate."""
    weights, trained = policy.of_one_actor(config.actor.fsdp_config.sharding_strategy, count)
    rows = max(1, (config.actor.global_batch_size or 1) // count)
    micro = min(config.actor.micro_batch_size or rows, rows)
    # A batch is drawn in parts.
    between, unknown = known_gaps(policy, config.actor, spec, micro, micro, imitates=True)
    phases = (
        PhaseForecast(
            "init_actor",
            {"base": base["init"], "weights": policy.making, "demonstrations": _READING_COPIES * data.size},
            frozenset(("weights",)),
        ),
        PhaseForecast(
            "learn",
            {
                "base": base["train"],
                "weights": weights,
                "gradients": trained,
                "optimizer": 2 * trained,
                **({"sent weights": sent_weights(config, policy, count)} if sends else {}),
                "batch": micro * policy.sample,
                "activations": policy.learning(micro, rows // micro),
                "demonstrations": data.size,
                "gaps": between.learning,
            },
            frozenset(("weights", "gradients", "optimizer", "batch", "activations")),
            HOST_ONLY,
        ),
    )
    return ProcessForecast("actor", count, phases, notes=(*data.notes, *policy.notes, *unknown))


def _rollout(config: SftConfig, policy: PolicyMemory, base: Mapping[str, int], count: int) -> ProcessForecast:
    """Return the forecast of one rollout worker, which acts in the environments that evaluate."""
    rows = config.env.eval.total_num_envs // count // config.rollout.pipeline_stage_num
    acting = {
        "base": base["act"],
        "weights": policy.weights,
        # The actor's copy in shared memory, which is mapped here too.
        "received weights": policy.weights,
        "observations": OBSERVATION_COPIES * rows * policy.inputs,
        "activations": policy.acting(rows),
    }
    phases = (
        PhaseForecast("init_worker", {"base": base["init"], "weights": policy.making}),
        PhaseForecast("evaluate", acting, frozenset(("weights", "activations"))),
    )
    return ProcessForecast("rollout", count, phases)


def _data_of(config: SftConfig) -> _Data:
    """Return what the data sets say of themselves; their rows are not read."""
    shape: DatasetShape | None = None
    size = 0
    modules: list[str] = []
    notes: list[str] = []
    for path in config.data.paths:
        if path.endswith(HDF5_ENDINGS):
            modules.append("h5py")
            notes.append(f"the rows of `{path}` are not counted: only reading the file tells how many there are")
            continue
        try:
            info = read_info(Path(path))
            shape = shape or info.shape(path, config.data.state_keys, config.data.columns)
        except DatasetError as error:
            raise ConfigError("the size of the demonstrations is not known", why=str(error)) from error
        size += _size(path, info)
        dtypes = sorted({each.dtype for each in info.cameras.values()})
        modules += [*_LEROBOT, *(_READERS[each] for each in dtypes)]
    return _Data(shape, size, tuple(dict.fromkeys(modules)), tuple(notes))


def _size(path: str, info: DatasetInfo) -> int:
    """Return the bytes of a data set in memory: float32 rows; images as they are encoded; videos stay files."""
    numbers = sum(4 * math.prod(each.shape) for each in info.features.values() if not each.is_camera)
    encoded = any(each.dtype == "image" for each in info.cameras.values())
    pictures = sum(file.stat().st_size for file in Path(path).glob(DATA_FILES)) if encoded else 0
    return info.total_frames * numbers + pictures


def _spec_of_rows(config: SftConfig, data: _Data) -> EnvSpec:
    """Return the sizes that a policy has which learns from rows alone, without environments."""
    if data.shape is None:
        raise ConfigError(
            "the sizes of the demonstrations' rows are not known",
            why="HDF5 files do not tell them without being read",
            help="give `rollout` and `env` a place, whose environments tell them",
        )
    if config.data.target == "success":
        return EnvSpec(0, 1, num_choices=2, cameras=data.shape.cameras)
    # How many choices there are only the rows tell; it changes no more than a policy's last layer.
    choices = 2 if data.shape.choices else None
    return EnvSpec(
        data.shape.state_size,
        data.shape.action_size,
        num_choices=choices,
        cameras=data.shape.cameras,
        has_instructions=True,
    )
