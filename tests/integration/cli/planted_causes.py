"""Jobs with a planted cause, and what `rlinf why` has to name; each so small that it takes seconds."""

from __future__ import annotations

from typing import Final, NamedTuple

FAULTS: Final = "tests.integration.cli.planted_faults"
WORKERS: Final = "tests.integration.cli.planted_workers"
EMBODIED: Final = (
    *("recipe=embodied", f"env.train.env_type={FAULTS}:FaultyEnv", "env.train.total_num_envs=8"),
    *("env.train.max_episode_steps=10", "env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40"),
    *("actor.model.hidden_dim=16", "algorithm.update_epoch=1", "runner.val_check_interval=-1", "runner.max_steps=12"),
)
_LEARNING: Final = (
    *("actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.warm_start.steps=2"),
    *("data.rollout_batch_size=4", "data.val_size=4", "algorithm.group_size=4", "runner.save_format=dcp"),
    *("runner.val_check_interval=-1", "runner.max_steps=12", "actor.optim.lr_warmup_steps=0"),
)
MATH: Final = ("math_laptop", *_LEARNING)
AGENT: Final = ("agent_calculator", *_LEARNING)
_USES_TOOLS: Final = ("actor.warm_start.steps=100", "actor.warm_start.tool_share=1.0")
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


def _env(task: str, *more: str) -> tuple[str, ...]:
    return (*EMBODIED, f"env.train.task={task}", *more)


def _reward(function: str, *more: str) -> tuple[str, ...]:
    return (*MATH, f"reward.reward_type={FAULTS}:{function}", *more)


CAUSES: Final[dict[str, PlantedCause]] = {
    "killed": PlantedCause(_env("killed", NO_RESTART), "killed-by-signal", "was killed by SIGKILL"),
    "crashed": PlantedCause(_env("crash", NO_RESTART), "crashed", "crashed in native code: SIGSEGV"),
    "exit": PlantedCause(_env("exit", NO_RESTART), "exited", "ended itself with exit code 3"),
    "exception": PlantedCause(_env("broken"), "simulator-raises", "raised KeyError: 'joint' at "),
    "no memory": PlantedCause(_env("memory"), "host-memory", "more memory"),
    "blind": PlantedCause(_env("blind"), "observations-constant", "without seeing"),
    "worthless": PlantedCause(_env("worthless"), "reward-never-varies", "it is 0 for all"),
    "reward is NaN": PlantedCause(_env("priceless"), "not-finite", "reward"),
    "observation is infinite": PlantedCause(_env("dizzy"), "not-finite", "observation"),
    "small rate": PlantedCause((*EMBODIED, "actor.optim.lr=1e-30"), "updates-rounded-away", "rounded away"),
    "diverges": PlantedCause((*EMBODIED, "actor.optim.lr=1e30"), "not-finite", "NaN or infinite"),
    "schedule": PlantedCause(
        (*EMBODIED, "actor.optim.lr_scheduler=linear", "actor.optim.total_training_steps=4"),
        *("learning-rate-zero", "fell to 0"),
    ),
    "large rate": PlantedCause(
        (*EMBODIED, "algorithm.update_epoch=10", "actor.optim.lr=0.3"), "policy-jumps", "far away from the one"
    ),
    "no gradient passes": PlantedCause(
        (*EMBODIED, "algorithm.update_epoch=4", "actor.optim.clip_grad=1e-30"), "gradients-clipped-away", "clip_grad"
    ),
    "evaluated on training": PlantedCause(
        (*EMBODIED, "env.train.seed=7", "env.eval.seed=7", "runner.val_check_interval=6"),
        *("evaluated-on-training", "both have the same seed"),
    ),
    "reward raises": PlantedCause(_reward("raising"), "reward-fails", "the reward fails"),
    "reward hangs": PlantedCause(_reward("hanging", "reward.timeout=0.1"), "reward-fails", "the reward fails"),
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
        _reward("by_length", "actor.optim.lr=0.01"), "engine-has-other-weights", "do not arrive", worker="deaf"
    ),
    "fingerprint differs": PlantedCause(
        _reward("by_length"), "weights-not-arrived", "did not arrive", worker="honestly deaf"
    ),
    "deadly prompt": PlantedCause(
        _reward("by_length", "data.shuffle=false", "runner.max_failed_fraction=0.5"),
        *("items-set-aside", "died of prompt", "dies of a prompt"),
    ),
    "tool hangs": PlantedCause(
        (*AGENT, f"agent.tools=[{FAULTS}:hanging_tool]", "agent.tool_timeout=0.1", *_USES_TOOLS), "tool-fails", "tool"
    ),
}
