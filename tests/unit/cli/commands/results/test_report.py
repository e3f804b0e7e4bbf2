"""`rlinf report`, its curves, and its `--samples`."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from recipes.demonstrations.pictures import write_video
from recipes.language.loop.group_accounts import write_samples
from rlinf_cli.report import charts, curves
from rlinf_cli.report.content import gather
from rlinf_cli.report.curves import draw_curve, result_curves
from rlinf_cli.runs.metric_columns import Band, series_of
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.runners.metrics import Metrics, MetricsWriter, read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.report_runs import NASTY, asset, empty_run, full_run, written
from tests.unit.cli.typed import Cli

pytest.importorskip("vl_convert")
pytest.importorskip("jinja2")


@pytest.fixture(autouse=True)
def short_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, with a stand-in for the chart library's code, which takes seconds to make."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(charts, "chart_script", lambda: "window.vegaEmbed = null;")


class _Elements(HTMLParser):
    """The elements of a page, and the addresses that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "onerror", "action")]


def elements(page: str) -> _Elements:
    parser = _Elements()
    parser.feed(page)
    return parser


def test_a_report_shows_everything_and_loads_nothing(cli: Cli) -> None:
    run = full_run("runs")
    ended = cli("report", run.path.name)
    assert (ended.code, ended.out) == (0, f"runs/{run.path.name}/report.html\n")
    page = written(run.path / "report.html")
    headings = (
        "Result|Course of the run|What was asked|First contact|Learning|Where the time went|"
        "Staleness and queues|Resources|"
        "Samples|Videos|Placement|Environment of the processes|Configuration|All metrics"
    )
    for heading in headings.split("|"):
        assert f"<h2>{heading}</h2>" in page
    for text in (
        "started with actor 2",
        "job.yaml:7",
        "success 0.75",
        "small.mp4",
        "0 | 1",
        "actor:1",
        "300 MiB",
        "5 MiB",
        '<td>agrees</td><td class="right">1e-05</td><td class="right">0.001</td><td class="right">250 ms</td>',
    ):
        assert text in page
    loaded = elements(page).addresses
    assert {item.partition(":")[0] if ":" in item else item.partition("#")[0] for item in loaded} == {
        "", "data", "videos/large%20one.mp4",
    }  # fmt: skip
    assert len(page) < 1_000_000
    assert "<td>300 MiB</td><td>5 MiB</td>" in page
    assert f"<code>rlinf inspect memory {run.path.name}</code> shows it beside a forecast" in page


def test_a_video_shows_one_of_its_frames_until_it_is_played(cli: Cli) -> None:
    run = full_run("runs")
    frames = [np.full((32, 48, 3), 200, np.uint8)] * 8
    write_video(run.path / "videos" / "small.mp4", frames, fps=4)
    assert cli("report", str(run.path)).code == 0
    page = written(run.path / "report.html")
    # The other video holds no frame.
    assert page.count('poster="data:image/jpeg;base64,') == 1


def test_no_text_of_a_run_becomes_a_part_of_the_page(cli: Cli) -> None:
    run = full_run("runs", status=RunStatus.FAILED)
    assert cli("report", run.path).code == 0
    page = written(run.path / "report.html")
    assert NASTY not in page
    assert "&lt;img src=x onerror=alert(2)&gt;{{ 7*7 }}" in page
    result = elements(page)
    assert result.names.count("script") == 3
    # The picture of the placement is made of its record.
    assert result.names.count("img") == 0
    assert f"<h3>{escape(NASTY)} <small>" in page
    specs = json.loads(asset(page, "application/json"))
    assert any(NASTY in spec["description"] for spec in specs.values())
    assert "`env:1` died in `interact`" in page


