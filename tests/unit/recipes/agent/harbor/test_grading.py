"""Whether what an agent left earns what it is worth, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.agent.boxes.box import BoxEnded
from recipes.agent.boxes.boxes import BoxHost
from recipes.agent.harbor.checking import CheckedTask, check_task, load_checked, read_checks, write_checks
from recipes.agent.harbor.grading import Expected, Grade, finish, grade, read_reward, task_box
from recipes.agent.harbor.task_folder import read_task
from recipes.agent.images.building import image_of
from recipes.agent.images.store import ImageStore
from rlinf_core import ConfigError
from tests.unit.recipes.agent.harbor.made_tasks import FORGERIES, FROM_WITHIN, double_task, fit, greeting_task

pytestmark = pytest.mark.security

TASKS: dict[str, Callable[..., Path]] = {"greeting": greeting_task, "double": double_task}
SOLUTION = {"greeting": "echo 'good morning' > /app/greeting", "double": "echo 'double = (2).__mul__' > double.py"}
EXPECTED = Expected("work", ("txt",), 0)


def graded(
    folder: Path, task_folder: Path, script: str, expected: Expected = EXPECTED, seconds: float | None = None
) -> Grade:
    async def run() -> Grade:
        boxes = BoxHost(folder, 4096)
        store = ImageStore(boxes)
        try:
            return await one(store)
        finally:
            store.close()
            await boxes.close()

    async def one(store: ImageStore) -> Grade:
        task = read_task(task_folder)
        image = await image_of(store, task.environment, task.docker_image, seconds=60)
        async with task_box(store, task, image) as box:
            with contextlib.suppress(BoxEnded):
                await box.run(["bash", "-c", script], timeout=10)
            await finish(task, image, box, expected.mode)
            return await grade(store, task, image, store.boxes.kept(box), expected, seconds=seconds)

    return asyncio.run(run())


@pytest.mark.parametrize("name", TASKS)
def test_a_solution_earns_one_and_nothing_earns_zero(name: str, box_folder: Path, tmp_path: Path) -> None:
    task = TASKS[name](tmp_path)
    solved = graded(box_folder, task, SOLUTION[name])
    assert (solved.reward, solved.why, solved.tries) == (1.0, "", 1), solved
    assert graded(box_folder, task, "true").reward == 0.0


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_earns_nothing(forgery: str, box_folder: Path, tmp_path: Path) -> None:
    name, script = FORGERIES[forgery]
    result = graded(box_folder, TASKS[name](tmp_path), script, seconds=0.5 if "hangs" in forgery else None)
    assert result.reward == 0.0, result


def test_there_are_ten_forgeries() -> None:
    assert len(FORGERIES) >= 10


def test_tests_that_never_end_are_tried_in_two_boxes(box_folder: Path, tmp_path: Path) -> None:
    result = graded(box_folder, double_task(tmp_path), "echo 'while True: pass' > /app/double.py", seconds=0.5)
    assert (result.reward, result.timed_out, result.tries) == (0.0, True, 2)
    assert result.why == "the tests took longer than 0.5 s"


def test_a_forged_reward_says_so_and_is_not_tried_again(box_folder: Path, tmp_path: Path) -> None:
    forged = graded(box_folder, double_task(tmp_path), FORGERIES["code under test that writes the other file"][1])
    assert (forged.tampered, forged.tries) == (True, 1)
    assert "reward.json" in forged.why


def test_a_reward_that_is_written_after_the_tests_says_so(box_folder: Path, tmp_path: Path) -> None:
    late = "code under test that leaves a process which writes the reward after the tests, and ends"
    forged = graded(box_folder, double_task(tmp_path), FORGERIES[late][1])
    assert (forged.tampered, forged.tries, forged.running) == (True, 1, 0)
    assert forged.why == "reward.txt was changed after the tests had ended"


def test_what_hinders_the_box_of_the_tests_is_the_policys(box_folder: Path, tmp_path: Path) -> None:
    name, script = FORGERIES["a file in place of the work folder"]
    hindered = graded(box_folder, TASKS[name](tmp_path), script)
    assert (hindered.reward, hindered.tries) == (0.0, 1)
    assert "what the agent left hinders the tests: the box could not be made: `/app` is no folder" in hindered.why


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
        boxes = BoxHost(folder, 4096)
        store = ImageStore(boxes)
        try:
            return await check_task(store, read_task(task))
        finally:
            store.close()
            await boxes.close()

    return asyncio.run(run())


def test_a_sound_task_is_fit(box_folder: Path, tmp_path: Path) -> None:
    result = checked(box_folder, greeting_task(tmp_path))
    assert (result.solution, result.nothing, result.mode, result.kinds) == (1.0, 0.0, "work", ("txt",))
    assert result.fault(30.0) == ""
    # The machine's own programs are those of the image.
    assert result.tmux is (shutil.which("tmux") is not None)


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
    assert (result.fit, result.canary) == (True, 1.0)
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
