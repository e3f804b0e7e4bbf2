"""The memory estimate of an embodied job, computed from its file: `rlinf inspect memory`."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import nn

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.lerobot.set_info import read_info
from recipes.embodied.config import EmbodiedConfig, PolicyActorConfig, PolicyJob
from recipes.embodied.config.algorithm_config import buffer_rows, is_off_policy, off_policy_of
from recipes.embodied.config.embodied_config import batch_sizes, samples_of_a_step, samples_of_an_actor
from recipes.embodied.config.env_config import EnvironmentConfig, stepping
from recipes.embodied.config.env_types import is_simulator
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.config.model_config import MODEL_OPTIONS
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, learned_spec
from recipes.embodied.learning.policy_precision import acting_type
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.flow_policy import FlowMatchingPolicy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.squashed_policy import SquashedPolicy
from recipes.embodied.off_policy.algorithm import algorithm_of
from recipes.embodied.off_policy.sources import transition_spec
from recipes.training.weights.weight_sync import PIECE_BYTES
from recipes.training.without_memory import (
    FORWARD,
    PLAIN,
    TORCH,
    TRAINING,
    TRANSFORMERS,
    WORKER,
    computing_layers,
    held_in_blocks,
    parameter_bytes,
    shard_parts,
)
from rlinf_core import ConfigError
from rlinf_core.job.recipe import ProcessForecast

# Bytes of a simulator's process, without and with cameras (docs/environments.md). Other simulators were not measured.
SIMULATORS: Final[Mapping[str, tuple[int, int]]] = {"libero": (int(1.3 * 2**30), int(1.8 * 2**30))}
# Pieces of weights in transit at a time, and blocks whose shards are gathered at a time.
_PIECES: Final = 3
_BLOCKS: Final = 2
# The assumed size of a simulator's state, which only the simulator knows: the capacity of a published pi0.
_UNKNOWN_STATES: Final = 32
# Bytes that an environment stepped in its worker holds per byte of its observation: the state behind it, float32 colors
# while drawing, the message and the one before. Measured.
_STEPPING: Final = 20
_SIMULATED: Final = 4
# Copies that a rollout worker holds of the steps of a rollout (as recorded, and as sent), and of observations (as
# received, as inputs, and at the ends of episodes).
_ROLLOUT_COPIES: Final = 2
_OBSERVATION_COPIES: Final = 4
# Bytes computed for an action before training, float32: rewards including bootstraps of truncations, values including
# the last, value errors, advantages, returns, and normalized advantages.
_ADVANTAGES: Final = 6 * 4
# Names of the layers that compute an action, once for each denoising step.
_ACTING: Final = ("velocity", "action", ".dit.", "expert")


class PolicySizes(NamedTuple):
    """Sizes of a policy for an environment, in bytes.

    Attributes:
        weights, acting, trained: all weights as trained, all as held by rollout workers, and the trained ones.
        gathered: whole weights that FSDP2 holds while it computes.
        observation, sample: a policy's observation, and a step of a rollout.
        learning, predicting: memory of a pass per sample, with and without gradients.
        base: a process that has loaded nothing but the libraries for it.
    """

    weights: int
    acting: int
    trained: int
    gathered: int
    observation: int
    sample: int
    learning: int
    predicting: int
    base: int


def forecast(config: EmbodiedConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, see `Recipe.memory`.

    Raises:
        ConfigError: the policy cannot be made for the environment, or its sizes are unknown.
    """
    sizes = {name: count or 1 for name, count in world_sizes.items()}
    spec, notes = environment_spec(config.env.train)
    policy = policy_sizes(config.actor, spec)
    count, actors = sizes.get("rollout", 1), sizes.get("actor", 1)
    steps = _ROLLOUT_COPIES * samples_of_a_step(config) * policy.sample // count
    return [
        _actor(config, policy, spec, actors),
        rollout_forecast(config, config.env.train, policy, count, steps),
        env_forecast(config.env.train, spec, sizes.get("env", 1), notes),
    ]


def environment_spec(environments: EnvironmentConfig) -> tuple[EnvSpec, tuple[str, ...]]:
    """Return the sizes of an environment, and notes. Unless it is a simulator, one is created.

    Raises:
        ConfigError: the environment cannot be created here.
    """
    from recipes.embodied.envs.real.franka_robot import SPEC
    from recipes.embodied.envs.registry import make_env
    from recipes.embodied.rules.env_rules import options_of_simulator
    from recipes.embodied.rules.robot_rules import robot_options

    kind = environments.env_type
    if is_simulator(kind):
        options = options_of_simulator(environments)
        cameras = {str(camera): (options.image_size, options.image_size, 3) for camera in options.cameras}
        states = options.state_size or _UNKNOWN_STATES
        notes = () if options.state_size else (f"the states of `{kind}` are taken to be {states} numbers",)
        return EnvSpec(states, 7, cameras=cameras, has_instructions=kind != "robosuite"), notes
    if kind == "franka_robot":
        options = robot_options(environments)
        return replace(SPEC, cameras={} if options is None else options.shapes), ()  # the arm is remote
    try:
        settings = EnvSettings(
            num_envs=1,
            task=environments.task,
            options=environments.options,
            success_reward=environments.in_training.success_reward,
        )
        env = make_env(kind, settings)
    except ConfigError as error:
        raise ConfigError("the environment cannot be made here", why=error.message, help=error.help) from error
    try:
        return env.spec, ()
    finally:
        env.close()


