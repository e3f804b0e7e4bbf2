"""`rlinf tasks`: tasks with images, checked and built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.harbor.checking import load_checked
from rlinf_cli.main import main
from tests.unit.recipes.agent.harbor.made_tasks import double_task, greeting_task
from tests.unit.recipes.agent.images.test_images import layer_of, write_archive

pytestmark = pytest.mark.security

EXAMPLES = Path(__file__).parents[5] / "examples/terminal_tasks"


Tasks = Callable[..., tuple[int, Any]]


@pytest.fixture
def tasks(box_folder: Path, capsys: pytest.CaptureFixture[str]) -> Tasks:
    """Runs `rlinf tasks` with the boxes of the tests: its exit code and its record."""

    def run(*words: str | Path) -> tuple[int, Any]:
        capsys.readouterr()
        code = main(["tasks", *map(str, words), "--boxes", str(box_folder), "--memory", "1024", "--json"])
        out, err = capsys.readouterr()
        assert out, err
        return int(code), json.loads(out)

    return run


def test_a_check_is_kept_beside_the_tasks(tasks: Tasks, tmp_path: Path) -> None:
    greeting_task(tmp_path)
    code, record = tasks("check", tmp_path)
    assert code == 0
    (row,) = record["tasks"]
    assert (row["name"], row["solution"], row["nothing"], row["fault"]) == ("made/greeting", 1.0, 0.0, "")
    assert [task.name for task, _ in load_checked(tmp_path)] == ["made/greeting"]


def test_a_task_that_is_not_fit_ends_the_check_with_1(
    box_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double_task(tmp_path)
    greeting_task(tmp_path, **{"environment/Dockerfile": "FROM python:3.12\n"})
    assert main(["tasks", "check", str(tmp_path), "--boxes", str(box_folder), "--memory", "1024"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("made/double", "forgeable from within", "greeting", "`python:3.12` is not on this node"):
        assert text in printed
    assert "rlinf tasks load" in printed


def test_images_are_built_and_loaded_under_a_name(tasks: Tasks, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=True)
    assert tasks("load", archive, "mine:1")[1]["layers"] == 1
    greeting_task(tmp_path, **{"environment/Dockerfile": "FROM mine:1\nWORKDIR /app\n"})
    code, built = tasks("build", tmp_path)
    assert (code, built["failed"]) == (0, [])
    assert built["images"][0]["task"] == "made/greeting"


@pytest.mark.nightly
def test_the_examples_are_fit(tasks: Tasks, tmp_path: Path) -> None:
    for folder in EXAMPLES.iterdir():
        if folder.is_dir():
            (tmp_path / folder.name).symlink_to(folder)
    code, record = tasks("check", tmp_path)
    assert (code, len(record["tasks"])) == (0, 3)
