"""Rules for keys of files of verl and of the original RLinf, whose soft actor-critic is `loss_type: sac` here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Final, cast

from rlinf_cli.importing.shared_rules import Added, Leaf, LeftOut, Result, Values, new, precision, same
from rlinf_core.config.tree import Path, format_path
from rlinf_core.errors import ConfigError

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
# verl's default names of image and video columns, which need not exist.
_PICTURES: Final = ("images", "videos")


def needs_values(values: Values) -> bool:
    """Return whether a verl file uses a critic."""
    return str(values.get("algorithm.adv_estimator", "gae")) == "gae"


def kl_in_loss(values: Values) -> bool:
    """Return whether a verl file adds the KL divergence to the loss."""
    return bool(values.get(f"{_ACTOR}.use_kl_loss", False))


def kl_in_reward(values: Values) -> bool:
    """Return whether a verl file subtracts the KL divergence from the rewards."""
    return bool(values.get("algorithm.use_kl_in_reward", False))


def engine(values: Values) -> str:
    """Return the inference backend; `vllm` replaces SGLang, whose keys are the same."""
    name = str(values.get(f"{_ROLLOUT}.name", "vllm"))
    return "vllm" if name == "sglang" else name


def mini_batch(leaf: Leaf, values: Values) -> Result:
    prompts, answers = values.of(leaf), values.get(f"{_ROLLOUT}.n", 1)
    if not isinstance(prompts, int) or not isinstance(answers, int):
        return LeftOut("its product with `rollout.n` is unknown: `actor.global_batch_size` counts answers")
    return new(
        "actor.global_batch_size",
        prompts * answers,
        f"counts answers here: {prompts} prompts x {answers} answers",
    )


def refills(leaf: Leaf, values: Values) -> Result:
    return new("algorithm.max_refills", values.of(leaf) - 1, "counts the batches after the first")


def scorer(leaf: Leaf, values: Values) -> Result:
    path, section = values.of(leaf), format_path(leaf.path[:-1])
    name = values.get(f"{section}.name", "compute_score")
    if not path:
        return LeftOut("null: there is none", quiet=True)
    module = str(path).removesuffix(".py").removeprefix("./")
    if module.startswith(("/", "~", "..")):
        module = module.rpartition("/")[2]
    return new(
        "reward.reward_type",
        f"{module.replace('/', '.')}:{name}",
        f"is imported: `PYTHONPATH` must contain the folder of `{module}.py`",
    )


def pictures_of_verl(leaf: Leaf, values: Values) -> Result:
    """Keep the image column of a model that reads images, which makes the new file invalid until the user decides."""
    sees = re.search(r"(?i)(?:^|[-_./\d])vl(?:[-_./]|$)", str(values.get(f"{_MODEL}.path", "")))
    if sees or values.of(leaf) not in (*_PICTURES, None):
        return same(leaf.name, leaf)
    return LeftOut("models of text alone are trained", quiet=True)


_CORRECTION: Final = "algorithm.rollout_correction"
_DISTILLATION: Final = "distillation.distillation_loss"
_TEACHERS: Final = "distillation.teacher_models"
# Losses without a dual clip, by their names in verl.
_UNCLIPPED_LOSSES: Final = ("geo_mean", "sapo", "cispo")


def _loss(values: Values) -> str:
    return str(values.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla"))


def teachers(values: Values) -> list[str]:
    """Return the names of the teachers with a folder; `teacher_model` counts only if there are no others."""
    models = values.get(_TEACHERS, {})
    entries = cast("dict[str, Any]", models) if isinstance(models, dict) else {}
    folders = {name: cast("dict[str, Any]", entry) for name, entry in entries.items() if isinstance(entry, dict)}
    names = [name for name, entry in folders.items() if entry.get("model_path")]
    others = [name for name in names if name != "teacher_model"]
    return others or names


def distills(values: Values) -> bool:
    """Return whether a file learns as with `adv_type: distillation`: from the log-ratio of tokens to one teacher as the
    only reward.
    """
    loss = {key: values.get(f"{_DISTILLATION}.{key}") for key in ("loss_mode", "use_policy_gradient")}
    return (
        bool(values.get("distillation.enabled", False))
        and loss == {"loss_mode": "k1", "use_policy_gradient": True}
        and not values.get(f"{_DISTILLATION}.use_task_rewards", True)
        and len(teachers(values)) == 1
    )


def teacher_rows(values: Values) -> dict[str, str | dict[str, Any] | list[dict[str, Any]]]:
    """Return the rows for a teacher's keys, which contain the name that the file gives the teacher."""
    if not distills(values):
        return {}
    return {
        f"{_TEACHERS}.{teachers(values)[0]}.model_path": {
            "to": "teacher.model_path",
            "note": "a folder here, with the tokens of the actor's tokenizer",
        },
        f"{_DISTILLATION}.loss_max_clamp": {"why": "the divergence of a token is not bounded"},
        f"{_DISTILLATION}.log_prob_min_clamp": {"why": "the log-probability of a token is not bounded"},
    }


