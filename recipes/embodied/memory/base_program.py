"""The memory of a process before it holds anything of a job: run as a program, it prints its peaks by phase as JSON.

    python -m recipes.embodied.memory.base_program COMPONENT MODEL_TYPE [MODULE ...]

It imports what a worker imports, further modules included, and does with a tiny policy what the worker does, so that
libraries which are loaded on the way are counted.
"""

from __future__ import annotations

import json
import sys

from recipes.training.memory.empty_process import import_worker
from rlinf_core.process.process_memory import PeakMeter

_MODULES = {
    "actor": "recipes.embodied.workers.actor_worker",
    "rollout": "recipes.embodied.workers.rollout_worker",
    "env": "recipes.embodied.workers.env_worker",
}


def main(component: str, model_type: str, *modules: str) -> None:
    """Print the peaks, in bytes: `start`, and for a component with a policy `init`, `act` and `train`."""
    meter = PeakMeter()
    import_worker(meter, _MODULES[component], *modules)
    if component != "env":
        _with_policy(meter, component, model_type)
    print(json.dumps({phase: peak.rss for phase, peak in meter.peaks.items()}))


def _with_policy(meter: PeakMeter, component: str, model_type: str) -> None:
    import torch

    from recipes.embodied.config import EmbodiedModelConfig
    from recipes.embodied.envs.env_spec import EnvSpec
    from recipes.embodied.memory.policy_memory import example_inputs
    from recipes.embodied.models.registry import make_model
    from recipes.sections.actor import OptimConfig
    from recipes.training.optimizer import make_optimizer

    torch.set_num_threads(1)
    spec = EnvSpec(4, 2, cameras={"main": (48, 48, 3)}, has_instructions=True)
    with meter.during("init"):
        policy = make_model(EmbodiedModelConfig(model_type=model_type, hidden_dim=32), spec)
    with meter.during("act"):
        inputs = example_inputs(policy, spec, 2)
        actions = policy.act(inputs).actions
    if component != "actor":
        return
    with meter.during("train"):
        optimizer = make_optimizer(policy, OptimConfig())
        policy.forward(inputs, actions).logprobs.sum().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
