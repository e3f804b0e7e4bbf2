"""Pages, tables and pictures that are made from the code or from runs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Final
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest
from PIL import Image

from docs import gallery, results, site_hooks
from docs.arm import compose
from docs.media import PICTURE, Terminal, drawn, record
from rlinf_cli.main import main
from rlinf_core.runners import events
from rlinf_core.runners.exporters import BackendSettings, PrometheusExporter

ENTRIES = gallery.entries()


def test_there_are_four_runs() -> None:
    assert [entry.name for entry in ENTRIES] == ["trained", "failed", "videos", "samples"]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_its_command_is_sound(entry: gallery.Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*entry.arguments, "--dry-run", "--quiet"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_only_reports_that_are_there_are_linked(tmp_path: Path) -> None:
    page = (gallery.DOCS / "results.md").read_text(encoding="utf-8")
    assert gallery.with_links(page, tmp_path) == page
    (tmp_path / "failed.html").write_text("<p>report</p>")
    linked = gallery.with_links(page, tmp_path)
    assert "(gallery/failed.html)" in linked
    assert "(gallery/trained.html)" not in linked


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gallery.main(["nosuch"]) == 2
    assert "there are trained, failed, videos, samples" in capsys.readouterr().out


TABLE = """
Engines:
  columns: [CPU]
  rows:
    torch: {{cells: [{cell}], run: here, tests: ["{test}"]}}
"""
TEST = "integration/recipes/embodied/test_embodied.py::test_ppo_learns_to_pick"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "DOCS", tmp_path)
    (tmp_path / "support.md").write_text("above\n<!-- matrix -->\nold\n<!-- end of matrix -->\nbelow\n")
    return tmp_path / "support.yaml"


def test_a_table_is_made_anew(page: Path) -> None:
    page.write_text(TABLE.format(cell="R 2026-11-25", test=TEST))
    text = results.support_page()
    assert "| torch | **R** 2026-11-25 | here | `test_embodied` (nightly) |" in text
    assert re.search(r"^above\n.*^below\n", text, re.MULTILINE | re.DOTALL)
    assert "old" not in text


@pytest.mark.parametrize(
    ("cell", "test", "words"),
    [
        ("yes", TEST, "are no cells"),
        ("R", TEST, "are no cells"),
        ("C", "unit/test_nothing.py", "there is no test"),
        ("C", TEST + "_twice", "there is no test"),
    ],
)
def test_what_does_not_exist_is_an_error(page: Path, cell: str, test: str, words: str) -> None:
    page.write_text(TABLE.format(cell=cell, test=test))
    with pytest.raises(ValueError, match=words):
        results.support_page()


SVG = "{http://www.w3.org/2000/svg}"


def shown(text: str) -> list[str]:
    terminal = Terminal()
    terminal.feed(text)
    return ["".join(part for part, _ in row) for row in terminal.rows(9)]


def test_terminal_draws_lines_again() -> None:
    assert shown("kept\r\nstep 1\r\nnow a\r\x1b[2K\x1b[1A\x1b[2Kstep 2\r\nnow b") == ["kept", "step 2", "now b"]


def test_terminal_keeps_styles() -> None:
    terminal = Terminal()
    terminal.feed("\x1b[1mbold\x1b[0m plain \x1b[32mgreen")
    assert [(text, style.bold, style.colour) for text, style in terminal.rows(1)[0]] == [
        ("bold", True, ""),
        (" plain ", False, ""),
        ("green", False, "32"),
    ]


def test_picture_shows_first_and_last_frame() -> None:
    picture = ElementTree.fromstring(drawn("rlinf", [(0.0, "a < b\r\n"), (1.0, "finished\r\n")]))
    frames = list(picture.iterfind(f".//{SVG}g[@id='run']/{SVG}g"))
    texts = [[text.text for text in frame.iter(f"{SVG}text")] for frame in (frames[0], frames[-1])]
    assert texts == [["$", "rlinf", "a\N{NO-BREAK SPACE}<\N{NO-BREAK SPACE}b"], [*texts[0], "finished"]]


def test_recording_of_a_failed_command_is_refused() -> None:
    with pytest.raises(CalledProcessError):
        record([sys.executable, "-c", "raise SystemExit(3)"])


def test_committed_picture_is_small_and_ends_well() -> None:
    assert PICTURE.stat().st_size <= 500 * 1024
    assert "finished" in list(ElementTree.parse(PICTURE).iterfind(f".//{SVG}g[@id='run']/{SVG}g"))[-1].itertext()


def test_arm_at_four_moments_stands_beside_its_curve() -> None:
    frames = [Image.new("RGB", (528, 136), (level, level, level)) for level in range(101)]
    curve = Image.new("RGB", (400, 132), "white")
    curve.paste((255, 0, 0), (200, 0, 400, 132))
    picture = compose(frames, curve)
    shown = [picture.getpixel(place) for place in ((10, 10), (274, 10), (10, 146), (274, 146))]
    assert shown == [(level,) * 3 for level in (0, 30, 60, 95)]
    assert picture.getpixel((530, 130)) == (255, 0, 0)


ROOT: Final = Path(__file__).parents[3]
DASHBOARD: Final = ROOT / "docs" / "grafana" / "rlinf.json"
PHASES: Final = (
    events.SYNC_WEIGHTS,
    events.GENERATE_ROLLOUTS,
    events.ADVANTAGES,
    events.ACTOR_TRAINING,
    events.EVALUATE,
)
# What depends on the machine is not in the good runs. The nightly run with a real Prometheus serves them.
MEASURED: Final = (
    *("time/step", "speed/env_steps_per_second", "speed/samples_per_second", "speed/learner_idle", "speed/env_idle"),
    *("memory/actor_gib", "memory/actor_accelerator_gib", "rollout/tokens_per_second"),
)


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def asked() -> set[str]:
    text = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    return set(re.findall(r"rlinf_\w+", text))


def recorded() -> Iterator[str]:
    for path in sorted((ROOT / "tests" / "data" / "good_runs").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield from json.loads(line)["metrics"]


@pytest.fixture
def served(tmp_path: Path) -> set[str]:
    exporter = PrometheusExporter(BackendSettings(tmp_path, "rlinf", "run", {}), 0)
    names = {*recorded(), *(f"time/{phase}" for phase in PHASES), *MEASURED}
    exporter.log(1, dict.fromkeys(names, 1.0))
    with urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    exporter.close()
    return set(re.findall(r"^(rlinf_\w+)\{", text, re.MULTILINE))


def test_every_gauge_of_the_dashboard_is_served(served: set[str]) -> None:
    assert len(asked()) > 20
    assert asked() - served == set()


def test_panels_have_distinct_ids_and_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in panels()]
    cells = [
        (place["x"] + column, place["y"] + row)
        for place in places
        for column in range(place["w"])
        for row in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_query_is_of_the_chosen_runs() -> None:
    for panel in panels():
        for target in panel["targets"]:
            assert len(re.findall(r'rlinf_\w+\{run=~"\$run"\}', target["expr"])) == 1, target


DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("troubleshooting.md", "placement.md")
COMMAND = re.compile(r"^\$ (.*?)\n(.*?)(?=^\$|\Z)", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str) -> list[tuple[str, str]]:
    """Return the blocks of a page of this kind, each with what stands beside the kind."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


