"""The command: its page, its record, its exit codes, its bundle, and folders that somebody else broke."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlinf_cli.why.facts import REACHED, limit_reached
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_events import EVIDENCE, FAILURE
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.typed import Cli
from tests.unit.cli.why.made_runs import STEPS, Metric, add_failure, dead, made_run, raised


def in_order(page: str, *parts: str) -> bool:
    places = [page.index(part) for part in parts]
    return places == sorted(places)


def test_page_has_cause_consequence_evidence_and_remedy(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path, status=RunStatus.FAILED, reason="no room")
    closed = raised("rlinf_core.errors.ChannelClosed", "closed", consequence=True)
    first = add_failure(run, "`EnvGroup:0` died", dead(signal="SIGKILL"), closed, ended=False, at=1.0e9)
    add_failure(run, "no room", raised("builtins.OSError", "No space left on device"), step=9, at=1.1e9)
    evidence = f"{EVIDENCE}/{first.name}/{FAILURE}"
    parts = (
        *("what failed first", "killed by SIGKILL", evidence, "do: SIGKILL came from outside"),
        *("what followed", "ChannelClosed: closed", "started again 1 time", "what ended it", "no room on the disk"),
    )
    assert in_order(cli.printed(1, "why", run.path), *parts)
    assert "there is no run `nosuch`" in cli.refuses(1, "why", "nosuch", "--runs-dir", tmp_path)


def test_page_tells_what_was_started_again_alone(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path)
    for at in (1.0e9, 1.1e9):
        add_failure(run, "`EnvGroup:0` died", dead(signal="SIGKILL"), ended=False, alone=True, at=at)
    page = cli("why", run.path).out
    assert "what had died was started again alone 2 times, and went on" in page
    assert "from its last checkpoint" not in page
    add_failure(run, "`ActorGroup:0` died", dead(signal="SIGKILL"), ended=False, at=1.2e9)
    page = cli("why", run.path).out
    assert "what had died was started again alone 2 times\n" in page
    assert "the run was started again 1 time from its last checkpoint, and went on" in page


def test_record_and_report_have_the_same_findings(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path, {"train/actor/lr": 0.0})
    record = json.loads(cli.printed(1, "why", run.path, "--json"))
    assert (record["schema"], record["clean"]) == ("rlinf.why/1", False)
    assert [finding["code"] for finding in record["learning"]] == ["learning-rate-zero"]
    assert cli("report", run.path, "--quiet").code == 0
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert '<section id="why">' in page
    assert "learning-rate-zero" in page


def at_the_end(value: float, otherwise: float | None) -> Metric:
    return lambda step: value if step == STEPS else otherwise


INCOMPLETE = "evaluation-incomplete"


@pytest.mark.parametrize(
    ("metrics", "code", "says"),
    [
        ({"left_out": 1.0, "episodes": 15.0}, INCOMPLETE, "1 of 16 were left out after step 20"),
        # Figures of one step belong together, also where not every step has both.
        (
            {"left_out": at_the_end(2.0, 0.0), "episodes": at_the_end(6.0, None)},
            INCOMPLETE,
            "2 of 8 were left out after step 20",
        ),
        ({"left_out": 2.0}, INCOMPLETE, "2 of 2 were left out after step 20"),
        ({"left_out": 3.0, "answers": 61.0}, INCOMPLETE, "3 of 64 were left out after step 20"),
        ({"failed/timeout": lambda step: float(step == 4)}, "left-out", "1 episodes or answers were left out"),
        ({"cut_off": 160.0, "answers": 160.0}, "answers-truncated", "160 of 160 answers"),
    ],
)
def test_what_figures_lack_is_told(
    cli: Cli, tmp_path: Path, metrics: Mapping[str, Metric], code: str, says: str
) -> None:
    named = {name if "/" in name else f"eval/{name}": metric for name, metric in metrics.items()}
    run = made_run(tmp_path, named)
    page = cli("why", run.path)
    assert (page.code, "No problem found" in page.out) == (1, False)
    assert "what its figures lack" in page.out
    assert says in page.out
    record = json.loads(cli("why", run.path, "--json").out)
    assert [(finding["kind"], finding["code"]) for finding in record["learning"]] == [("figures", code)]


def test_errors_of_an_environment_are_told_with_their_line(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path, {"eval/env_errors": lambda step: 5.0 * (step == 10)})
    text = "the simulator of `Ship-v0` raised RuntimeError: engine on fire at ship.py:25 in step"
    run_events.append_event(run.path, run_events.ENVIRONMENT, 10, text)
    page = cli("why", run.path).out
    assert "by which 5 episodes count as failed" in page
    assert "ship.py:25" in page


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_goes_on_only_from_a_checkpoint(cli: Cli, tmp_path: Path, has_checkpoint: bool) -> None:
    run = made_run(tmp_path, status=RunStatus.INTERRUPTED, reason="terminated")
    run_events.append_event(run.path, run_events.INTERRUPTED, 20, "terminated")
    if has_checkpoint:
        store = run.checkpoints
        (store.begin(20) / "weights").write_bytes(b"0")
        store.commit(20, Manifest(step=20))
    page = cli("why", run.path).out
    assert "asked to end by SIGTERM" in page
    assert ("runner.resume_dir=auto" in page) == has_checkpoint


def test_bundle_has_evidence_and_no_secret(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "tr0ub4dor&3")
    run = made_run(tmp_path, status=RunStatus.FAILED)
    folder = add_failure(run, "`EnvGroup:0` died", dead(signal="SIGKILL", text="key tr0ub4dor&3"))
    (folder / "stacks.txt").write_text("in step, password=hunter2secret")
    (folder / "elsewhere").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    path = tmp_path / "failure.tar.gz"
    assert cli("why", run.path, "--bundle", path).code == 1
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"{run.path.name}/") for name in archive.getnames()}
        texts = [archive.extractfile(member).read() for member in archive.getmembers()]  # pyright: ignore[reportOptionalMemberAccess]
    assert {"why.txt", "why.json", "run.json", "metrics.jsonl", f"{EVIDENCE}/{folder.name}/{FAILURE}"} <= names
    assert not [name for name in names if name.endswith(("elsewhere", "pipe"))]
    assert not [text for text in texts if b"tr0ub4dor" in text or b"hunter2secret" in text]
    assert path.stat().st_mode & 0o777 == 0o600


def test_evidence_of_a_stranger_is_skipped_and_named(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path)
    folder = run.path / EVIDENCE / "20260101-000000"
    folder.mkdir(parents=True)
    (folder / FAILURE).write_text('{"schema": "rlinf.evidence/1", "time": -1}')
    assert "20260101-000000/failure.json is skipped: it has an invalid value: `time`" in cli.out("why", run.path)


def test_long_metrics_are_read_from_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_cli.why import facts

    run = made_run(tmp_path)
    monkeypatch.setattr(facts, "MOST_METRICS_BYTES", 2000)
    read = facts.read_facts(run)
    steps = list(read.column("rollout/reward").steps)
    assert steps
    assert steps[0] > 1
    assert steps[-1] == 20
    assert any("the end was read" in note for note in read.notes)


def test_aliases_of_yaml_do_not_multiply(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path)
    levels = [f"l{number}: &l{number} [{', '.join([f'*l{number - 1}'] * 9)}]" for number in range(1, 9)]
    (run.path / "config.yaml").write_text("l0: &l0 [a, a, a]\n" + "\n".join(levels) + "\n")
    assert "config.yaml cannot be read" in cli.out("why", run.path)


def test_checkpoints_that_cannot_be_read_are_a_note(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, listed = made_run(tmp_path), Path.iterdir
    (run.path / "checkpoints").mkdir()

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "checkpoints":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert "its checkpoints cannot be read: Permission denied" in cli.out("why", run.path)


def test_idle_hardware_and_long_answers_are_no_fault_and_named(cli: Cli, tmp_path: Path) -> None:
    run = made_run(tmp_path, {"time/step": 10.0, "time/generate_rollouts": 6.0})
    row = {"component": "rollout", "processes": 1, "quantiles": []}
    rows = [
        {**row, "phase": "engine/step", "rows": 64.0, "calls": 20, "seconds": 60.0},
        {**row, "phase": "engine/step", "rows": 1.0, "calls": 90, "seconds": 60.0},
        {**row, "phase": "answer", "rows": 7.0, "calls": 1000, "seconds": 0.0},
    ]
    run.profile_file.write_text(json.dumps({"rows": rows}))
    page = cli.out("why", run.path)
    assert "No problem found." in page
    advice = f"rlinf inspect placement {run.path} --advise {run.path}"
    parts = (
        "what its steps wait for",
        "actor waits for rollout for 60 % of a step",
        "rollout waits for actor for 40 % of a step (`time/generate_rollouts`)",
        f"do: `{advice}`",
        "the longest 1 of 64 of answers take 50 % of generation, 30 % of a step",
        "profile.json: tokens of an answer: median 7, p99 7, longest 7",
        f"do: `{advice} --staleness 1`",
    )
    assert in_order(page, *parts)
    record = json.loads(cli("why", run.path, "--json").out)
    assert [one["code"] for one in record["speed"]] == ["idle-hardware", "long-tail"]
    assert record["clean"]


@pytest.mark.parametrize("field", ["rows", "processes", "seconds"])
def test_a_profile_that_cannot_be_read_is_a_note(cli: Cli, tmp_path: Path, field: str) -> None:
    run = made_run(tmp_path, {"time/step": 10.0})
    row = {"component": "rollout", "processes": 1, "quantiles": [], "phase": "answer", "rows": 7.0, "calls": 1000}
    run.profile_file.write_text(json.dumps({"rows": [{**row, "seconds": 1.0, field: -1}]}))
    assert "profile.json cannot be read: it has an invalid value" in cli("why", run.path).out


END = 1_795_680_000


@pytest.mark.parametrize(("before", "near"), [(30, True), (-5, True), (599, True), (3600, False), (-3600, False)])
def test_limit_is_told_near_its_moment(before: int, near: bool) -> None:
    words = limit_reached({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(END)}, END - before)
    assert (words is not None) == near
    assert words is None or words.startswith(f"Slurm job 17 {REACHED} at 20")
    for end in ({}, {"SLURM_JOB_END_TIME": "soon"}, {"SLURM_JOB_END_TIME": "\u0663"}):
        assert limit_reached(end, END) is None
