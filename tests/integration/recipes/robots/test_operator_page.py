"""The page of an operator in headless Chromium: it moves the arm, shows pictures, and has no fault at three widths."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.cameras.drivers import CameraView
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.registry import open_source
from tests.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKEN = "0123456789abcdef0123456789abcdef"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


class SteeredRun:
    """A simulated arm that is stepped at 20 Hz by a thread, with a page to steer it.

    Attributes:
        steps: by step, whether a person acted, and the largest number of what was carried out.
        ended: rewards of the steps that ended an episode by a flag.
    """

    def __init__(self, token_file: Path) -> None:
        self._env = make_env("franka_kin", EnvSettings(num_envs=1, task="pick", max_episode_steps=100_000))
        self.source: Any = open_source("browser", self._env, {"token_file": str(token_file), "port": 0})
        self._env.intervention = self.source
        self._env.reset()
        self.steps: list[tuple[bool, float]] = []
        self.ended: list[tuple[float, bool]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            result = self._env.step(np.zeros((1, 1, 8), np.float32))
            assert result.interventions is not None
            assert result.executed is not None
            self.steps.append((bool(result.interventions[0, 0]), float(np.abs(result.executed[0, 0, :7]).max())))
            if result.dones.any():
                self.ended.append((float(result.rewards.sum()), bool(result.failed is not None)))

    def show_more(self) -> None:
        """Add cameras of other shapes, one with a long name, one that has taken no picture for some time."""
        views, began = self._env.views, time.monotonic()
        extra = {"front_left_of_the_table": (720, 1280), "wrist": (480, 640), "side": (640, 480)}

        def all_views(row: int) -> list[CameraView]:
            added = [
                CameraView(name, np.zeros((*size, 3), np.uint8), began if name == "side" else time.monotonic())
                for name, size in extra.items()
            ]
            return [*views(row), *added]

        self._env.views = all_views

    def acts(self) -> bool:
        return self.steps[-1][0]

    def moves(self) -> bool:
        return self.steps[-1][1] > 0

    def close(self) -> None:
        self._over.set()
        self._thread.join(20)
        self.source.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SteeredRun]:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    steered = SteeredRun(file)
    yield steered
    steered.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser: Any, run: SteeredRun, complaints: list[str] | None = None, **options: Any) -> Any:
    """Return a page that steers."""
    page = browser.new_context(**options).new_page()
    said = [] if complaints is None else complaints
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(run.source.url)
    page.fill("#token", TOKEN)
    page.click("button[type=submit]")
    page.wait_for_selector("#cameras img")
    return page


def test_keys_flags_and_pictures(browser: Any, run: SteeredRun, record_property: Any) -> None:
    page = opened(browser, run)
    page.keyboard.down("KeyW")
    page.wait_for_timeout(300)
    assert not any(acts for acts, _ in run.steps)  # nothing moves unless it is held
    page.keyboard.down("Shift")
    until(lambda: run.acts() and run.moves(), "the arm moves")
    page.wait_for_selector("#status.you")
    page.keyboard.up("KeyW")
    until(lambda: run.acts() and not run.moves(), "the arm is held")
    page.evaluate("window.dispatchEvent(new Event('blur'))")
    until(lambda: not run.acts(), "the policy acts again")
    page.keyboard.up("Shift")
    page.keyboard.press("KeyE")
    page.keyboard.press("KeyX")
    until(lambda: run.ended, "the episode is discarded")
    page.keyboard.press("KeyY")
    until(lambda: len(run.ended) == 2, "the episode has succeeded")
    assert [failed for _, failed in run.ended] == [True, False]
    assert run.ended[1][0] >= 1

    begun, steps, count = time.monotonic(), len(run.steps), "[...cameras.values()][0].count"
    before = page.evaluate(count)
    page.wait_for_timeout(5000)
    seconds, pictures = time.monotonic() - begun, page.evaluate(count) - before
    trips = sorted(run.source.picture_seconds)
    p50, p99 = trips[len(trips) // 2], trips[int(0.99 * len(trips))]
    record_property("pictures_per_second", pictures / seconds)
    print(f"{pictures / seconds:.1f} pictures/s, on screen after p50 {1000 * p50:.0f}, p99 {1000 * p99:.0f} ms")
    # At most as many as steps, and as the option allows; a busy machine draws fewer.
    assert 0 < pictures <= min(10 * seconds + 2, len(run.steps) - steps + 2)
    assert "old" in page.text_content("#cameras figcaption")


def test_wrong_token_and_second_person_are_told(browser: Any, run: SteeredRun) -> None:
    page = browser.new_page()
    page.goto(run.source.url)
    page.fill("#token", "wrong" * 8)
    page.click("button[type=submit]")
    page.wait_for_selector("text=The token is wrong")
    assert page.query_selector("#cameras img") is None
    first = opened(browser, run)
    page.fill("#token", TOKEN)
    page.click("button[type=submit]")
    page.wait_for_selector("text=Somebody else is steering")
    first.close()
    until(lambda: run.source._desk.operator is None, "the first has left")
    page.click("button[type=submit]")
    page.wait_for_selector("#cameras img")


def test_arm_is_held_when_the_browser_is_killed(run: SteeredRun) -> None:
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = opened(started, run)
        page.keyboard.down("Shift")
        page.keyboard.down("KeyW")
        until(lambda: run.acts() and run.moves(), "the arm moves")
        begun = time.monotonic()
        session = started.new_browser_cdp_session()
        for process in session.send("SystemInfo.getProcessInfo")["processInfo"]:
            os.kill(process["id"], 9)
        until(lambda: run.acts() and not run.moves(), "the arm is held")
        assert (run.acts(), run.moves()) == (True, False)  # neither the policy nor the last key moves it
        print(f"held {1000 * (time.monotonic() - begun):.0f} ms after the browser was killed")
    again = sync.sync_playwright()
    with again as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = opened(started, run)  # the newest who tells the token steers
        until(lambda: not run.acts(), "the policy acts again")
        assert page.query_selector("#cameras img") is not None
        started.close()


def test_link_that_returns_is_taken_up_again(browser: Any, run: SteeredRun) -> None:
    page = opened(browser, run)
    page.evaluate("socket.close()")
    page.wait_for_selector("text=The connection is lost")
    page.wait_for_selector("text=The policy acts")
    assert not run.acts()
    page.keyboard.down("Shift")
    until(run.acts, "the person steers again")
    page.wait_for_selector("#status.you")
    assert run.acts()


@pytest.mark.parametrize("cameras", [1, 4])
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1024, "dark"), (1600, "light")])
def test_page_has_no_fault(
    browser: Any, run: SteeredRun, tmp_path: Path, width: int, scheme: str, cameras: int
) -> None:
    if cameras > 1:
        run.show_more()
    axe_playwright_python = pytest.importorskip("axe_playwright_python")
    axe = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    complaints: list[str] = []
    page = opened(
        browser,
        run,
        complaints,
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        has_touch=width < 600,
    )
    page.keyboard.down("Shift")
    page.wait_for_selector("#status.you")
    until(lambda: page.locator("#cameras img").count() == cameras, "all cameras")
    if cameras > 1:
        page.wait_for_selector("figure.old:has([title=side])")
        bottom = page.evaluate("Math.max(...[...document.images].map((image) => image.getBoundingClientRect().bottom))")
        assert bottom < 800  # all are on the screen at once
    page.evaluate(axe)
    faults = [(fault["id"], fault["nodes"][0]["html"]) for fault in page.evaluate("axe.run()")["violations"]]
    assert faults == []
    assert complaints == []
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1")
    page.screenshot(path=str(tmp_path / f"page-{width}-{scheme}.png"), full_page=True)
    page.keyboard.up("Shift")
    # A thumb on each of two buttons: held as long as both are down.
    until(lambda: not run.acts(), "the policy acts again")
    for selector in ("#enable", "[data-key=w]"):
        page.dispatch_event(selector, "keydown", {"code": "Space"})
    until(lambda: run.acts() and run.moves(), "the arm moves")