def test_charts_have_their_data(cli: Cli) -> None:
    run = full_run("runs")
    cli("report", run.path)
    specs = json.loads(asset(written(run.path / "report.html"), "application/json"))
    success = next(iter(specs["curve-1"]["datasets"].values()))
    assert 'eval,"eval, at end",12,0.75,0.63' in success
    assert 'mean,"train, at end",6,0.5,0.5,0.5' in success
    assert "driver,rollout,0.6" in next(iter(specs["time-components"]["datasets"].values()))
    # A phase has one colour in both charts.
    scales = [specs[name]["encoding"]["color"]["scale"] for name in ("time-steps", "time-components")]
    steps, components = (dict(zip(scale["domain"], scale["range"], strict=True)) for scale in scales)
    assert len(steps) > 1
    assert steps.items() <= components.items()
    # Those of a long run stay small.
    run = full_run("runs", steps=2000)
    cli("report", run.path)
    specs = json.loads(asset(written(run.path / "report.html"), "application/json"))
    assert 150 < len(next(iter(specs["curve-0"]["datasets"].values())).splitlines()) <= 301


def test_a_run_without_anything_has_no_empty_sections(cli: Cli) -> None:
    run = empty_run("runs")
    assert cli("report", run.path).code == 0
    page = written(run.path / "report.html")
    assert "no cluster" in page
    assert re.findall('<section id="([a-z]+)">', page) == ["result", "why", "curves"]


@pytest.mark.parametrize(("staleness", "shown"), [(0.0, False), (1.0, True)])
def test_staleness_of_zero_has_no_section(cli: Cli, staleness: float, shown: bool) -> None:
    run = empty_run("runs")
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(1, 700):
            metrics.log(step, {"rollout/staleness": staleness if step == 300 else 0.0})
    cli("report", run.path)
    page = written(run.path / "report.html")
    assert ('<section id="staleness">' in page) is shown
    # It stays among all metrics.
    assert page.count("rollout/staleness") >= 1


def test_out_json_and_what_is_missing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = full_run("runs")
    ended = cli("report", run.path, "-o", "page.html", "--json")
    record = json.loads(ended.out)
    assert record == {"schema": "rlinf.report/1", "run": str(run.path), "report": str(tmp_path / "page.html")}
    # Opening the page asks for no other file.
    assert f'preload="none" src="runs/{run.path.name}/videos/large%20one.mp4"' in written(tmp_path / "page.html")
    assert "cannot write" in cli.fails(1, "report", run.path, "-o", "nowhere/page.html")
    assert "ends in `.html`" in cli.refuses(2, "report", run.path, "-o", "page.png")
    assert "`--live` is now `--watch`" in cli("report", run.path, "--live", "--port", "8800").err
    monkeypatch.setattr(charts, "missing_modules", lambda _: ["vl_convert"])
    err = cli.fails(1, "report", run.path)
    assert "does not have `vl_convert`" in err
    assert "vl-convert-python" in err


def test_several_runs_are_side_by_side(cli: Cli, tmp_path: Path) -> None:
    runs = [full_run("runs"), full_run("runs"), empty_run("runs")]
    (runs[1].path / "report.html").write_text("its own")
    assert cli("report", *(run.path for run in runs)).code == 0
    page = written(tmp_path / "report.html")
    assert f'<td><a href="runs/{runs[1].path.name}/report.html">{runs[1].path.name}</a></td>' in page
    assert f"<td>{runs[2].path.name}</td>" in page
    curve = json.loads(asset(page, "application/json"))["curve-0"]
    lines = curve["datasets"]["rows"].splitlines()[1:]
    assert {line.split(",")[1] for line in lines} == {run.path.name for run in runs[:2]}


def test_evaluations_are_no_phase_of_a_step(cli: Cli, tmp_path: Path) -> None:
    runs = [empty_run("runs"), empty_run("runs")]
    times = {"time/step": 2.0, "time/generate_rollouts": 1.5, "time/evaluate": 9.0, "time/save_checkpoint": 8.0}
    for run in runs:
        with MetricsWriter(run.metrics_file) as writer:
            writer.log(1, times)
    assert cli("report", *(run.path for run in runs)).code == 0
    assert written(tmp_path / "report.html").count(" 75%</td>") == 2


