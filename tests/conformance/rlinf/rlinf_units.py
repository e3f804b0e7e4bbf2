"""RLinf's unit tests, run over our names of theirs, counted by part: a file, or a class of a file.

`python -m tests.conformance.rlinf.rlinf_units DIR [PART...]` prints the counts for the checkout `DIR/RLinf`; `--write`
stores them. A part, such as `test_comm::TestCollective`, runs in a process of its own, with a package `rlinf` that has
our names under theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

COUNTS = Path(__file__).with_name("rlinf_unit_counts.json")
PARTS = (
    "test_placement",
    "test_cluster_config",
    "test_worker",
    "test_channel",
    "test_comm::TestCommunication",
    "test_comm::TestCollective",
    "test_comm::TestMultiChannelProcessGroupFailures",
)
# Their modules that the tests import, all made of the names below.
MODULES = (
    "rlinf",
    "rlinf.scheduler",
    "rlinf.scheduler.channel",
    "rlinf.scheduler.channel.channel_worker",
    "rlinf.scheduler.cluster",
    "rlinf.scheduler.cluster.cluster",
    "rlinf.scheduler.cluster.config",
    "rlinf.scheduler.cluster.node",
    "rlinf.scheduler.collective",
    "rlinf.scheduler.collective.collective_group",
    "rlinf.scheduler.collective.multi_channel_pg",
    "rlinf.scheduler.hardware",
    "rlinf.scheduler.hardware.accelerators",
    "rlinf.scheduler.hardware.accelerators.amd_gpu",
    "rlinf.scheduler.hardware.accelerators.nvidia_gpu",
    "rlinf.scheduler.hardware.robots",
    "rlinf.scheduler.hardware.robots.franka",
    "rlinf.scheduler.manager",
    "rlinf.scheduler.manager.coll_manager",
    "rlinf.scheduler.manager.manager",
    "rlinf.utils",
    "rlinf.utils.placement",
)
_SECONDS = 600
_PROJECT = Path(__file__).parents[3]
_MODULE = """\
from tests.conformance.rlinf import rlinf_names
from tests.conformance.rlinf.rlinf_names import *


def __getattr__(name):
    return getattr(rlinf_names, name)
"""


def stored() -> dict[str, dict[str, int]]:
    """Return the counts by part."""
    data: dict[str, dict[str, int]] = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    return data


def run(checkout: Path, part: str) -> tuple[Counter[str], str]:
    """Run a part; return how many tests passed, were skipped and failed, and what pytest printed."""
    file, *inside = part.split("::")
    with tempfile.TemporaryDirectory() as folder:
        root, report = Path(folder), Path(folder, "report.xml")
        for module in MODULES:
            package = root.joinpath(*module.split("."))
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(_MODULE, encoding="utf-8")
        (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        tests = checkout / "tests" / "unit_tests"
        own = ["-c", str(root / "pytest.ini"), f"--rootdir={tests}", "-p", "tests.conformance.rlinf.rlinf_plugin"]
        quiet = ["-p", "no:cacheprovider", "-q", "-rsfE", "--tb=short", "--timeout=240", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *own, *quiet, "::".join((str(tests / f"{file}.py"), *inside))],
            env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{_PROJECT}", "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return (_counts(report) if report.exists() else Counter()), done.stdout + done.stderr


def _counts(report: Path) -> Counter[str]:
    counts = Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        counts["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def main(arguments: list[str]) -> None:
    """Print the counts; see the module."""
    folder, *parts = [argument for argument in arguments if not argument.startswith("--")]
    data = stored()
    for part in parts or PARTS:
        counts, printed = run(Path(folder, "RLinf").absolute(), part)
        data[part] = {kind: counts[kind] for kind in ("passed", "skipped", "failed")}
        print(printed, part, data[part], sep="\n")
    if "--write" in arguments:
        COUNTS.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
