"""The math recipe's file, and the folders of its models: what does not fit together is found before anything runs."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.rules.model_rules import require_model
from recipes.math.config import MathConfig
from recipes.sections.model_folders import fault_of_weights, read_object, read_settings
from recipes.training.huggingface import load_tokenizer
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigError
from tests.known import known
from tests.unit.recipes.weights_file import WEIGHTS

NODE = "{node_group: node, placement: 0}"
LAPTOP = f"recipe: math\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,reward: {NODE}\n"


@pytest.mark.parametrize(("prompt", "unread"), [("3*4=", ""), ("3 apples and 4", "'a'")])
def test_characters_unknown_to_a_model_from_scratch(tmp_path: Path, findings: Any, prompt: str, unread: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text((json.dumps({"prompt": prompt, "answer": "12"}) + "\n") * 10)
    text = LAPTOP + f"data: {{train_data_paths: [{file}]}}\n"
    messages = [finding[2] for finding in findings(text, messages=True)]
    expected = f"problem 1 of `{file}` has {unread}"
    assert [message.partition(": ")[2] for message in messages] == ([expected] if unread else [])


def test_adapters_of_random_weights_are_a_poor_start(findings: Any, model: Path) -> None:
    adapters = "{lora: {rank: 4}}"
    diagnostics = findings(LAPTOP + f"actor:\n  model: {adapters}\n", messages=True)
    assert [(diagnostic[0], diagnostic[3]) for diagnostic in diagnostics] == [
        ("conflicting-settings", "give `actor.model.model_path`, or remove `lora`")
    ]
    assert findings(LAPTOP + f"actor:\n  model: {{model_path: {model}, lora: {{rank: 4}}}}\n") == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("adv_type: reinforce_plus_plus", {"adv_type": "reinforce_pp"}),
        ("adv_type: reinpp_baseline", {"adv_type": "reinforce_pp_baseline"}),
        ("loss_type: vanilla", {"loss_type": "actor"}),
        ("{options: {kl_penalty: low_var_kl}, kl_beta: 0}", {"kl_penalty": "k3", "kl_beta": 0}),
        ("{options: {tis_cap: 2}, recompute_logprobs: true}", {"tis_cap": 2.0}),
    ],
)
def test_values_of_other_projects(tmp_path: Path, written: str, meant: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{LAPTOP}algorithm: {written if written.startswith('{') else '{' + written + '}'}\n")
    job = load_with_lint(str(path), (), environ={})
    job.raise_if_bad()
    algorithm = cast("MathConfig", job.config).algorithm.inputs
    assert {name: getattr(algorithm, name) for name in meant} == meant


@pytest.mark.parametrize(
    ("sections", "module"),
    [
        ("data:\n  type: reasoning_gym\n  options: {task: chain_sum}\n", "reasoning_gym"),
        ("reward:\n  reward_type: math\n", "math_verify"),
        ("actor:\n  model:\n    lora: {rank: 4}\n", "peft"),
        ("actor:\n  model:\n    hidden_dim: 64\n", "transformers"),
    ],
)
def test_packages_that_this_python_lacks(
    findings: Any, monkeypatch: pytest.MonkeyPatch, sections: str, module: str
) -> None:
    lacks = "recipes.sections.imports.missing_modules"
    monkeypatch.setattr(lacks, lambda names: [name for name in names if name == module])
    missing = [item for item in findings(LAPTOP + sections, messages=True) if item[0] == "missing-extra"]
    assert [(f"`{module}`" in item[2], "pip install" in item[3]) for item in missing] == [(True, True)]


INDEX, SHARDED = "model.safetensors.index.json", '{"weight_map": {"w": "model-2.safetensors"}}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model with all that is looked at before a run; its weights are one number."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 3}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}')
    return folder


def test_a_whole_folder_is_well(findings: Any, model: Path) -> None:
    assert findings(LAPTOP, f"actor.model.model_path={model}") == []
    # `save_pretrained` into the folder of a larger model leaves its index; transformers prefers the single file.
    (model / INDEX).write_text(SHARDED)
    assert findings(LAPTOP, f"actor.model.model_path={model}") == []


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "no config.json"),
        ("model.safetensors", None, "has no weights"),
        ("adapter_config.json", "{}", "has an adapter of peft"),
        (INDEX, SHARDED, "lacks `model-2.safetensors`"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("config.json", '{"model_type": "qwen2", "vocab_size": 2}', "has 3 tokens, but the model only 2"),
        ("config.json", '{"vocab_size": 3}', "config.json has no `model_type`"),
        ("config.json", '{"model_type": "qwen2", "sliding_window": "8"}', "`sliding_window` of config.json is `'8'`"),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json` is `'2'`"),
        ("generation_config.json", '{"eos_token_id": [2, null]}', "generation_config.json` is `None`"),
    ],
)
def test_what_a_folder_lacks_is_found_before_a_run(
    findings: Any, model: Path, file: str, content: str | None, words: str
) -> None:
    (model / ("model.safetensors" if file == INDEX else file)).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)
    diagnostics = findings(LAPTOP, f"actor.model.model_path={model}", messages=True)
    assert [diagnostic[0] for diagnostic in diagnostics] == ["unusable-path"]
    assert words in diagnostics[0][2]
    config: Any = load_with_lint("math/sums-laptop", [f"actor.model.model_path={model}"], environ={}).config
    with pytest.raises(ConfigError, match=re.escape(words)):
        require_model(config)


def test_a_stop_token_that_the_model_lacks_is_refused(findings: Any, model: Path) -> None:
    options = (f"actor.model.model_path={model}", "rollout.sampling_params.stop_token_ids=[2, 3]")
    assert findings(LAPTOP, *options) == [("conflicting-settings", "3")]
    config: Any = load_with_lint("math/sums-laptop", options, environ={}).config
    with pytest.raises(ConfigError, match="no token 3, only 0 to 2"):
        require_model(config)


YARN = '512, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}'


@pytest.mark.parametrize(("positions", "refused"), [(1024, True), (1025, False), ('"1024"', False), (YARN, False)])
def test_an_answer_fits_into_the_positions_of_the_model(
    findings: Any, model: Path, positions: int | str, refused: bool
) -> None:
    settings = f'{{"model_type": "qwen2", "vocab_size": 3, "max_position_embeddings": {positions}}}'
    (model / "config.json").write_text(settings)
    reported = ("conflicting-settings", "1024") in findings(
        LAPTOP + "rollout: {sampling_params: {max_new_tokens: 1024}}\n", f"actor.model.model_path={model}"
    )
    assert reported == refused


def test_a_chat_template_that_is_not_there(findings: Any, model: Path) -> None:
    chat = "data:\n  apply_chat_template: true\n"
    assert findings(LAPTOP + chat) == [("conflicting-settings", "true")]

    asked = findings(LAPTOP + chat, f"actor.model.model_path={model}", messages=True)
    assert [(item[0], "has no chat template" in item[2]) for item in asked] == [("unusable-path", True)]


TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS


def test_messages_without_a_template_are_refused(findings: Any, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = findings(f"{LAPTOP}data:\n  train_data_paths: {file}\n", messages=True)
    assert refused[0][0] == "conflicting-settings"
    assert "are messages of a chat, and `apply_chat_template` is off" in refused[0][2]


def save_tokenizer(folder: Path, template: str) -> None:
    from recipes.language.models.load_model import built_tokenizer

    tokenizer: Any = built_tokenizer("".join(map(chr, range(32, 127))))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(f'{{"model_type": "qwen2", "vocab_size": {len(tokenizer)}}}')


def test_missing_folder_may_be_elsewhere_until_a_run_starts() -> None:
    job = load_with_lint("math/sums-laptop", ["actor.model.model_path=/nowhere/model"], environ={})

    assert job.diagnostics.ok
    assert [diagnostic.code for diagnostic in job.diagnostics] == ["unusable-path"]
    with pytest.raises(ConfigError, match="does not exist"):
        require_model(cast("Any", job.config))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ('{"prompt": "1+1"}\n', "there is no key `answer`: the row has `prompt`"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n', ":2: the line is not JSON"),
        ('{"prompt": " ", "answer": "2"}\n', "the prompt under `prompt` is empty"),
        ('{"prompt": "1+1", "answer": null}\n', "there is no answer under `answer`"),
    ],
)
def test_files_of_problems_are_looked_into(findings: Any, model: Path, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(text)

    inputs = (f"data.train_data_paths={file}", f"actor.model.model_path={model}")
    diagnostics = findings(LAPTOP, *inputs, messages=True)
    assert [diagnostic[0] for diagnostic in diagnostics] == ["unusable-path"]
    assert words in diagnostics[0][2]


@pytest.mark.parametrize("name", ["some.jsonl", "some.parquet"])
def test_a_pipe_in_the_place_of_data_is_not_waited_for(findings: Any, model: Path, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)

    options = (f"data.train_data_paths={tmp_path / name}", f"actor.model.model_path={model}")
    diagnostics = findings(LAPTOP, *options, messages=True)
    assert "is a pipe, not a regular file" in diagnostics[0][2]


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_pipe_in_a_model_folder_is_not_waited_for(findings: Any, model: Path, name: str) -> None:
    save_tokenizer(model, NO_SYSTEM)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)

    chat = LAPTOP + "data:\n  apply_chat_template: true\n"
    findings(chat, f"actor.model.model_path={model}")

    with pytest.raises(ConfigError, match=f"`{name}` is a pipe"):
        load_tokenizer(str(model))


@pytest.mark.parametrize(
    ("wanted", "codes"), [("solution", []), ("solution=None, hint=None", []), ("hint", ["conflicting-settings"])]
)
def test_columns_that_trl_functions_want_are_in_the_data(
    findings: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, codes: list[str]
) -> None:
    (tmp_path / "columns_of_trl.py").write_text(f"def score(completions, {wanted}, **kwargs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2", "solution": "2"}\n{"prompt": "1+2", "answer": "3"}\n' * 5)

    options = (f"data.train_data_paths={file}", f"actor.model.model_path={model}")
    diagnostics = findings(LAPTOP, *options, "reward.reward_type=columns_of_trl:score", messages=True)
    assert [diagnostic[0] for diagnostic in diagnostics] == codes
    assert all("`hint`" in diagnostic[2] for diagnostic in diagnostics)


@pytest.mark.parametrize("name", ["embodied/pick-laptop", "math/sums-laptop", "math/smollm2-laptop"])
def test_a_shipped_config_travels_to_the_workers(name: str) -> None:
    config: Any = load_with_lint(name, (), environ={}).config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(("rate", "is_usual"), [("10", False), ("0.06", False), ("0.01", True), ("1e-7", True)])
def test_learning_rates_far_off_are_reported(rate: str, is_usual: bool) -> None:
    job = load_with_lint("math/sums-laptop", [f"actor.optim.lr={rate}"], environ={})
    assert ("unusual-value" not in {problem.code for problem in job.diagnostics}) == is_usual
    assert job.ok


MODEL, OWN = {"model_path": "/models/m"}, {"model_path": "/models/n"}
RATE = 5e-4


@pytest.mark.parametrize(
    ("actor", "critic", "rates"),
    [
        # Built on the spot, and with adapters.
        ({}, {}, (1e-4, 1e-4)),
        ({"model": {**MODEL, "lora": {"rank": 4}}}, {}, (1e-4, 1e-4)),
        ({"model": {"model_path": ""}}, {"model_path": ""}, (1e-4, 1e-4)),
        ({"model": {**MODEL, "lora": {}}}, {}, (1e-4, 1e-4)),
        # All weights of a pretrained model; the critic's is that of the actor, or one of its own.
        ({"model": MODEL}, {}, (1e-6, 1e-5)),
        ({"model": MODEL, "optim": {"clip_grad": 0.5}}, {}, (1e-6, 1e-5)),
        ({}, OWN, (1e-4, 1e-5)),
        ({"model": MODEL, "optim": {"lr": None}}, {"lr": None}, (1e-6, 1e-5)),
        # What the file says.
        ({"model": MODEL, "optim": {"lr": RATE}}, {}, (5e-4, 1e-5)),
        ({"model": MODEL}, {"lr": RATE}, (1e-6, 5e-4)),
    ],
)
def test_the_learning_rate_is_that_of_what_is_trained(
    actor: dict[str, Any], critic: dict[str, Any], rates: tuple[float, float]
) -> None:
    placed = {"actor,rollout,reward": {"node_group": "node", "placement": 0}}
    cluster = {"num_nodes": 1, "component_placement": placed}
    config = MathConfig.model_validate({"recipe": "math", "cluster": cluster, "actor": actor, "critic": critic})
    assert (config.actor.optim.lr, config.critic.lr) == rates
    if "optim" in actor and "clip_grad" in actor["optim"]:
        assert config.actor.optim.clip_grad == 0.5


def test_a_pretrained_model_is_taught_by_one(findings: Any, tmp_path: Path) -> None:
    text = LAPTOP.replace("actor,rollout,reward", "actor,rollout,reward,teacher")
    text += f"algorithm: {{adv_type: distillation}}\nactor: {{model: {{model_path: {tmp_path / 'model'}}}}}\n"
    assert ("conflicting-settings", "distillation") in findings(text)


@pytest.mark.filterwarnings("error")
def test_weights_of_files_are_dumped_and_read(tmp_path: Path) -> None:
    files = [{"path": str(tmp_path / "a.jsonl"), "weight": 3.0}, str(tmp_path / "b.jsonl")]
    data = LanguageDataConfig.model_validate({"train_data_paths": files})
    assert data.train_files == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert data.train_weights == (3.0, None)
    dumped = data.model_dump(mode="json")
    assert dumped["train_data_paths"] == files
    assert LanguageDataConfig.model_validate(dumped) == data


BAD = ["[" * 200_000, "{", "[]", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json` cannot be read"):
        read_settings(file)
    assert read_object(file) == {}


def test_infinity_of_a_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_settings(file) == read_object(file) == {"time_step_limit": [0.0, math.inf]}


def test_header_of_weights_that_is_nested_deeply_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    header = b"[" * 200_000
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    fault = fault_of_weights(file)
    assert "is not a safetensors file" in known(fault).message
