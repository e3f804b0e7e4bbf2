"""PPO in one process and one loop: what `rlinf train recipe=embodied` does, without workers, channels or weight sync.

    python -m benchmarks.baselines.single_process_ppo [--seeds 0 1 2] [--task pick] [--adv-type grpo] [--verbose]
    python -m benchmarks.baselines.single_process_ppo --env-type gymnasium --task CartPole-v1 --target-return 475

The same environments, model, algorithm and sizes as the recipe's defaults, with one torch thread. This is what the cost
of the recipe is compared with. Times are CPU seconds of this process, so that a busy machine does not matter, without
imports and evaluations. One line for each seed: when the policy, acting greedily on starts that it was not trained on,
first solves the share `--target` of 256 episodes (or first has the mean return `--target-return`), and what it does
after the last step. Exits with 1 when a seed does not get there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedActorConfig
from recipes.embodied.config.algorithm_config import ActorCriticConfig, GroupConfig, PolicyGradientConfig
from recipes.embodied.config.env_config import EVAL_SEED_OFFSET, TrainEnvironmentConfig
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.learning.batch import bootstrap_rewards
from recipes.embodied.learning.trajectory import sum_to_level
from recipes.embodied.models.base_policy import BasePolicy, Inputs
from recipes.embodied.models.registry import make_model
from recipes.training.typed_tensors import explained_variance
from rlinf_core.algorithms.advantages import AdvantageSettings, Trajectories
from rlinf_core.algorithms.loss_inputs import LossInputs, LossSettings
from rlinf_core.algorithms.options import get_advantage, get_policy_loss

EVALUATION_ENVS = 256


@dataclass(frozen=True)
class Samples:
    """The samples of a step; the first dimension of each tensor is time x environments."""

    inputs: Inputs
    tensors: dict[str, Tensor]

    def batches(self, size: int) -> Iterator[tuple[Inputs, dict[str, Tensor]]]:
        """Return all samples in random batches."""
        count = len(self.tensors["actions"])
        for rows in torch.randperm(count).split(min(size, count)):
            yield (
                {name: tensor[rows] for name, tensor in self.inputs.items()},
                {name: tensor[rows] for name, tensor in self.tensors.items()},
            )


@dataclass(frozen=True)
class Outcome:
    """The result of one seed. Seconds are CPU seconds.

    Attributes:
        reached: seconds and environment steps until the target; None when it was not reached.
        success: share of greedy episodes that end solved, after the last step; 0 where success is not known.
        mean_return: the mean return of those episodes.
        rollout: seconds of rollouts in all.
        training: seconds of training in all.
        steps: training steps.
    """

    reached: tuple[float, int] | None
    success: float
    mean_return: float
    rollout: float
    training: float
    steps: int


class Loop:
    """A policy, its environments and its optimizer.

    Args:
        env: the keys of `env.train`.
        actor: the keys of `actor`.
        algorithm: the keys of `algorithm`; actions and chunks are the same level here.
    """

    def __init__(
        self, env: TrainEnvironmentConfig, actor: EmbodiedActorConfig, algorithm: PolicyGradientConfig
    ) -> None:
        self.config, self.actor, self.algorithm = env, actor, algorithm
        size = algorithm.group_size
        self.env = make_env(
            env.env_type, EnvSettings.of(env, num_envs=env.total_num_envs, first_env=0, group_size=size)
        )
        self.policy = make_model(actor.model, self.env.spec)
        optim = actor.optim
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=optim.lr,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
        )
        self.metrics: dict[str, float] = {}

    def rollout(self) -> Samples:
        """Return one pass of all environments, with advantages."""
        policy, rows = self.policy, list[dict[str, Tensor]]()
        passed: list[Inputs] = []
        inputs = policy.prepare(self.env.reset())
        for _ in range(self.config.max_steps_per_rollout_epoch):
            output = policy.act(inputs)
            result = self.env.step(policy.to_env(output.actions))
            row = {"actions": output.actions, "logprobs": output.logprobs}
            for name in ("rewards", "terminations", "truncations", "valid"):
                row[name] = torch.from_numpy(getattr(result, name))
            if output.values is not None:
                row["values"] = output.values
                row["finals"] = torch.zeros_like(output.values)
                if result.final_observations is not None and result.truncations.any():
                    row["finals"] = policy.values(policy.prepare(result.final_observations))
            passed.append(inputs)
            rows.append(row)
            inputs = policy.prepare(result.observations)
        columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if "values" in columns:
            columns["last"] = policy.values(inputs)
        return Samples(
            {name: torch.cat([step[name] for step in passed]) for name in inputs},
            self._learnable(columns),
        )

    def _learnable(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        rewards, ends = columns["rewards"][..., 0], (columns["terminations"], columns["truncations"])
        mask, dones = columns["valid"][..., 0], (ends[0] | ends[1])[..., 0]
        values = None
        if "values" in columns:
            values = torch.cat((columns["values"], columns["last"][None]))[..., 0]
            finals = columns["finals"][..., 0]
            rewards = bootstrap_rewards(rewards, ends[0][..., 0], ends[1][..., 0], finals, self.algorithm.gamma)
        estimate = get_advantage(self.algorithm.adv_type)(
            Trajectories(rewards=rewards, dones=dones, values=values, mask=mask), AdvantageSettings.of(self.algorithm)
        )
        tensors = {
            "actions": columns["actions"].flatten(0, 1),
            "old_logprobs": sum_to_level(columns["logprobs"].flatten(0, 1), self.algorithm.logprob_type),
            "advantages": estimate.advantages.flatten()[:, None],
            "mask": mask.flatten()[:, None],
        }
        if values is not None and estimate.returns is not None:
            tensors["old_values"] = columns["values"].flatten(0, 1)
            tensors["returns"] = estimate.returns.flatten()[:, None]
            self.metrics["explained_variance"] = explained_variance(values[:-1], estimate.returns, mask).item()
        self.metrics["reward"] = columns["rewards"].sum(dim=0).mean().item()
        return tensors

    def learn(self, samples: Samples) -> None:
        """Several passes over the samples in random batches."""
        loss = get_policy_loss(self.algorithm.loss_type)
        settings = replace(LossSettings.of(self.algorithm), huber_delta=None)
        if bool(samples.tensors["mask"].all()):
            del samples.tensors["mask"]  # the loss is simpler, and so faster, where everything counts
        result = None
        # Four batches, as the recipe takes where the file gives no size.
        size = self.actor.global_batch_size or -(-len(samples.tensors["actions"]) // 4)
        for _ in range(self.algorithm.update_epoch):
            for inputs, batch in samples.batches(size):
                evaluated = self.policy(inputs, batch.pop("actions"))
                values = evaluated.values if "returns" in batch else None
                terms = LossInputs(
                    logprobs=sum_to_level(evaluated.logprobs, self.algorithm.logprob_type),
                    entropy=sum_to_level(evaluated.entropy, self.algorithm.logprob_type)
                    if self.algorithm.entropy_bonus
                    else None,
                    values=values,
                    value_mask=batch.get("mask") if values is not None else None,
                    **batch,
                )
                result = loss(terms, settings)
                self.optimizer.zero_grad()
                result.loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.actor.optim.clip_grad)
                self.optimizer.step()
        if result is not None:
            self.metrics |= {name: value.item() for name, value in result.metrics.items()}


def evaluate(env: VectorEnv, policy: BasePolicy) -> tuple[float, float]:
    """Return the share of episodes that end solved, and their mean return; the first episode of every environment
    counts.
    """
    inputs = policy.prepare(env.reset(0))
    solved: list[bool] = []
    returns: list[float] = []
    while len(returns) < env.num_envs:
        result = env.step(policy.to_env(policy.act(inputs, greedy=True).actions))
        inputs = policy.prepare(result.observations)
        if result.episodes is not None:
            first = result.episodes.number == 0
            returns += result.episodes.returns[first].tolist()
            if result.episodes.success_at_end is not None:
                solved += result.episodes.success_at_end[first].tolist()
    return sum(solved) / max(len(solved), 1), sum(returns) / len(returns)


def run(args: argparse.Namespace, seed: int) -> Outcome:
    """Train one policy."""
    torch.manual_seed(seed)
    loop = Loop(*configuration(args, seed))
    held_back = replace(
        loop.env.settings,
        num_envs=args.eval_envs,
        seed=seed + EVAL_SEED_OFFSET,
        group_size=1,
        auto_reset=True,
    )
    judge = make_env(args.env_type, held_back)
    per_step = loop.env.num_envs * loop.config.max_steps_per_rollout_epoch
    rollout = training = success = mean_return = 0.0
    reached: tuple[float, int] | None = None
    step = 0
    while step < args.steps and not (reached and args.stop):
        begun = time.process_time()
        samples = loop.rollout()
        rolled = time.process_time()
        loop.learn(samples)
        rollout, training = rollout + rolled - begun, training + time.process_time() - rolled
        step += 1
        if step % args.every and step != args.steps:
            continue
        success, mean_return = evaluate(judge, loop.policy)
        if args.verbose:
            figures = " ".join(f"{name.split('/')[-1]} {value:.3f}" for name, value in loop.metrics.items())
            print(f"  {step:4d} {rollout + training:6.1f} s success {success:.3f} return {mean_return:.2f} {figures}")
        there = mean_return >= args.target_return if args.target_return is not None else success >= args.target
        if reached is None and there:
            reached = (rollout + training, step * per_step)
    return Outcome(reached, success, mean_return, rollout, training, step)


def configuration(
    args: argparse.Namespace, seed: int
) -> tuple[TrainEnvironmentConfig, EmbodiedActorConfig, PolicyGradientConfig]:
    """Return the sections of a job: defaults, but for what was asked for."""
    grouped = args.adv_type != "gae"
    env: dict[str, Any] = {"env_type": args.env_type, "task": args.task, "seed": seed, "auto_reset": not grouped}
    if args.episode:
        env["max_episode_steps"] = args.episode
    if args.envs:
        env["total_num_envs"] = args.envs
    if args.rollout:
        env["max_steps_per_rollout_epoch"] = args.rollout
    actor: dict[str, Any] = {"model": {"add_value_head": not grouped}}
    if args.batch:
        actor["global_batch_size"] = args.batch
    if args.lr:
        actor["optim"] = {"lr": args.lr}
    algorithm: dict[str, Any] = {"adv_type": args.adv_type}
    if args.epochs:
        algorithm["update_epoch"] = args.epochs
    if grouped:
        algorithm |= {"group_size": 8}
    return (
        TrainEnvironmentConfig.model_validate(env),
        EmbodiedActorConfig.model_validate(actor),
        (GroupConfig if grouped else ActorCriticConfig).model_validate(algorithm),
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, or these words instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-type", default="franka_kin")
    parser.add_argument("--task", default="pick")
    parser.add_argument("--adv-type", default="gae", help="gae, or a form without values: groups of 8, no value head")
    parser.add_argument("--episode", type=int, help="max_episode_steps")
    parser.add_argument("--envs", type=int, help="total_num_envs")
    parser.add_argument("--rollout", type=int, help="max_steps_per_rollout_epoch")
    parser.add_argument("--batch", type=int, help="global_batch_size")
    parser.add_argument("--epochs", type=int, help="update_epoch")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="training steps at most")
    parser.add_argument("--every", type=int, default=10, help="training steps between evaluations")
    parser.add_argument("--eval-envs", type=int, default=EVALUATION_ENVS)
    parser.add_argument("--target", type=float, default=0.9, help="greedy success to reach")
    parser.add_argument("--target-return", type=float, help="greedy mean return to reach, instead")
    parser.add_argument("--stop", action="store_true", help="end a seed once it has reached the target")
    parser.add_argument("--verbose", action="store_true", help="a line for each evaluation")
    return parser.parse_args(words)


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    print(
        f"{'seed':>4} {'cpu-s':>6} {'env steps':>9} {'steps':>5} {'success':>7} {'return':>7} {'rollout':>8} training"
    )
    missed = 0
    for seed in args.seeds:
        score = run(args, seed)
        missed += score.reached is None
        seconds, samples = score.reached or (float("nan"), 0)
        print(
            f"{seed:4d} {seconds:6.1f} {samples:9d} {score.steps:5d} {score.success:7.3f} {score.mean_return:7.2f}"
            f" {score.rollout / score.steps * 1e3:5.1f} ms {score.training / score.steps * 1e3:5.1f} ms",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
