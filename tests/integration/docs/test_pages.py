"""Programs and commands of the pages, run as they stand there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import write_description
from recipes.embodied.models.registry import make_model
from recipes.embodied.using.exporting import export
from recipes.training.weights import training_state
from rlinf_core import Recipe
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.job.load import load_job
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.storage import run_folder
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.rlinf_command import output_of, rlinf

REPOSITORY = Path(__file__).parents[3]
DOCS = REPOSITORY / "docs"
_BLOCK = re.compile(
    r"^```((?:python|yaml) file=(?P<file>\S+)|python|output)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)


def files_of(page: str) -> dict[str, str]:
    """Return the files of a page by their names."""
    return {block["file"]: block["text"] for block in _BLOCK.finditer(page) if block["file"]}


FollowPage = Callable[..., str]


@pytest.fixture
def follow_page(tmp_path: Path) -> FollowPage:
    """Saves the files of a page in `tmp_path`, runs its Python in one session, and compares what that prints.

    `then` is Python to run after it. What is printed beyond what the page shows is returned.
    """

    def follow(page: str, then: str = "", seconds: float = 150) -> str:
        script: list[str] = []
        expected: list[str] = []
        for block in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
            if block["file"]:
                path = tmp_path / block["file"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block["text"], encoding="utf-8")
            elif block[1] == "output":
                expected.append(block["text"])
            else:
                script.append(block["text"])
        assert script
        (tmp_path / "session.py").write_text("\n".join((*script, then)), encoding="utf-8")
        said, shown = output_of(sys.executable, "session.py", cwd=tmp_path, timeout=seconds), "".join(expected)
        assert said[: len(shown)] == shown
        return said.removeprefix(shown)

    return follow


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page",
    [
        "rewards-and-data.md",
        pytest.param("language-models.md", marks=pytest.mark.nightly),
        pytest.param("worker-api.md", marks=[pytest.mark.nightly, pytest.mark.ray]),
    ],
)
def test_a_page_prints_what_it_says(page: str, follow_page: FollowPage) -> None:
    assert follow_page(page, seconds=220) == "", "all that it prints is on the page"


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_its_commands_train_a_model_that_transformers_loads(tmp_path: Path) -> None:
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    (tmp_path / "ask.py").write_text(files_of(page)["ask.py"], encoding="utf-8")
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    (commands,) = re.findall(r"^```sh\n((?:(?!```).*\n)*python ask\.py.*\n)```", page, re.MULTILINE)
    said = output_of("bash", "-ec", commands, cwd=tmp_path, env=environment)
    assert len(re.findall(r"^prompt \d+, answer \d+: reward ", said, re.MULTILINE)) == 3
    assert re.search(r"^3\s*\+\s*4\s*=\s*\d", said, re.MULTILINE)


PAGE = DOCS / "evaluation.md"


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    model, spec = EmbodiedModelConfig(), EnvSpec(state_size=21, action_size=8, has_instructions=True)
    policy = make_model(model, spec)
    training_state.save(tmp_path / "trained", policy, torch.optim.AdamW(policy.parameters()), 1)
    write_description(tmp_path / "trained", model, spec, Normalization())
    config = load_job("embodied/pick-laptop").config
    export(config, tmp_path / "trained", tmp_path / "exported", "safetensors")  # pyright: ignore[reportArgumentType]
    export(config, tmp_path / "trained", tmp_path / "script", "torchscript")  # pyright: ignore[reportArgumentType]
    acting, graph = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "of 16 picked" in printed(acting, tmp_path)
    assert printed(graph, tmp_path).strip() == "(1, 1, 8)"


def printed(program: str, folder: Path) -> str:
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": ""}
    return output_of(sys.executable, "-W", "ignore", "-c", program, cwd=folder, env=environment, timeout=100)


EXAMPLES = DOCS.parent / "examples"
FILE = EXAMPLES / "own_recipe.py"


def test_recipe_is_one_file_of_sixty_lines() -> None:
    assert len([line for line in FILE.read_text(encoding="utf-8").splitlines() if line.strip()]) <= 60


def test_blocks_of_the_page_are_sound() -> None:
    page = (DOCS / "extend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    # As a module of its own, which pickling of its classes asks for.
    names: dict[str, Any] = {"__name__": "page_of_recipes"}
    for block in blocks:
        exec(block, names)  # noqa: S102 - the page's own
    report = Mock()
    names["check"](None, {"learner": 1}, report)
    report.assert_not_called()
    names["check"](None, {"learner": 2}, report)
    assert report.call_args.args[:2] == (("cluster", "component_placement", "learner"), "one-learner")
    assert {"launch", "program"} <= names.keys()
    assert isinstance(names["recipe"], Recipe)


def test_recipe_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    job = load_job("recipe=own_recipe:recipe", ["moves=x"], environ={})
    assert [(diagnostic.code, diagnostic.path) for diagnostic in job.diagnostics] == [("wrong-type", ("moves",))]
    assert dict(job.world_sizes) == {"walker": 2, "learner": 1}


@pytest.mark.timeout(400)
def test_recipe_trains_and_resumes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    for changes in ((), ("runner.resume_dir=auto", "runner.max_steps=14")):
        rlinf(tmp_path, "train", "recipe=own_recipe:recipe", *changes, env=environment, timeout=180)
    run = RunFolder.latest(tmp_path / "runs")
    assert run is not None
    lines = read_metrics(run.metrics_file)
    returns = {line.step: line.metrics["eval/return"] for line in lines if "eval/return" in line.metrics}
    # Ten times along the line for each of the two walkers.
    assert returns[0] < returns[12] == returns[14] == 20
    assert [line.step for line in lines] == list(range(15))
    assert {"time/walk", "time/learn", "train/loss"} <= lines[-1].metrics.keys()
    assert (run.path / "curve.png").is_file()


# The single-process loop of the benchmarks, on the page's own file.
LEARN = f"""
import sys
from dataclasses import replace

