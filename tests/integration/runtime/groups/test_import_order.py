"""Workers of a driver that `rlinf` started, in a working folder whose modules have names that are taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.process.import_path import OWN_ROOT

DRIVER = """\
import os, sys
sys.path.pop(0)
from rlinf_core.process import import_path
import_path.manage(os.getcwd())
import json
import mine
from rlinf_core import Cluster
if __name__ == "__main__":
    with Cluster(address="local") as cluster:
        [found] = mine.Mine.create_group().launch(cluster).find().wait()
    print(json.dumps(found))
"""
MINE = """\
from rlinf_core import Worker
class Mine(Worker):
    def find(self):
        import queue, random, recipes.embodied, recipes.theirs
        return [module.__file__ for module in (queue, random, recipes.embodied, recipes.theirs)]
"""


@pytest.mark.timeout(200)
def test_workers_import_rlinf_the_library_and_user_code(tmp_path: Path) -> None:
    for name in ("random", "queue", "rlinf_core"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('hidden')")
    (tmp_path / "recipes").mkdir()
    for name in ("__init__", "theirs"):
        (tmp_path / "recipes" / f"{name}.py").write_text("")
    (tmp_path / "mine.py").write_text(MINE)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": OWN_ROOT},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *standard, recipe, theirs = map(Path, json.loads(done.stdout.splitlines()[-1]))
    assert all(file.parent != tmp_path for file in standard)
    assert Path(OWN_ROOT) in recipe.parents
    assert theirs == tmp_path / "recipes" / "theirs.py"
