"""Rules for keys of the original RLinf's files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final, cast

from rlinf_cli.importing.outcomes import Added, Leaf, LeftOut
from rlinf_cli.importing.rules.shared_rules import (
    COMMON,
    EVALUATING,
    LOG_PATH,
    SAVING,
    Result,
    Rule,
    Table,
    Values,
    drop,
    loggers,
    new,
    precision,
    same,
    steps_or_never,
    to,
    top_k,
)
from rlinf_core.config.tree import Path

_READS: Final = "becomes `pi0`, which reads folders of HuggingFace, lerobot and openpi's PyTorch"
_BY_FLOW: Final = "becomes `flow_policy`, flow matching without a language model; GR00T weights are not supported"
# Policies of the original, each with our nearest policy and the difference.
_POLICIES: Final = {
    "openpi": ("pi0", _READS),
    "openpi_rlinf": ("pi0", _READS),
    "dexbotic_pi": ("pi0", f"{_READS}, and none of Dexbotic"),
    "gr00t": ("flow_policy", _BY_FLOW),
    "gr00t_n1d6": ("flow_policy", _BY_FLOW),
    "gr00t_n1d7": ("flow_policy", _BY_FLOW),
    "mlp": ("mlp_policy", None),
    "cnn": ("cnn_policy", None),
}
_ENVIRONMENTS: Final = {
    "realworld": ("franka_robot", "is a Franka arm with our own controller and tasks"),
    "frankasim": ("franka_mujoco", "is our own Franka arm in MuJoCo"),
}
# What names of the original's real tasks begin with where a single Franka arm does them.
_FRANKA_TASKS: Final = ("Franka", "PegInsertion", "Charger", "Bottle")
# Policies that need images, and simulators that render none by default.
_SEEING: Final = ("cnn_policy", "vlm_policy", "openvla", "openvla_oft", "pi0")
_BLIND: Final = ("metaworld", "robosuite", "gymnasium_robotics", "maniskill")


def _of_model(values: Values, key: str) -> Any:
    """Return a value of the policy; an evaluation has it in `rollout`."""
    return values.get(f"actor.model.{key}", values.get(f"rollout.model.{key}", ""))


def _kind(values: Values) -> str:
    return str(_of_model(values, "model_type"))


def _flow_option(name: str) -> Rule:
    """Return the rule for an option of a policy by flow matching; other policies have none of it."""

    def rule(leaf: Leaf, values: Values) -> Result:
        kind = _kind(values)
        if _POLICIES.get(kind, (kind,))[0] not in ("pi0", "flow_policy"):
            return LeftOut("it belongs to policies by flow matching", quiet=True)
        return same(f"actor.model.options.{name}", leaf)

    return rule


def _loss_type(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "decoupled_actor_critic":
        note = "`decoupled_actor_critic` becomes `actor_critic`: ratios are to the policy that acted, however old"
        return new("algorithm.loss_type", "actor_critic", note)
    return same("algorithm.loss_type", leaf)


def _lr_scheduler(path: str) -> Rule:
    """Return the rule for a schedule, which the original also names as torch does."""

    def rule(leaf: Leaf, values: Values) -> Result:
        written = str(values.of(leaf))
        return new(path, written.removeprefix("torch_")) if written.startswith("torch_") else same(path, leaf)

    return rule


def _model_type(leaf: Leaf, values: Values) -> Result:
    written = str(values.of(leaf))
    if written not in _POLICIES:
        return same("actor.model.model_type", leaf)
    ours, note = _POLICIES[written]
    if ours == "pi0" and "pi05" in str(_of_model(values, "openpi.config_name")):
        ours, note = "pi05", str(note).replace("`pi0`", "`pi05`")
    return new("actor.model.model_type", ours, note and f"`{written}` {note}")


def _model_path(leaf: Leaf, values: Values) -> Result:
    kind = _kind(values)
    if _POLICIES.get(kind, ("", None))[1] == _BY_FLOW:
        return LeftOut(f"`{kind}` {_BY_FLOW}")
    return same("actor.model.model_path", leaf)


def _path_of_rollout(leaf: Leaf, values: Values) -> Result:
    """Jobs of Megatron name the model's folder for the rollout alone."""
    if values.get("actor.model.model_path", False) is not False or not values.of(leaf):
        return LeftOut("the rollout receives its weights from the actor: `actor.model.model_path`")
    return same("actor.model.model_path", leaf)


