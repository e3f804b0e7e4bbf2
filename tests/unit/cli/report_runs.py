"""Run folders to make pages of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.language.loop.group_accounts import write_samples
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.first_contact import ContactCheck, note_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"
PICTURE: dict[str, Any] = {
    "title": NASTY, "subtitle": NASTY, "idle": True, "components": [{"name": NASTY, "size": 2}],
    "sections": [{"title": NASTY, "subtitle": NASTY, "cards": [{
        "title": NASTY, "about": NASTY, "many": False, "loose": [{"component": NASTY, "ranks": NASTY, "color": 9}],
        "rows": [{"columns": 8, "runs": [{"units": [NASTY], "users": [], "about": NASTY}]}],
    }]}],
}  # fmt: skip


def full_run(folder: str, *, status: str = RunStatus.FINISHED, steps: int = 12) -> RunFolder:
    """A run that left everything that a report shows, with texts that try to get out of theirs."""
    runner = RunnerConfig.model_validate({"logger": {"experiment_name": "full", "log_path": folder}})
    run = RunFolder.create(runner, "embodied")
    run.write_config_text(f'recipe: embodied\nname: "{NASTY}"\n')
    value = {"path": "runner.note", "value": NASTY, "origin": "file", "file": "job.yaml", "line": 7, "column": 3}
    default = {"path": "runner.trace", "value": False, "origin": "default", "file": None, "line": None, "column": None}
    (run.path / "origins.json").write_text(json.dumps({"values": [value, default]}))
    process: dict[str, Any] = {
        "rank": 0, "node_rank": 0, "node_group": "cluster", "hardware_type": "", "local_hardware_ranks": [],
        "python": None, "env": {"RANK": "0", "NOTE": NASTY}, "env_layers": {"RANK": "runtime", "NOTE": "env_configs"},
    }  # fmt: skip
    other = {**process, "rank": 1, "env": {"RANK": "1"}}
    (run.path / "placement.json").write_text(
        json.dumps({"components": {"actor": {"processes": [process, other]}}, "picture": PICTURE})
    )
    peaks = [{"component": "actor", "rank": 1, "phases": {NASTY: {"rss": 300 << 20, "device": 5 << 20}}}]
    run.memory_file.write_text(json.dumps({"schema": "rlinf.memory/1", "processes": peaks}))
    checks = [ContactCheck("actor", "logits", NASTY, "agrees", 1e-5, 1e-3, 0.25, NASTY)]
    note_comparisons(run.path, [*checks, ContactCheck("env", "first step", "the spec")])
    run_events.append_event(run.path, run_events.STARTED, 0, "started with actor 2")
    write_samples(
        run.path,
        4,
        [
            {"prompt": NASTY, "text": NASTY, "answer": "5", "reward": float(number % 2), "reason": "no"}
            for number in range(40)
        ],
    )
    videos = run.path / "videos"
    videos.mkdir()
    (videos / "small.mp4").write_bytes(b"\0" * 1000)
    (videos / "large one.mp4").write_bytes(b"\0" * 500_000)
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(1, steps + 1):
            metrics.log(step, {
                "env/return": float(step), "env/success_at_end": step / steps, "train/actor/policy_loss": 1 / step,
                "rollout/staleness": 1.0, "time/step": 1.0, "time/generate_rollouts": 0.6, "time/actor_training": 0.3,
                "time/env/wait": 0.2, "memory/actor_gib": 0.4, NASTY: 1.0,
            })  # fmt: skip
        metrics.log(steps, {"eval/success_at_end": 0.75, "eval/episodes": 64.0})
    run.update(step=steps)
    if status == RunStatus.FAILED:
        run_events.append_event(
            run.path, run_events.FAILED, steps, "`env:1` died in `interact`", ["node 0", "killed", NASTY]
        )
    run.end(status, "`env:1` died in `interact`" if status == RunStatus.FAILED else "")
    return run


def empty_run(folder: str) -> RunFolder:
    """A run that failed before anything was there."""
    runner = RunnerConfig.model_validate({"logger": {"experiment_name": "empty", "log_path": folder}})
    run = RunFolder.create(runner, "embodied")
    run.end(RunStatus.FAILED, "no cluster")
    return run


def asset(page: str, kind: str) -> str:
    """The content of the only element `<script type=KIND ...>` of a page."""
    return page.split(f'<script type="{kind}"')[1].partition(">")[2].partition("</script>")[0]


def written(path: Path) -> str:
    return path.read_text(encoding="utf-8")
