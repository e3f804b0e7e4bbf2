"""Recipes that a job finds: a user's own, those of earlier runs, and variants."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_cli.job.completion import file_schema
from rlinf_core.config.diagnostics import Severity
from rlinf_core.errors import ConfigError
from rlinf_core.job.find_recipe import UnknownRecipeError, find_recipe, recipe_of
from rlinf_core.job.load import Job, load_job
from rlinf_core.job.recipe import Recipe
from rlinf_core.process import import_path
from tests.payloads import code

IMPORT = "from rlinf_core import JobConfig, Recipe\n"
RECIPE = 'Recipe("own", "Mine.", config="rlinf_core:JobConfig", default_config="cluster:\\n  num_nodes: 1\\n")\n'
Write = Callable[[str, str], Path]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forgets the modules that a test has imported."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None) -> Write:
    """Writes a module below a folder that is on `sys.path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def writing(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return writing


@pytest.fixture
def unnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None) -> Path:
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


@pytest.mark.parametrize(
    ("placement", "reason"), [("0", "on node 0, the head"), ("1", "on node 1"), ("0-1", None), ("1-2", None)]
)
def test_component_goes_on_with_the_processes_left(placement: str, reason: str | None) -> None:
    job = load(
        "recipe: embodied\ncluster:\n  num_nodes: 3\n  component_placement:\n"
        "    actor,rollout: {node_group: node, placement: 0}\n"
        f"    env: {{node_group: node, placement: {placement}, elastic: true}}\n"
    )
    findings = [finding.message for finding in job.diagnostics if finding.code == "component-not-elastic"]
    assert len(findings) == (reason is not None)
    assert all(str(reason) in message for message in findings)


@pytest.mark.security
def test_module_of_ones_own_is_a_recipe(write: Write) -> None:
    write("own_one.py", f"{IMPORT}recipe = {RECIPE}")
    assert find_recipe("own_one:recipe").name == "own"
    job = load("recipe: own_one:recipe\ncluster: {num_nodes: 1, component_placement: {actor: {placement: 0}}}\n")
    assert job.recipe is not None
    assert job.recipe.name == "own"


@pytest.mark.security
def test_override_names_a_recipe(write: Write) -> None:
    write("own_two.py", f"{IMPORT}recipe = {RECIPE}")
    job = load_job("recipe=own_two:recipe", ["cluster.num_nodes=2"], environ={})
    assert job.name == "recipe=own_two:recipe"
    assert [diagnostic.code for diagnostic in job.diagnostics] == []
    assert job.cluster is not None
    assert job.cluster.num_nodes == 2


@pytest.mark.security
def test_recipe_of_a_package_has_its_config_beside_it(write: Write) -> None:
    file = write("own_three/job.yaml", "cluster: {num_nodes: 1}\n")
    write("own_three/__init__.py", f"{IMPORT}x: Recipe = Recipe('o', 'O.', 'rlinf_core:JobConfig', 'job.yaml')\n")
    assert find_recipe("own_three:x").default_config == str(file)


@pytest.mark.security
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


@pytest.mark.security
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


@pytest.mark.security
def test_error_names_the_recipe_of_the_module(write: Write) -> None:
    write("own_four.py", f"{IMPORT}mine = {RECIPE}")
    with pytest.raises(UnknownRecipeError, match="assigns no `recipe`") as caught:
        find_recipe("own_four:recipe")
    assert caught.value.help == "its recipe is `own_four:mine`"


@pytest.mark.security
def test_call_of_another_recipe_is_refused(write: Write) -> None:
    write("own_five.py", "def Recipe(): return 3\nrecipe = Recipe()\n")
    with pytest.raises(UnknownRecipeError, match="a int, not a Recipe of rlinf"):
        find_recipe("own_five:recipe")


@pytest.mark.security
def test_recipe_that_cannot_be_imported_is_broken(write: Write) -> None:
    write("own_six.py", f"import no_such_package\n{IMPORT}recipe = {RECIPE}")
    with pytest.raises(ConfigError, match="No module named 'no_such_package'"):
        find_recipe("own_six:recipe")
    (finding,) = load("recipe: own_six:recipe\ncluster: {num_nodes: 1}\n").diagnostics
    assert finding.code == "broken-recipe"


@pytest.mark.security
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


@pytest.mark.security
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


@pytest.mark.security
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


@pytest.mark.parametrize("name", ["embodied", "math"])
def test_recipe_names_what_can_be_loaded(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    assert {"recipe", "cluster"} <= set(recipe.config_model().model_fields)
    assert callable(recipe.load(recipe.check))


def test_what_a_recipe_names_may_be_missing() -> None:
    recipe = Recipe("x", "X.", "no_such_module:Config", "x", program="rlinf_core.errors:nothing")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        recipe.config_model()
    with pytest.raises(ConfigError, match="has no attribute 'nothing'"):
        recipe.load(recipe.program)
    assert recipe.load(recipe.check) is None


# As `rlinf train` wrote it before `sft` lost its section `algorithm`, with one more key that is gone.
EARLIER = """
recipe: sft
cluster: {num_nodes: 1, component_placement: {actor: 0}}
runner: {max_steps: 3, checkpoint_style: whole}
algorithm: {gamma: 0.99, gae_lambda: 0.95, loss_type: actor_critic}
data: {train_data_paths: [demos]}
"""


# Of `algorithm` the command line knows that other recipes have it.
REFUSED = {"unknown-key", "not-available"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"schema": "rlinf.run/1"}))
    (folder / "config.yaml").write_text(EARLIER)
    return folder


def unknown(file: Path, *overrides: str) -> list[str]:
    job = load_job(file, overrides, environ={})
    return [one.path[0] for one in job.diagnostics if one.code in REFUSED and one.path]  # pyright: ignore[reportReturnType]


def test_earlier_keys_of_a_run_are_left_out_with_one_note(run: Path) -> None:
    job = load_job(run / "config.yaml", environ={})
    notes = [one for one in job.diagnostics if one.code == "no-effect"]
    assert [note.severity for note in notes] == [Severity.NOTE]
    assert "`algorithm`" in notes[0].message
    assert "`runner.checkpoint_style`" in notes[0].message
    assert unknown(run / "config.yaml") == []


def test_a_value_that_an_earlier_run_chose_is_a_warning(run: Path) -> None:
    text = EARLIER.replace("sft", "embodied").replace("actor: 0", "'actor,rollout,env': 0")
    changed = "weight_sync_interval: 4, checkpoint_style: whole"
    text = text.replace("checkpoint_style: whole", changed).replace(
        "gamma: 0.99", "entropy_type: token_level, critics: 3"
    )
    (run / "config.yaml").write_text(text)
    job = load_job(run / "config.yaml", environ={})
    assert {(one.path, one.severity) for one in job.diagnostics if one.code == "no-effect"} == {
        (("algorithm", "entropy_type"), Severity.WARNING),
        (("algorithm", "critics"), Severity.WARNING),
        (("runner", "weight_sync_interval"), Severity.WARNING),
        (("runner", "checkpoint_style"), Severity.NOTE),
    }
    (entropy,) = [one for one in job.diagnostics if one.path == ("algorithm", "entropy_type")]
    assert "`algorithm.entropy_type: token_level`" in entropy.message
    assert "`algorithm.logprob_type`" in (entropy.help or "")


def test_keys_of_other_kinds_of_an_earlier_run_are_warnings(run: Path) -> None:
    text = """
recipe: embodied
cluster: {num_nodes: 1, component_placement: {actor: 0, rollout: 0, env: 0}}
env: {train: {simulator_timeout: 100.0, num_processes: null}}
actor: {model: {is_lora: false, lora_rank: 32}}
"""
    (run / "config.yaml").write_text(text)
    job = load_job(run / "config.yaml", environ={})
    assert job.config is not None
    assert {(one.path, one.severity) for one in job.diagnostics if one.code in (*REFUSED, "no-effect")} == {
        (("env", "train", "simulator_timeout"), Severity.WARNING),
    }


def test_the_same_file_elsewhere_has_unknown_keys(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "config.yaml"
    mine.write_text(EARLIER)
    assert sorted(unknown(mine)) == ["algorithm", "runner"]


def test_overrides_of_a_run_are_checked_as_ever(run: Path) -> None:
    assert unknown(run / "config.yaml", "runner.max_stepps=3") == ["runner"]


@pytest.mark.parametrize(
    ("data", "recipe"),
    [
        ("train_data_paths: chat.jsonl", "sft_chat"),
        ("train_data_paths: [one.parquet, two.parquet]", "sft_chat"),
        ("train_data_paths: rows.json.gz", "sft_chat"),
        ("train_data_paths: '${env:CHATS}'", "sft_chat"),
        ("messages_key: turns", "sft_chat"),
        ("{type: chat, train_data_paths: demonstrations}", "sft_chat"),
        ("train_data_paths: demonstrations", "sft"),
        ("train_data_paths: [lift.hdf5]", "sft"),
        ("train_data_paths: [{dataset_path: jsonl, weight: 1}]", "sft"),
    ],
)
def test_files_of_rows_are_conversations(tmp_path: Path, data: str, recipe: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"recipe: sft\ncluster: {{num_nodes: 1}}\ndata:\n  {data}\n")
    job = load_job(file, environ={"CHATS": "all.jsonl"})
    assert job.recipe is not None
    assert job.recipe.name == recipe
    assert not [finding for finding in job.diagnostics if finding.code == "unknown-key"]


@pytest.mark.parametrize(
    ("overrides", "recipe"),
    [
        ([], "sft"),
        (["data.type=sums"], "sft_chat"),
        (["data.train_data_paths=chat.jsonl"], "sft_chat"),
        (["data.train_data_paths=[a.jsonl, b.jsonl]"], "sft_chat"),
    ],
)
def test_start_of_a_recipe_follows_the_overrides(overrides: list[str], recipe: str) -> None:
    job = load_job("recipe=sft", overrides, environ={})
    assert job.recipe is not None
    assert job.recipe.name == recipe


def test_validated_file_tells_its_variant() -> None:
    config = SimpleNamespace(recipe="sft", data=SimpleNamespace(type="chat"))
    assert recipe_of(config).name == "sft_chat"
    assert recipe_of(SimpleNamespace(recipe="sft", data=SimpleNamespace())).name == "sft"


def test_schema_of_files_selects_the_variant() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    recipes = {name: find_recipe(name) for name in ("sft", "sft_chat")}
    models = {name: recipe.config_model() for name, recipe in recipes.items()}
    schema = file_schema(models, {name: recipe.variants for name, recipe in recipes.items()})
    cluster = {"num_nodes": 1, "component_placement": {"actor": 0}}
    for data, right in [
        ({"type": "chat", "overlong": "truncate"}, True),
        ({"train_data_paths": ["a.jsonl"], "overlong": "truncate"}, True),
        ({"messages_key": "turns", "overlong": "truncate"}, True),
        ({"train_data_paths": "demonstrations", "overlong": "truncate"}, False),
    ]:
        file = {"recipe": "sft", "cluster": cluster, "data": data}
        assert validator(json.loads(json.dumps(schema))).is_valid(file) is right
