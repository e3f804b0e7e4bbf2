"""Live pages: what their server gives and refuses, and how a run that goes on is followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vl_convert")
pytest.importorskip("starlette")

from starlette.testclient import TestClient

from rlinf_cli.report.serving import server
from rlinf_cli.report.serving.followed_run import FollowedRun
from rlinf_cli.report.serving.pages import run_page
from rlinf_core.process.tracing import Taken, TraceSpan
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.runners.trace import TraceWriter
from tests.unit.cli.report_runs import NASTY, empty_run, full_run

LONG = 60.0
HOST = "127.0.0.1:8800"


@pytest.fixture(autouse=True)
def short_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "chart_script", lambda: "window.vegaEmbed = null;")


def client(*runs: RunFolder) -> TestClient:
    followed = [FollowedRun(run) for run in runs]
    return TestClient(server.application(followed, "secret", [HOST]), base_url=f"http://{HOST}/secret/")


@pytest.mark.security
@pytest.mark.parametrize("path", ["/", "/other/", "/secre/", "/secret2/", "//secret/", "/%00/"])
def test_address_without_token_is_refused(path: str) -> None:
    answer = client(full_run("runs")).get(f"http://{HOST}{path}")
    assert answer.status_code == 403
    assert "script-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.security
def test_another_host_is_refused() -> None:
    pages = client(full_run("runs"))
    assert pages.get("", headers={"host": "evil.example:8800"}).status_code == 403
    assert pages.get("").status_code == 200


@pytest.mark.security
def test_server_only_reads() -> None:
    assert client(full_run("runs")).post("", content="x").status_code == 405


@pytest.mark.security
def test_texts_of_a_run_do_not_become_html() -> None:
    pages = client(full_run("runs", status=RunStatus.FAILED))
    page = pages.get("").text
    assert NASTY not in page
    assert "&lt;img src=x onerror=alert(2)&gt;" in page
    # Those of the page itself, which have no code in them.
    assert page.count("<script") == page.count("<script defer src=") == 2
    assert "style=" not in page


def test_page_names_charts_that_the_server_draws() -> None:
    pages = client(full_run("runs"))
    assert 'data-chart="curve-0"' in pages.get("").text
    specs = pages.get("charts?names=curve-0,nothing").json()
    assert list(specs) == ["curve-0"]
    assert "train,train,12,12" in next(iter(specs["curve-0"]["datasets"].values()))


def test_page_is_sent_again_only_when_the_run_has_changed() -> None:
    run = empty_run("runs")
    followed = FollowedRun(run)
    pages = TestClient(server.application([followed], "secret", [HOST]), base_url=f"http://{HOST}/secret/")
    assert pages.get("").status_code == 200
    assert pages.get(f"?since={followed.version}").status_code == 204
    with MetricsWriter(run.metrics_file) as metrics:
        metrics.log(1, {"env/return": 2.0})
    answer = pages.get(f"?since={followed.version}")
    assert answer.status_code == 200
    assert "return 2" in answer.text


def test_several_runs_are_side_by_side() -> None:
    runs = [full_run("runs"), full_run("runs"), empty_run("runs")]
    pages = client(*runs)
    page = pages.get("").text
    for number, run in enumerate(runs):
        assert f'<a href="runs/{number}/">{run.path.name}</a>' in page
    curve = next(iter(pages.get("charts?names=curve-0").json()["curve-0"]["datasets"].values()))
    assert {line.split(",")[0] for line in curve.splitlines()[1:]} == {run.path.name for run in runs[:2]}
    one = pages.get("runs/1/").text
    assert f"<h1>{runs[1].path.name}</h1>" in one
    assert '<a href="../../">all runs</a>' in one
    assert pages.get("runs/3/").status_code == 404


@pytest.mark.security
def test_videos_are_served_but_no_links() -> None:
    run = full_run("runs")
    pages = client(run)
    assert 'src="videos/0"' in pages.get("").text
    names = [pages.get(f"videos/{number}") for number in (0, 1, 2)]
    assert [answer.status_code for answer in names] == [200, 200, 404]
    secret = Path("secret.txt")
    secret.write_text("private")
    for video in (run.path / "videos").iterdir():
        video.unlink()
        video.symlink_to(secret.absolute())
    assert [pages.get(f"videos/{number}").status_code for number in (0, 1)] == [404, 404]


@pytest.mark.security
def test_pipe_in_the_place_of_metrics_is_a_note() -> None:
    run = empty_run("runs")
    os.mkfifo(run.metrics_file)
    assert "metrics.jsonl cannot be read: it is a pipe, not a regular file" in client(run).get("").text


def test_metrics_are_read_once_and_renewed() -> None:
    run = empty_run("runs")
    followed = FollowedRun(run)
    with MetricsWriter(run.metrics_file) as metrics:
        metrics.log(1, {"env/return": 1.0})
        metrics.log(2, {"env/return": 2.0, "time/step": 1.0})
        followed.refresh(LONG)
        # An evaluation adds to the line of its step.
        metrics.log(2, {"eval/return": 5.0})
        metrics.log(3, {"env/return": 3.0})
        followed.refresh(LONG)
        series = followed.series
        assert list(series.columns["env/return"].newest) == [1.0, 2.0, 3.0]
        assert [step for step, _ in series.evaluations] == [2]
        assert (series.steps, len(series.moments)) == (3, 1)
        # A run that goes back to a checkpoint writes later steps again.
        metrics.rewind(1)
        metrics.log(2, {"env/return": 7.0})
        followed.refresh(LONG)
    assert list(followed.series.columns["env/return"].newest) == [1.0, 7.0]
    assert followed.series.evaluations == []


def test_torn_line_is_read_when_it_is_whole() -> None:
    run = empty_run("runs")
    line = json.dumps({"step": 1, "time": 1773482102.5, "metrics": {"env/return": 1.0}})
    run.metrics_file.write_text(line)
    followed = FollowedRun(run)
    followed.refresh(LONG)
    assert followed.series.steps == 0
    run.metrics_file.write_text(line + "\n")
    followed.refresh(LONG)
    assert followed.series.steps == 1


def long_run(steps: int) -> RunFolder:
    run = empty_run("runs")
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(1, steps + 1):
            metrics.log(step, {"env/return": float(step)})
    return run


def test_long_run_is_shown_before_all_of_it_is_read() -> None:
    followed = FollowedRun(long_run(3000))
    followed.refresh(0.0)
    overview = followed.series
    # The curve is whole from the beginning, by lines from all over the file.
    assert overview.steps <= 300
    assert overview.columns["env/return"].bands()[0].step == 1
    assert overview.columns["env/return"].last == 3000
    assert "all of them are being read" in run_page(followed, overview="", root="").text
    version = followed.version
    followed.refresh(0.0)
    assert followed.version == version
    while followed.reading:
        followed.refresh(0.0)
    assert followed.version == version + 1
    assert followed.series.steps == 3000
    assert "being read" not in run_page(followed, overview="", root="").text


def test_overview_of_a_file_that_was_replaced_is_made_anew() -> None:
    run = long_run(3000)
    followed = FollowedRun(run)
    followed.refresh(0.0)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    other = Path("other.jsonl")
    other.write_text("".join(lines[:2000]))
    other.replace(run.metrics_file)
    followed.refresh(0.0)
    assert followed.series.columns["env/return"].last == 2000


def test_opened_page_holds_its_curve_until_charts_are_drawn() -> None:
    pages = client(long_run(3000))
    opened = pages.get("").text
    points = opened.split('class="sketch"')[1].split('points="')[1].split('"')[0].split()
    assert 50 <= len(points) <= 100
    assert (points[0], points[-1]) == ("0,200", "1000,0")
    assert 'class="sketch"' not in pages.get("?since=other").text


def test_answers_do_not_grow_with_the_steps() -> None:
    sizes: list[int] = []
    for steps in (1000, 8000):
        pages = client(long_run(steps))
        while "being read" in (page := pages.get("?since=other").text):
            pass
        chart = pages.get("charts?names=curve-0")
        assert next(iter(chart.json()["curve-0"]["datasets"].values())).count("\n") <= 301
        sizes.append(len(page.encode()) + len(chart.content))
    assert sizes[1] < 1.3 * sizes[0]


def test_large_answers_are_compressed() -> None:
    pages = client(long_run(1000))
    pages.get("")
    packed, plain = (
        pages.get("charts?names=curve-0", headers={"accept-encoding": encoding}) for encoding in ("gzip", "identity")
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < len(plain.content) / 3


def test_run_that_goes_on_shows_the_timeline_of_its_newest_steps() -> None:
    run = full_run("runs", status=RunStatus.RUNNING)
    now = 1_773_482_000.0
    lines = [{"step": step, "time": now + step, "metrics": {"time/step": 1.0}} for step in range(100, 103)]
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    with TraceWriter(run.trace_file) as trace:
        spans = [TraceSpan("method", f"generate {step}", now + step - 0.5, 0.25, 1) for step in range(100, 103)]
        trace.add("rollout:0", Taken(spans, 0))
    pages = client(run)
    assert "step 101 (newest)" in pages.get("").text
    chart = next(iter(pages.get("charts?names=timeline-0").json()["timeline-0"]["datasets"].values()))
    assert "generate 101" in chart
    assert "generate 100" not in chart


def test_run_that_goes_on_says_what_it_fails_of() -> None:
    run = full_run("runs", status=RunStatus.RUNNING)
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(20, 80):
            metrics.log(step, {"env/return": 1.0, "train/actor/grad_norm": 0.0, "train/actor/weights_changed": 0.0})
    followed = FollowedRun(run)
    followed.refresh(LONG)
    diagnosis = followed.content().diagnosis
    assert diagnosis is not None
    codes = [finding.code for finding in diagnosis.learning]
    assert codes
    assert codes[0] in run_page(followed, overview="", root="").text


def test_page_tells_who_waits_in_the_newest_steps() -> None:
    run = full_run("runs", status=RunStatus.RUNNING)
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(20, 220):
            metrics.log(step, {"time/step": 2.0, "time/env/wait": 1.0, "speed/learner_idle": 0.25})
    page = client(run).get("").text
    rows = page.split("Who waits for whom")[1].split("</table>")[0]
    assert '<td>env for others</td><td class="right">50 %</td>' in rows
    assert '<td>actor for samples</td><td class="right">25 %</td>' in rows