def test_watched_page_is_written_until_the_run_ends(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run = full_run("runs", status=RunStatus.RUNNING)
    pages: list[str] = []

    def go_on(seconds: float) -> None:
        assert seconds >= 5
        pages.append(written(run.path / "report.html"))
        if len(pages) == 1:
            with MetricsWriter(run.metrics_file) as metrics:
                metrics.log(40, {"env/return": 321.0})
        else:
            state = json.loads((run.path / "run.json").read_text())
            (run.path / "run.json").write_text(json.dumps({**state, "status": "finished"}))

    monkeypatch.setattr(time, "sleep", go_on)
    assert cli("report", run.path, "--watch").code == 0
    pages.append(written(run.path / "report.html"))
    # A browser loads the page again while the run lasts.
    assert ['http-equiv="refresh" content="10"' in page for page in pages] == [True, True, False]
    assert ["return 321" in page for page in pages] == [False, True, True]


def test_a_comparison_is_a_page_too(cli: Cli, tmp_path: Path) -> None:
    first, second = full_run("runs"), full_run("runs")
    cli.out("compare", first.path, second.path, "--html", "page.html", "--metric", "env/return")
    page = written(tmp_path / "page.html")
    assert second.path.name in page
    assert "no recorded difference between the runs" in page
    assert "env/return of each run over steps" in asset(page, "application/json")


class TestAtTheEndOfARun:
    def test_it_is_written_by_another_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = empty_run("runs")
        monkeypatch.setattr(curves, "COMMAND", (sys.executable, "-c", _WRITER))
        output: list[str] = []
        for asked, path in (("0", None), ("1", run.path / "report.html")):
            monkeypatch.setenv("RLINF_REPORT", asked)
            assert curves.write_report_at_end(run.path, output.append, lambda: False) == path
        assert output == []

    def test_what_keeps_it_is_one_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = empty_run("runs")
        monkeypatch.setenv("RLINF_REPORT", "1")
        output: list[str] = []
        failing = (
            sys.executable,
            "-c",
            "import sys; sys.exit('error: cannot write `r`\\n    why: a reason\\n    help: a remedy')",
        )
        monkeypatch.setattr(curves, "COMMAND", failing)
        assert curves.write_report_at_end(run.path, output.append, lambda: False) is None
        monkeypatch.setattr(curves, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
        assert curves.write_report_at_end(run.path, output.append, lambda: True) is None
        monkeypatch.setattr(curves, "missing_modules", lambda _: ["jinja2"])
        assert curves.write_report_at_end(run.path, output.append, lambda: False) is None
        assert len(output) == 3
        assert output[0].startswith("no report: cannot write `r`: a reason; `rlinf report ")
        assert output[1].startswith("no report: interrupted")
        assert "jinja2" in output[2]


_WRITER = "import sys, pathlib; pathlib.Path(sys.argv[2], 'report.html').write_text('x')"


def test_the_chart_code_cannot_end_its_element() -> None:
    assert "</script" not in charts._inlinable("a = '</script><!--';")
    assert "<!--" not in charts._inlinable("a = '</script><!--';")


def sample(number: int, reward: float, text: str, **options: Any) -> dict[str, Any]:
    return {
        "slot": number, "sample": 0, "prompt": f"{number}+1=", "text": text, "answer": str(number + 1),
        "reward": reward, "reason": "number", "finish_reason": "stop", "parts": {}, "tokens": [1, 2],
        "logprobs": [-0.1, -1.0], "versions": [3, 3], "pieces": [text, "<eos>"], **options,
    }  # fmt: skip


def turn(who: str, text: str, tool: str = "", seconds: float = 0.0, failure: str = "", part: int = 0) -> dict[str, Any]:
    return {"who": who, "text": text, "tool": tool, "seconds": seconds, "failure": failure, "segment": part}


@pytest.fixture
def run() -> RunFolder:
    """Return a finished run with samples of two steps."""
    made = RunFolder.create(RunnerConfig(), "math")
    write_samples(made.path, 1, [sample(0, 0.0, "early")])
    cut = sample(2, 0.0, "no\x1b[31m idea", finish_reason="length")
    write_samples(made.path, 10, [sample(0, 0.5, "half", parts={"style": 0.25}), sample(1, 1.0, "2"), cut])
    made.end(RunStatus.FINISHED)
    return made


def asked(out: str) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.strip().startswith("asked")]


def test_the_last_step_is_shown_whole(cli: Cli, run: RunFolder) -> None:
    ended = cli("samples")

    assert ended.code == 0
    assert asked(ended.out) == ["0+1=", "1+1=", "2+1="]
    assert "reward 0.5 (number), style 0.25" in ended.out
    assert "cut off at the length limit" in ended.out
    # What a model writes is no terminal control.
    assert "\x1b" not in ended.out
    assert "step 10: 3 of 3 samples" in ended.err
    assert "--step 1" in ended.err


def test_conversation_is_shown_by_turns_with_times_and_rewards(cli: Cli, run: RunFolder) -> None:
    turns = [
        turn("task", "1+1="),
        turn("model", "<search>1</search>\n", seconds=0.25),
        turn("reward", "+0.5"),
        turn("tool", "error: no answer", "search", 1.5, "timeout"),
    ]
    write_samples(run.path, 10, [sample(1, 1.0, "2", turns=turns)])
    assert cli("samples").out.splitlines()[1:5] == [
        "      task  1+1=",
        "     model  <search>1</search>  (250.0 ms)",
        "    reward  +0.5",
        "      tool  error: no answer  (search, 1500.0 ms, timeout)",
    ]


def test_conversations_of_one_run_are_told_apart(cli: Cli, run: RunFolder) -> None:
    turns = [turn("task", "play"), turn("model", "north"), turn("model", "south", part=1)]
    write_samples(run.path, 10, [{**sample(1, 1.0, "", turns=turns), "text": "", "answer": ""}])
    # Of a game there is no answer, and none that would be right.
    assert cli("samples").out.splitlines()[1:] == [
        "      task  play  (conversation 1)",
        "     model  north  (conversation 1)",
        "     model  south  (conversation 2)",
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--order", "best"), ["1+1=", "0+1=", "2+1="]),
        (("--order", "worst", "-n", "1"), ["2+1="]),
        (("--at-least", "0.5"), ["0+1=", "1+1="]),
        (("--at-least", "0.1", "--at-most", "0.9"), ["0+1="]),
        (("--step", "1"), ["0+1="]),
    ],
)
def test_order_step_and_bounds(cli: Cli, run: RunFolder, arguments: tuple[str, ...], shown: list[str]) -> None:
    ended = cli("samples", run.path, *arguments)

    assert (ended.code, asked(ended.out)) == (0, shown)


