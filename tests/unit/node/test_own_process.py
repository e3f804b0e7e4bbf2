"""A user number that the password database does not have, and settings under which Ray does not start."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlinf_core.errors import ClusterError, RLinfError
from rlinf_core.node.cluster_records import folder
from rlinf_core.node.own_process import name_user, refuse_stripped_docstrings


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The temporary folder of a process whose user has neither a name nor a variable."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


def test_a_nameless_user_gets_a_home_and_a_name(nameless: Path) -> None:
    with pytest.raises(RuntimeError):
        folder()
    home = name_user()
    assert home is not None
    assert os.environ["HOME"] == home
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    assert folder().is_relative_to(home)
    assert getpass.getuser() == f"uid-{os.getuid()}"
    assert name_user() is None  # it is there now


def test_what_is_set_stays(nameless: Path) -> None:
    os.environ |= {"HOME": "/somewhere", "USER": "sim"}
    assert name_user() is None
    assert (os.environ["HOME"], getpass.getuser()) == ("/somewhere", "sim")


def test_a_home_that_others_may_enter_is_refused(nameless: Path) -> None:
    base = nameless / f"rlinf-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(RLinfError, match="HOME is not set, user"):
        name_user()


LEVELS = {"2": True, "3": True, "9" * 5000: True, "": False, "0": False, "1": False, "yes": False}


@pytest.mark.parametrize(("level", "stripped"), LEVELS.items())
def test_stripped_docstrings_alone_are_refused(level: str, stripped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", level)
    refusal = pytest.raises(ClusterError, match="PYTHONOPTIMIZE") if stripped else nullcontext()
    with refusal as caught:
        refuse_stripped_docstrings()
    assert caught is None or caught.value.help == "unset PYTHONOPTIMIZE"