def policy_sizes(actor: PolicyActorConfig, spec: EnvSpec) -> PolicySizes:
    """Return the sizes of the policy that `actor` names. Its weights are not read.

    Raises:
        ConfigError: the policy cannot be made for the environment, or its folder is not on this machine.
    """
    model, folder = actor.model, actor.model.model_path
    if folder is not None and not os.path.isdir(folder):
        why, help = f"the model folder `{folder}` is not on this machine", "run it where the folder is"
        raise ConfigError("the sizes of the model are not known", why=why, help=help)
    with torch.device("meta"):
        policy = make_model(model, spec)
    options = MODEL_OPTIONS.get(model.model_type)
    prompt = 0 if options is None else int(getattr(options.model_validate(model.options), "max_prompt_tokens", 0))
    flow = policy.sde if isinstance(policy, FlowMatchingPolicy) else None
    # The numbers or tokens of a chunk, as drawn.
    numbers = (policy.horizon or model.num_action_chunks) * (1 if spec.num_choices is not None else spec.action_size)
    # Tokens are int64, with a flag each. The action of a flow includes what its denoising steps record. Each step has a
    # reward, three flags and two values.
    observation = _pixels(spec) + 4 * spec.state_size + 9 * prompt
    action = 8 * numbers * (flow.recorded if flow else 1) + (4 + 3 + 8) * model.num_action_chunks
    learning, largest = _held(policy, spec, actor, prompt + numbers + 1, flow.judged if flow else 1)
    width = acting_type(actor).itemsize
    blocks = sorted(parameter_bytes(block.parameters(), width=4) for block in policy.blocks)
    whole = parameter_bytes(policy.parameters(), width=4)
    return PolicySizes(
        weights=whole,
        gathered=whole - sum(blocks[:-_BLOCKS]),
        acting=parameter_bytes(policy.to(acting_type(actor)).parameters()),
        trained=parameter_bytes((weight for weight in policy.parameters() if weight.requires_grad), width=4),
        observation=observation,
        sample=observation + action,
        learning=int(width * learning),
        predicting=width * FORWARD * largest,
        base=WORKER + TORCH + (TRANSFORMERS if prompt else 0),
    )