def test_random_ones_are_all_in_another_order(cli: Cli, run: RunFolder) -> None:
    orders = {tuple(asked(cli("samples", "--order", "random").out)) for _ in range(40)}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {("0+1=", "1+1=", "2+1=")}


def test_data_is_of_its_contract(cli: Cli, run: RunFolder, contract: Callable[[str, str], Any]) -> None:
    data = contract("samples", cli("samples", "--order", "best", "-n", "2", "--json").out)

    assert (data["step"], [item["reward"] for item in data["samples"]]) == (10, [1.0, 0.5])


def test_unlikely_tokens_are_coloured(cli: Cli, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_cli.console.colored", lambda stream=None: True)
    ended = cli("samples", "--logprobs", "--at-least", "1")
    assert "\x1b[1;33m<eos>" in ended.out
    assert "\x1b[1;33m2" not in ended.out
    assert "yellow below -0.7, red below -3" in ended.err


def test_a_step_without_samples_and_a_run_without_any(cli: Cli, run: RunFolder) -> None:
    assert "steps with samples: 1, 10" in cli.fails(1, "samples", "--step", "7")

    bare = RunFolder.create(RunnerConfig(), "embodied")
    bare.end(RunStatus.FINISHED)
    assert "the run has no samples" in cli.fails(1, "samples", bare.path)


def test_rows_of_an_older_version_are_shown(rlinf: Cli, run: RunFolder) -> None:
    old = {"prompt": "1+1=", "text": "2", "answer": "2", "reward": 1.0, "turns": [{"text": "2"}]}
    write_samples(run.path, 11, [old, {"reward": 0.0}])
    out = rlinf.out("samples")
    assert "prompt 0, answer 0: reward 1 ()" in out
    assert "prompt 0, answer 0: reward 0 ()" in out


pytest.importorskip("vl_convert")


def write(path: Path, steps: int, names: dict[str, int]) -> Path:
    """Metrics of a run, each name every so many steps."""
    file = path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        for step in range(1, steps + 1):
            writer.log(step, {name: step / steps for name, every in names.items() if step % every == 0})
    return file


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        (1, {"env/return": 1, "eval/return": 1, "env/success_once": 1}),
        (2, {"eval/success_at_end": 2}),
        (3000, {"env/return": 1, "env/success_at_end": 1, "eval/success_at_end": 500}),
    ],
)
def test_both_pictures_are_there(tmp_path: Path, steps: int, names: dict[str, int]) -> None:
    drawn = draw_curve(write(tmp_path, steps, names), tmp_path, "策略 $x_$ & <b>")
    assert drawn == (tmp_path / "curve.png", tmp_path / "curve.svg")
    png, svg = drawn
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    text = svg.read_text()
    assert "series: train" in text or "series: eval" in text
    # A long run is a line of a few hundred points.
    longest = max(path.count("L") for path in re.findall(r' d="([^"]*)"', text))
    assert longest < 700
    assert longest > 100 or steps < 100
    assert png.stat().st_size < 1 << 20
    assert svg.stat().st_size < 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "curve.svg", "metrics.jsonl"]


