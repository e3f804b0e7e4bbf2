"""The report of a run of 100,000 steps: made by `rlinf report`, and opened in headless Chromium.

python benchmarks/runtime/bench_report.py [--steps 100000]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Result, run_parts

MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
_BEGAN = 1.7e9
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run_of(steps: int, folder: Path) -> Path:
    """Return the folder of a run of that many steps that has ended."""
    run = folder / "long"
    run.mkdir()
    names = [f"train/actor/figure_{number}" for number in range(12)]
    with (run / "metrics.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            metrics = {name: math.sin(step / (100 + number)) for number, name in enumerate(names)}
            metrics |= {"env/return": step / steps, "time/step": 0.1, "time/rollout": 0.06, "time/actor_training": 0.04}
            lines.write(json.dumps({"step": step, "time": _BEGAN + step, "metrics": metrics}) + "\n")
    state: dict[str, object] = {
        "schema": "rlinf.run/1", "recipe": "embodied", "experiment": "long", "status": "finished", "step": steps,
        "reason": "", "pid": 1, "host": "here", "start": "1:1", "address": "", "created": _BEGAN,
        "updated": _BEGAN + steps, "ended": _BEGAN + steps, "resumed_from": None, "checkpoints": "checkpoints",
        "earlier": None,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(state))
    return run


def results(steps: int) -> Iterator[Result]:
    """Yield the size of the page, and how long it takes to make it and to open it."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(steps, Path(folder))
        page = Path(folder) / "report.html"
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "rlinf_cli", "report", str(run), "-o", str(page), "-q"], check=True)
        seconds = time.perf_counter() - began
        yield Result(f"{steps} steps: made", f"{seconds / steps * 1e6:.0f} us a step", f"{seconds:.1f} s", "", True)
        size = page.stat().st_size
        yield Result("size", "", f"{size / 1e6:.2f} MB", "< 3 MB", size < MOST_BYTES)
        if CHROMIUM is not None:
            shown, drawn = opened(page)
            yield Result("opened: there to read", "", f"{shown:.1f} s", "< 2 s", shown < MOST_SECONDS)
            yield Result("opened: every chart drawn", "", f"{drawn:.1f} s", "", True)


def opened(page: Path) -> tuple[float, float]:
    """Return the seconds until a page is there, and until all its charts are."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        began = time.perf_counter()
        tab.goto(page.as_uri())
        shown = time.perf_counter() - began
        tab.wait_for_selector("body[data-drawn]", timeout=120_000)
        drawn = time.perf_counter() - began
        browser.close()
    return shown, drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run (default 100000)")
    steps = parser.parse_args().steps
    return run_parts({"report": lambda: results(steps)}, None)


if __name__ == "__main__":
    sys.exit(main())
