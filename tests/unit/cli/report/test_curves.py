"""Curves and the content of reports."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recipes.language.loop.arrivals import write_samples
from rlinf_cli.report import curves
from rlinf_cli.report.content import gather
from rlinf_cli.report.curves import draw_curve, result_curves
from rlinf_cli.runs.metric_columns import Band, series_of
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.runners.metrics import Metrics, MetricsWriter, read_metrics
from tests.unit.cli.report_runs import empty_run

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

    monkeypatch.setattr(curves, "save_picture", fail)
    with pytest.raises(RunError, match="cannot be drawn") as raised:
        draw_curve(write(tmp_path, 3, {"env/return": 1}), tmp_path, "run")
    assert "ZeroDivisionError: in a later version" in str(raised.value)


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file = write(tmp_path, 3, {"env/return": 1})
    with pytest.raises(RLinfError, match="no learning curve") as raised:
        draw_curve(file, tmp_path, "run")
    assert "vl-convert-python" in str(raised.value)
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
