"""A forecast of the memory of a job's processes, of the file alone: `rlinf inspect memory`.

Weights and activations are those of the policy on torch's meta device, which has shapes and no memory. What a process
holds before it holds anything of the job is measured when the forecast is made, by `memory_base`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recipes.demonstrations.errors import DatasetError
from recipes.demonstrations.info import read_info
from recipes.embodied.batch_sizes import batch_sizes, samples_of_a_step, samples_of_an_actor
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.env_config import EnvironmentConfig
from recipes.embodied.env_types import is_simulator
from recipes.embodied.envs.franka_robot import SPEC as FRANKA_ROBOT
from recipes.embodied.envs.keys import INSTRUCTIONS
from recipes.embodied.envs.types import EnvSettings, EnvSpec
from recipes.embodied.interventions.table import NONE
from recipes.embodied.models.base import ActionEval, BasePolicy, Inputs
from recipes.embodied.models.critics import Critics
from recipes.embodied.models.registry import make_model
from recipes.embodied.off_policy.sources import transition_spec
from recipes.embodied.off_policy_config import BufferSize, buffer_sizes, is_off_policy
from recipes.embodied.precision import weight_type
from recipes.embodied.replay.types import TransitionSpec
from recipes.training.memory import PhaseForecast, ProcessForecast
from rlinf_core import ConfigError

# Bytes that a worker holds besides what `memory_base` measures: its connections to Ray and to its peers. Measured.
CONNECTED: Final = {"actor": 45 * 2**20, "rollout": 45 * 2**20, "env": 45 * 2**20}
# Bytes of a simulator's own process, without and with cameras (docs/simulators.md); None: not measured.
SIMULATORS: Final[Mapping[str, tuple[int, int] | None]] = {
    "libero": (int(1.3 * 2**30), int(1.8 * 2**30)),
    "metaworld": None,
    "robosuite": None,
    "gymnasium_robotics": None,
}
# How often the steps of a rollout lie in memory: written down and sent; received, joined, and as samples.
_ROLLOUT_COPIES, _RECEIVED_COPIES, _SAMPLE_COPIES = 2, 2, 1
# Observations of all environments that an env worker holds at a time: the present ones, those sent, those being made.
_OBSERVATION_COPIES: Final = 4
_UNKNOWN_STATES: Final = 64


class PolicySizes(NamedTuple):
    """Sizes of a policy, in bytes.

    Attributes:
        weights: all of them, as they are kept.
        trained: those that are trained.
        sample: one step of a rollout: inputs, actions, log-probabilities, rewards.
        activations: what the backward pass of a sample needs.
    """

    weights: int
    trained: int
    sample: int
    activations: int

    def of_one_actor(self, strategy: str, count: int) -> tuple[int, int]:
        """Return the weights, and the trained ones, that one of so many actors holds; `strategy` may shard them."""
        shards = 1 if strategy == "no_shard" else count
        return self.weights // shards, self.trained // shards


def forecast(config: EmbodiedConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, by component and phase.

    Args:
        config: the whole file.
        world_sizes: processes of each component; None where that is not known: 1.

    Raises:
        ConfigError: the policy cannot be made for the environment.
    """
    sizes = {name: count or 1 for name, count in world_sizes.items()}
    spec, notes = environment_spec(config.env.train)
    policy = policy_sizes(config, spec)
    bases = {name: empty_process(name, config.actor.model.model_type) for name in ("actor", "rollout", "env")}
    return [
        _actor(config, policy, spec, bases["actor"], sizes.get("actor", 1), notes),
        _rollout(config, policy, bases["rollout"], sizes.get("rollout", 1)),
        env_forecast(config.env.train, "interact", spec, bases["env"], sizes.get("env", 1), notes),
    ]


def savings(config: EmbodiedConfig) -> list[tuple[str, ...]]:
    """Return changes that save memory, the nearest first: smaller parts of a batch, fewer environments, both."""
    found: list[tuple[str, ...]] = []
    share, micro = batch_sizes(config, 1)
    smaller = [f"actor.micro_batch_size={size}" for size in _divisors(share) if size < micro]
    chosen = [each for each in smaller if config.actor.global_batch_size is not None]
    if not chosen:
        chosen = [f"{each} actor.global_batch_size={share}" for each in smaller]
    found += [tuple(each.split()) for each in chosen]
    smallest = found[-1] if found else ()
    envs, size = config.env.train.total_num_envs, config.algorithm.group_size
    for count in _divisors(envs):
        if count < envs and count % size == 0:
            fewer = (f"env.train.total_num_envs={count}", f"env.eval.total_num_envs={count}")
            batch = share * count // envs
            if batch:
                found.append(
                    (*fewer, f"actor.global_batch_size={batch}", f"actor.micro_batch_size={min(micro, batch)}")
                )
                found.append((*fewer, f"actor.global_batch_size={batch}", "actor.micro_batch_size=1"))
    return [*found, *([] if not smallest else [smallest])]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]


