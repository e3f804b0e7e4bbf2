"""Code planted in the files of models and data sets, and beside them: no reader runs it."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from recipes.demonstrations.load_set import load_demonstrations
from recipes.language.data.problem_sources import read_file
from recipes.training.huggingface import config_of, load_pretrained, load_tokenizer
from rlinf_core import RLinfError
from tests.payloads import NEIGHBOURS, PAYLOADS, archived, code, pickled, plant_neighbours, tagged
from tests.unit.cli.conftest import Cli

RLINF = Path(sys.executable).with_name("rlinf")


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

    cli("validate", "math_laptop", f"actor.model.model_path={folder}", "actor.model.model_type=hf")
    cli("inspect", "memory", "math_laptop", f"actor.model.model_path={folder}", "actor.model.model_type=hf")
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


def test_the_model_is_read_where_nothing_is_planted(cli: Cli, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert load_tokenizer(str(model))("x")
    assert load_pretrained(AutoModelForCausalLM, str(model)) is not None


@pytest.mark.parametrize("kind", ["qwen2", "x"])
def test_code_beside_a_model_is_not_run(cli: Cli, model: Path, marker: Path, kind: str) -> None:
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
    [["validate", "math_laptop"], pytest.param(["inspect", "memory", "math_laptop"], marks=pytest.mark.nightly)],
    ids=" ".join,
)
def test_modules_of_a_received_folder_are_not_imported(tmp_path: Path, marker: Path, command: list[str]) -> None:
    """The installed command and the processes that it starts, in the folder itself."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    place = tmp_path / "run" / "checkpoints"
    plant_neighbours(place, marker)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([RLINF, *command], cwd=place, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
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
