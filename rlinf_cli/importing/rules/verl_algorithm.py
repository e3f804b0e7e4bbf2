"""Rules for verl's advantages, losses, corrections for other policies, and teachers."""

from __future__ import annotations

from typing import Any, Final, cast

from rlinf_cli.importing.outcomes import Leaf, LeftOut
from rlinf_cli.importing.rules.shared import Result, Table, Values, drop, new, same, to

_ACTOR: Final = "actor_rollout_ref.actor"
_CORRECTION: Final = "algorithm.rollout_correction"
_DISTILLATION: Final = "distillation.distillation_loss"
_TEACHERS: Final = "distillation.teacher_models"
_BY_SEQUENCE: Final = "seq-mean-token-mean"
# Losses that verl averages by sequence whatever the file says, and those without a dual clip, by their names there.
_SEQUENCE_LOSSES: Final = ("gspo", "geo_mean", "sapo")
_UNCLIPPED_LOSSES: Final = ("geo_mean", "sapo", "cispo")


def _loss(values: Values) -> str:
    return str(values.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla"))


def teachers(values: Values) -> list[str]:
    """Return the names of the teachers that a file gives a folder; `teacher_model` counts only without others."""
    models = values.get(_TEACHERS, {})
    entries = cast("dict[str, Any]", models) if isinstance(models, dict) else {}
    folders = {name: cast("dict[str, Any]", entry) for name, entry in entries.items() if isinstance(entry, dict)}
    names = [name for name, entry in folders.items() if entry.get("model_path")]
    others = [name for name in names if name != "teacher_model"]
    return others or names


def distills(values: Values) -> bool:
    """Return whether a file learns from one teacher as `adv_type: distillation` does: by a token's log-ratio to it, as
    a reward, and from no other reward.
    """
    loss = {key: values.get(f"{_DISTILLATION}.{key}") for key in ("loss_mode", "use_policy_gradient")}
    return (
        bool(values.get("distillation.enabled", False))
        and loss == {"loss_mode": "k1", "use_policy_gradient": True}
        and not values.get(f"{_DISTILLATION}.use_task_rewards", True)
        and len(teachers(values)) == 1
    )


def teacher_rules(values: Values) -> Table:
    """Return the rules of a teacher's keys, whose names a file chooses."""
    if not distills(values):
        return {}
    return {
        f"{_TEACHERS}.{teachers(values)[0]}.model_path": to(
            "teacher.model_path", "a folder here, with the tokens of the actor's tokenizer"
        ),
        f"{_DISTILLATION}.loss_max_clamp": drop("the divergence of a token is not bounded"),
        f"{_DISTILLATION}.log_prob_min_clamp": drop("the log-probability of a token is not bounded"),
    }


def distillation(leaf: Leaf, values: Values) -> Result:
    if not values.of(leaf):
        return LeftOut("no teacher is distilled from", quiet=True)
    if not distills(values):
        return same(leaf.name, leaf)
    note = "`k1` as a reward, without task rewards, is `distillation`: the teacher is the only training signal"
    return new("algorithm.adv_type", "distillation", note)


def adv_estimator(leaf: Leaf, values: Values) -> Result:
    written = values.of(leaf)
    if distills(values):
        return LeftOut("the teacher is the only training signal: `adv_type: distillation`", quiet=True)
    alone = values.get("actor_rollout_ref.rollout.n", 1) == 1 and values.get("algorithm.gamma", 1) == 1
    if written in ("grpo", "rloo") and alone and not values.get("algorithm.use_kl_in_reward", False):
        note = f"`{written}` of groups of one has no baseline: the reward is the advantage, as here without a mean"
        return (
            new("algorithm.adv_type", "reinforce_pp", note),
            new("algorithm.normalize_advantages", False),
        )
    if written == "grpo" and not values.get("algorithm.norm_adv_by_std_in_grpo", True):
        return new("algorithm.adv_type", "dr_grpo", "`norm_adv_by_std_in_grpo: false` with GRPO is `dr_grpo` here")
    return same("algorithm.adv_type", leaf)


def loss_agg_mode(leaf: Leaf, values: Values) -> Result:
    if _loss(values) in _SEQUENCE_LOSSES and values.of(leaf) != _BY_SEQUENCE:
        note = f"verl's {_loss(values)} ignores `{values.of(leaf)}` and averages by sequence"
        return new("algorithm.loss_agg_func", _BY_SEQUENCE, note)
    return same("algorithm.loss_agg_func", leaf)


def dual_clip(leaf: Leaf, values: Values) -> Result:
    if _loss(values) == "gspo":
        return new("algorithm.clip_ratio_c", None, "verl's gspo has no dual clip")
    if _loss(values) in _UNCLIPPED_LOSSES:
        return LeftOut(f"`loss_type: {_loss(values)}` has no dual clip", quiet=True)
    return same("algorithm.clip_ratio_c", leaf)


def bound(leaf: Leaf, values: Values) -> Result:
    """Take over a bound of the ratio."""
    key = str(leaf.path[-1])
    if _loss(values) == "sapo":
        return LeftOut("`loss_type: sapo` has a soft gate in the place of a clip", quiet=True)
    written = values.of(leaf)
    if key == "clip_ratio_low" and _loss(values) == "cispo" and isinstance(written, int | float) and written > 1:
        return new(f"algorithm.{key}", 1, f"no ratio is below 0: 1 bounds nothing, as {written:g} does")
    return same(f"algorithm.{key}", leaf)


def tau(leaf: Leaf, values: Values) -> Result:
    """Take over a parameter of SAPO's gate, which stands at one of two places."""
    key = str(leaf.path[-1])
    if _loss(values) != "sapo":
        return LeftOut("it belongs to `loss_type: sapo`", quiet=True)
    own = f"{_ACTOR}.policy_loss.{key}"
    if leaf.name != own and values.get(own) is not None:
        return LeftOut(f"`policy_loss.{key}` holds", quiet=True)
    return same(f"algorithm.{key}", leaf)


def _bypasses(values: Values) -> bool:
    return bool(values.get(f"{_CORRECTION}.bypass_mode", False))


def recomputes(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) is None:
        return LeftOut("null corrects for no other policy", quiet=True)
    if _bypasses(values):
        return LeftOut("with `bypass_mode` ratios are to the policy that drew the tokens, as they are here", quiet=True)
    return (
        new("algorithm.recompute_logprobs", True, "verl takes ratios to the trainer's own log-probabilities"),
        new("algorithm.correction_level", "sequence" if values.of(leaf) == "sequence" else "token"),
    )


def tis(leaf: Leaf, values: Values) -> Result:
    if values.get(f"{_CORRECTION}.rollout_is") is None:
        return LeftOut("without `rollout_is` samples count as they are", quiet=True)
    if _bypasses(values):
        return LeftOut("with `bypass_mode` the ratio of the loss corrects for the engine", quiet=True)
    written = values.of(leaf)
    if isinstance(written, str) and "_" in written:
        low, _, high = written.partition("_")
        return (new("algorithm.reject_ratio_low", float(low)), new("algorithm.reject_ratio_high", float(high)))
    return same("algorithm.tis_cap", leaf)


def rejects(leaf: Leaf, values: Values) -> Result:
    """Take over a rejection of tokens by the bounds of their ratio; other criteria are not there."""
    written = values.of(leaf)
    if written is None:
        return LeftOut("null rejects no sample", quiet=True)
    if _bypasses(values):
        return LeftOut("samples are rejected by ratios to recomputed log-probabilities, which `bypass_mode` leaves out")
    names = [name.strip("'\" ") for name in str(written).split(",")]
    limits = [limit.strip("'\" ") for limit in str(values.get(f"{_CORRECTION}.rollout_rs_threshold", "")).split(",")]
    low, _, high = dict(zip(names, limits, strict=False)).get("token_k1", "").partition("_")
    if not high:
        return LeftOut("`reject_ratio_low` and `reject_ratio_high` bound the ratio of a token, or of a sequence's mean")
    others = [name for name in names if name != "token_k1"]
    note = f"not taken over: {', '.join(others)}" if others else None
    return (new("algorithm.reject_ratio_low", float(low), note), new("algorithm.reject_ratio_high", float(high)))


def loss_mode(leaf: Leaf, values: Values) -> Result:
    """Name REINFORCE with weights of its own, which stands in for the loss that the key names."""
    if _bypasses(values) and values.get(f"{_CORRECTION}.loss_type") == "reinforce":
        return new("algorithm.loss_type", "reinforce", f"`rollout_correction.loss_type` replaces `{values.of(leaf)}`")
    return same("algorithm.loss_type", leaf)
