"""Task folders, how what an agent left is graded, and the command that checks and builds them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.agent_memory import placement_notes
from recipes.agent.boxes.box import BoxEnded
from recipes.agent.boxes.boxes import own_ids
from recipes.agent.boxes.image_building import image_of
from recipes.agent.harbor.grading import (
    CheckedTask,
    Expected,
    Grade,
    check_task,
    finish,
    grade,
    load_checked,
    read_checks,
    read_reward,
    task_box,
    write_checks,
)
from recipes.agent.harbor.task_folder import find_tasks, read_task
from rlinf_cli.main import main
from rlinf_core import ConfigError
from tests.unit.recipes.agent.boxes.running import stored
from tests.unit.recipes.agent.boxes.test_images import layer_of, write_archive
from tests.unit.recipes.agent.harbor.made_tasks import FORGERIES, FROM_WITHIN, double_task, fit, greeting_task


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


def test_paths_are_compared_in_their_shortest_form(tmp_path: Path) -> None:
    assert read_task(with_toml(tmp_path, '[environment]\nworkdir = "//app/./"\n')).workdir == "/app"
    assert read_task(with_toml(tmp_path, 'artifacts = ["/srv/./a/"]\n', "")).artifacts == ("/srv/a",)


@pytest.mark.parametrize(
    ("artifact", "why"),
    [
        ('{destination = "a"}', "`` is no absolute path"),
        ('""', "`` is no absolute path"),
        ('"//."', "the artifact `/`"),
    ],
)
def test_an_artifact_that_is_everything_is_refused(artifact: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        read_task(with_toml(tmp_path, f"artifacts = [{artifact}]\n", ""))


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
    folder = with_toml(tmp_path, "[environment]\nmemory_md = 3\nhealthcheck = {}\nallow_internet = true\n")
    (folder / "environment/Dockerfile").write_text('FROM rlinf/host\nENTRYPOINT ["/start"]\n')
    task = read_task(folder)
    assert task.notes[0].startswith("`environment.memory_md` is not known")
    assert task.notes[1:] == (
        "`environment.healthcheck` changes nothing here",
        "it asks for the internet, and a box has no network",
        "the `ENTRYPOINT` of its Dockerfile does not run: commands start alone",
    )


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_folder_without_a_file_is_refused(missing: str, tmp_path: Path) -> None:
    task = greeting_task(tmp_path)
    (task / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        read_task(task)


def test_a_task_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"an empty `instruction.md`"):
        read_task(greeting_task(tmp_path, **{"instruction.md": "\n"}))


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


TASKS: dict[str, Callable[..., Path]] = {"greeting": greeting_task, "double": double_task}
SOLUTION = {"greeting": "echo 'good morning' > /app/greeting", "double": "echo 'double = (2).__mul__' > double.py"}
EXPECTED = Expected("work", ("txt",), 0)


def graded(
    folder: Path, task_folder: Path, script: str, expected: Expected = EXPECTED, seconds: float | None = None
) -> Grade:
    async def one() -> Grade:
        task = read_task(task_folder)
        async with stored(folder) as store:
            image = await image_of(store, task.environment, task.docker_image, seconds=60)
            async with task_box(store, task, image) as box:
                with contextlib.suppress(BoxEnded):
                    await box.run(["bash", "-c", script], timeout=10)
                await finish(task, image, box, expected.mode)
                return await grade(store, task, image, store.boxes.kept(box), expected, seconds=seconds)

    return asyncio.run(one())


@pytest.mark.parametrize("name", TASKS)
def test_a_solution_earns_one_and_nothing_earns_zero(name: str, box_folder: Path, tmp_path: Path) -> None:
    task = TASKS[name](tmp_path)
    solved = graded(box_folder, task, SOLUTION[name])
    assert (solved.reward, solved.why, solved.tries) == (1.0, "", 1), solved
    assert graded(box_folder, task, "true").reward == 0.0


# What is told of some, and whether the policy has tampered.
TOLD = {
    "code under test that writes the other file": ("reward.json", True),
    "code under test that leaves a process which writes the reward after the tests, and ends": (
        *("reward.txt was changed after the tests had ended", True),
    ),
    "a file in place of the work folder": (
        *("what the agent left hinders the tests: the box could not be made: `/app` is no folder", False),
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_earns_nothing(forgery: str, box_folder: Path, tmp_path: Path) -> None:
    name, script = FORGERIES[forgery]
    result = graded(box_folder, TASKS[name](tmp_path), script, seconds=0.5 if "hangs" in forgery else None)
    assert result.reward == 0.0, result
    if forgery in TOLD:
        words, tampered = TOLD[forgery]
        assert (words in result.why, result.tampered, result.tries, result.running) == (True, tampered, 1, 0)


def test_there_are_ten_forgeries() -> None:
    assert len(FORGERIES) >= 10


def test_tests_that_never_end_are_tried_in_two_boxes(box_folder: Path, tmp_path: Path) -> None:
    result = graded(box_folder, double_task(tmp_path), "echo 'while True: pass' > /app/double.py", seconds=0.5)
    assert (result.reward, result.timed_out, result.tries) == (0.0, True, 2)
    assert result.why == "the tests took longer than 0.5 s"


def test_a_box_over_its_memory_in_the_tests_is_the_policys(box_folder: Path, tmp_path: Path) -> None:
    eater = "printf 'x = [bytearray(20 << 20) for _ in range(100)]\\n' > /app/double.py"
    assert graded(box_folder, double_task(tmp_path), eater).reward == 0.0


def test_what_a_task_declares_is_kept_and_the_rest_is_not(box_folder: Path, tmp_path: Path) -> None:
    tests = "cat /srv/a /app/b /opt/c 2>/dev/null > /tmp/all\n[ \"$(cat /tmp/all)\" = 'ab' ] && r=1 || r=0\n"
    tests += "echo $r > /logs/verifier/reward.txt\n"
    toml = (greeting_task(tmp_path) / "task.toml").read_text()
    task = greeting_task(tmp_path, **{"task.toml": f'artifacts = ["/srv/a"]\n{toml}', "tests/test.sh": tests})
    script = "mkdir -p /srv /opt; printf a > /srv/a; printf b > /app/b; printf c > /opt/c"
    assert graded(box_folder, task, script).reward == 1.0


@pytest.mark.parametrize(
    ("files", "reward", "why"),
    [
        ({"txt": b"0.5\n"}, 0.5, ""),
        ({"json": b'{"reward": 0.25}', "txt": b"1"}, 0.25, ""),
        ({"json": b'{"reward": 1, "speed": 3}'}, 1.0, ""),
        ({"txt": b"yes"}, 0.0, "cannot be read"),
        ({"txt": b"nan"}, 0.0, "no finite number"),
        ({"json": b'{"reward": true}'}, 0.0, "no finite number"),
        ({"json": b'{"reward": "1"}'}, 0.0, "no finite number"),
        ({"json": b'{"reward": Infinity}'}, 0.0, "no finite number"),
        ({"json": b"[1]"}, 0.0, "cannot be read"),
        ({"json": b'{"reward": 1' + b"0" * 400 + b"}"}, 0.0, "cannot be read"),
        ({"json": b"[" * 60_000}, 0.0, "cannot be read"),
        ({}, 0.0, "wrote no reward"),
    ],
)
def test_rewards_are_numbers_of_one_file(files: dict[str, bytes], reward: float, why: str) -> None:
    number, said = read_reward(files)
    assert number == reward
    assert why in said
    assert bool(why) == bool(said)


# `rlinf tasks check`


def checked(folder: Path, task: Path) -> CheckedTask:
    async def run() -> CheckedTask:
        async with stored(folder) as store:
            return await check_task(store, read_task(task))

    return asyncio.run(run())


def test_a_sound_task_is_fit(box_folder: Path, tmp_path: Path) -> None:
    result = checked(box_folder, greeting_task(tmp_path))
    assert (result.solution, result.nothing, result.mode, result.kinds) == (1.0, 0.0, "work", ("txt",))
    assert result.fault(30.0) == ""
    # The machine's own programs are those of the image.
    assert result.tmux is (shutil.which("tmux") is not None)


@pytest.mark.skipif(own_ids()["how"] == "single", reason="this user's boxes have one id")
@pytest.mark.parametrize(("of_image", "of_task"), [("me", ""), ("root", 'user = "me"\n')])
def test_solution_and_tests_run_as_the_tasks_users(
    of_image: str, of_task: str, box_folder: Path, tmp_path: Path
) -> None:
    made = "echo me:x:1000:1000::/home/me:/bin/sh >> /etc/passwd && chown 1000 /app && chmod 750 /app"
    files = {
        "environment/Dockerfile": f"FROM rlinf/host\nRUN {made}\nWORKDIR /app\nUSER {of_image}\n",
        "solution/solve.sh": "echo $SAID $(id -u) $(stat -c %a /app) > /app/greeting\n",
        "tests/test.sh": '[ "$(cat /app/greeting) $(id -u)" = "hi 1000 750 1000" ]\n'
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    }
    task = greeting_task(tmp_path, **files)
    toml = (task / "task.toml").read_text().replace("[agent]\n", f"[agent]\n{of_task}")
    toml = toml.replace("[verifier]\n", f'[solution.env]\nSAID = "hi"\n[verifier]\n{of_task}')
    (task / "task.toml").write_text(toml)
    assert checked(box_folder, task).fault(30.0) == ""


def test_an_image_without_tmux_is_refused_to_agents_in_it(tmp_path: Path) -> None:
    without = fit(read_task(greeting_task(tmp_path))).model_copy(update={"tmux": False})
    assert "its image has no `tmux`, in which `terminus-2` works" in without.fault(30.0, "terminus-2")
    assert without.fault(30.0) == without.fault(30.0, "own.agents:Own") == ""
    write_checks(tmp_path, [without])
    assert load_checked(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_checked(tmp_path, "terminus-2")
    assert "made/greeting: its image has no `tmux`" in (error.value.why or "")


def test_a_task_that_loads_the_policys_code_is_named_forgeable(box_folder: Path, tmp_path: Path) -> None:
    task = double_task(tmp_path)
    result = checked(box_folder, task)
    assert (result.solution, result.nothing, result.canary) == (1.0, 0.0, 1.0)
    assert "forgeable from within" in result.fault(30.0)
    assert graded(box_folder, task, FROM_WITHIN[1]).reward == 1.0


def test_a_task_keeps_more_where_its_work_folder_is_too_little(box_folder: Path, tmp_path: Path) -> None:
    files = {
        "solution/solve.sh": "mkdir /data; echo 'good morning' > /data/greeting\n",
        "tests/test.sh": "[ -s /data/greeting ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
    }
    result = checked(box_folder, greeting_task(tmp_path, **files))
    assert (result.solution, result.nothing, result.mode) == (1.0, 0.0, "files")


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        pytest.param({"solution/solve.sh": "true\n"}, "its solution earns 0", marks=pytest.mark.nightly),
        ({"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}, "doing nothing earns 1"),
        pytest.param(
            {"tests/test.sh": "exit 0\n"},
            "its solution earns 0: the tests wrote no reward",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_task_whose_grades_mean_nothing_is_not_fit(
    files: dict[str, str], fault: str, box_folder: Path, tmp_path: Path
) -> None:
    assert fault in checked(box_folder, greeting_task(tmp_path, **files)).fault(30.0)


def test_checks_are_kept_by_the_digest_of_the_task(tmp_path: Path) -> None:
    task = read_task(greeting_task(tmp_path))
    result = fit(task, seconds=11.0)
    write_checks(tmp_path, [result])
    assert read_checks(tmp_path) == {task.digest: result}
    assert "slow" in result.fault(30.0)
    (tmp_path / "checked.json").write_text('{"tasks": {"a": {}}}')
    with pytest.raises(ConfigError, match="no record of checks"):
        read_checks(tmp_path)


def test_checks_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    task = read_task(greeting_task(tmp_path))
    with pytest.raises(ConfigError, match=r"checked.json` cannot be written") as error:
        write_checks(tmp_path / "missing", [fit(task)])
    assert error.value.why == "No such file or directory"


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


def _config(path: Path, memory: int | None = None, most: int = 256, *, plays: bool = True) -> Any:
    environment = SimpleNamespace(path=str(path), box_memory_mib=memory)
    return SimpleNamespace(agent=SimpleNamespace(tasks=environment if plays else None, max_concurrent=most))


def test_boxes_are_counted_by_node_and_by_memory(tmp_path: Path) -> None:
    for folder, memory in ((greeting_task(tmp_path), 200), (double_task(tmp_path), 500)):
        toml = folder / "task.toml"
        toml.write_text(f"[environment]\nmemory_mb = {memory}\n")
    nodes = {"agent": [0, 0, 1, 1, 2], "actor": [3]}
    assert placement_notes(_config(tmp_path, 2000, most=4), nodes) == [
        "boxes of 2 agent processes on nodes 0-1: 4-8 at once in 2000 MiB (a task needs 200-500 MiB)",
        "boxes of 1 agent process on node 2: 4 at once in 2000 MiB (a task needs 200-500 MiB)",
    ]
    assert placement_notes(_config(tmp_path, 400), {"agent": [0]}) == [
        "boxes of 1 agent process on node 0: a task of 500 MiB never fits into 400 MiB"
        " (`agent.environment.options.box_memory_mib`) (a task needs 200-500 MiB)"
    ]
    assert placement_notes(_config(tmp_path / "none", 2000), {"agent": [0]}) == [
        "boxes of 1 agent process on node 0: as many as fit into 2000 MiB"
    ]
    assert placement_notes(_config(tmp_path / "none"), {"agent": [0]}) == [
        "boxes of 1 agent process on node 0: as many as fit into half of its memory"
    ]
    assert placement_notes(_config(tmp_path, plays=False), {"actor": [0]}) == []


def test_nothing_of_a_task_is_read_but_its_sizes(tmp_path: Path) -> None:
    task = greeting_task(tmp_path)
    # What `folder_digest` refuses.
    os.mkfifo(task / "environment/pipe")
    (notes,) = placement_notes(_config(task, 512), {"agent": [0]})
    assert notes.endswith("2 at once in 512 MiB (a task needs 256 MiB)")
    (task / "task.toml").unlink()
    (task / "task.toml").mkdir()
    (notes,) = placement_notes(_config(task, 512), {"agent": [0]})
    assert notes.endswith("as many as fit into 512 MiB")
