"""Models and tokenizers of folders; folders with mistakes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.data.problems import Problem, PromptEncoder
from recipes.language.models.load_model import (
    built_model,
    built_tokenizer,
    check_vocabulary,
    load_model,
    stop_token_ids,
)
from recipes.training.huggingface import load_tokenizer
from recipes.training.tensor_files import stored_tensors
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.errors import ConfigError
from tests.mistakes import HOSTILE, garbled, mutated
from tests.unit.recipes.agent.conversation.byte_level import write_byte_level


def saved(folder: Path) -> tuple[Any, Any]:
    tokenizer = built_tokenizer()
    model = built_model(tokenizer, hidden_dim=32, layers=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return tokenizer, model


def test_a_built_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    tokenizer, model = saved(tmp_path / "model")
    again, loaded = load_tokenizer(str(tmp_path / "model")), load_model(str(tmp_path / "model"))
    assert again.encode("12+3=") == tokenizer.encode("12+3=")
    assert tokenizer.decode([*tokenizer.encode("1 + 2"), tokenizer.eos_token_id], skip_special_tokens=True) == "1 + 2"
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert stop_token_ids(again, str(tmp_path / "model")) == (tokenizer.eos_token_id,)


def test_weights_depend_on_the_seed_alone() -> None:
    tokenizer = built_tokenizer()
    torch.manual_seed(5)
    first = built_model(tokenizer, hidden_dim=32, layers=1, seed=1)
    second = built_model(tokenizer, hidden_dim=32, layers=1, seed=1)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_missing_in_a_folder_is_told(tmp_path: Path) -> None:
    folder, empty = tmp_path / "model", tmp_path / "empty"
    saved(folder)
    empty.mkdir()
    weights, adapter = folder / "model.safetensors", folder / "adapter_config.json"
    for prepare, load, words in (
        (lambda: None, lambda: load_model(str(tmp_path / "nothing")), "does not exist"),
        (lambda: None, lambda: load_tokenizer(str(empty)), "no tokenizer"),
        (lambda: weights.write_bytes(b"nothing of the kind"), lambda: load_model(str(folder)), "cannot be loaded"),
        (weights.unlink, lambda: load_model(str(folder)), "has no weights"),
        # transformers would load it, and the model that it names.
        (lambda: adapter.write_text("{}"), lambda: load_model(str(folder)), "has an adapter of peft"),
    ):
        prepare()
        with pytest.raises(ConfigError, match=words):
            load()


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model = built_model(built_tokenizer("01"), hidden_dim=32, layers=1)
    with pytest.raises(ConfigError, match="the tokenizer has"):
        check_vocabulary(model, built_tokenizer())


def test_a_question_is_written_as_the_model_expects_it() -> None:
    tokenizer: Any = built_tokenizer("0123456789+=ab")
    plain = PromptEncoder(tokenizer, few_shot="1+1=2", max_prompt_length=12)
    assert tokenizer.decode(plain.encode(Problem(prompt="3+4=", answer=""))) == "1+1=23+4="
    assert plain.encode(Problem(prompt="123456789", answer="")) is None
    with pytest.raises(ConfigError, match="no chat template"):
        PromptEncoder(tokenizer, apply_chat_template=True)
    with pytest.raises(ConfigError, match="system_prompt"):
        PromptEncoder(tokenizer, system_prompt="a")
    tokenizer.chat_template = "{% for m in messages %}a{{ m['content'] }}{% endfor %}b"
    chat = PromptEncoder(tokenizer, apply_chat_template=True, system_prompt="0")
    assert tokenizer.decode(chat.encode(Problem(prompt="3+4=", answer=""))) == "a0a3+4=b"
    assert chat.text([*tokenizer.encode("7"), tokenizer.eos_token_id]) == "7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole folder of a model, with an index of its weights."""
    parts = tmp_path_factory.mktemp("parts")
    write_byte_level(parts)
    folder = parts / "whole"
    for part in ("model", "tokenizer"):
        shutil.copytree(parts / part, folder, dirs_exist_ok=True)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys("ab", "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def with_mistakes(draw: random.Random, content: bytes) -> bytes:
    kinds = (json.dumps(mutated(draw, json.loads(content))).encode(), garbled(draw, content), draw.choice(HOSTILE))
    return draw.choices(kinds, (8, 1, 1))[0]


@pytest.mark.security
@pytest.mark.parametrize(("first", "mistakes"), [(0, 60), pytest.param(60, 2000, marks=pytest.mark.nightly)])
def test_folders_with_mistakes_are_judged(folder: Path, tmp_path: Path, first: int, mistakes: int) -> None:
    files = sorted(file.name for file in folder.glob("*.json"))
    refused = 0
    for seed in range(first, first + mistakes):
        draw = random.Random(seed)
        name = draw.choice(files)
        content = with_mistakes(draw, (folder / name).read_bytes())
        copy = shutil.copytree(folder, tmp_path / str(seed), copy_function=lambda a, b: Path(b).symlink_to(a))
        (copy / name).unlink()
        (copy / name).write_bytes(content)
        job = load_with_lint("math/sums-laptop", [f"actor.model.model_path={copy}"], environ={})
        codes = {finding.code for finding in job.diagnostics}
        assert codes <= {"unusable-path"}, (seed, name, content, list(job.diagnostics))
        refused += bool(codes)
    assert 0 < refused < mistakes


@pytest.mark.security
@pytest.mark.parametrize(
    "index",
    [
        "[]",
        *(
            f'{{"weight_map": {named}}}'
            for named in ("[]", "{}", '{"a": ["model.safetensors"]}', '{"a": 3}', '{"a": "../model.safetensors"}')
        ),
        '{"weight_map": {"a": ""}}',
    ],
)
def test_an_index_that_names_no_files_beside_it_is_refused(folder: Path, tmp_path: Path, index: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "model.safetensors").rename(tmp_path / "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(index)
    assert stored_tensors(copy) is None
    job = load_with_lint("math/sums-laptop", [f"actor.model.model_path={copy}"], environ={})
    assert ["has no `weight_map`" in finding.message for finding in job.diagnostics] == [True]
