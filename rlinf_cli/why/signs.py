"""The table of signs: metrics by which a run does not learn, and what each says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rlinf_cli.why.finding import Rule, Sign
from rlinf_cli.why.sign_rules import (
    CLIPPED,
    CUT,
    KL,
    NORM,
    RATE,
    SET_ASIDE,
    STEPS,
    TRUNCATED,
    contact_differs,
    entropy_collapsed,
    environment_raises,
    evaluated_answers_cut,
    evaluated_on_training,
    gradients_clipped_away,
    items_set_aside,
    left_out,
    not_finite,
    not_solved,
    policy_does_not_change,
    precision,
    reward_collapsed,
    reward_fails,
    reward_never_varies,
    staleness_at_bound,
)

SIGNS: Final[Sequence[Rule]] = (
    not_finite,
    Sign(
        "updates-skipped",
        "train/actor/skipped_updates",
        *(1.0, math.inf, STEPS),
        "losses or gradients are NaN or infinite in every step, and those updates are left out",
        "`runner.on_nonfinite: stop` names the first number that is not finite; lower `actor.optim.lr`",
    ),
    Sign(
        "observations-constant",
        "rollout/observations_std",
        *(0.0, 0.0, STEPS),
        "all observations are the same, so the policy acts without seeing anything",
        "look at what the environment returns, at its camera, and at the statistics of the normalization",
    ),
    evaluated_on_training,
    contact_differs,
    items_set_aside,
    reward_never_varies,
    Sign(
        "groups-equal",
        "rollout/groups_equal",
        *(1.0, 1.0, STEPS),
        "since step {since} all answers to a prompt have the same reward, so none is better than another",
        "use problems that are sometimes solved, a larger `algorithm.group_size`, or a higher temperature",
        when=not_solved,
    ),
    reward_fails,
    Sign(
        "advantages-constant",
        "rollout/advantages_std",
        *(0.0, 0.0, STEPS),
        "all advantages are the same, so no action is better than another",
        "look at the reward, and at `algorithm.adv_type`: advantages within a group need members that end differently",
    ),
    Sign(
        "answers-truncated",
        "rollout/truncated",
        *(CUT, 1.0, STEPS),
        "nearly all answers are cut off at the limit of tokens before they end",
        TRUNCATED,
    ),
    Sign(
        "learning-rate-zero",
        RATE,
        *(0.0, 0.0, 3),
        "the learning rate is 0, and the policy does not change",
        "set `actor.optim.lr`",
        when=lambda streak: streak.whole,
    ),
    Sign(
        "learning-rate-zero",
        RATE,
        *(0.0, 0.0, 3),
        "the learning rate fell to 0",
        "let `actor.optim.total_training_steps` be the length of the run, or set `actor.optim.min_lr_ratio`",
        when=lambda streak: not streak.whole,
    ),
    gradients_clipped_away,
    # Biases that begin at 0 change by any update.
    Sign(
        "updates-rounded-away",
        "train/actor/weights_changed",
        *(0.0, 0.2, STEPS),
        "the updates are rounded away: weights that have gradients stay as they are",
        "raise `actor.optim.lr`, or keep the weights that are trained in fp32 (`actor.model.precision: fp32`)",
        when=lambda streak: streak.facts.column(RATE).since(0.0, 0.0) is None,
        shown=precision,
    ),
    Sign(
        "no-gradient",
        NORM,
        *(0.0, 0.0, STEPS),
        "gradients are zero: no training data changes a weight",
        "look at the rewards, at `algorithm` (weights of the losses), and at what of the model is frozen",
    ),
    # Mean differences of log-probabilities by equal weights are below 0.02 in bf16, and below 1e-4 in fp32.
    Sign(
        "engine-has-other-weights",
        "train/logprob_gap/mean",
        *(0.05, math.inf, 3),
        "engine and trainer do not have the same weights, or not the same model: by equal versions of the weights their"
        " log-probabilities differ by {value:.3g} on the mean, by {first:.3g} in the first step",
        "`rollout.check_logprobs: strict` ends the run at the first step that differs; compare precision, adapter and"
        " version of the engine",
    ),
    Sign(
        "all-clipped",
        CLIPPED,
        *(0.8, 1.0, STEPS),
        "nearly all samples are clipped: the policy moves away from the one that drew them at the first update",
        "lower `actor.optim.lr` or `algorithm.update_epoch`; where it is so from the first step on, the"
        " log-probabilities of rollout and training differ",
    ),
    # Of log-probabilities of a step's samples, in nats: good runs have 0.0001 to 0.05.
    Sign(
        "policy-jumps",
        KL,
        *(1.0, math.inf, STEPS),
        "each step moves the policy far away from the one that drew its samples: the divergence is {value:.3g}, and"
        " below 0.1 in good runs",
        "lower `actor.optim.lr` or `algorithm.update_epoch`, or bound gradients by `actor.optim.clip_grad`; a"
        " checkpoint before that step is still good",
    ),
    policy_does_not_change,
    entropy_collapsed,
    reward_collapsed,
    staleness_at_bound,
    environment_raises,
    left_out,
    evaluated_answers_cut,
)

# What follows from a cause is not a second one.
FOLLOWS: Final[Mapping[str, frozenset[str]]] = {
    cause: frozenset(followers.split())
    for cause, followers in {
        "reward-never-varies": "groups-equal advantages-constant no-gradient policy-does-not-change",
        "right-answers-fail": "reward-never-varies groups-equal reward-fails",
        "groups-equal": "advantages-constant no-gradient policy-does-not-change",
        "advantages-constant": "no-gradient policy-does-not-change",
        "learning-rate-zero": "updates-rounded-away policy-does-not-change",
        "updates-rounded-away": "policy-does-not-change",
        "no-gradient": "policy-does-not-change",
        "answers-truncated": "reward-never-varies groups-equal",
        "reward-fails": "reward-never-varies groups-equal reward-collapsed left-out",
        "not-finite": "reward-collapsed",
        "updates-skipped": "not-finite",
        "engine-has-other-weights": "all-clipped policy-jumps reward-collapsed",
        "policy-jumps": "all-clipped entropy-collapsed reward-collapsed",
        "entropy-collapsed": "reward-collapsed groups-equal advantages-constant no-gradient",
        "gradients-clipped-away": "updates-rounded-away policy-does-not-change",
        SET_ASIDE: "reward-fails",
    }.items()
}
