"""All runs of one `make chaos`: the undisturbed ones, one for each seed, and the table of what came out."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rlinf_cli import console
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import open_log, write_fault
from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from tests.chaos.disturbed_run import DisturbedRun
from tests.chaos.fault_table import FAULTS, Deed
from tests.chaos.judge import GOOD, RunVerdict, UndisturbedRuns, judge, reference_of
from tests.chaos.outcomes import RunEnding, Struck, outcome_of
from tests.chaos.started_run import PAUSE, StartedRun
from tests.chaos.strike_plan import StrikePlan, plan_of

SCHEMA: Final = "rlinf.chaos/1"
RESULTS: Final = "chaos.jsonl"
_LEAST_DEADLINE: Final = 90.0
_LAUNCHES: Final = 4.0


class ChaosJob(NamedTuple):
    """The job that is disturbed, and how.

    Attributes:
        file, overrides: the file and overrides, as of `rlinf train`.
        config_id: digest of its configuration.
        steps: its length at most.
        groups: the component of each worker group.
        faults: the names that are drawn from.
        most: the largest number of strikes on one run.
        deadline: seconds without a sign of life after which a run is hung; None: from the undisturbed runs.
        keep: whether the folders of good runs stay.
        synchronous: whether no rollouts run ahead of training: a run that goes on from a checkpoint does those anew.
    """

    file: str
    overrides: tuple[str, ...]
    config_id: str
    steps: int
    groups: Mapping[str, str]
    faults: tuple[str, ...]
    most: int
    deadline: float | None
    keep: bool
    synchronous: bool


class SeedResult(NamedTuple):
    """The result of one seed."""

    plan: StrikePlan
    outcome: RunEnding
    verdict: RunVerdict
    why: str


def prepare_folder(folder: Path) -> None:
    """Make the folder of the runs, or check that one that is there was made so: runs in it are replaced.

    Raises:
        RunError: it has other files, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / RESULTS).is_file():
            raise RunError(
                "the folder has other files",
                where=str(folder),
                why=f"it has no `{RESULTS}`, which `make chaos` writes first",
                help="name a new folder, or that of an earlier call",
            )
        os.close(open_log(folder, RESULTS))
    except OSError as error:
        raise RunError("the folder cannot be made", where=str(folder), why=write_fault(folder, error)) from None


def undisturbed(job: ChaosJob, folder: Path) -> UndisturbedRuns:
    """Return what is the same in two runs without a fault; those that are in the folder already are used again.

    Raises:
        RunError: one of them does not finish, or the folder has those of another job.
    """
    outcomes: list[RunEnding] = []
    launches: list[float] = []
    # Where nothing is compared, one shows which steps there are.
    count = 2 if job.synchronous else 1
    for number in range(1, count + 1):
        place = folder / f"undisturbed-{number}"
        if not place.exists():
            console.message(f"undisturbed run {number} of {count}")
            _run_undisturbed(job, place)
        run = RunFolder.latest(place)
        outcomes.append(outcome_of(place, 0))
        if run is None or outcomes[-1].status != RunStatus.FINISHED:
            raise RunError(
                "the job does not finish, even if nothing disturbs it", where=str(place), why=outcomes[-1].reason
            )
        if run.state.config_id != job.config_id:
            raise RunError(
                "the folder has runs of another job", where=str(place), help="name a new folder, or the same job"
            )
        launches.append(read_metrics(run.metrics_file)[0].time - run.state.created)
    one, *others = outcomes
    if not others:
        return UndisturbedRuns(one.steps, {}, (), max(launches))
    return reference_of(one, others[0], max(launches))


def _run_undisturbed(job: ChaosJob, place: Path) -> None:
    with StartedRun(job.file, job.overrides, place, job.groups) as started:
        while started.code is None:
            time.sleep(PAUSE)


