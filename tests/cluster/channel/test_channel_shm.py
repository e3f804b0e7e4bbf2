"""Channels where /dev/shm is as small as in a container by default."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare"),
]

_ROOT = Path(__file__).parents[3]
_SCRIPT = Path(__file__).with_name("small_shm.py")
_SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"')


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(180)
def test_items_of_up_to_100_mb_pass_where_dev_shm_has_64() -> None:
    if subprocess.run([*_SMALL, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    done = subprocess.run(
        [*_SMALL, sys.executable, str(_SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report == {"shm": 64 << 20, "whole": [1, 8, 32, 32, 32, 100]}
