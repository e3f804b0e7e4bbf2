"""The waits of components for each other in the steps of a run, and the tail of its answers' lengths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rlinf_cli.runs.metric_columns import NEWEST, MetricColumn
from rlinf_core.runners.storage.profile import CallsOfSize

# Another placement is predicted within 4 % of its step, and at worst 10 %: a wait below that is no sure gain.
MATTERS: Final = 0.1
# Answers that a percentile needs.
_FEWEST_ANSWERS: Final = 100
_STEP, _GENERATE, _ENGINE, _ANSWER = "time/step", "time/generate_rollouts", "engine/step", "answer"
_ENV, _ROLLOUT, _ACTOR = "env", "rollout", "actor"
_PARTNERS: Final = {_ENV: _ROLLOUT, _ROLLOUT: _ENV}

Units = Mapping[str, Collection[tuple[int, int | None]]]
"""What each component's processes are on: nodes, each with an accelerator or None."""


class ComponentWait(NamedTuple):
    """A component that waits for another.

    Attributes:
        who, whom: the two; `whom` may be no component, as in `scores and messages`.
        share: the part of a step that it waits.
        source: what shows it.
        in_turns: whether it has no hardware that the other does not have: then they take turns, and none is idle.
    """

    who: str
    whom: str
    share: float
    source: str
    in_turns: bool = False

    @property
    def matters(self) -> bool:
        """Whether hardware is idle for longer than predictions of other placements err."""
        return self.share >= MATTERS and not self.in_turns

    @property
    def words(self) -> str:
        """The wait in words: `actor waits for rollout for 61 % of a step`."""
        turns = ", in turns on the same hardware" if self.in_turns else ""
        return f"{self.who} waits for {self.whom} for {self.share:.0%} of a step{turns}".replace("%", " %")


class LengthTail(NamedTuple):
    """Lengths of answers, in tokens, and what the longest cost.

    Attributes:
        middle, percentile, longest: half of the answers are no longer, 99 % are, and the longest one.
        last, of: the number of an engine's answers that are the longest 1 %, at least one, and the whole number.
        generation: the part of the engines' time in which no others are left.
        step: the same as a part of a step.
    """

    middle: float
    percentile: float
    longest: float
    last: int
    of: int
    generation: float
    step: float

    @property
    def matters(self) -> bool:
        """Whether other answers meanwhile would be a sure gain."""
        return self.step >= MATTERS

    @property
    def cost(self) -> str:
        """The cost of the longest in words."""
        which = "1 %" if self.last > 1 else f"1 of {self.of}"
        shares = f"{self.generation:.0%} of generation, {self.step:.0%} of a step".replace("%", " %")
        return f"the longest {which} of answers take {shares}"

    @property
    def lengths(self) -> str:
        """The lengths in words."""
        return f"tokens of an answer: median {self.middle:.0f}, p99 {self.percentile:.0f}, longest {self.longest:.0f}"


def waits_of(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize], units: Units) -> list[ComponentWait]:
    """Return who waits for whom in the newest steps, the longest first.

    Args:
        columns: the metrics of the run.
        calls: the timed calls of its processes.
        units: what each component's processes are on; a component that it lacks is on hardware of its own.
    """
    waits = [
        wait._replace(in_turns=_in_turns(wait, units)) for wait in _every_wait(columns, calls) if wait.share >= 0.005
    ]
    return sorted(waits, key=lambda wait: (wait.in_turns, -wait.share))


def _in_turns(wait: ComponentWait, units: Units) -> bool:
    own, others = units.get(wait.who), units.get(wait.whom)
    if own is None:
        return False
    # What is no component leaves accelerators idle, and processors to others.
    return all(unit is None for _, unit in own) if others is None else set(own) <= set(others)


def _every_wait(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize]) -> Iterator[ComponentWait]:
    step = _recent(columns, _STEP)
    if not step:
        return
    for who, whom in _PARTNERS.items():
        name = f"time/{who}/wait"
        if name in columns:
            yield ComponentWait(who, whom, _recent(columns, name) / step, name)
    if "speed/env_idle" in columns:
        for who in (_ENV, _ROLLOUT):
            yield ComponentWait(who, _ACTOR, _recent(columns, "speed/env_idle"), "speed/env_idle")
    if "speed/learner_idle" in columns:
        yield ComponentWait(_ACTOR, _ROLLOUT, _recent(columns, "speed/learner_idle"), "speed/learner_idle")
        return
    if _GENERATE not in columns:
        return
    generate = _recent(columns, _GENERATE) / step
    yield ComponentWait(_ACTOR, _ROLLOUT, generate, _GENERATE)
    if "rollout/in_flight" in columns:
        return
    yield ComponentWait(_ROLLOUT, _ACTOR, 1 - generate, _GENERATE)
    steps = [row for row in calls if row.phase == _ENGINE]
    seconds = sum(map(sum, (columns[name].values for name in (_STEP, "time/evaluate") if name in columns)))
    if steps and seconds:
        busy = sum(row.seconds for row in steps) / max(row.processes for row in steps) / seconds
        whom = "tools, scores and messages" if "agent/turns" in columns else "scores and messages"
        yield ComponentWait(_ROLLOUT, whom, max(0.0, generate - busy), f"{_ENGINE} of profile.json")


def tail_of(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize]) -> LengthTail | None:
    """Return the tail of the lengths of a run's answers; None for a run without, or with too few."""
    answers = sorted((row.rows, row.calls) for row in calls if row.phase == _ANSWER)
    number = sum(calls for _, calls in answers)
    steps = [row for row in calls if row.phase == _ENGINE and row.rows]
    step = _recent(columns, _STEP)
    if number < _FEWEST_ANSWERS or not steps or not step:
        return None
    # Every step begins with all of its answers; an evaluation may have more, and there are few of them.
    often = [row.rows for row in steps if row.calls * 2 >= len(columns[_STEP])]
    of = round(max(often or [row.rows for row in steps]))
    last = max(1, of // 100)
    whole = sum(row.seconds for row in steps)
    share = sum(row.seconds for row in steps if row.rows <= last) / whole if whole else 0.0
    middle, percentile = (_percentile(answers, part * number) for part in (0.5, 0.99))
    return LengthTail(middle, percentile, answers[-1][0], last, of, share, share * _recent(columns, _GENERATE) / step)


def _percentile(sizes: Sequence[tuple[float, int]], wanted: float) -> float:
    seen = 0
    for size, number in sizes:
        seen += number
        if seen >= wanted:
            return size
    return sizes[-1][0]


def _recent(columns: Mapping[str, MetricColumn], name: str) -> float:
    return columns[name].last(NEWEST).mean() if name in columns else 0.0
