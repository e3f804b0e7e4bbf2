"""Rules for keys of verl's files."""

from __future__ import annotations

import re
from typing import Final

from rlinf_cli.importing.outcomes import Leaf, LeftOut
from rlinf_cli.importing.rules.rules_verl_algorithm import ALGORITHM
from rlinf_cli.importing.rules.shared_rules import (
    EVALUATING,
    HYDRA,
    SAVING,
    Result,
    Rule,
    Table,
    Values,
    betas,
    drop,
    loggers,
    new,
    offload,
    same,
    steps_or_never,
    to,
    top_k,
    training_backend,
)
from rlinf_core.config.tree import format_path

_ACTOR: Final = "actor_rollout_ref.actor"
_FOLDER: Final = "a folder, or a name of the HuggingFace Hub; nothing is fetched from HDFS"
_MODEL: Final = "actor_rollout_ref.model"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_REF: Final = "actor_rollout_ref.ref"
# Sections that moved between verl's versions.
_SCORERS: Final = ("custom_reward_function", "reward.custom_reward_function")
_OVERLONG: Final = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
# Columns of pictures and videos by verl's default, which rows without any lack.
_PICTURES: Final = ("images", "videos")
# Engine arguments that verl mixes with its own keys.
_VLLM_OPTIONS: Final = (
    "enforce_eager",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "disable_log_stats",
)


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
    """Return the inference engine."""
    return str(values.get(f"{_ROLLOUT}.name", "vllm"))


def _kl(path: str, *, in_loss: bool) -> Rule:
    def rule(leaf: Leaf, values: Values) -> Result:
        asked = kl_in_loss(values) if in_loss else kl_in_reward(values) and not kl_in_loss(values)
        key = "use_kl_loss" if in_loss else "use_kl_in_reward"
        if asked:
            return same(path, leaf)
        if not in_loss and kl_in_loss(values):
            return LeftOut("`use_kl_loss` sets weight and estimator: there is one KL divergence")
        return LeftOut(f"without `{key}` it has no effect", quiet=True)

    return rule


def _use_kl_loss(leaf: Leaf, values: Values) -> Result:
    if kl_in_loss(values):
        return LeftOut("`algorithm.kl_beta` above 0 adds the KL divergence to the loss", quiet=True)
    return LeftOut("`algorithm.kl_beta` is 0 by default", quiet=True)


def _use_kl_in_reward(leaf: Leaf, values: Values) -> Result:
    if kl_in_reward(values) and kl_in_loss(values):
        return LeftOut("the KL divergence is either in the loss or in the rewards; `use_kl_loss` puts it in the loss")
    return same("algorithm.kl_in_reward", leaf)


def _mini_batch(leaf: Leaf, values: Values) -> Result:
    prompts, answers = values.of(leaf), values.get(f"{_ROLLOUT}.n", 1)
    if not isinstance(prompts, int) or not isinstance(answers, int):
        return LeftOut("its product with `rollout.n` is unknown: `actor.global_batch_size` counts answers")
    return new(
        "actor.global_batch_size",
        prompts * answers,
        f"counts answers here: {prompts} prompts x {answers} answers",
    )


def _clip_ratio(leaf: Leaf, values: Values) -> Result:
    if values.get(f"{_ACTOR}.clip_ratio_low") is not None or values.get(f"{_ACTOR}.clip_ratio_high") is not None:
        return LeftOut("`clip_ratio_low` and `clip_ratio_high` hold", quiet=True)
    return same("algorithm.ratio_clip_eps", leaf)


def _norm_adv(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) is False and values.get("algorithm.adv_estimator") == "grpo":
        return LeftOut("implied by `adv_type: dr_grpo`", quiet=True)
    return LeftOut("`adv_type` decides whether advantages are divided by the standard deviation", quiet=True)


def _refills(leaf: Leaf, values: Values) -> Result:
    batches = values.of(leaf)
    if not values.get("algorithm.filter_groups.enable", False):
        return LeftOut("without `filter_groups` it has no effect", quiet=True)
    if not isinstance(batches, int) or batches < 1:
        return new("algorithm.max_refills", 16, "0 means no limit in verl; here a step ends after 16 refills")
    return new("algorithm.max_refills", batches - 1, "counts the batches after the first")


def lora_of(path: str, section: str = _MODEL) -> Rule:
    """Return the rule for a setting of adapters, which are off with rank 0."""

    def rule(leaf: Leaf, values: Values) -> Result:
        if not values.get(f"{section}.lora_rank", 0):
            return LeftOut("`lora_rank: 0` trains all weights", quiet=True)
        if values.of(leaf) == "all-linear":
            return LeftOut("all linear layers are the default of `actor.model.lora.target_modules`", quiet=True)
        return same(path, leaf)

    return rule


