"""Jobs with a planted cause, and what `rlinf why` has to name; each so small that it takes seconds."""

from __future__ import annotations

from typing import Final, NamedTuple

FAULTS: Final = "tests.integration.cli.planted.planted_faults"
WORKERS: Final = "tests.integration.cli.planted.planted_workers"
EMBODIED: Final = (
    *("recipe=embodied", f"env.train.env_type={FAULTS}:FaultyEnv", "env.train.total_num_envs=8"),
    *("env.train.max_episode_steps=10", "env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40"),
    *("actor.model.hidden_dim=16", "algorithm.update_epoch=1", "runner.val_check_interval=-1", "runner.max_steps=12"),
)
MATH: Final = (
    *("math/sums-laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.warm_start.steps=2"),
    *("data.rollout_batch_size=4", "data.val_size=4", "algorithm.group_size=4", "runner.save_format=dcp"),
    *("runner.val_check_interval=-1", "runner.max_steps=12", "actor.optim.lr_warmup_steps=0"),
)
NO_RESTART: Final = "runner.max_restarts=0"


class PlantedCause(NamedTuple):
    """A job, and what is wrong with it.

    Attributes:
        job: the arguments of `rlinf train`.
        code: the code of the cause.
        words: words of the cause.
        worker: the planted worker in the place of a recipe's own, see `planted_workers`.
    """

    job: tuple[str, ...]
    code: str
    words: str
    worker: str = ""


def env_job(task: str, *extra: str) -> tuple[str, ...]:
    """Return a job whose environment has a fault of this name."""
    return (*EMBODIED, f"env.train.task={task}", *extra)


def _reward(function: str, *extra: str) -> tuple[str, ...]:
    return (*MATH, f"reward.reward_type={FAULTS}:{function}", *extra)


CAUSES: Final[dict[str, PlantedCause]] = {
    "killed": PlantedCause(env_job("killed", NO_RESTART), "killed-by-signal", "was killed by SIGKILL"),
    "crashed": PlantedCause(env_job("crash", NO_RESTART), "crashed", "crashed in native code: SIGSEGV"),
    "exit": PlantedCause(env_job("exit", NO_RESTART), "exited", "ended itself with exit code 3"),
    "given up": PlantedCause(env_job("hangs", "runner.on_hang=fail"), "hung", "held up the run, and was ended"),
    "exception": PlantedCause(env_job("broken"), "simulator-raises", "raised KeyError: 'joint' at "),
    "no memory": PlantedCause(env_job("memory"), "host-memory", "more memory"),
    "blind": PlantedCause(env_job("blind"), "observations-constant", "without seeing"),
    "worthless": PlantedCause(env_job("worthless"), "reward-never-varies", "it is 0 for all"),
    "reward is NaN": PlantedCause(env_job("priceless"), "not-finite", "reward"),
    "observation is infinite": PlantedCause(env_job("dizzy"), "not-finite", "observation"),
    "small rate": PlantedCause((*EMBODIED, "actor.optim.lr=1e-30"), "updates-rounded-away", "rounded away"),
    "diverges": PlantedCause((*EMBODIED, "actor.optim.lr=1e30"), "not-finite", "NaN or infinite"),
    "deadly start": PlantedCause(
        (*EMBODIED, f"env.train.env_type={FAULTS}:FragileEnv"), "items-set-aside", "died of episode"
    ),
    "no gradient passes": PlantedCause(
        (*EMBODIED, "algorithm.update_epoch=4", "actor.optim.clip_grad=1e-30"), "gradients-clipped-away", "clip_grad"
    ),
    "evaluated on training": PlantedCause(
        (*EMBODIED, "env.train.seed=7", "env.eval.seed=7", "runner.val_check_interval=6"),
        *("evaluated-on-training", "both have the same seed"),
    ),
    "reward raises": PlantedCause(_reward("raising"), "reward-fails", "the reward fails"),
    "reward hangs": PlantedCause(
        # Its process is ended for each answer, and started again.
        _reward("hanging", "reward.timeout=0.1", "data.rollout_batch_size=2", "algorithm.group_size=2"),
        *("reward-fails", "the reward fails"),
    ),
    "reward constant": PlantedCause(_reward("constant"), "right-answers-fail", "by `reward_type:"),
    "reward fades": PlantedCause(_reward("fading"), "groups-equal", "have the same reward"),
    "brevity": PlantedCause(
        _reward("brief", "actor.optim.lr=0.02", "runner.max_steps=30"), "entropy-collapsed", "no longer explores"
    ),
    "cut off": PlantedCause((*MATH, "rollout.sampling_params.max_new_tokens=1"), "answers-truncated", "cut off"),
    "long prompts": PlantedCause(
        (*MATH, "data.max_prompt_length=1"), "refused", "longer than `data.max_prompt_length`"
    ),
    "stale": PlantedCause(
        _reward(
            "by_length", "runner.max_staleness=3", f"algorithm.loss_type={FAULTS}:slow_loss", "runner.max_steps=20"
        ),
        *("staleness-at-bound", "the most that `runner.max_staleness` allows"),
    ),
    "weights stay behind": PlantedCause(
        _reward("by_length", "actor.optim.lr=0.01"), "engine-has-other-weights", "the same weights", worker="deaf"
    ),
    "fingerprint differs": PlantedCause(
        _reward("by_length"), "weights-not-arrived", "did not arrive", worker="honestly deaf"
    ),
    "deadly prompt": PlantedCause(
        _reward("by_length", "data.shuffle=false", "runner.max_failed_fraction=0.5"),
        *("items-set-aside", "died of prompt", "dies of a prompt"),
    ),
}