def _held(policy: BasePolicy, spec: EnvSpec, actor: PolicyActorConfig, tokens: int, steps: int) -> tuple[float, int]:
    """Return how many numbers a learning pass holds for a sample, and the largest output of one layer.

    Convolutions on an image follow each other. A convolution whose kernel equals its stride divides images into
    patches, which the blocks of the vision tower take as tokens; a `connector` merges some of them. The policy takes
    `tokens` in addition, and a flow computes `steps` of its denoising steps.
    """
    again = actor.fsdp_config.gradient_checkpointing
    if again and steps > 1:
        # The inputs of a flow are recomputed at once, and then each denoising step by itself.
        again, steps = False, 1
    resized = policy.describe_images().get("resized")
    images = [(*resized, shape[2]) if resized else shape for shape in spec.cameras.values()]
    cameras = cycle(images)
    inputs, outputs = Counter[str](), Counter[str]()
    plain, largest, patches, patch_width, height, width = 0, 0, 0, 0, 0, 0
    for name, block, layer in computing_layers(policy):
        acts = any(part in name for part in _ACTING)
        places = 1
        if isinstance(layer, nn.Conv2d):
            size, stride, patch_width = layer.kernel_size[0], layer.stride[0], layer.out_channels
            if size == stride:
                patches = places = sum(rows // size * (columns // size) for rows, columns, _ in images)
                tokens += patches
            else:
                if layer.in_channels == images[0][2]:
                    height, width, channels = next(cameras)
                    plain += height * width * channels
                    largest = max(largest, height * width * channels)
                height, width = ((edge - size) // stride + 1 for edge in (height, width))
                places = height * width
        elif "connector" in name:
            tokens += patches * patch_width // layer.in_features - patches
        elif block is not None:
            ahead = policy.horizon or actor.model.num_action_chunks
            places = patches if "vision" in name else ahead + 1 if acts else tokens
        repeats = places * (steps if acts else 1)
        numbers = layer.weight.shape[0]
        largest = max(largest, places * numbers)
        if block is None:
            plain += repeats * numbers
        else:
            inputs.setdefault(block, repeats * layer.weight.shape[1])
            outputs[block] += repeats * numbers
    return PLAIN * plain + held_in_blocks(outputs, inputs, checkpointing=again), largest


def _pixels(spec: EnvSpec) -> int:
    """Return the bytes of the images in an observation."""
    return sum(math.prod(shape) for shape in spec.cameras.values())


def _actor(config: EmbodiedConfig, policy: PolicySizes, spec: EnvSpec, count: int) -> ProcessForecast:
    rows = samples_of_an_actor(samples_of_a_step(config), count)
    share, micro = batch_sizes(config, count)
    replayed, notes = _off_policy(config, spec, count) if is_off_policy(config.algorithm.loss_type) else ({}, ())
    if config.actor.model.compile:
        notes = (*notes, "the compiler of the passes of training is not counted")
    parts = {
        **learner_parts(config, policy, count),
        **replayed,
        # Trajectories stay in shared memory; samples are views of them.
        "trajectories": rows * policy.sample,
        "advantages": rows * _ADVANTAGES * config.actor.model.num_action_chunks,
        "batch": share * policy.sample,
        "activations": micro * policy.learning,
    }
    shared = count * (rows * policy.sample + parts["sent weights"])
    return ProcessForecast("actor", count, parts, shared, config.actor.enable_offload, notes)


def learner_parts(config: PolicyJob, policy: PolicySizes, count: int, *, sends: bool = True) -> dict[str, int]:
    """Return the memory that every actor holds: an empty process, its shard, and the weights that it sends.

    Weights are sent in pieces through shared memory; weights sent in the background are copied whole before. The shards
    of a block are gathered while another block computes, and its gradients are summed over ranks before the next
    gathering.
    """
    actor, behind = config.actor, config.runner.staleness > 0
    parts = {
        "base": policy.base + TRAINING,
        **shard_parts(policy.weights, policy.trained, actor.fsdp_config, count, state_dtype=actor.optim.state_dtype),
        "sent weights": 0 if not sends else 2 * policy.acting if behind else min(policy.acting, _PIECES * PIECE_BYTES),
    }
    if count > 1 and actor.fsdp_config.sharding_strategy != "no_shard":
        gradients = min(policy.trained, 2 * policy.gathered)
        parts |= {"gathered weights": policy.gathered, "gathered gradients": gradients}
    return parts


def _off_policy(config: EmbodiedConfig, spec: EnvSpec, count: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return what an off-policy actor holds in addition, and a note on the disk space of its replay buffers.

    Critics have gradients, two moments and target networks; replay buffers are counted as full.
    """
    settings = off_policy_of(config.algorithm)
    with torch.device("meta"):
        policy, algorithm = make_model(config.actor.model, spec), algorithm_of(config.algorithm)
        size = policy.action_size if isinstance(policy, SquashedPolicy) else spec.action_size
        critics = algorithm.make_critics(config, spec, size).values()
        part = algorithm.learned_part(config, spec, size)
        columns = transition_spec(learned_spec(spec, part.stop - (part.start or 0)))
    rows = sum(buffer_rows(settings.replay, count, intervenes=config.env.train.intervention.source != NONE).values())
    stored = 0 if settings.replay.storage is None else rows * columns.observation_bytes
    held = rows * columns.row_bytes - stored
    weights = sum(parameter_bytes(module.parameters()) for module in critics)
    parts = {"critics": 5 * weights, "replay": held}
    for path in config.data.paths:
        with suppress(DatasetError):
            info = read_info(Path(path))
            parts["demonstrations"] = parts.get("demonstrations", 0) + columns.row_bytes * (
                info.total_frames + info.total_episodes
            )
    files, path = count * stored, settings.replay.storage
    return parts, ((f"the replay buffers take {files / 2**30:.1f} GiB of disk in {path}",) if files else ())


def rollout_forecast(
    config: PolicyJob, environments: EnvironmentConfig, policy: PolicySizes, count: int, trajectories: int
) -> ProcessForecast:
    """Return the forecast of one of `count` rollout workers, which holds `trajectories` bytes of trajectories."""
    rows = environments.total_num_envs // count // config.rollout.pipeline_stage_num
    parts = {
        "base": policy.base,
        "weights": policy.acting,
        # The actor's copy in shared memory, which is also mapped here.
        "received weights": policy.acting,
        "trajectories": trajectories,
        "observations": _OBSERVATION_COPIES * rows * policy.observation,
        "activations": rows * policy.predicting,
    }
    return ProcessForecast("rollout", count, parts, 0, config.rollout.enable_offload)


def env_forecast(
    environments: EnvironmentConfig, spec: EnvSpec, count: int, notes: tuple[str, ...] = ()
) -> ProcessForecast:
    """Return the forecast of one of `count` env workers, with the processes of its simulators."""
    kind, rows = environments.env_type, environments.total_num_envs // count
    observed = rows * (4 * spec.state_size + _pixels(spec))
    simulated = is_simulator(kind)
    parts = {"base": WORKER, "environments": (_SIMULATED if simulated else _STEPPING) * observed}
    if simulated and kind not in SIMULATORS:
        notes = (*notes, f"the processes of `{kind}` are not counted: they were not measured")
    elif simulated:
        processes = min(rows, stepping(environments).num_processes or 1)
        parts["simulators"] = processes * SIMULATORS[kind][bool(spec.cameras)]
        if processes < rows:
            notes = (*notes, f"a process of `{kind}` is counted as it holds one environment")
    return ProcessForecast("env", count, parts, observed * count, notes=notes)