def nested_lora(name: str, section: str = _MODEL) -> Rule:
    """Return the rule for `model.lora`, the section of verl's Megatron trainer, which is off with rank 0."""

    def rule(leaf: Leaf, values: Values) -> Result:
        if not values.get(f"{section}.lora.rank", 0):
            return LeftOut("`lora.rank: 0` trains all weights", quiet=True)
        if name == "target_modules":
            return LeftOut("the names are of Megatron's layers; all linear layers are the default here", quiet=True)
        return same(f"actor.model.lora.{name}", leaf)

    return rule


def model_folder(path: str) -> Rule:
    """Return the rule for the folder of a model."""

    def rule(leaf: Leaf, values: Values) -> Result:
        return same(path, leaf, _FOLDER)

    return rule


def _rollout_name(leaf: Leaf, values: Values) -> Result:
    written = values.of(leaf)
    if written == "hf":
        return new("rollout.backend", "torch", "`hf` becomes our own torch engine")
    return same("rollout.backend", leaf)


def _of_gpu_engines(path: str) -> Rule:
    def rule(leaf: Leaf, values: Values) -> Result:
        if engine(values) not in ("vllm", "sglang"):
            return LeftOut("the torch engine has no such setting", quiet=True)
        return same(path, leaf)

    return rule


def _vllm_option(name: str) -> Rule:
    def rule(leaf: Leaf, values: Values) -> Result:
        if engine(values) != "vllm":
            return LeftOut(f"it is an argument of vLLM: `rollout.engine_options` takes arguments of `{engine(values)}`")
        if values.of(leaf) is None:
            return LeftOut("null leaves it to the engine", quiet=True)
        return same(f"rollout.engine_options.{name}", leaf)

    return rule


def _overlong(section: str) -> Rule:
    """Return the rule for the tokens over which an answer near the limit is punished."""

    def rule(leaf: Leaf, values: Values) -> Result:
        if not values.get(f"{section}.enable", False):
            return LeftOut("the overlong buffer is not enabled", quiet=True)
        factor = values.get(f"{section}.penalty_factor", 1)
        note = f"the punishment grows to 1 here, to {factor} in verl" if factor != 1 else None
        return same("reward.soft_overlong", leaf, note)

    return rule


def _reward_model(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf):
        return same("reward.use_reward_model", leaf)
    return LeftOut("no model rewards", quiet=True)


def _resume(leaf: Leaf, values: Values) -> Result:
    if values.get("trainer.resume_mode") == "resume_path" and values.of(leaf):
        return same("runner.resume_dir", leaf, "names an rlinf checkpoint; verl checkpoints are not supported")
    return LeftOut("`runner.resume_dir` names an rlinf checkpoint; verl checkpoints are not supported", quiet=True)


