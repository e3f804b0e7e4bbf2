"""Task folders: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.agent.harbor.task_folder import find_tasks, read_task
from rlinf_core import ConfigError
from tests.unit.recipes.agent.harbor.made_tasks import greeting_task


def with_toml(folder: Path, text: str, old: str = "[environment]") -> Path:
    task = greeting_task(folder)
    toml = (task / "task.toml").read_text()
    (task / "task.toml").write_text(toml.replace(old, text) if old else text + toml)
    return task


def test_a_task_has_its_limits_and_its_text(tmp_path: Path) -> None:
    task = read_task(greeting_task(tmp_path))
    assert (task.name, task.memory_mib, task.storage_mib, task.agent_seconds) == ("made/greeting", 256, 64, 30.0)
    assert task.instruction == "Write `good morning` into `/app/greeting`."
    assert (task.docker_image, task.workdir, task.notes, task.has_solution) == (None, None, (), True)


def test_sizes_of_earlier_versions_are_read(tmp_path: Path) -> None:
    task = read_task(with_toml(tmp_path, 'memory = "1.5G"\n', "memory_mb = 256\n"))
    assert task.memory_mib == 1536


def test_a_size_that_no_machine_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`environment.storage_mb` must be at most"):
        read_task(with_toml(tmp_path, "storage_mb = 1e300\n", "storage_mb = 64\n"))


def test_the_digest_changes_with_each_file(tmp_path: Path) -> None:
    task = greeting_task(tmp_path)
    first = read_task(task).digest
    (task / "tests/more.txt").write_text("")
    assert read_task(task).digest != first


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[environment]\ngpus = 1\n", "needs GPUs"),
        ('[environment]\ntpu = {type = "v5"}\n', r"needs a TPU \(`environment.tpu`\)"),
        ('[environment]\nmcp_servers = [{name = "a"}]\n', "MCP servers"),
        ('[environment]\nos = "windows"\n', "not for Linux"),
        ("[environment]\ncpus = -1\n", "`environment.cpus` must be greater than 0"),
        ('[environment]\ncpus = "many"\n', "`environment.cpus`: expected a number, found text"),
        ('[environment]\nworkdir = "app"\n', "no absolute path"),
        ('[environment]\nworkdir = "/app/../etc"\n', "no absolute path"),
        ('[environment]\nenv = {KEY = "${HOME}"}\n', "`environment.env.KEY` asks for a variable of this machine"),
        ('[environment]\nmemory = "much"\n', "no size"),
        (f'[environment]\nmemory = "{"9" * 400}G"\n', "no size"),
    ],
)
def test_what_boxes_do_not_have_is_refused_by_name(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        read_task(with_toml(tmp_path, text))


def test_several_steps_containers_and_hosts_are_refused(tmp_path: Path) -> None:
    for name, text in (("steps", '[[steps]]\nname = "a"\n[environment]'), ("hosts", "[environment]")):
        task = with_toml(tmp_path / name, text)
        if name == "steps":
            # Those of its steps are in folders of their own.
            (task / "instruction.md").unlink()
        if name == "hosts":
            toml = (task / "task.toml").read_text()
            (task / "task.toml").write_text(toml.replace('"no-network"', '"allowlist"'))
        with pytest.raises(ConfigError, match="several steps" if name == "steps" else "some hosts"):
            read_task(task)
    task = greeting_task(tmp_path / "compose", **{"environment/docker-compose.yaml": "services: {}\n"})
    with pytest.raises(ConfigError, match=r"run by compose \(`environment/docker-compose.yaml`\)"):
        read_task(task)


def test_what_changes_nothing_is_told(tmp_path: Path) -> None:
    task = read_task(with_toml(tmp_path, "[environment]\nmemory_md = 3\nhealthcheck = {}\nallow_internet = true\n"))
    assert task.notes[0].startswith("`environment.memory_md` is not known")
    assert task.notes[1:] == (
        "`environment.healthcheck` changes nothing here",
        "it asks for the internet, and a box has no network",
    )


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_folder_without_a_file_is_refused(missing: str, tmp_path: Path) -> None:
    task = greeting_task(tmp_path)
    (task / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        read_task(task)


def test_tasks_are_found_in_a_folder_and_below_it(tmp_path: Path) -> None:
    task = greeting_task(tmp_path / "set/easy")
    assert find_tasks(task) == [task]
    assert find_tasks(task.parent) == [task]
    assert find_tasks(tmp_path / "set") == [task]
    with pytest.raises(ConfigError, match="has no tasks"):
        find_tasks(task / "tests")
    (tmp_path / "old/task").mkdir(parents=True)
    (tmp_path / "old/task/task.yaml").touch()
    with pytest.raises(ConfigError) as error:
        find_tasks(tmp_path / "old")
    assert "`task.yaml`, of the first format of Terminal-Bench" in (error.value.why or "")
    with pytest.raises(ConfigError, match=r"there is no folder `.*none`"):
        find_tasks(tmp_path / "none")