def _robots(values: Values) -> list[dict[str, Any]]:
    """Return the sections `hardware` of a file's node groups."""
    groups = cast("list[dict[str, Any]]", values.get("cluster.node_groups", []))
    return [group["hardware"] for group in groups if group.get("hardware")]


def _env_type(section: str) -> Rule:
    """Return the rule for an environment; a real one that no Franka of the file could be keeps its name."""

    def rule(leaf: Leaf, values: Values) -> Result:
        written, at = str(values.of(leaf)), f"env.{section}"
        kinds = sorted({str(robot.get("type")) for robot in _robots(values)})
        if written == "realworld" and kinds and not any("Franka" in kind for kind in kinds):
            return new(
                f"{at}.env_type", kinds[0], f"`realworld` is a {kinds[0]} here, and rlinf has nothing that moves it"
            )
        if written == "realworld" and not kinds and values.get(f"{at}.override_cfg.is_dummy", False):
            task = str(values.get(f"{at}.init_params.id", ""))
            if not task.startswith(_FRANKA_TASKS):
                return new(f"{at}.env_type", task, f"`{task}` moves another robot than a Franka")
            return new(f"{at}.env_type", "franka_mujoco", "the dummy arm becomes our Franka arm in MuJoCo")
        if written in _ENVIRONMENTS:
            ours, note = _ENVIRONMENTS[written]
            return new(f"{at}.env_type", ours, f"`{written}` {note}")
        return same(f"env.{section}.env_type", leaf)

    return rule


def _env_type_of(section: str, values: Values) -> str:
    written = values.get(f"env.{section}.env_type", values.get(f"env.{section}.simulator_type", ""))
    return str(written or values.get("env.train.env_type", values.get("env.train.simulator_type", "")))


def _task(section: str, *, of: tuple[str, ...]) -> Rule:
    def rule(leaf: Leaf, values: Values) -> Result:
        kind = _env_type_of(section, values)
        if kind in of:
            return same(f"env.{section}.task", leaf)
        if kind in _ENVIRONMENTS:
            return LeftOut(f"`{kind}` {_ENVIRONMENTS[kind][1]}")
        return LeftOut(f"`task` has another meaning for `env_type: {kind}`")

    return rule


def _task_of_arm(section: str) -> Rule:
    """Return the rule for a task of the original's Franka arm in MuJoCo."""

    def rule(leaf: Leaf, values: Values) -> Result:
        written = str(values.of(leaf))
        if _env_type_of(section, values) == "frankasim" and written.startswith("PandaPickCube"):
            return new(f"env.{section}.task", "pick", f"`{written}` is `task: pick`")
        return LeftOut("`env.*.task` names the task, where an environment has several")

    return rule


def _greedy(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf):
        return new("rollout.sampling_params.temperature", 0, "`use_greedy: true` is `temperature: 0`")
    return LeftOut("`temperature` above 0 samples tokens", quiet=True)


def _temperature(leaf: Leaf, values: Values) -> Result:
    if values.get("algorithm.sampling_params.use_greedy", False):
        return LeftOut("`use_greedy: true` applies", quiet=True)
    return same("rollout.sampling_params.temperature", leaf)


def _group_size(leaf: Leaf, values: Values) -> Result:
    """Leave out a group of one where `algorithm.group_size` says how many are compared."""
    compared = values.get("algorithm.group_size", 1)
    if values.of(leaf) == 1 and compared != 1:
        return LeftOut(f"`algorithm.group_size: {compared}` holds: the members of a group share their start here")
    return same("env.train.group_size", leaf)


def _adv_type(leaf: Leaf, values: Values) -> Result:
    if values.get("algorithm.use_reinpp_baseline", False) and values.of(leaf) in ("reinpp", "reinforce_pp"):
        return new("algorithm.adv_type", "reinforce_pp_baseline", "set by `use_reinpp_baseline: true`")
    return same("algorithm.adv_type", leaf)


