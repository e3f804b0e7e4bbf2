"""`rlinf tasks`: tasks with images, checked and built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.commands.tasks import build, check, load
from recipes.agent.harbor.checking import load_checked
from tests.unit.recipes.agent.harbor.made_tasks import double_task, greeting_task
from tests.unit.recipes.agent.images.test_images import layer_of, write_archive

pytestmark = pytest.mark.security

EXAMPLES = Path(__file__).parents[5] / "examples/terminal_tasks"


def answer(registered: Any, **arguments: Any) -> Any:
    """Return the `Result` of a command."""
    command = next(item.callback for item in registered.registered_commands if item.callback.__name__ in arguments)
    name = command.__name__
    return command.__wrapped__(**{key: value for key, value in arguments.items() if key != name})


def test_a_check_is_kept_beside_the_tasks(box_folder: Path, tmp_path: Path) -> None:
    greeting_task(tmp_path)
    result = answer(check, check=True, path=tmp_path, boxes=box_folder, memory=1024)
    assert result.code == 0
    (row,) = result.record["tasks"]
    assert (row["name"], row["solution"], row["nothing"], row["fault"]) == ("made/greeting", 1.0, 0.0, "")
    assert [task.name for task, _ in load_checked(tmp_path)] == ["made/greeting"]
    assert "fit" in result.text()
    json.dumps(result.record)


def test_a_task_that_is_not_fit_ends_the_check_with_1(box_folder: Path, tmp_path: Path) -> None:
    double_task(tmp_path)
    greeting_task(tmp_path, **{"environment/Dockerfile": "FROM python:3.12\n"})
    result = answer(check, check=True, path=tmp_path, boxes=box_folder, memory=1024)
    assert result.code == 1
    assert "forgeable from within" in result.record["tasks"][0]["fault"]
    (failed,) = result.record["failed"]
    assert failed["task"] == "greeting"
    assert "`python:3.12` is not on this node" in failed["why"]
    assert "rlinf tasks load" in failed["why"]


def test_images_are_built_and_loaded_under_a_name(box_folder: Path, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar", [layer_of(("one", "1"))], oci=True)
    loaded = answer(load, load=True, archive=archive, name="mine:1", boxes=box_folder, memory=1024)
    assert loaded.record["layers"] == 1
    greeting_task(tmp_path, **{"environment/Dockerfile": "FROM mine:1\nWORKDIR /app\n"})
    built = answer(build, build=True, path=tmp_path, boxes=box_folder, memory=1024)
    assert (built.code, built.record["failed"]) == (0, [])
    assert built.record["images"][0]["task"] == "made/greeting"


@pytest.mark.nightly
def test_the_examples_are_fit(box_folder: Path, tmp_path: Path) -> None:
    for folder in EXAMPLES.iterdir():
        if folder.is_dir():
            (tmp_path / folder.name).symlink_to(folder)
    result = answer(check, check=True, path=tmp_path, boxes=box_folder, memory=1024)
    assert (result.code, len(result.record["tasks"])) == (0, 3)