def dual_clip(leaf: Leaf, values: Values) -> Result:
    if _loss(values) == "gspo":
        return new("algorithm.options.clip_ratio_c", None, "verl's gspo has no dual clip")
    if _loss(values) in _UNCLIPPED_LOSSES:
        return LeftOut(f"`loss_type: {_loss(values)}` has no dual clip", quiet=True)
    return same("algorithm.options.clip_ratio_c", leaf)


def bound(leaf: Leaf, values: Values) -> Result:
    """Convert a clip bound of the ratio."""
    key = str(leaf.path[-1])
    if _loss(values) == "sapo":
        return LeftOut("`loss_type: sapo` has a soft gate in the place of a clip", quiet=True)
    written = values.of(leaf)
    if key == "clip_ratio_low" and _loss(values) == "cispo" and isinstance(written, int | float) and written > 1:
        return new(f"algorithm.{key}", 1, f"no ratio is below 0: 1 bounds nothing, as {written:g} does")
    return same(f"algorithm.{key}", leaf)


def ratio_range(leaf: Leaf, values: Values) -> Result:
    """Convert `LOW_HIGH`, the ratios outside which tokens are rejected; a number alone caps the weights."""
    low, between, high = values.of(leaf).partition("_")
    if not between:
        return same("algorithm.options.tis_cap", leaf)
    return (
        new("algorithm.options.reject_ratio_low", float(low)),
        new("algorithm.options.reject_ratio_high", float(high)),
    )


def rejects(leaf: Leaf, values: Values) -> Result:
    """Convert the rejection of tokens by bounds of their ratio; other criteria do not exist here."""
    names = [name.strip("'\" ") for name in str(values.of(leaf)).split(",")]
    limits = [limit.strip("'\" ") for limit in str(values.get(f"{_CORRECTION}.rollout_rs_threshold", "")).split(",")]
    low, _, high = dict(zip(names, limits, strict=False)).get("token_k1", "").partition("_")
    if not high:
        return LeftOut("`reject_ratio_low` and `reject_ratio_high` bound the ratio of a token, or of a sequence's mean")
    others = [name for name in names if name != "token_k1"]
    note = f"not taken over: {', '.join(others)}" if others else None
    return (
        new("algorithm.options.reject_ratio_low", float(low), note),
        new("algorithm.options.reject_ratio_high", float(high)),
    )


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
# The beginnings of the names of the original's real tasks for a single Franka arm.
_FRANKA_TASKS: Final = ("Franka", "PegInsertion", "Charger", "Bottle")
# Policies that need images, and simulators that render none by default.
_SEEING: Final = ("cnn_policy", "openvla", "openvla_oft", "pi0")
_BLIND: Final = ("metaworld", "robosuite", "gymnasium_robotics", "maniskill")


