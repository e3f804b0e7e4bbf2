"""Planted payloads in files, models and data run nothing."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.demonstrations.load_set import load_demonstrations
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.policy_folder import write_description
from recipes.embodied.models.registry import make_model
from recipes.language.data.problem_sources import read_file
from recipes.training.huggingface import config_of, load_pretrained, load_tokenizer
from recipes.training.weights import training_state
from rlinf_core import RLinfError, load_policy
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.runners.storage.resuming import find_source
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.payloads import NEIGHBOURS, PAYLOADS, archived, code, pickled, plant, plant_neighbours, tagged
from tests.unit.cli.report_runs import full_run
from tests.unit.cli.typed import Cli
from tests.unit.recipes.embodied.using.test_trained_policy import normalization

SPEC = EnvSpec(21, 8, has_instructions=True)


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with everything that a run leaves, and a checkpoint."""
    log_path = tmp_path_factory.mktemp("received")
    run = full_run(str(log_path))
    job = load_job("embodied/pick-laptop", ("actor.model.hidden_dim=8",), environ={})
    run.write_config_text(resolved_text(job.tree, job.config))
    _checkpoint(run)
    return run.path


def _checkpoint(run: RunFolder) -> None:
    store = CheckpointStore(run.path / "checkpoints")
    folder, model = store.begin(1), policy_model({"hidden_dim": 8})
    policy = make_model(model, SPEC)
    policy.normalization = normalization(SPEC)
    training_state.save(folder, policy, torch.optim.AdamW(policy.parameters()), 1)
    write_description(folder, model, SPEC, policy.normalization)
    policy.normalization.save(folder)
    torch.save({"updates": 1}, folder / "learner.pt")
    store.commit(1, Manifest(step=1))


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _resume(run: Path) -> None:
    """Read a checkpoint as `train` with `runner.resume_dir` does in the driver, and then in an actor."""
    source = find_source(str(run), run.parent, "full")
    assert source is not None
    policy = torch.nn.Linear(1, 1)
    training_state.load(source.path, policy, torch.optim.AdamW(policy.parameters()))


def _loads(run: Path) -> Iterator[Callable[[], object]]:
    """Yield the ways in which a checkpoint is loaded."""
    yield lambda: load_policy(run)
    yield lambda: load_policy(run / "checkpoints" / "global_step_1")
    yield lambda: _resume(run)


def _uses(cli: Cli, run: Path) -> Iterator[Callable[[], object]]:
    """Yield every use of a run folder that needs no Ray."""
    config, checkpoint = run / "config.yaml", run / "checkpoints" / "global_step_1"
    for arguments in (
        ("runs", "--runs-dir", run.parent),
        ("report", run),
        ("compare", run, run),
        ("report", "--samples", run),
        ("logs", run),
        ("stop", run),
        ("export", run, "-o", run.parent / "exported"),
        ("validate", config),
        ("validate", config, f"actor.checkpoint_load_path={checkpoint}"),
        ("validate", config, f"runner.resume_dir={run}"),
        *(("inspect", what, config) for what in ("config", "placement", "memory", "env")),
    ):
        yield lambda arguments=arguments: cli(*arguments)
    yield from _loads(run)


def use(cli: Cli, run: Path) -> None:
    """Use a run in every way; that it is refused is fine."""
    for action in _uses(cli, run):
        with contextlib.suppress(RLinfError):
            action()