def _both_clips(leaf: Leaf, values: Values) -> Result:
    low, high = values.get("algorithm.clip_ratio_low"), values.get("algorithm.clip_ratio_high")
    if low is not None and high is not None:
        return LeftOut("`clip_ratio_low` and `clip_ratio_high` apply", quiet=True)
    return (
        *([same("algorithm.clip_ratio_low", leaf)] if low is None else []),
        *([same("algorithm.clip_ratio_high", leaf)] if high is None else []),
    )


def _false_is_default(key: str, instead: str) -> Rule:
    """Return the rule for a switch that is always off here."""

    def rule(leaf: Leaf, values: Values) -> Result:
        return LeftOut(instead if values.of(leaf) else f"`{key}: false` is the only option", quiet=not values.of(leaf))

    return rule


def _of_training(path: str) -> Rule:
    """Return the rule for a key that an evaluation does not need."""

    def rule(leaf: Leaf, values: Values) -> Result:
        if values.get("runner.only_eval", False):
            return LeftOut("an evaluation trains nothing", quiet=True)
        return same(path, leaf)

    return rule


def _reward_model(leaf: Leaf, values: Values) -> Result:
    """Keep a model that rewards: the result is wrong until somebody decides."""
    if values.of(leaf):
        return same("reward.use_reward_model", leaf)
    return LeftOut("`use_reward_model: false` is the only option", quiet=True)


def _of_pictures(leaf: Leaf, values: Values) -> Result:
    """Keep columns of pictures: the result is wrong until somebody decides."""
    names = values.of(leaf)
    if isinstance(names, list) and names:
        return new("data.image_key", str(cast("list[Any]", names)[0]))
    return LeftOut("models of text alone are trained", quiet=True)


def _engine_option(engine: str, name: str) -> Rule:
    def rule(leaf: Leaf, values: Values) -> Result:
        used = values.get("rollout.backend", values.get("rollout.rollout_backend", ""))
        if used != engine:
            return LeftOut(f"it is an argument of {engine}, but `rollout.backend` is `{used}`", quiet=True)
        return same(f"rollout.engine_options.{name}", leaf)

    return rule


def _enforce_eager(leaf: Leaf, values: Values) -> Result:
    if values.get("rollout.backend", values.get("rollout.rollout_backend")) == "vllm":
        return same("rollout.engine_options.enforce_eager", leaf)
    return LeftOut("it is an argument of vLLM: `rollout.engine_options` takes the engine's own arguments")