def _of_model(values: Values, key: str) -> Any:
    """Return a value of the policy, which is in `rollout` in an evaluation."""
    return values.get(f"actor.model.{key}", values.get(f"rollout.model.{key}", ""))


def _kind(values: Values) -> str:
    return str(_of_model(values, "model_type"))


def flow_option(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert an option that only flow-matching policies have."""
    kind = _kind(values)
    if _POLICIES.get(kind, (kind,))[0] not in ("pi0", "flow_policy"):
        return LeftOut("it belongs to policies by flow matching", quiet=True)
    return same(to, leaf)


def adapters(leaf: Leaf, values: Values) -> Result:
    """Convert the switch of adapters; their scale is twice their rank."""
    if not values.of(leaf):
        return LeftOut("all weights are trained", quiet=True)
    rank = values.get("actor.model.lora_rank", 32)
    alpha = new("actor.model.lora.alpha", 2 * rank if isinstance(rank, int) else rank, "is twice the rank")
    return (new("actor.model.lora.rank", rank), alpha)


def lr_scheduler(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert the name of a schedule, which in the original may have the prefix `torch_`."""
    written = str(values.of(leaf))
    return new(to, written.removeprefix("torch_")) if written.startswith("torch_") else same(to, leaf)


def model_type(leaf: Leaf, values: Values) -> Result:
    written = str(values.of(leaf))
    if written not in _POLICIES:
        return same("actor.model.model_type", leaf)
    ours, note = _POLICIES[written]
    if ours == "pi0" and "pi05" in str(_of_model(values, "openpi.config_name")):
        ours, note = "pi05", str(note).replace("`pi0`", "`pi05`")
    return new("actor.model.model_type", ours, note and f"`{written}` {note}")


def env_type(leaf: Leaf, values: Values) -> Result:
    """Convert the type of an environment; a real robot other than a Franka gets its own name, which is no type here."""
    written, at = str(values.of(leaf)), f"env.{leaf.path[1]}"
    groups = cast("list[dict[str, Any]]", values.get("cluster.node_groups", []))
    kinds = sorted({str(group["hardware"].get("type")) for group in groups if group.get("hardware")})
    if written == "realworld" and kinds and not any("Franka" in kind for kind in kinds):
        return new(f"{at}.env_type", kinds[0], f"`realworld` is a {kinds[0]} here, and rlinf has nothing that moves it")
    if written == "realworld" and not kinds and values.get(f"{at}.override_cfg.is_dummy", False):
        task = str(values.get(f"{at}.init_params.id", ""))
        if not task.startswith(_FRANKA_TASKS):
            return new(f"{at}.env_type", task, f"`{task}` moves another robot than a Franka")
        return new(f"{at}.env_type", "franka_mujoco", "the dummy arm becomes our Franka arm in MuJoCo")
    if written in _ENVIRONMENTS:
        ours, note = _ENVIRONMENTS[written]
        return new(f"{at}.env_type", ours, f"`{written}` {note}")
    return same(f"{at}.env_type", leaf)


def _env_type_of(section: str, values: Values) -> str:
    written = values.get(f"env.{section}.env_type", values.get(f"env.{section}.simulator_type", ""))
    return str(written or values.get("env.train.env_type", values.get("env.train.simulator_type", "")))


def task(leaf: Leaf, values: Values, simulators: list[str]) -> Result:
    """Convert the name of a task for `simulators`; for others the key is left out."""
    section = str(leaf.path[1])
    kind = _env_type_of(section, values)
    if kind in simulators:
        return same(f"env.{section}.task", leaf)
    if kind in _ENVIRONMENTS:
        return LeftOut(f"`{kind}` {_ENVIRONMENTS[kind][1]}")
    return LeftOut(f"`task` has another meaning for `env_type: {kind}`")


def task_of_arm(leaf: Leaf, values: Values) -> Result:
    """Convert the name of a task of the original's Franka arm in MuJoCo."""
    written, section = str(values.of(leaf)), str(leaf.path[1])
    if _env_type_of(section, values) == "frankasim" and written.startswith("PandaPickCube"):
        return new(f"env.{section}.task", "pick", f"`{written}` is `task: pick`")
    return LeftOut("`env.*.task` names the task, where an environment has several")


def pictures_of_rlinf(leaf: Leaf, values: Values) -> Result:
    """Convert the first image column, which makes the new file invalid until the user decides."""
    names = values.of(leaf)
    if isinstance(names, list) and names:
        return new("data.image_key", str(cast("list[Any]", names)[0]))
    return LeftOut("models of text alone are trained", quiet=True)


def cameras(values: Values, present: Collection[Path]) -> Iterator[Added]:
    """Yield cameras for simulators that render no images by default, if the policy needs images."""
    kind = _kind(values)
    ours = _POLICIES[kind][0] if kind in _POLICIES else kind
    at = ("env", "train", "options", "cameras")
    if ours in _SEEING and _env_type_of("train", values) in _BLIND and at not in present:
        yield Added(at, ["main"], f"`{ours}` needs images, which this simulator renders only on request")


LOSS: Final = "embodied_sac"
_AT: Final = "algorithm"


def is_off_policy(values: Values) -> bool:
    """Return whether a file of RLinf trains by soft actor-critic.

    Raises:
        ConfigError: it trains a flow-matching policy by soft actor-critic, or steers a pi0 by its noise (DSRL).
    """
    is_sac = LOSS in (values.get("algorithm.loss_type"), values.get("algorithm.adv_type"))
    if is_sac and values.get("actor.model.model_type") == "flow_policy":
        raise ConfigError(
            "this file trains a policy by flow matching with soft actor-critic, which no recipe here does",
            help="`loss_type: sac` trains `model_type: squashed_policy`; a flow policy learns by `actor_critic`",
        )
    if is_sac and values.get("actor.model.model_type") == "openpi":
        raise ConfigError(
            "this file trains the noise that steers a pi0, by soft actor-critic (DSRL), which no recipe here does",
            help="`loss_type: sac` trains `model_type: squashed_policy`; a pi0 learns by `actor_critic`",
        )
    return is_sac


def _steps_of_a_round(values: Values) -> tuple[int, str]:
    """Return the number of environment steps per training step, and the product in words."""
    names = ("total_num_envs", "max_steps_per_rollout_epoch", "rollout_epoch")
    numbers = [values.count(f"env.train.{name}", 1) for name in names]
    product = numbers[0] * numbers[1] * numbers[2]
    return product, " x ".join(map(str, numbers))


def update_epoch(leaf: Leaf, values: Values) -> Result:
    updates = values.of(leaf)
    steps, words = _steps_of_a_round(values)
    if not isinstance(updates, int) or updates < 1:
        return LeftOut("`algorithm.update_to_data` counts critic updates per environment step")
    return new(
        f"{_AT}.update_to_data",
        round(updates / steps, 6),
        f"counts critic updates per environment step: {updates} / ({words} = {steps})",
    )


def learning_starts(leaf: Leaf, values: Values) -> Result:
    trajectories = values.of(leaf)
    length = values.count("env.train.max_steps_per_rollout_epoch", 1)
    if not isinstance(trajectories, int):
        return LeftOut("`algorithm.learning_starts` counts environment steps")
    note = f"counts environment steps: {trajectories} trajectories x {length}, at least 1"
    return new(f"{_AT}.learning_starts", max(1, trajectories * length), note)


def computes_in_fp32(leaf: Leaf, values: Values) -> Result:
    plain = precision(leaf, values, "actor.model.precision")
    written = getattr(plain, "value", None)
    if getattr(written, "raw", written) == "fp32":
        return plain
    return new("actor.model.precision", "fp32", "`loss_type: sac` computes in fp32")