def _actor(
    config: EmbodiedConfig,
    policy: PolicySizes,
    spec: EnvSpec,
    base: Mapping[str, int],
    count: int,
    notes: tuple[str, ...],
) -> ProcessForecast:
    """Return the forecast of one actor."""
    weights, trained = policy.of_one_actor(config.actor.fsdp_config.sharding_strategy, count)
    samples = samples_of_an_actor(samples_of_a_step(config), count) * policy.sample
    _, micro = batch_sizes(config, count)
    kept = {
        "weights": weights,
        **(_off_policy(config, spec, count) if is_off_policy(config.algorithm.loss_type) else {}),
    }
    resting = {**kept, "gradients": trained, "optimizer": 2 * trained}
    # What a training step leaves is there in the next rollout.
    phases = (
        PhaseForecast("init_worker", {"base": base["init"], "weights": 2 * weights}),
        PhaseForecast(
            "recv_rollout_batch", {"base": base["train"], **resting, "trajectories": _RECEIVED_COPIES * samples}
        ),
        PhaseForecast(
            "compute_advantages_and_returns",
            {"base": base["train"], **resting, "trajectories": samples, "samples": _SAMPLE_COPIES * samples},
        ),
        PhaseForecast(
            "run_training",
            {
                "base": base["train"],
                **resting,
                "samples": _SAMPLE_COPIES * samples,
                "activations": micro * (policy.activations + policy.sample),
            },
        ),
    )
    device = frozenset(("weights", "gradients", "optimizer", "activations", "samples"))
    phases = tuple(phase._replace(on_device=device & set(phase.parts)) for phase in phases)
    return ProcessForecast("actor", count, phases, samples * count, (*notes, *_spilled(config, spec, count)))


def _off_policy(config: EmbodiedConfig, spec: EnvSpec, count: int) -> dict[str, int]:
    """Return what an actor of off-policy learning holds besides: critics, and replay buffers at their largest."""
    settings, columns = config.algorithm.off_policy, transition_spec(spec)
    with torch.device("meta"):
        width = config.actor.model.hidden_dim
        critics = Critics(spec, settings.critics, width, settings.critic_layers, settings.critic_norm)
    weights = sum(each.numel() * each.element_size() for each in critics.parameters())
    sizes = buffer_sizes(settings.replay, count, intervenes=config.env.train.intervention.source != NONE)
    found = {
        # With gradients, the optimizer's two moments and target networks.
        "critics": 5 * weights,
        "replay": sum(_in_memory(columns, each) for each in sizes.values()),
    }
    shown = 0
    for path in config.data.train_data_paths:
        with suppress(DatasetError):
            info = read_info(Path(path))
            shown += info.total_frames + info.total_episodes
    return {**found, **({"demonstrations": columns.bound(shown)} if shown else {})}


def _in_memory(columns: TransitionSpec, size: BufferSize) -> int:
    """Return the bytes of a replay buffer in memory at its largest."""
    bound = columns.bound(size.rows, size.image_bytes)
    return bound if size.memory_bytes is None else min(bound, size.memory_bytes)


def _spilled(config: EmbodiedConfig, spec: EnvSpec, count: int) -> tuple[str, ...]:
    """Return a note on the disk that replay buffers take, where they do."""
    replay, columns = config.algorithm.off_policy.replay, transition_spec(spec)
    if replay.memory_gib is None or not is_off_policy(config.algorithm.loss_type):
        return ()
    sizes = buffer_sizes(replay, count, intervenes=config.env.train.intervention.source != NONE).values()
    files = count * sum(columns.bound(each.rows) - _in_memory(columns, each) for each in sizes)
    if not files:
        return ()
    return (f"the replay buffers take {files / 2**30:.1f} GiB of disk in {replay.spill_path}",)


def _rollout(config: EmbodiedConfig, policy: PolicySizes, base: Mapping[str, int], count: int) -> ProcessForecast:
    """Return the forecast of one rollout worker."""
    steps = samples_of_a_step(config) * policy.sample // count
    rows = config.env.train.total_num_envs // count // config.rollout.pipeline_stage_num
    parts = {
        "base": base["act"],
        "weights": policy.weights,
        "trajectories": _ROLLOUT_COPIES * steps,
        # Without gradients a layer's output goes as soon as the next one is there.
        "activations": rows * policy.activations // 4,
    }
    device = frozenset(("weights", "activations"))
    phases = (
        PhaseForecast("init_worker", {"base": base["init"], "weights": 2 * policy.weights}, frozenset(("weights",))),
        PhaseForecast("generate", parts, device),
    )
    return ProcessForecast("rollout", count, phases)


def env_forecast(
    environments: EnvironmentConfig,
    phase: str,
    spec: EnvSpec,
    base: Mapping[str, int],
    count: int,
    notes: tuple[str, ...],
) -> ProcessForecast:
    """Return the forecast of one env worker, with the processes of its simulators.

    Args:
        environments: those that it steps in `phase`.
        phase: the method that steps them.
        spec: of the environments.
        base: an empty process, by phase.
        count: number of env workers.
        notes: what is not known of the environments.
    """
    rows = environments.total_num_envs // count
    observed = rows * (4 * spec.state_size + _image_bytes(spec))
    parts = {"base": base["start"], "observations": _OBSERVATION_COPIES * observed}
    if is_simulator(environments.env_type):
        per_simulator = SIMULATORS.get(environments.env_type)
        if per_simulator is None:
            notes = (*notes, f"the processes of `{environments.env_type}` are not counted: they were not measured")
        else:
            parts["simulators"] = rows * per_simulator[bool(spec.cameras)]
    phases = (
        PhaseForecast("init_worker", {"base": base["start"]}),
        PhaseForecast(phase, parts),
    )
    return ProcessForecast("env", count, phases, observed * count, notes)


