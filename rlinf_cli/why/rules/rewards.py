"""Rewards and advantages from which nothing can be learned."""

from __future__ import annotations

from typing import Final

from rlinf_cli.why.facts import RunFacts, is_constant
from rlinf_cli.why.finding import FindingKind, RunFinding

_STEPS: Final = 5
_EQUAL: Final = "rollout/groups_equal"
_FAILED: Final = "failed/"
# Shares of answers.
_MANY: Final = 0.2
_RIGHT: Final = 0.999
_CUT: Final = 0.9


def reward_never_varies(facts: RunFacts) -> RunFinding | None:
    """Find a reward that is the same for every answer or episode since the first step."""
    spread = facts.column("rollout/reward_std")
    rewards = facts.column("rollout/reward")
    if len(spread):
        constant = max(spread.values) == 0.0 and is_constant(rewards)
    else:
        # A reward for each step is the same in passes of equal length, though episodes differ.
        returns = facts.column("env/return")
        constant = len(returns) >= _STEPS and is_constant(returns) and is_constant(rewards)
    if not constant or len(rewards) < _STEPS:
        return None
    value = rewards.values[-1]
    return RunFinding(
        FindingKind.LEARNING,
        "reward-never-varies",
        f"the reward never varies: it is {value:.6g} for all",
        (f"metrics.jsonl: `rollout/reward` is {value:.6g} in all {len(rewards)} steps",),
        (
            "score a right and a wrong answer, or a good and a bad episode, by hand: the reward must tell them apart;"
            " one that is found by chance alone needs an easier start or a reward for parts of the way",
        ),
        step=rewards.steps[0],
    )


def groups_are_equal(facts: RunFacts) -> RunFinding | None:
    """Find that all answers to a prompt have had equal rewards since a step, without being right."""
    equal, right = facts.column(_EQUAL), facts.column("rollout/correct", "rollout/reward")
    since = equal.since(1.0, 1.0)
    if since is None or equal.steps[-1] - since + 1 < _STEPS or (len(right) and right.values[-1] >= _RIGHT):
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "groups-equal",
        f"since step {since} all answers to a prompt have the same reward, so none is better than another",
        (f"metrics.jsonl: `{_EQUAL}` is 1 from step {since} to {equal.steps[-1]}",),
        ("use problems that are sometimes solved, a larger `algorithm.group_size`, or a higher temperature",),
        step=since,
    )


def reward_fails(facts: RunFacts) -> RunFinding | None:
    """Find a reward that cannot score many of the answers."""
    answers = (facts.number("data.rollout_batch_size") or 0) * (facts.number("algorithm.group_size") or 1)
    kinds = {name: column for name, column in facts.columns.items() if name.startswith(_FAILED)}
    last = {name: column for name, column in kinds.items() if column.steps and column.steps[-1] >= facts.step - 1}
    failed = sum(column.values[-1] for column in last.values())
    if not answers or failed < _MANY * answers:
        return None
    kind, column = max(last.items(), key=lambda item: item[1].values[-1])
    return RunFinding(
        FindingKind.LEARNING,
        "reward-fails",
        f"the reward fails: {failed:.0f} of {answers:.0f} answers of a step could not be scored",
        (f"metrics.jsonl: `{kind}` is {column.values[-1]:.0f} in step {column.steps[-1]}",),
        ("score one answer by hand with the same function; `rlinf report --samples` shows answers with the reasons",),
        step=column.steps[0],
    )


def advantages_are_constant(facts: RunFacts) -> RunFinding | None:
    """Find advantages that are all the same."""
    spread = facts.column("rollout/advantages_std")
    since = spread.since(0.0, 0.0)
    if since is None or spread.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "advantages-constant",
        "all advantages are the same, so no action is better than another",
        (f"metrics.jsonl: `rollout/advantages_std` is 0 from step {since} to {spread.steps[-1]}",),
        (
            "look at the reward, and at `algorithm.adv_type`: advantages within a group need members that end"
            " differently",
        ),
        step=since,
    )


def answers_are_cut(facts: RunFacts) -> RunFinding | None:
    """Find that nearly all answers end at the limit of tokens."""
    cut = facts.column("rollout/truncated")
    since = cut.since(_CUT, 1.0)
    if since is None or cut.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "answers-truncated",
        "nearly all answers are cut off at the limit of tokens before they end",
        (f"metrics.jsonl: `rollout/truncated` is {cut.values[-1]:.2f} in step {cut.steps[-1]}",),
        ("raise `rollout.sampling_params.max_new_tokens`, or see that the model knows its token of the end",),
        step=since,
    )


RULES: Final = (reward_never_varies, groups_are_equal, reward_fails, advantages_are_constant, answers_are_cut)
