"""Run folders with a planted cause, made without running anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlinf_cli.why.diagnosis import Diagnosis, diagnose
from rlinf_cli.why.facts import read_facts
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.run_events import EVIDENCE, EVIDENCE_SCHEMA, FAILURE
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus

STEPS = 20
Metric = float | Callable[[int], float] | None


def sound_metrics(step: int) -> dict[str, float]:
    """The metrics of a run that learns."""
    return {
        "rollout/reward": 0.2 + step / 100, "rollout/reward_std": 0.4, "rollout/correct": 0.2 + step / 100,
        "rollout/groups_equal": 0.3, "rollout/truncated": 0.0, "rollout/staleness_mean": 0.0,
        "rollout/advantages_std": 1.0, "rollout/observations_std": 0.5, "train/actor/clip_fraction": 0.05,
        "train/actor/approx_kl": 1e-3, "train/actor/entropy": 0.8, "train/actor/grad_norm": 1.0,
        "train/actor/lr": 1e-3, "train/actor/weights_changed": 1.0, "train/logprob_gap/mean": 1e-7,
    }  # fmt: skip


def made_run(
    folder: Path,
    metrics: Mapping[str, Metric] | None = None,
    config: str = "",
    status: str = RunStatus.FINISHED,
    reason: str = "",
) -> RunFolder:
    """A run of `STEPS` steps that learns, but for `metrics`: a number, a function of the step, or None for none."""
    runner = RunnerConfig.model_validate({"logger": {"experiment_name": "made", "log_path": str(folder / "runs")}})
    run = RunFolder.create(runner, "math")
    run.write_config_text(f"recipe: math\n{config}")
    run_events.append_event(run.path, run_events.STARTED, 0, "started with actor 1")
    with open(run.metrics_file, "w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            planted = {name: make(step) if callable(make) else make for name, make in (metrics or {}).items()}
            absent = {name for name, value in planted.items() if value is None}
            values = {**sound_metrics(step), **planted}
            shown = {name: None if value != value else value for name, value in values.items() if name not in absent}
            file.write(json.dumps({"step": step, "time": time.time(), "metrics": shown}) + "\n")
    run.update(step=STEPS)
    run.end(status, reason)
    return run


def add_failure(
    run: RunFolder,
    what: str,
    *failures: Mapping[str, Any],
    step: int = 7,
    ended: bool = True,
    alone: bool = False,
    at: float | None = None,
) -> Path:
    """Add the evidence of a failure, and its event: it ended the run, or sent it back, or was healed `alone`."""
    moment = time.time() if at is None else at
    folder = run.path / EVIDENCE / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(moment))}-{what.__hash__() % 997}"
    folder.mkdir(parents=True)
    content = {"schema": EVIDENCE_SCHEMA, "time": moment, "step": step, "what": what, "failures": list(failures)}
    (folder / FAILURE).write_text(json.dumps(content))
    healed = run_events.RELAUNCHED if alone else run_events.RESTARTED
    kind = run_events.FAILED if ended else healed
    named = f"{run_events.EVIDENCE}: {EVIDENCE}/{folder.name}"
    line = {"time": moment, "kind": kind, "step": step, "text": what, "details": ["node 0", named]}
    with open(run.path / run_events.EVENTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return folder


def dead(**fields: Any) -> dict[str, Any]:
    """A worker that died."""
    return {
        "name": "EnvGroup:0", "component": "env", "rank": 0, "method": "interact", "place": "node 0, pid 4711",
        "type": "rlinf_core.errors.WorkerDiedError", "bases": ["WorkerDiedError", "RLinfError"], "died": True,
        "text": "`EnvGroup:0` on node 0 died", **fields,
    }  # fmt: skip


def raised(kind: str, text: str, *bases: str, **fields: Any) -> dict[str, Any]:
    """A worker that raised."""
    return {
        "name": "ActorGroup:0", "component": "actor", "rank": 0, "method": "run_training", "place": "node 0, pid 4711",
        "type": kind, "bases": [kind.rpartition(".")[2], *bases, "Exception"], "text": text, **fields,
    }  # fmt: skip


def diagnosis_of(run: RunFolder) -> Diagnosis:
    return diagnose(read_facts(RunFolder.open(run.path)))


def codes_of(run: RunFolder) -> list[str]:
    """The codes of all findings, failures first."""
    diagnosis = diagnosis_of(run)
    return [finding.code for _, finding in diagnosis.failures] + [finding.code for finding in diagnosis.learning]