# Sizes of the policy


def policy_sizes(config: EmbodiedConfig, spec: EnvSpec, *, imitates: bool = False) -> PolicySizes:
    """Return the sizes of the policy for an environment, without its memory.

    Args:
        config: the whole file.
        spec: of the environment.
        imitates: the activations are those of the loss of demonstrations, not of reinforcement learning.
    """
    section = config.actor.model
    dtype = weight_type(config.actor)
    with torch.device("meta"):
        policy = make_model(section.model_copy(update={"model_path": None}), spec).to(dtype)
    for module in policy.modules():
        if hasattr(module, "set_attn_implementation"):
            # The others look at what a mask holds, and on the meta device nothing holds anything.
            module.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    weights = sum(each.numel() * each.element_size() for each in policy.state_dict().values())
    trained = sum(each.numel() * each.element_size() for each in policy.parameters() if each.requires_grad)
    inputs = example_inputs(policy, spec, 1, "meta")
    chunk = section.num_action_chunks
    output = policy.act(inputs)
    values = 0 if output.values is None else output.values.numel()
    sample = _bytes([*inputs.values(), output.actions, output.logprobs]) + 4 * chunk + 3 * chunk + 8 * values
    few, more = (_saved(policy, spec, rows, imitates=imitates) for rows in (1, 9))
    return PolicySizes(weights, trained, sample, max(0, more - few) // 8)


def _saved(policy: BasePolicy, spec: EnvSpec, rows: int, *, imitates: bool) -> int:
    """Return the bytes that autograd keeps of a forward pass over so many samples, weights not counted."""
    inputs = example_inputs(policy, spec, rows, "meta")
    actions = policy.act(inputs).actions
    own = {id(each) for each in policy.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in own and not isinstance(tensor, nn.Parameter):
            kept[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The graph is held until all that it keeps is counted.
        _ = policy.imitation_losses(inputs, actions) if imitates else _loss(policy.forward(inputs, actions))
    return _bytes(kept.values())


def _loss(found: ActionEval) -> Tensor:
    loss = found.logprobs.sum() + found.entropy.sum()
    return loss if found.values is None else loss + found.values.sum()


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def example_inputs(policy: BasePolicy, spec: EnvSpec, count: int, device: str = "cpu") -> Inputs:
    """Return what the policy makes of zeros, for `count` environments, on a device."""
    found: dict[str, Any] = {}
    for name, (shape, kind) in spec.observations.items():
        found[name] = np.array(["move"] * count) if name == INSTRUCTIONS else np.zeros((count, *shape), kind)
    return {name: each.to(device) for name, each in policy.prepare(found).items()}


# Sizes of the environment, and bases


def environment_spec(environments: EnvironmentConfig) -> tuple[EnvSpec, tuple[str, ...]]:
    """Return the spec of environments; where they cannot be made here, what their options say, with a note."""
    from recipes.embodied.env_rules import options_of_simulator
    from recipes.embodied.envs.registry import make_env

    if is_simulator(environments.env_type):
        options = options_of_simulator(environments)
        cameras: dict[str, Any] = {
            str(camera): (options.image_size, options.image_size, 3) for camera in options.cameras
        }
        spec = EnvSpec(_UNKNOWN_STATES, 7, cameras=cameras, has_instructions=environments.env_type != "robosuite")
        return spec, (f"the states of `{environments.env_type}` are taken to be {_UNKNOWN_STATES} numbers",)
    if environments.env_type == "franka_robot":
        return FRANKA_ROBOT, ()  # the arm is elsewhere
    try:
        env = make_env(
            environments.env_type, EnvSettings(num_envs=1, task=environments.task, options=environments.options)
        )
    except ConfigError as error:
        raise ConfigError("the environment cannot be made here", why=error.message, help=error.help) from error
    try:
        return env.spec, ()
    finally:
        env.close()


def _image_bytes(spec: EnvSpec) -> int:
    return sum(height * width * channels for height, width, channels in spec.cameras.values())


@cache
def empty_process(component: str, model_type: str, modules: tuple[str, ...] = ()) -> Mapping[str, int]:
    """Return the bytes of a process of a component before it holds anything of a job, by phase.

    Args:
        component: `actor`, `rollout` or `env`.
        model_type: kind of policy.
        modules: further ones that the worker imports.
    """
    known = model_type if ":" not in model_type else "mlp_policy"
    done = subprocess.run(
        [sys.executable, "-m", "recipes.embodied.memory_base", component, known, *modules],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError("the memory of an empty process cannot be measured", why=last)
    measured: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return {phase: bytes_ + CONNECTED[component] for phase, bytes_ in measured.items()}