COMMANDS = [
    (page, command, shown)
    for page in PAGES
    for _, text in blocks(page, "console")
    for command, shown in COMMAND.findall(text)
]


@pytest.mark.parametrize(("page", "command", "shown"), COMMANDS, ids=[command for _, command, _ in COMMANDS])
def test_a_command_shows_this(
    page: str,
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in blocks(page, "yaml"):
        if file:
            Path(file.removeprefix(" file=")).write_text(text, encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "rlinf"
    code = main(arguments)
    printed = capsys.readouterr()
    assert f"{printed.out}{printed.err}exit code {code}\n" == shown


def test_there_are_commands() -> None:
    assert {page for page, _, _ in COMMANDS} == set(PAGES)
    assert len(COMMANDS) >= 8


def test_every_named_test_is_there() -> None:
    root = DOCS.parent
    deaths = (DOCS / "dev/deaths.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", deaths)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (root / path).is_file() or (name and f"def {name}(" not in (root / path).read_text(encoding="utf-8"))
    ]

    assert len(named) >= 20
    assert missing == []


def test_pages_of_the_site_have_all_examples_and_names() -> None:
    pages = {name: site_hooks.page_of(name) for name in site_hooks.MADE}
    assert "## own_recipe.py" in pages["examples.md"]
    assert all(f".{name}\n" in pages["api.md"] for name in ("LeastLoaded", "WorkerGroup", "VectorEnv"))