def test_the_run_is_one_that_commands_accept(received: Path, cli: Cli) -> None:
    """The test below shows something only where commands get as far as to read the files."""
    load_policy(received)
    run, out = received, received.parent / "out"
    for arguments in (("runs", "--runs-dir", run.parent), ("report", run), ("export", run)):
        assert cli(*arguments, *(("-o", out) if arguments[0] == "export" else ())).code == 0, arguments
    shutil.rmtree(out)


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_nothing_in_a_checkpoint_runs(received: Path, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    for number, name in enumerate(name for name in _files(received) if name.startswith("checkpoints/")):
        run = tmp_path / str(number)
        shutil.copytree(received, run)
        plant(run, name, PAYLOADS[kind](marker))
        for action in _loads(run):
            with contextlib.suppress(RLinfError):
                action()
        assert not marker.exists(), name


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_no_command_runs_what_is_in_a_file(
    received: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    marker = tmp_path / "marker"
    for number, name in enumerate(_files(received)):
        log_path = tmp_path / str(number)
        shutil.copytree(received.parent, log_path)
        run = log_path / received.name
        plant(run, name, PAYLOADS[kind](marker))
        monkeypatch.chdir(run)
        use(cli, run)
        monkeypatch.chdir(os.sep)
        assert not marker.exists(), name
        shutil.rmtree(log_path)


def installed(
    folder: Path, *words: str, python_path: str | None = None, program: str = "rlinf"
) -> subprocess.CompletedProcess[str]:
    """Run an installed command in a folder."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path is not None:
        environ["PYTHONPATH"] = python_path
    command = [Path(sys.executable).with_name(program), *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.security
@pytest.mark.parametrize("start", [("rlinf",), ("python", "-m", "rlinf_cli")], ids=["script", "module"])
@pytest.mark.parametrize("path", [None, "."], ids=["unnamed", "named"])
def test_recipe_that_came_with_a_file_does_not_run(tmp_path: Path, start: tuple[str, ...], path: str | None) -> None:
    """Named or not: in the folder of the file lies a module, which is a recipe only where nobody names the folder."""
    marker = tmp_path / "marker"
    makes = "Recipe('x', 'X.', 'rlinf_core:JobConfig', 'x')" if path is None else "make_recipe()"
    (tmp_path / "came_along.py").write_text(f"{code(marker)}from rlinf_core import Recipe\nrecipe = {makes}\n")
    (tmp_path / "job.yaml").write_text("recipe: came_along:recipe\ncluster: {num_nodes: 1}\n")
    program, *arguments = start
    done = installed(tmp_path, *arguments, "validate", "job.yaml", python_path=path, program=program)
    assert done.returncode == 2, done.stderr
    assert "error[unknown-recipe]" in done.stdout
    assert ("is in the working folder" if path is None else "is not a Recipe") in done.stdout
    assert not marker.exists()


TEMPLATES = (
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    '{{ self.__init__.__globals__.__builtins__.exec("CODE") }}',
    '{{ lipsum.__globals__["__builtins__"]["exec"]("CODE") }}',
    '{{ (cycler|attr("__init__")|attr("__globals__"))["__builtins__"]["exec"]("CODE") }}',
    '{{ namespace.__init__.__globals__["__builtins__"]["exec"]("CODE") }}',
)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that planted code writes."""
    return tmp_path / "marker"


@pytest.fixture
def model(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a language model, with modules beside it; whoever is asked whether to run them says yes."""
    pytest.importorskip("transformers")
    from tests.unit.recipes.agent.conversation.byte_level import write_byte_level

    monkeypatch.setattr(builtins, "input", lambda _="": "y")
    folder = tmp_path / "model"
    write_byte_level(tmp_path / "parts")
    for part in ("model", "tokenizer"):
        shutil.copytree(tmp_path / "parts" / part, folder, dirs_exist_ok=True)
    plant_neighbours(folder, marker)
    return folder


def read_model(cli: Cli, folder: Path) -> None:
    """Read a model's folder by every command and reader that does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cli("validate", "math/sums-laptop", f"actor.model.model_path={folder}", "actor.model.model_type=hf")
    cli("inspect", "memory", "math/sums-laptop", f"actor.model.model_path={folder}", "actor.model.model_type=hf")
    for read in (
        lambda: load_tokenizer(str(folder)).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False),
        lambda: config_of(AutoConfig, str(folder)),
        lambda: load_pretrained(AutoModelForCausalLM, str(folder)),
    ):
        with suppress(Exception):  # jinja's and tokenizers' own are as good: nothing runs
            read()


def changed(file: Path, **fields: object) -> None:
    data = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(data | fields))


AUTO_MAP = {
    "AutoConfig": "configuration_x.XConfig",
    "AutoModel": "modeling_x.X",
    "AutoModelForCausalLM": "modeling_x.X",
    "AutoTokenizer": ["tokenization_x.XTokenizer", "tokenization_x.XTokenizer"],
    "AutoProcessor": "processing_x.XProcessor",
}


@pytest.mark.parametrize("kind", ["qwen2", "x"])
def test_code_beside_a_model_is_not_run(cli: Cli, model: Path, marker: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    # Where nothing is planted the model is read.
    assert load_tokenizer(str(model))("x")
    assert load_pretrained(AutoModelForCausalLM, str(model)) is not None
    changed(model / "config.json", auto_map=AUTO_MAP, model_type=kind, attn_implementation="x/y")
    changed(model / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="XTokenizer")
    changed(model / "processor_config.json", auto_map=AUTO_MAP)
    read_model(cli, model)
    assert not marker.exists()


def test_a_template_of_a_model_reaches_nothing(cli: Cli, model: Path, marker: Path) -> None:
    for line in TEMPLATES:
        text = line.replace("MARKER", str(marker)).replace("CODE", code(marker).strip())
        (model / "chat_template.jinja").write_text(text)
        changed(model / "tokenizer_config.json", chat_template=text)
        read_model(cli, model)
        assert not marker.exists(), line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "bin"])
