"""A forecast of the memory of a job's processes, of the file alone: `rlinf inspect memory`.

Weights and activations are those of the policy on torch's meta device, which has shapes and no memory. What a process
holds before it holds anything of the job is measured when the forecast is made, by `memory_base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import torch

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.lerobot.set_info import read_info
from recipes.embodied.config import EmbodiedConfig, PolicyActorConfig, PolicyJob
from recipes.embodied.config.batch_sizes import batch_sizes, samples_of_a_step, samples_of_an_actor
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.config.off_policy_config import BufferSize, buffer_sizes, is_off_policy
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.memory.env_memory import env_forecast, environment_sizes
from recipes.embodied.memory.heap_gaps import Gaps, gaps
from recipes.embodied.memory.policy_memory import PolicyMemory
from recipes.embodied.models.critics import Critics
from recipes.embodied.off_policy.sources import transition_spec
from recipes.embodied.replay.replay_types import TransitionSpec
from recipes.training.memory.empty_process import measure_empty_process
from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast

# How often the steps of a rollout lie in the memory of its worker: written down, and in shared memory as they are sent.
_ROLLOUT_COPIES: Final = 2
# Bytes of what is computed of an action before it is learned from, float32: rewards with what follows a truncation,
# values with the last ones, errors of values, advantages, returns, and the normalized advantages.
_ADVANTAGES: Final = 6 * 4
# Parts that a process with an accelerator does not have: its tensors lie elsewhere.
HOST_ONLY: Final = frozenset(("gaps",))
# Bytes of the weights of a policy whose gaps are looked for: it takes minutes for one of billions of weights.
_LARGEST_TRIED: Final = 2**30
# Observations that a rollout worker holds at a time: as they came, as inputs, and those in which episodes ended.
OBSERVATION_COPIES: Final = 4


def forecast(config: EmbodiedConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, by component and phase.

    Args:
        config: the whole file.
        world_sizes: processes of each component; None where that is not known: 1.

    Raises:
        ConfigError: the policy cannot be made for the environment.
    """
    sizes = {name: count or 1 for name, count in world_sizes.items()}
    environment = environment_sizes(config.env.train)
    policy, kind = PolicyMemory(config.actor, environment.spec), config.actor.model.model_type
    base = empty_process("env", kind, environment.modules)
    return [
        _actor(config, policy, environment.spec, empty_process("actor", kind), sizes.get("actor", 1)),
        _rollout(
            config,
            PolicyMemory(config.actor, environment.spec, acts=True),
            empty_process("rollout", kind),
            sizes.get("rollout", 1),
        ),
        env_forecast(config.env.train, "interact", environment, base, sizes.get("env", 1)),
    ]


