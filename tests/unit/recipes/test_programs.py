"""Programs of recipes and their front doors: what they name, import and validate."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from recipes.sections import checks
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.worker.worker import WorkerReference

DOORS = ("agent", "demonstrations", "embodied", "language")


@pytest.mark.parametrize("name", DOORS)
def test_door_has_what_it_lists(name: str) -> None:
    door = import_module(f"recipes.{name}")
    assert dir(door) == sorted(door.__all__)
    for public in door.__all__:
        assert getattr(door, public) is not None
    with pytest.raises(AttributeError, match="has no attribute 'gone'"):
        _ = door.gone


def test_doors_import_neither_ray_nor_torch() -> None:
    imports = "; ".join(f"import recipes.{name}" for name in DOORS)
    code = (
        f"import sys; {imports}; print([name for name in ('ray', 'torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


PROGRAMS = (
    "recipes.agent.agent_runner",
    "recipes.embodied.program",
    "recipes.math.program",
    "recipes.serve.serve_program",
    "recipes.sft_chat.chat_runner",
)


def references() -> Iterator[WorkerReference[Any]]:
    for program in PROGRAMS:
        yield from (var for var in vars(import_module(program)).values() if isinstance(var, WorkerReference))


@pytest.mark.parametrize("reference", list(references()), ids=lambda item: item.__name__)
def test_a_reference_says_of_its_class_what_is_so(reference: WorkerReference[Any]) -> None:
    resolved = pickle.loads(pickle.dumps(reference))
    assert (resolved.__module__, resolved.__name__) == (reference.__module__, reference.__name__)
    assert resolved.forked == reference.forked
    assert resolved.config_section == reference.config_section
    assert set(reference._rlinf_methods()) <= set(resolved._rlinf_methods())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_driver_imports_no_torch(program: str) -> None:
    code = f"import sys, {program}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def findings(monkeypatch: pytest.MonkeyPatch, *profiler: str, spy: str | None = None) -> list[tuple[str, str]]:
    """Return code and message of each error of a job with these overrides."""
    monkeypatch.setattr(checks, "py_spy", lambda: spy)
    overrides = (*(f"runner.profiler.{setting}" for setting in profiler), "runner.max_steps=4")
    job = load_with_lint("embodied/pick-laptop", overrides)
    return [(one.code, one.message) for one in job.diagnostics if one.code != "no-effect"]


def test_sound_profile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(monkeypatch, "components=[actor,env]", "last_step=4") == []
    assert findings(monkeypatch, "kind=py-spy", spy="/usr/bin/py-spy") == []


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("kind=py-spy", "missing-extra", "needs py-spy"),
        ("components=[critic]", "missing-component", "names `critic`, which is not placed"),
        ("first_step=5 last_step=5", "conflicting-settings", "after the last step of the run, 4"),
        ("last_step=1", "bad-value", "`last_step: 1` is before `first_step: 2`"),
        ("kind=nsys", "bad-value", "kind"),
    ],
)
def test_faulty_profile_is_told(monkeypatch: pytest.MonkeyPatch, setting: str, code: str, words: str) -> None:
    ((result, message),) = findings(monkeypatch, *setting.split())
    assert result == code
    assert words in message
