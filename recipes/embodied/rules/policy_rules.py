"""Rules of the policy and of how it learns: `actor.model`, running statistics, and off-policy losses.

Policies' models validate `actor.model.options`; rules of single off-policy algorithms are in their classes.
"""

from __future__ import annotations

from typing import Final

from recipes.embodied.config import EmbodiedConfig, PolicyJob
from recipes.embodied.config.algorithm_config import DEFAULT_BATCH, PolicyGradientConfig
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.config.model_config import MODEL_OPTIONS, RANDOM_LEROBOT
from recipes.embodied.models.folder_facts import lerobot_type, published_horizon
from recipes.embodied.off_policy.algorithm import LOSS, algorithm_of
from recipes.sections.checks import Report, WorldSizes
from recipes.sections.imports import runs_in_this_interpreter
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, install_command, missing_modules


def check_off_policy(config: EmbodiedConfig, world_sizes: WorldSizes, report: Report) -> None:
    """Report settings that are incompatible with off-policy learning."""
    algorithm_of(config.algorithm).check(config, report)
    actors, loss = world_sizes.get("actor") or 1, config.algorithm.loss_type
    _check_sources(config, report)
    fsdp = config.actor.fsdp_config
    if actors > 1 and fsdp.sharding_strategy != "no_shard":
        report(
            ("actor", "fsdp_config", "sharding_strategy"),
            "conflicting-settings",
            f"`loss_type: {loss}` replicates all weights on each of {actors} actors",
            "write `sharding_strategy: no_shard`",
            about=[LOSS],
        )
    batch = config.actor.global_batch_size or DEFAULT_BATCH
    if batch % actors:
        report(
            ("actor", "global_batch_size"),
            "batch-not-divisible",
            f"a batch of {batch} transitions cannot be split evenly over {actors} actors",
            f"write `global_batch_size: {batch // actors * actors or actors}`",
        )
    for path, is_set in (
        (("actor", "enable_offload"), config.actor.enable_offload),
        (("actor", "fsdp_config", "gradient_checkpointing"), fsdp.gradient_checkpointing),
        (("actor", "model", "compile"), config.actor.model.compile),
    ):
        if is_set:
            message = f"`loss_type: {loss}` does not support `{path[-1]}`"
            report(path, "conflicting-settings", message, "remove it: policy and critics are small", about=[LOSS])
    if config.actor.model.precision != "fp32":
        message = f"`loss_type: {loss}` computes in fp32"
        report(("actor", "model", "precision"), "conflicting-settings", message, "write `fp32`", about=[LOSS])


def _check_sources(config: EmbodiedConfig, report: Report) -> None:
    """Require demonstrations, and no interventions, of losses that learn from records alone."""
    loss = config.algorithm.loss_type
    if not algorithm_of(config.algorithm).records_alone:
        return
    if not config.data.train_data_paths:
        report(
            ("data", "train_data_paths"),
            "missing-key",
            f"`loss_type: {loss}` learns from recorded transitions alone, but none are named",
            "name LeRobotDataset folders or HDF5 files with rewards; `rlinf record` creates them",
            about=[LOSS],
        )
    if config.env.train.intervention.source != NONE:
        report(
            ("env", "train", "intervention", "source"),
            "conflicting-settings",
            f"`loss_type: {loss}` does not learn from what happens in the run",
            "remove it, or write `loss_type: td3`",
            about=[LOSS],
        )


def check_model_options(config: PolicyJob, report: Report) -> None:
    """Report options of the policy that do not fit its other keys."""
    ours = MODEL_OPTIONS.get(config.actor.model.model_type)
    if ours is not None and "action_horizon" in ours.model_fields:
        _check_horizon(config, report)


def _check_horizon(config: PolicyJob, report: Report) -> None:
    """Report that more actions are executed than the model predicts."""
    model = config.actor.model
    configured = model.options.get("action_horizon")
    published = published_horizon(model.model_path) if configured is None and model.model_path else None
    horizon = configured if isinstance(configured, int) else published
    if horizon is None or model.num_action_chunks <= horizon:
        return
    source = f"the model in `{model.model_path}`" if configured is None else "the model"
    report.conflict(
        "actor.model.num_action_chunks actor.model.options.action_horizon",
        f"{source} predicts {horizon} actions, but `num_action_chunks` is {model.num_action_chunks}",
        f"write `num_action_chunks: {horizon}` or less; or, to train it to predict more,"
        f" `options: {{action_horizon: {model.num_action_chunks}}}`",
        about="actor.model.model_path",
    )


_ENSEMBLE: Path = ("actor", "model", "options", "ensemble")


