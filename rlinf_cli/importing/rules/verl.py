"""Rules for keys of verl's files, including its advantages, losses, importance corrections, and teachers."""

from __future__ import annotations

import re
from typing import Any, Final, cast

from rlinf_cli.importing.rules.shared import Leaf, LeftOut, Result, Values, new, same
from rlinf_core.config.tree import format_path

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
