"""The live view as a person sees it: on a real terminal of 80 columns, with the recipe that starts nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pexpect: Any = pytest.importorskip("pexpect")

RLINF = Path(sys.executable).with_name("rlinf")
SHOW_CURSOR = "\x1b[?25h"
Start = Callable[..., Any]


@pytest.fixture
def start(fake_recipe: Path) -> Iterator[Start]:
    """Starts `rlinf train recipe=fake` on a terminal."""
    children: list[Any] = []

    def run(*arguments: str, **environ: str) -> Any:
        hidden = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        child = pexpect.spawn(
            str(RLINF),
            ["train", "recipe=fake", *arguments],
            cwd=str(fake_recipe),
            env=environment | {"TERM": "xterm-256color"} | environ,
            dimensions=(24, 80),
            timeout=60,
            encoding="utf-8",
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.close(force=True)


def end(child: Any) -> tuple[int, str]:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, child.before


def test_the_block_is_drawn_and_gone_at_the_end(start: Start) -> None:
    child = start("fake.launch=0.5", "fake.seconds=0.1")
    child.expect("waiting for rollout: 2 processes")
    child.expect("at most 30 s")
    child.expect("collecting rollouts")
    code, rest = end(child)
    assert code == 0
    assert SHOW_CURSOR in rest
    last = rest[rest.rindex(SHOW_CURSOR) :]
    assert "finished" in last
    assert "collecting rollouts" not in last
    # What lasts stays above the block.
    assert "evaluated at step 10: success 0.75, return 9" in rest


def test_ctrl_c_leaves_the_terminal_as_it_was(start: Start) -> None:
    child = start("fake.seconds=0.1", "runner.max_steps=100000")
    child.expect("collecting rollouts")
    child.sendintr()
    code, rest = end(child)
    assert code == 130
    assert SHOW_CURSOR in rest
    assert "interrupted after step" in rest
    assert "Traceback" not in rest


def test_ctrl_c_twice_leaves_the_terminal_as_it_was(start: Start) -> None:
    child = start("fake.seconds=0.1", "fake.end=500", "runner.max_steps=100000")
    child.expect("collecting rollouts")
    child.sendintr()
    child.expect("ending; press Ctrl-C again to end at once")
    child.sendintr()
    code, rest = end(child)
    assert code == 130
    assert SHOW_CURSOR in rest


@pytest.mark.parametrize("refusal", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=lambda item: next(iter(item)))
def test_a_terminal_that_wants_no_bars_gets_lines(start: Start, refusal: dict[str, str]) -> None:
    code, shown = end(start(**refusal))
    assert code == 0
    assert "\x1b" not in shown
    assert "step 12/12  success 0.9, return 12.5, length 40" in shown


def settled(screen: str) -> bool:
    """Return whether a screen shows the block once, whole, and below what has happened."""
    lines = [line for line in screen.splitlines() if line]
    above, _, block = "\n".join(lines).partition("\nfake   ")
    names = [line.split()[0] for line in block.splitlines()[1:]]
    return (
        names == ["step", "train", "learn", "time", "eval", "saved", "now"]
        and re.search(r"\nstep   \d+/100000  ─{24} 0%  [\d.]+ steps/s  [\d:]+, ", block) is not None
        and re.search(r"\nevaluated at step (\d+): success 0.75, return 9\nsaved global_step_\1$", above) is not None
    )


def test_the_screen_never_scrolls_sideways(fake_recipe: Path) -> None:
    """tmux keeps the screen as a terminal does: the block is whole, once, and below what has happened."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    name = f"rlinf-test-{os.getpid()}"
    tmux = ["tmux", "-L", name]
    steps = "runner.max_steps=100000 runner.save_interval=10 runner.val_check_interval=10"
    command = f"{RLINF} train recipe=fake fake.seconds=0.3 {steps}"
    environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TMUX")}
    subprocess.run(
        [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "30", command], check=True, env=environ
    )
    try:
        deadline = time.monotonic() + 60
        screen = ""
        # Between two drawings a picture may be taken of half a block.
        while not settled(screen) and time.monotonic() < deadline:
            screen = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
            time.sleep(0.1)
        assert settled(screen), screen
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
