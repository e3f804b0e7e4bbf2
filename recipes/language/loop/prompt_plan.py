"""The plan of when prompts are answered and for which training step, without any processes.

Every training step learns from a batch of prompts that were reserved for it before any was answered. The batches of
`max_staleness` later steps may be answered at the same time. A prompt for step s is answered by weights of at least the
version of step s minus `max_staleness`, so that no token is older when it is trained on, and none is discarded for its
age. The prompts of a step do not depend on speed, so short answers are not preferred to long ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from recipes.language.answers.prompt_messages import GroupReport, Prompt
from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data.problems import problem_number
from rlinf_core.runners.events import ItemFate, ItemFates, item_fates
from rlinf_core.runners.metrics import mean


class _Measured(NamedTuple):
    """The share of right answers to a problem, and how often the problem was skipped since."""

    rate: float
    passed_over: int = 0


class Curriculum:
    """A filter that skips training problems that were too easy or too hard for the policy when last asked.

    A problem that was never asked is asked. A problem whose share of right answers was outside the bounds is skipped
    `rests` times, and then asked again, as the policy has changed. If all problems would be skipped, the next one is
    asked.

    Args:
        low, high: inclusive bounds of the share of right answers.
        problems: the number of problems.
        seed, shuffle: the seed and shuffle of the order of problems.
        rests: how often a problem is skipped before it is asked again.

    Attributes:
        passed_over: the number of skips so far, for metrics.
    """

    def __init__(self, *, low: float, high: float, problems: int, seed: int, shuffle: bool, rests: int = 3) -> None:
        self._bounds = low, high
        self._rests = rests
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._measured: dict[int, _Measured] = {}
        self.passed_over = 0

    def next_position(self, start: int) -> int:
        """Return the first position from `start` on whose problem is to be asked."""
        for position in range(start, start + self._problems):
            problem = problem_number(self._problems, position, seed=self._seed, shuffle=self._shuffle)
            measured = self._measured.get(problem)
            low, high = self._bounds
            if measured is None or low <= measured.rate <= high or measured.passed_over >= self._rests:
                return position
            self._measured[problem] = measured._replace(passed_over=measured.passed_over + 1)
            self.passed_over += 1
        return start

    def observe(self, report: GroupReport) -> None:
        """Record the share of right answers of a training group."""
        if report.step and report.corrects:
            self._measured[report.problem] = _Measured(mean([float(right) for right in report.corrects]))

    def state(self) -> dict[str, Any]:
        """Return the state as plain data for JSON."""
        return {
            "passed_over": self.passed_over,
            "measured": [[problem, *measured] for problem, measured in self._measured.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`."""
        self.passed_over = int(state["passed_over"])
        self._measured = {
            int(problem): _Measured(float(rate), int(rests)) for problem, rate, rests in state["measured"]
        }


def make_curriculum(data: LanguageDataConfig, problems: int) -> Curriculum | None:
    """Return the curriculum for this number of training problems; None if `data.curriculum` is not set."""
    settings = data.curriculum
    if settings is None or not problems:
        return None
    return Curriculum(
        low=settings.low,
        high=settings.high,
        problems=problems,
        seed=data.seed,
        shuffle=data.reshuffles,
    )


# The minimum limit of refills for a place whose group lost too many answers to failed scoring.
_SPOILED_REFILLS: Final = 4


class _Place(NamedTuple):
    """A place in a batch: position of the problem, number of refills, whether answers are shown, and whether a
    checkpoint has unfinished answers.
    """

    position: int
    refill: int = 0
    shown: bool = False
    begun: bool = False


@dataclass
class _Batch:
    """The prompts of one training step.

    Attributes:
        waiting: the places whose prompts were not handed out yet.
        places: the places whose prompts were handed out, by slot.
        workers: the ranks that are answering, by slot.
        reports: the reports of the groups that have arrived, by slot.
    """

    step: int
    waiting: list[_Place] = field(default_factory=list[_Place])
    places: dict[int, _Place] = field(default_factory=dict[int, _Place])
    workers: dict[int, int] = field(default_factory=dict[int, int])
    reports: dict[int, GroupReport] = field(default_factory=dict[int, GroupReport])


class Restored(NamedTuple):
    """The prompts restored from a checkpoint.

    Attributes:
        slots: the slots of finished groups, which wait to be trained on.
        continued: the positions of problems whose unfinished answers continue.
        again: the number of prompts that are answered from the start.
        fates: the names of the prompts by their fates.
    """

    slots: tuple[int, ...]
    continued: tuple[int, ...]
    again: int
    fates: ItemFates