def test_the_same_run_draws_the_same_files(tmp_path: Path) -> None:
    file = write(tmp_path, 30, {"env/return": 1})
    contents: list[list[bytes]] = []
    for _ in range(2):
        drawn = draw_curve(file, tmp_path, "run")
        assert drawn is not None
        contents.append([path.read_bytes() for path in drawn])
    assert contents[0] == contents[1]


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path, "run") is None
    assert draw_curve(write(tmp_path, 3, {"time/step": 1}), tmp_path, "run") is None
    assert not (tmp_path / "curve.png").exists()


def test_what_is_drawn() -> None:
    metrics = [
        Metrics(1, 0.0, {"env/return": 1.0, "env/success_once": 0.5, "env/success_at_end": 0.5}),
        Metrics(2, 0.0, {"env/return": math.nan, "env/success_once": 0.75, "env/success_at_end": 0.75}),
        Metrics(3, 0.0, {"env/return": 3.0, "eval/return": 4.0}),
    ]
    (_, returns), (_, success) = result_curves(series_of(metrics))
    assert [(line.label, line.kind, line.bands) for line in returns] == [
        ("train", "mean", [Band(1, 1.0, 1.0, 1.0), Band(3, 3.0, 3.0, 3.0)]),
        ("eval", "eval", [Band(3, 4.0, None, None)]),
    ]
    # Where an episode ends with its success the two kinds are one line.
    assert [(line.label, [band.mean for band in line.bands]) for line in success] == [("train, at end", [0.5, 0.75])]


def test_whatever_fails_in_the_library_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a later version")

    file = write(tmp_path, 3, {"env/return": 1})
    monkeypatch.setattr(curves, "save_picture", fail)
    with pytest.raises(RunError, match="cannot be drawn") as raised:
        draw_curve(file, tmp_path, "run")
    assert "ZeroDivisionError: in a later version" in str(raised.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RLinfError, match="no learning curve") as missing:
        draw_curve(file, tmp_path, "run")
    assert "vl-convert-python" in str(missing.value)
    assert len(read_metrics(file)) == 3


def test_the_best_and_worst_samples_are_of_different_prompts(tmp_path: Path) -> None:
    run = empty_run(str(tmp_path))
    answers = [(prompt, 1.0) for prompt in "abcdefghij" for _ in range(4)]
    answers += [(prompt, 0.0) for prompt in "klmnopqrst" for _ in range(4)]
    write_samples(
        run.path,
        1,
        [{"prompt": prompt, "text": "", "answer": "", "reward": reward, "reason": ""} for prompt, reward in answers],
    )
    shown = gather(run)["samples"]
    assert [item["reward"] for item in shown] == [1.0] * 8 + [0.0] * 8
    assert len({item["prompt"] for item in shown}) == 16
