"""Verdicts on disturbed runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.chaos.judge import RunVerdict, judge, reference_of
from tests.chaos.outcomes import RunEnding, Struck
from tests.chaos.strike_plan import Strike

METRICS = ({"loss": 1.0, "time/step": 3.0, "memory/actor_gib": 1.0}, {"loss": math.nan, "time/step": 4.0})


def outcome(**changes: Any) -> RunEnding:
    """Of a run of two steps that nothing was wrong with."""
    fields: dict[str, Any] = {
        "code": 0,
        "status": "finished",
        "reason": "",
        "steps": (1, 2),
        "metrics": METRICS,
        "digests": {"2/actor/.metadata": "x", "2/actor/0.distcp": "a"},
        "why": (),
        "struck": (struck(),),
        "left": (),
        "bugs": (),
        "seconds": 9.0,
    }
    return RunEnding(**{**fields, **changes})


def struck(fault: str = "kill-worker", victim: str = "EnvGroup:0", **changes: Any) -> Struck:
    return Struck(Strike(fault, 1, 0.1, 0.5), victim, 77, 100.0, 1, **changes)


OTHER = outcome(
    digests={"2/actor/.metadata": "y", "2/actor/0.distcp": "a"},
    metrics=({"loss": 1.0, "time/step": 5.0, "memory/actor_gib": 1.0}, {"loss": math.nan, "time/step": 6.0}),
)
REFERENCE = reference_of(outcome(), OTHER, 5.0)
BY_CHANCE = reference_of(outcome(), outcome(digests={"2/actor/0.distcp": "b"}), 5.0)
KILLED = ("killed-by-signal", "`EnvGroup:0` was killed by SIGKILL")
NO_RAY = ("cluster", "the cluster refused: Ray does not start on this machine")
FAILED = {"code": 1, "status": "failed", "why": (KILLED,)}
CASES: dict[str, tuple[dict[str, Any], RunVerdict, str]] = {
    "same": ({}, RunVerdict.EQUAL, ""),
    "times differ": ({"metrics": OTHER.metrics}, RunVerdict.EQUAL, ""),
    "other memory": ({"metrics": ({**METRICS[0], "memory/actor_gib": 2.0}, METRICS[1])}, RunVerdict.EQUAL, ""),
    "other weights": ({"digests": {"2/actor/0.distcp": "b"}}, RunVerdict.WRONG, "differ: 2/actor/0.distcp"),
    "other loss": ({"metrics": ({"loss": 2.0}, METRICS[1])}, RunVerdict.WRONG, "step 1 differ: loss 2.0 not 1.0"),
    "step missing": ({"steps": (2,)}, RunVerdict.WRONG, "its steps are 2 to 2, not 1 to 2"),
    "step twice": ({"steps": (1, 1, 2)}, RunVerdict.WRONG, "its steps are [1, 1, 2]"),
    "not hit": ({"struck": (struck(victim=""),)}, RunVerdict.UNTOUCHED, ""),
    "named": (FAILED, RunVerdict.EXPLAINED, ""),
    "another named": ({**FAILED, "why": (("died", "`RewardGroup:0` died"),)}, RunVerdict.UNEXPLAINED, "RewardGroup"),
    "nothing named": ({**FAILED, "why": ()}, RunVerdict.UNEXPLAINED, "`rlinf why` says: nothing"),
    "ended by itself": ({**FAILED, "struck": (), "reason": "bad"}, RunVerdict.WRONG, "nothing was hit"),
    "no Ray at first": ({**FAILED, "struck": (), "why": (NO_RAY,)}, RunVerdict.EXPLAINED, ""),
    "no Ray later": (
        {**FAILED, "struck": (struck("kill-driver", "driver"),), "why": (NO_RAY,)},
        *(RunVerdict.EXPLAINED, ""),
    ),
    "no Ray again": ({**FAILED, "why": (NO_RAY,)}, RunVerdict.UNEXPLAINED, "cluster refused"),
    "success of a failure": ({"status": "failed"}, RunVerdict.WRONG, "its exit code is 0, and the run is failed"),
    "hung": ({"code": None, "status": "running"}, RunVerdict.HUNG, "neither went on nor ended"),
    "left": ({"left": ("process 5",)}, RunVerdict.UNCLEAN, "left behind: process 5"),
    "bug": ({"bugs": ("this is a bug in rlinf",)}, RunVerdict.UNCLEAN, "printed: this is a bug"),
    "frozen, named": ({"struck": (struck("freeze-worker", named=7.0),)}, RunVerdict.EQUAL, ""),
    "frozen, not named": ({"struck": (struck("freeze-worker"),)}, RunVerdict.UNEXPLAINED, "not named: EnvGroup:0"),
    "frozen, then ended": ({"struck": (struck("freeze-worker", gone=True),)}, RunVerdict.EQUAL, ""),
    "raylet": (
        {**FAILED, "struck": (struck("kill-raylet", "raylet"),), "why": (("node-lost", "the machine"),)},
        *(RunVerdict.EXPLAINED, ""),
    ),
    "no room": (
        {**FAILED, "struck": (struck("fill-actor"),), "why": (("disk-full", "No space left"),)},
        *(RunVerdict.EXPLAINED, ""),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    changes, expected, words = CASES[case]
    verdict, why = judge(outcome(**changes), REFERENCE)
    assert verdict == expected
    assert words in why
    assert bool(why) == bool(words)


def test_results_by_chance_are_not_compared() -> None:
    assert (REFERENCE.comparable, BY_CHANCE.comparable) == (True, False)
    assert judge(outcome(digests={"2/actor/0.distcp": "c"}), BY_CHANCE) == (RunVerdict.RIGHT, "")
    assert judge(outcome(steps=(1,)), BY_CHANCE)[0] == RunVerdict.WRONG


@pytest.mark.parametrize(
    ("fault", "restarts", "verdict"),
    [
        ("kill-worker", 1, RunVerdict.WRONG),
        ("kill-worker", 0, RunVerdict.EXPLAINED),
        ("fill-actor", 50, RunVerdict.EXPLAINED),
    ],
)
def test_run_with_restarts_left_must_not_end(fault: str, restarts: int, verdict: RunVerdict) -> None:
    why = ("disk-full", "No space left") if fault == "fill-actor" else KILLED
    ended = outcome(code=1, status="failed", why=(why,), struck=(struck(fault),), reason="the job has ended")
    inputs, words = judge(ended, REFERENCE, restarts)
    assert inputs == verdict
    assert ("the job has ended" in words) == (verdict == RunVerdict.WRONG)