class PromptPlan:
    """A plan that hands out prompts, and collects reports of their answers until the batch of a step is complete.

    A further prompt replaces a group that is not kept, up to `max_refills` times for each place of a batch; if too few
    answers could be scored, that limit is at least `_SPOILED_REFILLS`. In synchronous mode (`max_staleness` 0),
    replacements are handed out when all other groups have arrived, so that it does not depend on time which prompts are
    answered together.

    Args:
        batch_size: the number of prompts of a training step.
        max_staleness: how many versions a token may lag behind the weights that learn from it.
        max_refills: the maximum refills of a place whose group is not kept.
        workers: the number of processes that answer; each prompt goes to the least loaded.
        answers: the number of answers to each prompt.
        temperature: the sampling temperature.
        shown: returns the number of groups of a step whose samples are written.

    Attributes:
        taken: the number of training problems used so far, including skipped ones.
        curriculum: the filter of problems; None: every problem is asked.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        max_refills: int,
        workers: int,
        answers: int,
        temperature: float,
        shown: Callable[[int], int] = lambda step: 0,
    ) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_refills = max_refills
        self._workers = workers
        self._answers = answers
        self._temperature = temperature
        self._shown = shown
        self._batches: dict[int, _Batch] = {}
        self._free: list[int] = []
        self._slots = itertools.count()
        self.taken = 0
        self.curriculum: Curriculum | None = None

    @property
    def in_flight(self) -> int:
        """Number of prompts that are being answered or scored."""
        return sum(len(batch.workers) for batch in self._batches.values())

    @property
    def under_way(self) -> frozenset[int]:
        """Positions of the problems whose answers are not scored yet."""
        return frozenset(batch.places[slot].position for batch in self._batches.values() for slot in batch.workers)

    def given_to(self, workers: Collection[int]) -> list[Prompt]:
        """Return the training prompts that these processes answer now."""
        return [
            Prompt(slot, batch.places[slot].position, batch.step, worker, self._answers, self._temperature)
            for batch in self._batches.values()
            for slot, worker in batch.workers.items()
            if worker in workers
        ]

    @property
    def buffered(self) -> tuple[int, ...]:
        """Slots of the groups that wait to be trained on, ascending."""
        slots = [report.slot for batch in self._batches.values() for report in batch.reports.values() if report.kept]
        return tuple(sorted(slots))

    def due(self, steps: range, version: int) -> list[Prompt]:
        """Return the prompts to hand out now.

        Args:
            steps: the steps whose batches may be answered: the next step to train, and later ones.
            version: the version of the weights at the first of `steps`.
        """
        prompts: list[Prompt] = []
        for step in steps:
            if step not in self._batches:
                self._begin(step)
            batch = self._batches[step]
            if not self._max_staleness and batch.workers:
                continue
            oldest = max(0, version + (step - steps.start) - self._max_staleness)
            waiting, batch.waiting = batch.waiting, []
            prompts += [self._hand_out(batch, place, oldest) for place in waiting]
        return prompts

    def _begin(self, step: int) -> None:
        shown = self._shown(step)
        places = [_Place(self._set_aside(), 0, index < shown) for index in range(self._batch_size)]
        self._batches[step] = _Batch(step, places)

    def _set_aside(self) -> int:
        """Return the position of the next problem."""
        position = self.taken if self.curriculum is None else self.curriculum.next_position(self.taken)
        self.taken = position + 1
        return position

    def _hand_out(self, batch: _Batch, place: _Place, version: int) -> Prompt:
        slot = heapq.heappop(self._free) if self._free else next(self._slots)
        load = Counter(worker for planned in self._batches.values() for worker in planned.workers.values())
        worker = min(range(self._workers), key=lambda rank: (load[rank], rank))
        batch.places[slot] = place
        batch.workers[slot] = worker
        return Prompt(
            slot,
            place.position,
            batch.step,
            worker,
            self._answers,
            self._temperature,
            version,
            shown=place.shown,
            begun=place.begun,
        )

    def arrived(self, report: GroupReport) -> None:
        """Record the report of a group, and plan a replacement if the group is not kept.

        Raises:
            ValueError: the group's prompt is not in progress.
        """
        batch = self._batches.get(report.step)
        if batch is None or report.slot not in batch.workers:
            raise ValueError(f"no prompt is in progress in slot {report.slot} of step {report.step}")
        del batch.workers[report.slot]
        batch.reports[report.slot] = report
        if self.curriculum is not None:
            self.curriculum.observe(report)
        refill = batch.places[report.slot].refill + 1
        most = max(self._max_refills, _SPOILED_REFILLS) if report.spoiled else self._max_refills
        if not report.kept and refill <= most:
            batch.waiting.append(_Place(self._set_aside(), refill))

    def is_whole(self, step: int) -> bool:
        """Return whether all groups expected for a step have arrived."""
        batch = self._batches.get(step)
        return batch is not None and not batch.waiting and not batch.workers

    def take(self, step: int) -> list[GroupReport]:
        """Remove a complete batch from the plan, and return all its reports by slot."""
        if not self.is_whole(step):
            raise ValueError(f"the batch of step {step} is incomplete")
        batch = self._batches.pop(step)
        for slot in batch.places:
            heapq.heappush(self._free, slot)
        return [batch.reports[slot] for slot in sorted(batch.reports)]

    # Checkpoints

    def in_flight_at_checkpoint(self, unfinished: Mapping[int, int | None]) -> ItemFates:
        """Return the prompts that were reserved but not trained on yet, by what `restore` does with each; `unfinished`
        is that of `state`.
        """
        drawn = {position for position, oldest in unfinished.items() if oldest is not None}
        asked = [
            (_fate(batch.reports.get(slot), place.position in drawn), _name(place, batch.step))
            for batch in self._batches.values()
            for slot, place in batch.places.items()
        ]
        return item_fates([*asked, *self._not_asked()])

    def _not_asked(self) -> list[tuple[ItemFate, str]]:
        return [
            (ItemFate.WAITING, _name(place, batch.step)) for batch in self._batches.values() for place in batch.waiting
        ]

    def state(self, unfinished: Mapping[int, int | None] | None = None) -> dict[str, Any]:
        """Return the state as plain data for JSON.

        Args:
            unfinished: positions of the problems whose unfinished answers the checkpoint keeps, with the version of the
                oldest weights that drew a token; None: no tokens yet.
        """
        batches = [
            {
                "step": batch.step,
                # This checkpoint lacks the partial answers that an earlier one had.
                "waiting": [list(place._replace(begun=False)) for place in batch.waiting],
                "places": [[slot, *place] for slot, place in batch.places.items()],
                "reports": [report._asdict() for report in batch.reports.values()],
            }
            for batch in self._batches.values()
        ]
        here = self.under_way
        kept = {
            str(position): oldest
            for position, oldest in (unfinished or {}).items()
            if position in here and oldest is not None
        }
        measured = {} if self.curriculum is None else {"curriculum": self.curriculum.state()}
        return {"problems_taken": self.taken, "batches": batches, "unfinished": kept, **measured}

    def restore(self, state: Mapping[str, Any], step: int, version: int) -> Restored:
        """Restore a result of `state`.

        Prompts in progress are handed out again when they are due: they continue if the checkpoint has their tokens,
        and start again if not, or if their answers are older than `max_staleness` allows. Prompts that were not handed
        out yet follow them.

        Args:
            state: the state from a checkpoint.
            step: the last finished step.
            version: the version of the weights after that step.
        """
        self.taken = int(state["problems_taken"])
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.restore(state["curriculum"])
        oldest = {int(position): version for position, version in state.get("unfinished", {}).items()}
        again = 0
        kept: list[int] = []
        fates: list[tuple[ItemFate, str]] = []
        continued: list[int] = []
        for saved in state.get("batches", ()):
            batch = self._batches[saved["step"]] = _Batch(saved["step"])
            learns = version + batch.step - step - 1
            reports = [_report(record) for record in saved["reports"]]
            batch.reports = {
                report.slot: report
                for report in reports
                if not report.kept or learns - report.oldest <= self._max_staleness
            }
            young = {position for position, version in oldest.items() if learns - version <= self._max_staleness}
            places = {slot: _Place(*place) for slot, *place in saved["places"]}
            batch.places = {slot: place for slot, place in places.items() if slot in batch.reports}
            lost = [
                place._replace(begun=place.position in young)
                for slot, place in places.items()
                if slot not in batch.reports
            ]
            continued += [place.position for place in lost if place.begun]
            again += sum(not place.begun for place in lost)
            fates += [(ItemFate.RESTORED, _name(place, batch.step)) for place in batch.places.values()]
            fates += [(_fate(None, place.begun), _name(place, batch.step)) for place in lost]
            not_asked = [_Place(*place) for place in saved["waiting"]]
            fates += [(ItemFate.WAITING, _name(place, batch.step)) for place in not_asked]
            batch.waiting = [*lost, *not_asked]
            kept += [slot for slot, report in batch.reports.items() if report.kept]
        used = {slot for batch in self._batches.values() for slot in batch.places}
        self._slots = itertools.count(max(used, default=-1) + 1)
        self._free = [slot for slot in range(max(used, default=-1)) if slot not in used]
        return Restored(tuple(sorted(kept)), tuple(sorted(continued)), again, item_fates(fates))


def _fate(report: GroupReport | None, drawn: bool) -> ItemFate:
    """Return the fate of a prompt: restored with a report, continued with tokens, else started again."""
    if report is not None:
        return ItemFate.RESTORED
    return ItemFate.CONTINUED if drawn else ItemFate.AGAIN


def _name(place: _Place, step: int) -> str:
    return f"prompt {place.position} for step {step}"


def _report(saved: Mapping[str, Any]) -> GroupReport:
    fields = dict[str, Any](saved)
    return GroupReport(**fields)._replace(
        **{name: tuple(saved[name]) for name in ("rewards", "lengths", "corrects") if name in saved}
    )
