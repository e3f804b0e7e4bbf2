"""Rules for keys of verl's files; last its advantages, losses, corrections for other policies, and teachers."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final, cast

from rlinf_cli.importing.rules.shared import (
    Leaf,
    LeftOut,
    Result,
    Table,
    Values,
    drop,
    new,
    same,
    steps_or_never,
    to,
)
from rlinf_core.config.tree import format_path

_ACTOR: Final = "actor_rollout_ref.actor"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
# Columns of pictures and videos by verl's default, which rows without any lack.
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
    """Return the inference engine: SGLang's keys are those of vLLM, which takes its place."""
    name = str(values.get(f"{_ROLLOUT}.name", "vllm"))
    return "vllm" if name == "sglang" else name


def divergence_in_loss(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert a setting of the divergence in the loss."""
    return same(to, leaf) if kl_in_loss(values) else LeftOut("without `use_kl_loss` it has no effect", quiet=True)


def divergence_in_reward(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert a setting of the divergence in the rewards."""
    if kl_in_loss(values):
        return LeftOut("`use_kl_loss` sets weight and estimator: there is one KL divergence")
    if kl_in_reward(values):
        return same(to, leaf)
    return LeftOut("without `use_kl_in_reward` it has no effect", quiet=True)


def use_kl_loss(leaf: Leaf, values: Values) -> Result:
    if kl_in_loss(values):
        return LeftOut("`algorithm.kl_beta` above 0 adds the KL divergence to the loss", quiet=True)
    return LeftOut("`algorithm.kl_beta` is 0 by default", quiet=True)


def use_kl_in_reward(leaf: Leaf, values: Values) -> Result:
    if kl_in_reward(values) and kl_in_loss(values):
        return LeftOut("the KL divergence is either in the loss or in the rewards; `use_kl_loss` puts it in the loss")
    return same("algorithm.kl_in_reward", leaf)


def mini_batch(leaf: Leaf, values: Values) -> Result:
    prompts, answers = values.of(leaf), values.get(f"{_ROLLOUT}.n", 1)
    if not isinstance(prompts, int) or not isinstance(answers, int):
        return LeftOut("its product with `rollout.n` is unknown: `actor.global_batch_size` counts answers")
    return new(
        "actor.global_batch_size",
        prompts * answers,
        f"counts answers here: {prompts} prompts x {answers} answers",
    )


def clip_ratio(leaf: Leaf, values: Values) -> Result:
    if values.get(f"{_ACTOR}.clip_ratio_low") is not None or values.get(f"{_ACTOR}.clip_ratio_high") is not None:
        return LeftOut("`clip_ratio_low` and `clip_ratio_high` hold", quiet=True)
    return (same("algorithm.clip_ratio_low", leaf), same("algorithm.clip_ratio_high", leaf))


def norm_adv(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) is False and values.get("algorithm.adv_estimator") == "grpo":
        return LeftOut("implied by `adv_type: dr_grpo`", quiet=True)
    return LeftOut("`adv_type` decides whether advantages are divided by the standard deviation", quiet=True)


def refills(leaf: Leaf, values: Values) -> Result:
    batches = values.of(leaf)
    if not values.get("algorithm.filter_groups.enable", False):
        return LeftOut("without `filter_groups` it has no effect", quiet=True)
    if not isinstance(batches, int) or batches < 1:
        return new("algorithm.max_refills", 16, "0 means no limit in verl; here a step ends after 16 refills")
    return new("algorithm.max_refills", batches - 1, "counts the batches after the first")


def lora(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert a setting of adapters, which are off with rank 0."""
    if not values.get(f"{format_path(leaf.path[:-1])}.lora_rank", 0):
        return LeftOut("`lora_rank: 0` trains all weights", quiet=True)
    if values.of(leaf) == "all-linear":
        return LeftOut("all linear layers are the default of `actor.model.lora.target_modules`", quiet=True)
    return same(to, leaf)


def nested_lora(leaf: Leaf, values: Values) -> Result:
    """Take over `model.lora`, the section of verl's Megatron trainer, which is off with rank 0."""
    if not values.get(f"{format_path(leaf.path[:-1])}.rank", 0):
        return LeftOut("`lora.rank: 0` trains all weights", quiet=True)
    if leaf.path[-1] == "target_modules":
        return LeftOut("the names are of Megatron's layers; all linear layers are the default here", quiet=True)
    return same(f"actor.model.lora.{leaf.path[-1]}", leaf)


def of_gpu_engines(leaf: Leaf, values: Values, to: str) -> Result:
    if engine(values) != "vllm":
        return LeftOut("the torch engine has no such setting", quiet=True)
    return same(to, leaf)


def vllm_option(leaf: Leaf, values: Values) -> Result:
    """Take over an argument of vLLM, which verl mixes with its own keys."""
    if engine(values) != "vllm":
        return LeftOut(f"it is an argument of vLLM: `rollout.engine_options` takes arguments of `{engine(values)}`")
    if values.of(leaf) is None:
        return LeftOut("null leaves it to the engine", quiet=True)
    return same(f"rollout.engine_options.{leaf.path[-1]}", leaf)


def overlong(leaf: Leaf, values: Values) -> Result:
    """Take over the tokens over which an answer near the limit is punished."""
    section = format_path(leaf.path[:-1])
    if not values.get(f"{section}.enable", False):
        return LeftOut("the overlong buffer is not enabled", quiet=True)
    factor = values.get(f"{section}.penalty_factor", 1)
    note = f"the punishment grows to 1 here, to {factor} in verl" if factor != 1 else None
    return same("reward.soft_overlong", leaf, note)


def resume(leaf: Leaf, values: Values) -> Result:
    if values.get("trainer.resume_mode") == "resume_path" and values.of(leaf):
        return same("runner.resume_dir", leaf, "names an rlinf checkpoint; verl checkpoints are not supported")
    return LeftOut("`runner.resume_dir` names an rlinf checkpoint; verl checkpoints are not supported", quiet=True)


def resume_mode(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "auto":
        return new(
            "runner.resume_dir", "auto", "continues from an rlinf checkpoint; verl checkpoints are not supported"
        )
    return LeftOut(
        "`runner.resume_dir` names a checkpoint to continue from; without it a run starts at step 0", quiet=True
    )


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


def ppo_micro_batch(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) is None:
        return LeftOut("null leaves it to `max_tokens_per_micro_batch`", quiet=True)
    return LeftOut("`actor.micro_batch_size` counts the answers of a pass on one rank, not on all ranks")


def steps_of(leaf: Leaf, values: Values, to: str, otherwise: str) -> Result:
    """Convert a number of steps that may be negative, which means `otherwise`."""
    steps = values.of(leaf)
    if steps is None or (isinstance(steps, int) and steps < 0):
        return LeftOut(otherwise, quiet=True)
    return same(to, leaf)


def pictures_of_verl(leaf: Leaf, values: Values) -> Result:
    """Keep a column of pictures of a model that reads them: the result is wrong until somebody decides."""
    sees = re.search(r"(?i)(?:^|[-_./\d])vl(?:[-_./]|$)", str(values.get(f"{_MODEL}.path", "")))
    if sees or values.of(leaf) not in (*_PICTURES, None):
        return same(leaf.name, leaf)
    return LeftOut("models of text alone are trained", quiet=True)


def epochs_or_steps(leaf: Leaf, values: Values, to: str) -> Result:
    """Convert an interval in steps, which verl may also give as `after_each_epoch`."""
    written = values.of(leaf)
    if isinstance(written, str):
        return LeftOut(f"`{written}` is not a number of steps: `{to}` counts training steps")
    return steps_or_never(leaf, values, to)


def truncation(leaf: Leaf, values: Values) -> Result:
    written = values.of(leaf)
    if written == "right":
        return new("data.overlong", "truncate", "a conversation that is too long is cut off at its end")
    if written == "left":
        return LeftOut("a conversation that is too long is skipped, or cut off at its end: `data.overlong`")
    return new("data.overlong", "skip", "a conversation that is too long is skipped and counted; verl fails")


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
        f"{_TEACHERS}.{teachers(values)[0]}.model_path": partial(
            to, to="teacher.model_path", note="a folder here, with the tokens of the actor's tokenizer"
        ),
        f"{_DISTILLATION}.loss_max_clamp": partial(drop, reason="the divergence of a token is not bounded"),
        f"{_DISTILLATION}.log_prob_min_clamp": partial(drop, reason="the log-probability of a token is not bounded"),
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