import torch

sys.path.insert(0, {str(REPOSITORY)!r})
from benchmarks.baselines.single_process_ppo import Loop, evaluate
from recipes.embodied.envs.registry import make_env
from rlinf_core.job.load import load_job

torch.set_num_threads(1)
torch.manual_seed(0)
job = load_job("job.yaml")
assert job.ok, job.diagnostics
loop = Loop(job.config.env.train, job.config.actor, job.config.algorithm)
for _ in range(STEPS):
    loop.learn(loop.rollout())
settings = replace(loop.env.settings, num_envs=64, seed=1, group_size=1, auto_reset=True)
print(evaluate(make_env(job.config.env.train.env_type, settings), loop.policy)[0])
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "steps"), [("environments.md", 6), ("models.md", 7), ("embodied.md", 12)])
def test_the_example_of_a_page_runs_and_learns(page: str, steps: int, follow_page: FollowPage) -> None:
    success = float(follow_page(page, then=LEARN.replace("STEPS", str(steps))))
    assert success > 0.7


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_the_program_of_readme_greets_by_rank(follow_page: FollowPage) -> None:
    assert follow_page("../README.md").startswith("['rank 0 of ")


@pytest.mark.nightly
@pytest.mark.ray
def test_the_robot_of_the_page_is_trained(follow_page: FollowPage, tmp_path: Path) -> None:
    assert follow_page("robots.md") == ""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "RLINF_ADDRESS": "local"}
    command = (sys.executable, "-m", "rlinf_cli", "train", "my_robot.yaml", "runner.logger.log_path=runs")
    assert "finished" in output_of(*command, cwd=tmp_path, env=environment, timeout=200, errors=True)


@pytest.mark.timeout(100)
def test_page_prints_what_it_shows(follow_page: FollowPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260314-101502")
    runner = RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path / "runs")}})
    run = RunFolder.create(runner, "embodied")
    run.write_config_text("recipe: embodied\nactor: {optim: {lr: 3.0e-4}}\n")
    with MetricsWriter(run.metrics_file) as writer:
        writer.log(150, {"env/return": 4.9, "eval/return": 5.04, "eval/success_once": 1.0})
    run.update(step=150)
    run.end("finished")
    assert follow_page("run-folder.md") == ""