RLINF: Final[Table] = {
    **COMMON,
    "runner.logger.logger_backends": loggers("runner.logger.logger_backends"),
    "runner.logger.log_path": to("runner.logger.log_path", LOG_PATH),
    "runner.save_interval": steps_or_never("runner.save_interval", SAVING),
    "runner.val_check_interval": steps_or_never("runner.val_check_interval", EVALUATING),
    "runner.max_epochs": steps_or_never("runner.max_epochs"),
    "runner.max_steps": steps_or_never("runner.max_steps"),
    "algorithm.adv_type": _adv_type,
    "actor.optim.lr_scheduler": _lr_scheduler("actor.optim.lr_scheduler"),
    "actor.fsdp_config.mixed_precision.reduce_dtype": precision("actor.fsdp_config.mixed_precision.reduce_dtype"),
    "rollout.model.model_path": _path_of_rollout,
    "rollout.model.precision": drop("the rollout uses `actor.model.precision`"),
    "critic.use_critic_model": _false_is_default(
        "use_critic_model", "place a group `critic`, with `algorithm.adv_type: gae`"
    ),
    "reward.use_reward_model": _reward_model,
}
EMBODIED: Final[Table] = {
    **RLINF,
    "runner.max_epochs": steps_or_never("runner.max_epochs", "counts training steps: an embodied epoch is one step"),
    "actor.model.model_type": _model_type,
    "actor.model.model_path": _model_path,
    "rollout.model_dir": _model_path,
    "actor.global_batch_size": _of_training("actor.global_batch_size"),
    "actor.micro_batch_size": _of_training("actor.micro_batch_size"),
    "actor.model.openpi.num_steps": _flow_option("steps"),
    "actor.model.openpi.noise_level": _flow_option("noise"),
    "actor.model.dexbotic.num_steps": _flow_option("steps"),
    "actor.model.dexbotic.noise_level": _flow_option("noise"),
    "actor.model.denoising_steps": _flow_option("steps"),
    "actor.fsdp_config.mixed_precision.param_dtype": precision("actor.fsdp_config.mixed_precision.param_dtype"),
    "algorithm.loss_type": _loss_type,
    "env.train.group_size": _group_size,
    "algorithm.staleness_threshold": to("runner.max_staleness", "counts versions of the weights"),
    "algorithm.ratio_clip_eps": _both_clips,
    "env.train.video_cfg.save_video": drop("only evaluations are recorded: `env.eval.video_cfg.save_video`"),
    "env.train.video_cfg.video_base_dir": drop("only evaluations are recorded: `env.eval.video_cfg.video_base_dir`"),
    "runner.seq_length": drop("the policy decides how many tokens it reads"),
    "runner.max_prompt_length": drop("the policy decides how many instruction tokens it reads"),
    **{
        f"env.{section}.{key}": rule
        for section in ("train", "eval")
        for key, rule in {
            "env_type": _env_type(section),
            "simulator_type": _env_type(section),
            "gym_id": _task_of_arm(section),
            "init_params.id": _task(section, of=("maniskill",)),
            "task_suite_name": _task(section, of=("libero",)),
            "task_name": _task(section, of=("metaworld", "robosuite")),
            "use_fixed_reset_state_ids": drop(
                "the environments of a group share their start states: `algorithm.group_size`", quiet=True
            ),
            "video_cfg.info_on_video": drop("videos contain only the camera images"),
        }.items()
    },
}
# Recipe `sft` says by its name what the task is, and has no section `algorithm`.
SFT: Final[Table] = {
    **{key: rule for key, rule in EMBODIED.items() if not key.startswith("algorithm.")},
    "runner.task_type": drop("implied by `recipe: sft`"),
}
MATH: Final[Table] = {
    **RLINF,
    "algorithm.sampling_params.use_greedy": _greedy,
    "algorithm.sampling_params.temperature": _temperature,
    "algorithm.sampling_params.top_k": top_k("rollout.sampling_params.top_k"),
    "algorithm.use_reinpp_baseline": drop(
        "set by `adv_type`: `reinforce_pp_baseline` subtracts the group mean", quiet=True
    ),
    "actor.lr_sched.min_lr": drop("`actor.optim.min_lr_ratio` is the lowest learning rate divided by `lr`"),
    "critic.model.precision": precision("critic.model.precision"),
    "data.image_keys": _of_pictures,
    "rollout.enforce_eager": _enforce_eager,
    "rollout.sampling_params.top_k": top_k("rollout.sampling_params.top_k"),
    "rollout.vllm.max_num_batched_tokens": _engine_option("vllm", "max_num_batched_tokens"),
    "rollout.vllm.enable_chunked_prefill": _engine_option("vllm", "enable_chunked_prefill"),
    "rollout.vllm.enable_prefix_caching": _engine_option("vllm", "enable_prefix_caching"),
    "rollout.sglang.attention_backend": _engine_option("sglang", "attention_backend"),
    "rollout.sglang.cuda_graph_max_bs": _engine_option("sglang", "cuda_graph_max_bs"),
    "reward.reward_scale": to(
        "reward.correct_reward",
        "is the reward of a correct answer; `reward.incorrect_reward` is that of a wrong one, 0",
    ),
}


def cameras(values: Values, present: Collection[Path]) -> Iterator[Added]:
    """Yield cameras for simulators that render no images by default, if the policy needs images."""
    kind = _kind(values)
    ours = _POLICIES[kind][0] if kind in _POLICIES else kind
    at = ("env", "train", "options", "cameras")
    if ours in _SEEING and _env_type_of("train", values) in _BLIND and at not in present:
        yield Added(at, ["main"], f"`{ours}` needs images, which this simulator renders only on request")