def disturbed(job: ChaosJob, reference: UndisturbedRuns, seed: int, folder: Path) -> SeedResult:
    """Run the job with the faults of a seed, and judge it; a good run's folder is removed unless it is to be kept."""
    # Passes over data may end it before.
    plan = plan_of(seed, min(job.steps, len(reference.steps)), job.faults, job.most)
    deadline = job.deadline or max(_LEAST_DEADLINE, _LAUNCHES * reference.launch)
    overrides = (*job.overrides, f"runner.max_restarts={plan.max_restarts}")
    place = folder / f"seed-{seed}"
    with StartedRun(job.file, overrides, place, job.groups) as started:
        outcome = DisturbedRun(started, plan, reference.launch, deadline).to_end()
    verdict, why = judge(outcome, reference, plan.max_restarts)
    result = SeedResult(plan, outcome, verdict, why)
    _append(folder, record_of(result))
    if verdict in GOOD and not job.keep:
        shutil.rmtree(place)
    return result


def work(job: ChaosJob, folder: Path, seeds: Sequence[int], show: Callable[[SeedResult], None]) -> list[SeedResult]:
    """Run all seeds, one after the other."""
    reference = undisturbed(job, folder)
    kind = "must be equal bit by bit" if reference.comparable else "may differ from run to run, and are not compared"
    console.message(f"{len(reference.steps)} steps; launched in {reference.launch:.1f} s; results {kind}")
    results: list[SeedResult] = []
    for seed in seeds:
        results.append(disturbed(job, reference, seed, folder))
        show(results[-1])
    return results


def line_of(result: SeedResult) -> str:
    """Return one line about the run of a seed, and one for each strike."""
    outcome = result.outcome
    words = f": {result.why}" if result.why else ""
    head = f"seed {result.plan.seed}: {result.verdict} in {outcome.seconds:.0f} s{words}"
    return "\n".join((head, *(f"  {_strike_line(struck)}" for struck in outcome.struck)))


def table_of(results: Sequence[SeedResult]) -> str:
    """Return what came of the runs, and of each fault."""
    verdicts = Counter(str(result.verdict) for result in results)
    restless = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    rows: list[tuple[str, ...]] = []
    for name in FAULTS:
        struck = [struck for result in results for struck in result.outcome.hit if struck.strike.fault == name]
        if struck:
            bad = sum(any(hit in result.outcome.hit for hit in struck) for result in results if not _good(result))
            rows.append((name, str(len(struck)), _seconds(struck), str(bad)))
    table = console.table(("fault", "hits", "told after", "in bad runs"), rows, right=(1, 3))
    hits = sum(len(result.outcome.hit) for result in results)
    return f"{table}\n{hits} faults in {len(results)} runs: {restless}"


def record_of(result: SeedResult) -> dict[str, Any]:
    """Return the result of a seed as a record, `rlinf.chaos/1`."""
    outcome = result.outcome
    return {
        "schema": SCHEMA,
        "seed": result.plan.seed,
        "verdict": str(result.verdict),
        "why": result.why,
        "max_restarts": result.plan.max_restarts,
        "code": outcome.code,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 2),
        "causes": [code for code, _ in outcome.why],
        "strikes": [
            {
                **struck.strike._asdict(),
                "victim": struck.victim or None,
                "hit_after_step": struck.step,
                "told": struck.event,
                "told_after": None if struck.seconds is None else round(struck.seconds, 2),
                "named_after": None if struck.named is None else round(struck.named, 2),
            }
            for struck in outcome.struck
        ],
    }


def _append(folder: Path, record: Mapping[str, Any]) -> None:
    descriptor = open_log(folder, RESULTS)
    try:
        os.write(descriptor, (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)


def _strike_line(struck: Struck) -> str:
    if not struck.victim:
        return f"{struck.strike}: nothing to hit"
    words = f"{struck.strike}: hit {struck.victim} (pid {struck.pid}) after step {struck.step}"
    if struck.named is not None:
        return f"{words}; named after {struck.named:.1f} s"
    return words if struck.seconds is None else f"{words}; told after {struck.seconds:.1f} s: {struck.event}"


def _seconds(struck: Sequence[Struck]) -> str:
    waits = [
        seconds
        for hit in struck
        if (seconds := hit.named if FAULTS[hit.strike.fault].deed is Deed.FREEZE else hit.seconds) is not None
    ]
    return f"{median(waits):.1f} s, at most {max(waits):.1f} s" if waits else ""


def _good(result: SeedResult) -> bool:
    return result.verdict in GOOD
