"""Recipes that a file names as `package.module:name`: nothing is imported that is not a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.job.find_recipe import UnknownRecipeError, find_recipe
from rlinf_core.job.load import Job, load_job
from rlinf_core.process import import_path
from tests.payloads import code

pytestmark = pytest.mark.security
IMPORT = "from rlinf_core import JobConfig, Recipe\n"
RECIPE = 'Recipe("own", "Mine.", config="rlinf_core:JobConfig", default_config="cluster:\\n  num_nodes: 1\\n")\n'
Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forgets the modules that a test has imported."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module below a folder that is on `sys.path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def writing(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return writing


@pytest.fixture
def unnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder as the command has it: on `sys.path`, and named by nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["bin", *(entry for entry in sys.path if entry)])
    monkeypatch.setattr(import_path, "_managed", False)
    monkeypatch.setattr(import_path, "_unnamed_folder", None)
    import_path.manage(str(tmp_path))
    assert str(tmp_path) in sys.path
    return tmp_path


def load(text: str) -> Job:
    return load_job("-", stdin=text.encode(), environ={})


def test_module_of_ones_own_is_a_recipe(write: Write) -> None:
    write("own_one.py", f"{IMPORT}recipe = {RECIPE}")
    assert find_recipe("own_one:recipe").name == "own"
    job = load("recipe: own_one:recipe\ncluster: {num_nodes: 1, component_placement: {actor: {placement: 0}}}\n")
    assert job.recipe is not None
    assert job.recipe.name == "own"


def test_override_names_a_recipe(write: Write) -> None:
    write("own_two.py", f"{IMPORT}recipe = {RECIPE}")
    job = load_job("recipe=own_two:recipe", ["cluster.num_nodes=2"], environ={})
    assert job.name == "recipe=own_two:recipe"
    assert [diagnostic.code for diagnostic in job.diagnostics] == []
    assert job.cluster is not None
    assert job.cluster.num_nodes == 2


def test_recipe_of_a_package_has_its_config_beside_it(write: Write) -> None:
    file = write("own_three/job.yaml", "cluster: {num_nodes: 1}\n")
    write("own_three/__init__.py", f"{IMPORT}x: Recipe = Recipe('o', 'O.', 'rlinf_core:JobConfig', 'job.yaml')\n")
    assert find_recipe("own_three:x").default_config == str(file)


@pytest.mark.parametrize("module", ["own_bare/__init__.py", "own_bare/inner.py"])
def test_package_installed_without_its_config_says_what_to_add(write: Write, module: str) -> None:
    write("own_bare/__init__.py", "")
    file = write(module, f"{IMPORT}x = Recipe('o', 'O.', 'rlinf_core:JobConfig', 'job.yaml')\n")
    target = f"{module.removesuffix('/__init__.py').removesuffix('.py').replace('/', '.')}:x"
    with pytest.raises(ConfigError) as caught:
        load_job(f"recipe={target}", [], environ={})
    assert caught.value.message == f"recipe `{target}` starts from `job.yaml`, which is not in `{file.parent}`"
    assert caught.value.help == (
        'add `own_bare = ["*.yaml"]` under `[tool.setuptools.package-data]`, and install the package again'
    )
    # A file that names the recipe needs no other.
    assert load(f"recipe: {target}\ncluster: {{num_nodes: 1}}\n").recipe is not None


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("gone:recipe", "there is no module `gone`"),
        ("payload.gone:recipe", "there is no module `payload.gone`"),
        ("inside.payload:gone", "assigns no `gone`"),
        ("payload:other", "assigns no `other`"),
        ("payload:recipe", "`recipe` of "),
        ("payload:late", "`late` of "),
        ("payload:inner", "assigns no `inner`"),
        ("payload:made", "assigns no `made`"),
        ("torn:recipe", "line 1 of "),
        ("sys:recipe", "`sys` has no Python source"),
        (":recipe", "is not the name of a recipe"),
        ("payload:", "is not the name of a recipe"),
        ("payload:recipe:x", "is not the name of a recipe"),
        ("../payload:recipe", "is not the name of a recipe"),
    ],
)
def test_payload_that_is_no_recipe_does_not_run(write: Write, tmp_path: Path, target: str, reason: str) -> None:
    marker = tmp_path / "marker"
    plant = code(marker)
    write(
        "payload.py", f"{plant}recipe = {{}}\nlate = Recipe()\nlate = 3\nif 1:\n    inner = Recipe()\ndef made(): ...\n"
    )
    write("inside/__init__.py", plant)
    write("inside/payload.py", f"{plant}recipe = 3\n")
    write("torn.py", f"{plant.strip()} recipe = \n")
    job = load(f"recipe: '{target}'\ncluster: {{num_nodes: 1}}\n")
    (finding,) = job.diagnostics
    assert finding.code == "unknown-recipe"
    assert reason in finding.message
    assert finding.help
    assert not marker.exists()


def test_error_names_the_recipe_of_the_module(write: Write) -> None:
    write("own_four.py", f"{IMPORT}mine = {RECIPE}")
    with pytest.raises(UnknownRecipeError, match="assigns no `recipe`") as caught:
        find_recipe("own_four:recipe")
    assert caught.value.help == "its recipe is `own_four:mine`"


def test_call_of_another_recipe_is_refused(write: Write) -> None:
    write("own_five.py", "def Recipe(): return 3\nrecipe = Recipe()\n")
    with pytest.raises(UnknownRecipeError, match="a int, not a Recipe of rlinf"):
        find_recipe("own_five:recipe")


def test_recipe_that_cannot_be_imported_is_broken(write: Write) -> None:
    write("own_six.py", f"import no_such_package\n{IMPORT}recipe = {RECIPE}")
    with pytest.raises(ConfigError, match="No module named 'no_such_package'"):
        find_recipe("own_six:recipe")
    (finding,) = load("recipe: own_six:recipe\ncluster: {num_nodes: 1}\n").diagnostics
    assert finding.code == "broken-recipe"


@pytest.mark.parametrize("folder", ["", "recipes", "space"])
def test_working_folder_counts_only_if_named(unnamed: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    marker = unnamed / "marker"
    file = unnamed / folder / "came_along.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{code(marker)}{IMPORT}recipe = {RECIPE}")
    module = f"{folder}.came_along".strip(".")
    with pytest.raises(UnknownRecipeError, match=f"`{module}` is in the working folder") as caught:
        find_recipe(f"{module}:recipe")
    assert "PYTHONPATH=. rlinf" in (caught.value.help or "")
    assert not marker.exists()
    assert str(unnamed) in sys.path
    # A package that is loaded already keeps its folders.
    if "recipes" not in sys.modules or folder != "recipes":
        monkeypatch.setattr(import_path, "_unnamed_folder", None)
        assert find_recipe(f"{module}:recipe").name == "own"


def test_working_folder_hides_no_module_of_a_recipe(
    unnamed: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = unnamed / "marker"
    installed = tmp_path_factory.mktemp("installed")
    (installed / "own_seven.py").write_text(f"import its_helper\n{IMPORT}recipe = {RECIPE}")
    (installed / "its_helper.py").write_text("")
    for name in ("own_seven.py", "its_helper.py"):
        (unnamed / name).write_text(f"{code(marker)}{IMPORT}recipe = {RECIPE}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    assert find_recipe("own_seven:recipe").name == "own"
    assert not marker.exists()


def test_working_folder_installs_no_recipe(unnamed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unnamed / "came_along-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: came-along\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[rlinf.recipes]\ncame = came_along:recipe\n")
    (unnamed / "came_along.py").write_text(f"{code(unnamed / 'marker')}{IMPORT}recipe = {RECIPE}")
    with pytest.raises(UnknownRecipeError, match="there is no recipe `came`"):
        find_recipe("came")
    assert not (unnamed / "marker").exists()
    monkeypatch.setattr(import_path, "_unnamed_folder", None)
    assert find_recipe("came").name == "own"