def _resume_mode(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "auto":
        return new(
            "runner.resume_dir", "auto", "continues from an rlinf checkpoint; verl checkpoints are not supported"
        )
    return LeftOut(
        "`runner.resume_dir` names a checkpoint to continue from; without it a run starts at step 0", quiet=True
    )


def _scorer(leaf: Leaf, values: Values) -> Result:
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


def _ppo_micro_batch(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) is None:
        return LeftOut("null leaves it to `max_tokens_per_micro_batch`", quiet=True)
    return LeftOut("`actor.micro_batch_size` counts the answers of a pass on one rank, not on all ranks")


def steps_of(path: str, otherwise: str) -> Rule:
    """Return the rule for a number of steps that may be negative, which means `otherwise`."""

    def rule(leaf: Leaf, values: Values) -> Result:
        steps = values.of(leaf)
        if steps is None or (isinstance(steps, int) and steps < 0):
            return LeftOut(otherwise, quiet=True)
        return same(path, leaf)

    return rule


def _warmup_steps(path: str) -> Rule:
    return steps_of(path, "a negative number leaves it to `lr_warmup_steps_ratio`")


def _total_steps(path: str) -> Rule:
    return steps_of(path, "the run's last step is the default")


def _of_pictures(leaf: Leaf, values: Values) -> Result:
    """Keep a column of pictures of a model that reads them: the result is wrong until somebody decides."""
    sees = re.search(r"(?i)(?:^|[-_./\d])vl(?:[-_./]|$)", str(values.get(f"{_MODEL}.path", "")))
    if sees or values.of(leaf) not in (*_PICTURES, None):
        return same(leaf.name, leaf)
    return LeftOut("models of text alone are trained", quiet=True)


VERL: Final[Table] = {
    **HYDRA,
    **ALGORITHM,
    "actor_rollout_ref.hybrid_engine": drop(
        "`cluster.component_placement` decides which components share accelerators"
    ),
    f"{_ACTOR}.strategy": training_backend,
    "critic.strategy": training_backend,
    f"{_REF}.strategy": drop("the reference model is sharded like the actor"),
    f"{_ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{_ACTOR}.ppo_micro_batch_size": _ppo_micro_batch,
    "critic.ppo_micro_batch_size": _ppo_micro_batch,
    f"{_ACTOR}.clip_ratio": _clip_ratio,
    f"{_ACTOR}.use_kl_loss": _use_kl_loss,
    f"{_ACTOR}.kl_loss_coef": _kl("algorithm.kl_beta", in_loss=True),
    f"{_ACTOR}.kl_loss_type": _kl("algorithm.kl_penalty", in_loss=True),
    f"{_ACTOR}.optim.betas": betas("actor.optim"),
    "critic.optim.betas": betas("critic.optim"),
    f"{_ACTOR}.optim.lr_warmup_steps": _warmup_steps("actor.optim.lr_warmup_steps"),
    f"{_ACTOR}.optim.total_training_steps": _total_steps("actor.optim.total_training_steps"),
    "critic.optim.lr_warmup_steps": _warmup_steps("critic.optim.lr_warmup_steps"),
    "critic.optim.total_training_steps": _total_steps("critic.optim.total_training_steps"),
    f"{_ACTOR}.fsdp_config.param_offload": offload("actor.fsdp_config.cpu_offload"),
    f"{_ACTOR}.fsdp_config.optimizer_offload": offload("actor.fsdp_config.cpu_offload"),
    "critic.model.fsdp_config.param_offload": offload("critic.fsdp_config.cpu_offload"),
    "critic.model.fsdp_config.optimizer_offload": offload("critic.fsdp_config.cpu_offload"),
    "critic.model.path": to("critic.model.model_path", _FOLDER),
    "critic.model.tokenizer_path": drop("the critic reads the tokens of the actor"),
    "critic.model.enable_gradient_checkpointing": to("critic.fsdp_config.gradient_checkpointing"),
    f"{_REF}.fsdp_config.param_offload": drop("the reference model stays on its accelerator"),
    f"{_MODEL}.path": model_folder("actor.model.model_path"),
    f"{_MODEL}.tokenizer_path": model_folder("actor.tokenizer.tokenizer_model"),
    f"{_MODEL}.enable_gradient_checkpointing": to("actor.fsdp_config.gradient_checkpointing"),
    f"{_MODEL}.lora_rank": lora_of("actor.model.lora.rank"),
    f"{_MODEL}.lora_alpha": lora_of("actor.model.lora.alpha"),
    f"{_MODEL}.target_modules": lora_of("actor.model.lora.target_modules"),
    **{f"{_MODEL}.lora.{name}": nested_lora(name) for name in ("rank", "alpha", "target_modules")},
    f"{_ROLLOUT}.name": _rollout_name,
    f"{_ROLLOUT}.top_k": top_k("rollout.sampling_params.top_k"),
    f"{_ROLLOUT}.val_kwargs.n": to("data.val_samples", "1 decodes greedily; more are sampled as in training"),
    f"{_ROLLOUT}.gpu_memory_utilization": _of_gpu_engines("rollout.gpu_memory_utilization"),
    f"{_ROLLOUT}.tensor_model_parallel_size": _of_gpu_engines("rollout.tensor_parallel_size"),
    f"{_ROLLOUT}.free_cache_engine": to(
        "rollout.enable_offload", "frees the engine's memory while the actor trains, weights included"
    ),
    f"{_ROLLOUT}.prompt_length": drop("`data.max_prompt_length` is the longest prompt"),
    f"{_ROLLOUT}.response_length": drop("`rollout.sampling_params.max_new_tokens` is the longest answer"),
    **{f"{_ROLLOUT}.{name}": _vllm_option(name) for name in _VLLM_OPTIONS},
    "algorithm.norm_adv_by_std_in_grpo": _norm_adv,
    "algorithm.use_kl_in_reward": _use_kl_in_reward,
    "algorithm.kl_penalty": _kl("algorithm.kl_penalty", in_loss=False),
    "algorithm.kl_ctrl.kl_coef": _kl("algorithm.kl_beta", in_loss=False),
    "algorithm.filter_groups.enable": to("algorithm.filter_groups"),
    "algorithm.filter_groups.max_num_gen_batches": _refills,
    "algorithm.filter_groups.metric": drop("groups whose rewards are all equal are dropped"),
    **{f"{section}.len": _overlong(section) for section in _OVERLONG},
    "reward_model.enable": _reward_model,
    "reward.reward_model.enable": _reward_model,
    "data.image_key": _of_pictures,
    "data.video_key": _of_pictures,
    "trainer.logger": loggers("runner.logger.logger_backends"),
    "trainer.save_freq": steps_or_never("runner.save_interval", SAVING),
    "trainer.test_freq": steps_or_never("runner.val_check_interval", EVALUATING),
    "trainer.total_training_steps": steps_or_never("runner.max_steps"),
    "trainer.default_local_dir": drop("every run gets its own folder below `runner.logger.log_path`"),
    "trainer.resume_from_path": _resume,
    "trainer.resume_mode": _resume_mode,
    **{f"{section}.path": _scorer for section in _SCORERS},
    **{f"{section}.name": drop("part of `reward.reward_type`", quiet=True) for section in _SCORERS},
    "data.train_files": to("data.train_data_paths"),
    "data.val_files": to("data.val_data_paths"),
}