def check_ensemble(config: PolicyJob, report: Report) -> None:
    """Report a policy that predicts no step twice, or whose predictions cannot be averaged."""
    model = config.actor.model
    if not model.options.get("ensemble"):
        return
    if model.options.get("relative_actions"):
        report(
            _ENSEMBLE,
            "conflicting-settings",
            "temporal ensembling needs absolute actions: those of two chunks are relative to different states",
            "remove it",
            about=[("actor", "model", "options", "relative_actions")],
        )
    published = published_horizon(model.model_path) if model.model_path else None
    is_own = ":" in model.model_type
    horizon = model.options.get("action_horizon") or published or (None if is_own else model.num_action_chunks)
    kind = lerobot_type(model) if model.model_type == "lerobot" else None
    if kind not in (None, *RANDOM_LEROBOT):
        report(
            _ENSEMBLE,
            "conflicting-settings",
            f"temporal ensembling averages one prediction of each step, and lerobot's `{kind}` draws them",
            f"use {' or '.join(f'`{name}`' for name in RANDOM_LEROBOT)}, or remove it",
            about=[("actor", "model", "options", "type")],
        )
    elif isinstance(horizon, int) and horizon <= model.num_action_chunks and model.model_type != "lerobot":
        report(
            _ENSEMBLE,
            "conflicting-settings",
            f"temporal ensembling averages predictions of a step, but all {horizon} actions of a chunk are carried out"
            " before the next one",
            "write `num_action_chunks: 1`, as in ACT, with `options: {action_horizon: ...}`",
            about=[("actor", "model", "num_action_chunks")],
        )


_NORMALIZE: Path = ("algorithm", "normalize_observations")
# Policies that normalize states before they act, and learn from normalized ones.
_NORMALIZING = ("mlp_policy", "cnn_policy", "squashed_policy")


def check_running_statistics(config: EmbodiedConfig, algorithm: PolicyGradientConfig, report: Report) -> None:
    """Report settings with which states cannot be normalized by running statistics."""
    if not algorithm.normalize_observations:
        return
    model, runner = config.actor.model.model_type, config.runner
    if model not in _NORMALIZING and ":" not in model:  # a custom model reports at its start whether it does
        report(
            _NORMALIZE,
            "conflicting-settings",
            f"`{model}` does not take running statistics of states",
            f"remove it, or use {' or '.join(f'`{name}`' for name in _NORMALIZING)}",
            about=[("actor", "model", "model_type")],
        )
    if algorithm.bc_weight:
        report(
            _NORMALIZE,
            "conflicting-settings",
            "demonstrations bring their own statistics (`data.normalization`)",
            "remove it, or `algorithm.bc_weight`",
            about=[("algorithm", "bc_weight")],
        )
    if runner.staleness:
        report(
            _NORMALIZE,
            "conflicting-settings",
            "with `runner.max_staleness` samples were normalized by older statistics than those that are known",
            "remove one of the two: `runner.max_staleness`, or `algorithm.normalize_observations`",
            about=[("runner", "max_staleness")],
        )


# The package that a model needs besides torch.
_PACKAGES: Final = {
    **dict.fromkeys(("pi0", "pi05", "openvla", "openvla_oft"), "transformers"),
    **dict.fromkeys(("smolvla", "lerobot"), "lerobot"),
}
_TYPE: Final[Path] = ("actor", "model", "model_type")
_PRECISION: Final[Path] = ("actor", "model", "precision")


def check_lerobot(config: PolicyJob, report: Report) -> None:
    """Report an interpreter without the package of a model, and settings that no policy of lerobot supports."""
    model = config.actor.model
    _check_packages(config, report)
    if model.model_type != "lerobot":
        return
    if model.precision != "fp32":
        report(
            _PRECISION,
            "conflicting-settings",
            "lerobot's policies create fp32 tensors internally, which weights of another dtype cannot take",
            "remove it; to compute in bf16, write `actor.fsdp_config.mixed_precision.param_dtype: bf16`",
            about=[_TYPE],
        )
    if isinstance(config, EmbodiedConfig) and not config.runner.only_eval:
        _check_density(config, report)


def _check_packages(config: PolicyJob, report: Report) -> None:
    model = config.actor.model
    named = _PACKAGES.get(model.model_type)
    needed = [] if named is None else [named] if model.adapter() is None else [named, "peft"]
    components = [name for name in ("actor", "rollout") if name in config.cluster.component_placement]
    here = next((name for name in components if runs_in_this_interpreter(config, name)), None)
    missing = missing_modules(needed) if here is not None else []
    if not missing:
        return
    help = f"run `{install_command(*missing)}`"
    if "lerobot" in missing:
        help = (
            "create an environment with `pip install lerobot` and this rlinf, and name it as"
            " `python_interpreter_path` in `env_configs` of the node group of actor and rollout"
            " (docs/models.md)"
        )
    report(
        _TYPE,
        "missing-extra",
        f"`{model.model_type}` needs the package `{missing[0]}`, {absence(missing[0])}, where `{here}` runs",
        help,
    )


def _check_density(config: EmbodiedConfig, report: Report) -> None:
    """Report a policy that rewards cannot train."""
    kind = lerobot_type(config.actor.model)
    if kind is None or kind in RANDOM_LEROBOT:
        return
    own = {"pi0": "pi0", "pi05": "pi05", "smolvla": "smolvla"}.get(kind)
    report(
        _TYPE,
        "conflicting-settings",
        f"lerobot's `{kind}` gives no probability of its actions, which learning from rewards needs",
        f"write `model_type: {own}`, which reads the same folder and has one"
        if own
        else f"train it by `recipe: sft`, use {' or '.join(f'`{name}`' for name in RANDOM_LEROBOT)}, or"
        " `model_type: flow_policy`, which denoises actions, too, and learns from rewards",
        about=[("actor", "model", "options", "type"), ("actor", "model", "model_path")],
    )
