"""`rlinf init`, and `rlinf train` alone, which lists recipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.projects import ProjectKind, next_commands, project_files
from rlinf_cli.run import starting
from rlinf_core.errors import ConfigError
from rlinf_core.job import find_recipe as registry
from tests.unit.cli.typed import Cli

ALONE = [kind for kind in ProjectKind if kind is not ProjectKind.LAB]


@pytest.mark.parametrize("kind", ALONE)
def test_project_is_a_module_a_job_a_test_and_a_readme(kind: ProjectKind, cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "project"
    ended = cli("init", kind, folder, "--name", "cart")
    assert ended.code == 0, ended.err
    names = {"README.md", "cart.py", "cart.yaml", "test_cart.py"}
    assert {path.name for path in folder.iterdir()} == names
    assert set(ended.out.splitlines()) == {str(folder / name) for name in names}
    # None of the template's own name is left.
    assert not [path for path in folder.iterdir() if kind.word in path.read_text(encoding="utf-8")]


def test_lab_is_a_package_of_every_kind(cli: Cli, tmp_path: Path) -> None:
    assert cli("init", "lab", tmp_path, "--name", "my_env").code == 0
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    parts = {f"my_env/{form.format(kind)}" for kind in ALONE for form in ("{}.py", "{}.yaml", "test_{}.py")}
    assert files == {"README.md", "my_env/__init__.py", "my_env/my_env.yaml", *parts}
    # Each name is replaced once, also where the new one is the old one of another part.
    job = (tmp_path / "my_env" / "my_env.yaml").read_text(encoding="utf-8")
    assert '"my_env.env:Cart"' in job
    assert '"my_env.model:Gaussian"' in job


def test_next_commands_are_those_of_the_readme(cli: Cli, tmp_path: Path) -> None:
    ended = cli("init", "recipe", tmp_path, "--name", "bandits")
    commands = ["pytest", "PYTHONPATH=. rlinf validate bandits.yaml", "PYTHONPATH=. rlinf train bandits.yaml"]
    assert ended.err == f"\nnext, in {tmp_path}:\n" + "".join(f"  {line}\n" for line in commands)
    assert "\n".join(commands) in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_pytest_is_installed_first_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert next_commands(project_files(ProjectKind.ENV))[:2] == ["pip install pytest", "pytest"]


@pytest.mark.parametrize(("kind", "gymnasium"), [*((kind, False) for kind in ProjectKind), (ProjectKind.ENV, True)])
def test_readme_of_each_kind_begins_with_three_commands(kind: ProjectKind, gymnasium: bool) -> None:
    commands = next_commands(project_files(kind, gymnasium=gymnasium))
    assert commands[0] == "pytest"
    assert [line.split("rlinf ")[1].split()[0] for line in commands[1:]] == ["validate", "train"]


def test_environment_of_gymnasium_is_a_project_of_its_own(cli: Cli, tmp_path: Path) -> None:
    assert cli("init", "env", "--gymnasium", tmp_path, "--name", "cart").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "cart.py", "cart.yaml", "test_cart.py"}
    assert "(gymnasium.Env[" in (tmp_path / "cart.py").read_text(encoding="utf-8")
    ended = cli("init", "lab", "--gymnasium", tmp_path / "lab")
    assert (ended.code, (tmp_path / "lab").exists()) == (2, False)


def test_files_as_json(cli: Cli, tmp_path: Path) -> None:
    data = json.loads(cli("init", "env", tmp_path, "--json").out)
    assert (data["schema"], data["kind"], data["folder"]) == ("rlinf.init/1", "env", str(tmp_path))
    assert sorted(data["files"]) == sorted(path.name for path in tmp_path.iterdir())
    assert data["next"][-1] == "rlinf train my_env.yaml"


def test_current_folder_is_the_default(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert cli("init", "reward").code == 0
    assert (tmp_path / "my_reward.py").is_file()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    # A second project finds the readme in the way.
    assert "`README.md`" in cli.refuses(2, "init", "reward", "--name", "cart")
    assert not (tmp_path / "cart.py").exists()


def test_file_in_the_way_is_kept_and_nothing_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my_env.yaml").write_text("mine")
    (tmp_path / "README.md").symlink_to(tmp_path / "nowhere")
    err = cli.refuses(2, "init", "env", tmp_path)
    assert "error: nothing was written: `README.md`, `my_env.yaml` would be overwritten" in err
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "my_env.yaml"}
    assert (tmp_path / "my_env.yaml").read_text() == "mine"
    assert "the project cannot be written" in cli.fails(2, "init", "env", tmp_path / "my_env.yaml" / "new")


def test_failed_write_leaves_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[Path](), Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent == tmp_path and arguments == ("x",):
            opened.append(path)
            if len(opened) == 3:
                raise OSError(28, "No space left on device", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    ended = cli("init", "env", tmp_path)
    assert (ended.code, list(tmp_path.iterdir())) == (2, [])
    assert "why: No space left on device" in ended.err
    assert str(opened[2]) in ended.err


def test_folder_of_data_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    ended = cli("init", "env", tmp_path / "mine")
    assert (ended.code, (tmp_path / "mine").exists()) == (2, False)
    assert "a project cannot be here" in ended.err


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["1st", "my-env", "a.b", "a/b", "../up", "class", "", "ﬁt"], "cannot be the name of a Python module"),
        (["random", "numpy", "recipes", "rlinf_core"], "there is a Python module `{}` already"),
    ],
)
def test_name_that_is_no_new_module_is_refused(names: list[str], why: str, cli: Cli, tmp_path: Path) -> None:
    for name in names:
        assert why.format(name) in cli.fails(2, "init", "env", tmp_path, "--name", name)
    assert list(tmp_path.iterdir()) == []


def test_module_of_the_working_folder_takes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cart.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError):
        project_files(ProjectKind.ENV, "cart")
    monkeypatch.chdir(tmp_path)
    assert project_files(ProjectKind.ENV, "cart")


@pytest.mark.parametrize("kind", ProjectKind)
def test_every_job_file_is_valid(kind: ProjectKind, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{kind}_of_test"
    assert cli("init", kind, tmp_path, "--name", name).code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    jobs = sorted(tmp_path.rglob("*.yaml"))
    assert len(jobs) == (5 if kind is ProjectKind.LAB else 1)
    for path in jobs:
        job = load_with_lint(str(path), overrides=[])
        assert job.ok, job.diagnostics
        assert not list(job.diagnostics)


def test_writing_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rlinf_cli.main import main\nmain(['init', 'lab'])\n"
        "print(*(name for name in ('ray', 'torch', 'numpy', 'recipes') if name in sys.modules))\n"
    )
    words = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


PACKAGES = Path(__file__).parents[2] / "packages"


def test_a_broken_package_does_not_hide_the_others(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    find = registry.find_recipe

    def finding(name: str) -> Any:
        if name == "embodied":
            raise ConfigError("recipe `embodied` cannot be loaded", help="repair it")
        return find(name)

    monkeypatch.setattr(starting, "find_recipe", finding)
    ended = cli("train")
    assert ended.code == 0
    assert "math" in ended.out
    assert "recipe `embodied` cannot be loaded" in ended.err


def test_recipes_are_listed_with_the_configs_they_start_from(cli: Cli, fake_recipe: Path) -> None:
    data = json.loads(cli("train", "--json").out)
    assert data["schema"] == "rlinf.recipes/1"
    recipes = {recipe["name"]: recipe for recipe in data["recipes"]}
    assert {"agent", "embodied", "math", "serve", "sft", "sft_chat"} < set(recipes)
    assert all(recipe["summary"] and recipe["default_config"] for recipe in data["recipes"])
    # A package brings its own.
    assert Path(recipes["fake"]["default_config"]) == PACKAGES / "fake.yaml"
    cli.out("train", "recipe=fake", "--dry-run")


def test_what_cannot_be_run_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    unprogrammed = registry.find_recipe("embodied")._replace(name="unprogrammed", program=None)
    monkeypatch.setattr(starting, "recipe_names", lambda: ["embodied", "unprogrammed"])
    find = registry.find_recipe
    monkeypatch.setattr(starting, "find_recipe", lambda name: unprogrammed if name == "unprogrammed" else find(name))
    why = "it has no program in this version; its files can only be validated and laid out"
    text = cli("train").out
    assert f"\n`unprogrammed` cannot be run: {why}\n" in text
    assert "`embodied` cannot be run" not in text
    recipes = json.loads(cli("train", "--json").out)["recipes"]
    assert [(recipe["runnable"], recipe["obstacle"]) for recipe in recipes] == [(True, None), (False, why)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    assert "`embodied` cannot be run: needs `torch`, not installed in this Python\n" in cli("train").out
