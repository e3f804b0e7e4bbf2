"""Weights that do not change, or do not reach the policy that acts."""

from __future__ import annotations

from typing import Final

from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding

# A sign must hold for so many steps.
_STEPS: Final = 5
_SCHEDULE_STEPS: Final = 3
_CHANGED: Final = "train/actor/weights_changed"
_RATE: Final = "train/actor/lr"
_NORM: Final = "train/actor/grad_norm"
_GAP: Final = "train/logprob_gap/mean"
# Mean differences of log-probabilities by equal weights are below 0.02 in bf16, and below 1e-4 in fp32.
_LARGEST_GAP: Final = 0.05
# Biases that begin at 0 change by any update.
_FEWEST_CHANGED: Final = 0.2
# A bound that leaves less of a gradient makes steps of the optimizer that its own constants outweigh.
_LEAST_LEFT: Final = 1e-6


def rate_is_zero(facts: RunFacts) -> RunFinding | None:
    """Find a learning rate that is 0 while the run goes on."""
    rates = facts.column(_RATE)
    since = rates.since(0.0, 0.0)
    if since is None or rates.steps[-1] - since + 1 < _SCHEDULE_STEPS:
        return None
    whole = since == rates.steps[0]
    return RunFinding(
        FindingKind.LEARNING,
        "learning-rate-zero",
        "the learning rate is 0, and the policy does not change" if whole else "the learning rate fell to 0",
        (f"metrics.jsonl: `{_RATE}` is 0 from step {since} to {rates.steps[-1]}",),
        (
            "set `actor.optim.lr`"
            if whole
            else "let `actor.optim.total_training_steps` be the length of the run, or set `actor.optim.min_lr_ratio`",
        ),
        step=since,
    )


def updates_are_rounded_away(facts: RunFacts) -> RunFinding | None:
    """Find updates that are too small to change weights of this precision."""
    changed, rates = facts.column(_CHANGED), facts.column(_RATE)
    since = changed.since(0.0, _FEWEST_CHANGED)
    if since is None or rates.since(0.0, 0.0) is not None or changed.steps[-1] - since + 1 < _STEPS:
        return None
    rate = f"; `{_RATE}` is {rates.values[-1]:.3g}" if len(rates) else ""
    precision = facts.text("actor.model.precision")
    finer = (
        "" if precision == "fp32" else "keep the weights that are trained in fp32 (`actor.model.precision: fp32`), or "
    )
    return RunFinding(
        FindingKind.LEARNING,
        "updates-rounded-away",
        "the updates are rounded away: weights that have gradients stay as they are",
        (
            f"metrics.jsonl: `{_CHANGED}` is {changed.values[-1]:.3g} in step {changed.steps[-1]}, and below"
            f" {_FEWEST_CHANGED:g} since step {since}{rate}",
            *([f"config.yaml: `actor.model.precision` is {precision}"] if precision else []),
        ),
        (f"{finer}raise `actor.optim.lr`",),
        step=since,
    )


def gradients_are_clipped_away(facts: RunFacts) -> RunFinding | None:
    """Find a bound of the gradient that leaves next to nothing of it."""
    bound, norms = facts.number("actor.optim.clip_grad"), facts.column(_NORM)
    largest = max((norm for norm in norms.values if norm == norm), default=0.0)
    if not bound or len(norms) < _STEPS or min(norms.values[-_STEPS:]) * _LEAST_LEFT < bound or not largest:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "gradients-clipped-away",
        f"gradients are clipped to nothing: `actor.optim.clip_grad` is {bound:g}, their norm up to {largest:.3g}",
        (
            f"config.yaml: `actor.optim.clip_grad` is {bound:g}",
            f"metrics.jsonl: `{_NORM}` is {norms.values[-1]:.3g} in step {norms.steps[-1]}, before clipping",
        ),
        ("set `actor.optim.clip_grad` near the usual norm, such as 1",),
        step=norms.steps[0],
    )


def no_gradient(facts: RunFacts) -> RunFinding | None:
    """Find training without gradients."""
    norms = facts.column(_NORM)
    since = norms.since(0.0, 0.0)
    if since is None or norms.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "no-gradient",
        "gradients are zero: no training data changes a weight",
        (f"metrics.jsonl: `{_NORM}` is 0 from step {since} to {norms.steps[-1]}",),
        ("look at the rewards, at `algorithm` (weights of the losses), and at what of the model is frozen",),
        step=since,
    )


def engine_has_other_weights(facts: RunFacts) -> RunFinding | None:
    """Find an engine whose log-probabilities are not those of the trainer's weights."""
    gaps = facts.column(_GAP)
    since = gaps.since(_LARGEST_GAP, float("inf"))
    if since is None or gaps.steps[-1] - since + 1 < _SCHEDULE_STEPS:
        return None
    grows = since > gaps.steps[0]
    return RunFinding(
        FindingKind.LEARNING,
        "engine-has-other-weights",
        "the engine stays behind: the trainer's new weights do not arrive in it"
        if grows
        else "engine and trainer do not have the same weights, or not the same model",
        (
            f"metrics.jsonl: by equal versions of the weights their log-probabilities differ by"
            f" {gaps.values[-1]:.3g} on the mean (`{_GAP}`), by {gaps.values[0]:.3g} in step {gaps.steps[0]}",
        ),
        (
            "`rollout.check_logprobs: strict` ends the run at the first step that differs; compare precision, adapter"
            " and version of the engine",
        ),
        step=since,
    )


RULES: Final = (
    rate_is_zero,
    gradients_are_clipped_away,
    updates_are_rounded_away,
    no_gradient,
    engine_has_other_weights,
)
