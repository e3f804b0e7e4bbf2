"""The site builds without a warning, a dead link fails, pages load nothing from elsewhere, and the search finds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from docs import gallery

REPOSITORY = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a page loads by itself, unlike a link that somebody follows.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//"""
    r"""|<link[^>]+rel=["']?stylesheet[^>]+href=["']?(?:https?:)?//"""
)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the site is built from, with a report in its gallery."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("source")
    for name in ("docs", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, folder)
    made = folder / gallery.MADE.relative_to(REPOSITORY)
    made.mkdir(parents=True)
    (made / "failed.html").write_text("<!doctype html><title>a report</title>")
    return folder


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(source, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_its_pages_load_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
    api = (site / "api.html").read_text(encoding="utf-8")
    assert all(
        name in api for name in ("WorkerGroup", "consume_durations", "VectorEnv", "load_policy", "TextEnvironment")
    )


def test_a_report_of_the_gallery_is_a_page(site: Path) -> None:
    text = (site / "results.html").read_text(encoding="utf-8")
    assert re.findall(r'href="?(gallery/\w+\.html)', text) == ["gallery/failed.html"]
    assert "a report" in (site / "gallery/failed.html").read_text(encoding="utf-8")


def test_a_dead_link_fails(source: Path, site: Path, tmp_path: Path) -> None:
    assert site.exists()
    page = source / "docs/memory.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n[more](nosuch.md)\n", encoding="utf-8")
    done = build(source, tmp_path)
    assert done.returncode != 0
    assert "nosuch.md" in done.stderr


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served on this machine alone."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_part_of_a_key_is_found_by_the_search(address: str) -> None:
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        output: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: output.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        page.click("[data-md-component=search-query]")
        page.keyboard.type("staleness")
        page.wait_for_selector(".md-search-result__item", timeout=300_000)
        result = page.eval_on_selector_all(".md-search-result__item a", "links => links.map(each => each.href)")
        browser.close()
    assert output == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert any("/reference/" in link for link in result)