def _actor(
    config: EmbodiedConfig, policy: PolicyMemory, spec: EnvSpec, base: Mapping[str, int], count: int
) -> ProcessForecast:
    """Return the forecast of one actor."""
    strategy = config.actor.fsdp_config.sharding_strategy
    weights, trained = policy.of_one_actor(strategy, count)
    rows = samples_of_an_actor(samples_of_a_step(config), count)
    share, micro = batch_sizes(config, count)
    # What a training step leaves is there in the next rollout.
    resting = {
        "weights": weights,
        **(_off_policy(config, spec, count) if is_off_policy(config.algorithm.loss_type) else {}),
        "gradients": trained,
        "optimizer": 2 * trained,
        "sent weights": sent_weights(config, policy, count),
        # They stay in shared memory, and samples are views of them.
        "trajectories": rows * policy.sample,
    }
    advantages = rows * _ADVANTAGES * config.actor.model.num_action_chunks
    learning = policy.learning(micro, share // micro) if share else 0
    # Freed blocks of the step before, which the host's allocator keeps for the next one, as that of accelerators does.
    keeps = not is_off_policy(config.algorithm.loss_type) and share > 0
    kept = policy.kept(share, micro, learning) if keeps else 0
    between, unknown = known_gaps(policy, config.actor, spec, share, micro) if keeps else (Gaps(0, 0), ())
    resting_gaps = max(0, between.resting - kept)
    parts: dict[str, dict[str, int]] = {
        "recv_rollout_batch": {"kept": kept, "gaps": resting_gaps},
        "compute_advantages_and_returns": {"advantages": advantages, "kept": kept, "gaps": resting_gaps},
        "run_training": {
            "advantages": advantages,
            "batch": share * policy.sample,
            "activations": learning,
            "gaps": between.learning,
        },
    }
    device = {"weights", "gradients", "optimizer", "activations", "advantages", "batch", "kept"}
    phases = (
        PhaseForecast("init_worker", {"base": base["init"], "weights": policy.making}, frozenset(("weights",))),
        *(
            PhaseForecast(name, each, frozenset(device & set(each)), HOST_ONLY)
            for name, more in parts.items()
            if (each := {"base": base["train"], **resting, **more})
        ),
    )
    shared = count * (rows * policy.sample + policy.weights)
    notes = (*_spilled(config, spec, count), *policy.notes, *unknown)
    if config.actor.model.compile:
        notes = (*notes, "the compiler of the passes of training is not counted")
    return ProcessForecast("actor", count, phases, shared, notes)


def known_gaps(
    policy: PolicyMemory, actor: PolicyActorConfig, spec: EnvSpec, batch: int, rows: int, *, imitates: bool = False
) -> tuple[Gaps, tuple[str, ...]]:
    """Return the gaps in an actor's heap, see `memory_gaps.gaps`, and a note where they are not known."""
    if policy.weights > _LARGEST_TRIED:
        return Gaps(0, 0), ("gaps in the heap are not counted: a policy of this size trains on accelerators",)
    try:
        return gaps(actor, spec, batch, rows, imitates=imitates), ()
    except (RuntimeError, OSError) as error:
        return Gaps(0, 0), (f"gaps in the heap are not counted: {str(error).splitlines()[0]}",)


def sent_weights(config: PolicyJob, policy: PolicyMemory, count: int) -> int:
    """Return what an actor holds to send its weights, in bytes.

    That is a copy in shared memory. Shards are gathered into one before, weights of fewer bits are written into
    one, and what is sent behind rollouts is one more.
    """
    actor = config.actor
    copies = actor.model.precision != "fp32" or (count > 1 and actor.fsdp_config.sharding_strategy != "no_shard")
    sent = policy.weights if actor.model.precision == "fp32" else policy.weights // 2
    return sent * (1 + copies + (config.runner.staleness > 0))


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
    for path in config.data.paths:
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


def _rollout(config: EmbodiedConfig, policy: PolicyMemory, base: Mapping[str, int], count: int) -> ProcessForecast:
    """Return the forecast of one rollout worker."""
    steps = samples_of_a_step(config) * policy.sample // count
    rows = config.env.train.total_num_envs // count // config.rollout.pipeline_stage_num
    parts = {
        "base": base["act"],
        "weights": policy.weights,
        # The actor's copy in shared memory, which is mapped here too.
        "received weights": policy.weights,
        "trajectories": _ROLLOUT_COPIES * steps,
        "observations": OBSERVATION_COPIES * rows * policy.inputs,
        "activations": policy.acting(rows),
    }
    device = frozenset(("weights", "activations"))
    phases = (
        # They are made in the host's memory, and laid out there.
        PhaseForecast("init_worker", {"base": base["init"], "weights": policy.making}),
        PhaseForecast("generate", parts, device),
    )
    return ProcessForecast("rollout", count, phases)


@cache
def empty_process(component: str, model_type: str, modules: tuple[str, ...] = ()) -> Mapping[str, int]:
    """Return the bytes of a process of a component before it holds anything of a job, by phase.

    Args:
        component: `actor`, `rollout` or `env`.
        model_type: kind of policy.
        modules: further ones that the worker imports.

    Raises:
        ConfigError: it cannot be measured.
    """
    known = model_type if ":" not in model_type else "mlp_policy"
    return measure_empty_process("recipes.embodied.memory.base_program", component, known, *modules)
