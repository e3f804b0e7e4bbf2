"""Pages of runs in headless Chromium: nothing is loaded, nothing complains, axe finds no serious fault."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.main import main
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.report_runs import empty_run, full_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("axe_playwright_python")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module", params=["finished", "failed", "empty", "compared", "several"])
def page_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "page.html"
    if request.param == "compared":
        first, second = full_run(str(folder)), full_run(str(folder))
        code = main(["compare", str(first.path), str(second.path), "--html", str(path), "--metric", "env/return"])
    elif request.param == "several":
        code = main(["report", str(full_run(str(folder)).path), str(empty_run(str(folder)).path), "-o", str(path)])
    else:
        made = {
            "finished": full_run,
            "failed": lambda folder: full_run(folder, status=RunStatus.FAILED),
            "empty": empty_run,
        }
        code = main(["report", str(made[request.param](str(folder)).path), "-o", str(path)])
    assert code == 0
    return path


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1024, "dark"), (1600, "light")])
def test_a_page_loads_nothing_and_has_no_fault(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    import axe_playwright_python

    axe = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    output: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: output.append(message.text))
    page.on("pageerror", lambda error: output.append(str(error)))
    page.on("dialog", lambda dialog: output.append("a dialog opened"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=120_000)
    for part in page.query_selector_all("details:not([open]) > summary"):
        part.click()
    # The page forbids code from text, which `wait_for_function` is.
    page.wait_for_selector(".chart:not(:has(svg))", state="detached", timeout=120_000)
    page.evaluate(axe)
    faults = [
        (violation["id"], violation["nodes"][0]["html"])
        for violation in page.evaluate("axe.run()")["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert faults == []
    # The videos of these runs are no videos.
    assert [line for line in output if "media" not in line.lower()] == []
    beside = [url for url in asked if not url.startswith(("data:", "blob:")) and not url.endswith((".html", ".mp4"))]
    assert beside == []
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1")
    context.close()


def test_long_run_is_drawn_by_few_points_with_its_extremes(browser: Any, tmp_path: Path) -> None:
    steps, spike = 100_000, 77_777
    run = empty_run(str(tmp_path))
    with MetricsWriter(run.metrics_file) as metrics:
        for step in range(1, steps + 1):
            metrics.log(step, {"env/return": 1234.5 if step == spike else step / steps})
    path = tmp_path / "page.html"
    assert main(["report", str(run.path), "-o", str(path)]) == 0
    assert path.stat().st_size < 3_000_000
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=120_000)
    charts = page.evaluate("Object.values(JSON.parse(document.getElementById('charts').textContent))")
    # A point stands for the steps around it, with the least and the greatest of their values.
    assert charts
    assert all("1234.5" in str(chart) for chart in charts if "return" in chart["description"])
    counted = "[...document.querySelectorAll('.chart')].map(each => each.querySelectorAll('path').length)"
    points = max(page.evaluate(counted))
    assert 0 < points < 1000
    page.close()