def test_code_in_a_file_of_a_model_is_not_run(cli: Cli, model: Path, marker: Path, name: str) -> None:
    if name == "bin":
        (model / "model.safetensors").unlink()
    for content in (pickled, archived, tagged):
        (model / ("pytorch_model.bin" if name == "bin" else name)).write_bytes(content(marker))
        read_model(cli, model)
        assert not marker.exists(), content.__name__


# Data sets


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.arrow", "demos.hdf5", "demos.h5"])
def test_code_in_a_data_file_is_not_run(tmp_path: Path, marker: Path, name: str) -> None:
    for content in PAYLOADS.values():
        (tmp_path / name).write_bytes(content(marker))
        for read in (
            lambda: read_file(str(tmp_path / name), "prompt", "answer"),
            lambda: load_demonstrations([str(tmp_path / name)]),
        ):
            with suppress(RLinfError):
                read()
            assert not marker.exists()


def test_a_pickled_type_of_arrow_is_not_run(tmp_path: Path, marker: Path) -> None:
    """Arrow once unpickled the types of columns as it read them."""
    arrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    kind = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled(marker)}
    field = arrow.field("prompt", arrow.string(), metadata=kind)
    schema = arrow.schema([field, arrow.field("answer", arrow.string())], metadata={"pandas": pickled(marker)})
    parquet.write_table(arrow.table([["1+1"], ["2"]], schema=schema), tmp_path / "rows.parquet")
    assert len(read_file(str(tmp_path / "rows.parquet"), "prompt", "answer")) == 1
    with suppress(RLinfError):
        load_demonstrations([str(tmp_path / "rows.parquet")])
    assert not marker.exists()


def test_code_in_a_file_of_a_data_set_is_not_run(tmp_path: Path, marker: Path) -> None:
    pytest.importorskip("pyarrow")
    from tests.unit.recipes.demonstrations.test_lerobot import write

    write(tmp_path / "set")
    load_demonstrations([str(tmp_path / "set")])
    plant_neighbours(tmp_path / "set", marker)
    files = [file for file in sorted((tmp_path / "set").rglob("*")) if file.is_file() and file.name not in NEIGHBOURS]
    for file in files:
        old = file.read_bytes()
        for content in (pickled, archived, tagged):
            file.write_bytes(content(marker))
            with suppress(RLinfError):
                load_demonstrations([str(tmp_path / "set")])
            assert not marker.exists(), file.name
        file.write_bytes(old)


@pytest.mark.parametrize(
    "command",
    [
        ["validate", "math/sums-laptop"],
        pytest.param(["inspect", "memory", "math/sums-laptop"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_modules_of_a_received_folder_are_not_imported(tmp_path: Path, marker: Path, command: list[str]) -> None:
    """The installed command and the processes that it starts, in the folder itself."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    plant_neighbours(place, marker)
    done = installed(place, *command)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


def test_templates_of_the_payload_run_outside_of_a_sandbox(tmp_path: Path) -> None:
    """The test of the test: the templates do what they are meant to."""
    jinja2: Any = pytest.importorskip("jinja2")
    marker = tmp_path / "written"
    for line in TEMPLATES:
        marker.unlink(missing_ok=True)
        text = line.replace("MARKER", str(marker)).replace("CODE", code(marker).strip())
        jinja2.Environment().from_string(text).render(messages=[])
        assert marker.exists(), line
