"""The math recipe's file: what does not fit together is found before anything runs."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.rules.model_rules import require_model
from recipes.math.config import MathConfig
from recipes.training.huggingface import load_tokenizer
from rlinf_cli.job.load import load_with_lint
from rlinf_core.errors import ConfigError
from tests.unit.recipes.weights_file import WEIGHTS

NODE = "{node_group: node, placement: 0}"
LAPTOP = f"recipe: math\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,reward: {NODE}\n"


def test_a_cluster_is_enough(findings: Any) -> None:
    assert findings(LAPTOP) == []


def test_reward_needs_a_place(findings: Any) -> None:
    diagnostics = findings(LAPTOP.replace(",reward", ""), messages=True)
    assert [(diagnostic[0], diagnostic[3]) for diagnostic in diagnostics] == [
        ("missing-component", f"add `reward: {NODE}`")
    ]


def test_files_beside_generated_problems_are_refused(findings: Any) -> None:
    text = LAPTOP + "data: {type: sums, train_data_paths: [a.jsonl]}\n"
    diagnostics = findings(text, messages=True)
    assert ("conflicting-settings", "write `data.type: jsonl`, or remove the files") in [
        (diagnostic[0], diagnostic[3]) for diagnostic in diagnostics
    ]


@pytest.mark.parametrize(("prompt", "unread"), [("3*4=", ""), ("3 apples and 4", "'a'")])
def test_characters_unknown_to_a_model_from_scratch(tmp_path: Path, findings: Any, prompt: str, unread: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text((json.dumps({"prompt": prompt, "answer": "12"}) + "\n") * 10)
    text = LAPTOP + f"data: {{train_data_paths: [{file}]}}\n"
    messages = [finding[2] for finding in findings(text, messages=True)]
    expected = f"problem 1 of `{file}` has {unread}"
    assert [message.partition(": ")[2] for message in messages] == ([expected] if unread else [])


def test_the_samples_of_a_step(findings: Any) -> None:
    diagnostics = findings(
        LAPTOP + "data:\n  rollout_batch_size: 30\nactor:\n  global_batch_size: 256\n", messages=True
    )
    assert diagnostics == [
        (
            "batch-not-divisible",
            "256",
            "a step has rollout_batch_size 30 x group_size 8 = 240 answers, not a multiple of"
            " `actor.global_batch_size` 256",
            "nearest valid `actor.global_batch_size`: 240",
        )
    ]
    assert findings(LAPTOP + "data:\n  rollout_batch_size: 30\n") == []


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("algorithm.options={cap: 3}", "not-available"),
        ("data.task_config={space: true}", "unknown-key"),
        ('data.task_config.spaced="false"', "bad-value"),
        ("data.task_config.spaced=true", None),
    ],
)
def test_options_that_nothing_reads_are_refused(findings: Any, override: str, code: str | None) -> None:
    assert [finding[0] for finding in findings(LAPTOP, override)] == ([code] if code else [])


def test_minibatches_are_counted_once(findings: Any) -> None:
    both = "actor:\n  global_batch_size: 128\nalgorithm:\n  n_minibatches: {}\n"
    assert findings(LAPTOP + both.format(2)) == []
    diagnostics = findings(LAPTOP + both.format(4), messages=True)
    assert [diagnostic[0] for diagnostic in diagnostics] == ["conflicting-settings"]
    assert "32 x group_size 8 = 256 answers / `actor.global_batch_size` 128 = 2" in diagnostics[0][2]


def test_sequences_hold_prompt_and_answer(findings: Any) -> None:
    diagnostics = findings(LAPTOP + "rollout:\n  sampling_params:\n    max_new_tokens: 1500\n", messages=True)
    assert diagnostics == [
        (
            "conflicting-settings",
            "1500",
            "max_prompt_length 1024 + max_new_tokens 1500 = 2524 tokens exceed `runner.seq_length` 2048",
            "raise `runner.seq_length` to 2524",
        )
    ]


@pytest.mark.parametrize(
    ("sections", "underlined"),
    [
        ("algorithm:\n  loss_type: actor_critic\n", "actor_critic"),
        ("algorithm:\n  group_size: 1\n", "1"),
        ("algorithm:\n  n_minibatches: 33\n", "33"),
        ("actor:\n  global_batch_size: 4\n", "4"),
        ("algorithm:\n  group_size: 1\n  adv_type: rloo\n", "1"),
        ("algorithm:\n  ratio_clip_eps: 0.1\n  clip_ratio_low: 0.2\n", "0.1"),
        ("algorithm:\n  tis_cap: 2\n", "2"),
        ("algorithm:\n  loss_type: decoupled_actor\n", "decoupled_actor"),
        ("algorithm:\n  reject_ratio_high: 2\n", "2"),
        ("algorithm:\n  recompute_logprobs: true\n  reject_ratio_low: 3\n  reject_ratio_high: 2\n", "3"),
        ("algorithm:\n  loss_type: gspo\n", "gspo"),
        ("rollout:\n  enable_offload: true\nrunner:\n  max_staleness: 1\n", "true"),
        ("actor:\n  group_name: W\ncritic:\n  group_name: W\n", "W"),
        ("actor:\n  group_name: W\nreward:\n  group_name: W\n", "W"),
    ],
)
def test_two_settings_that_contradict(findings: Any, sections: str, underlined: str) -> None:
    assert findings(LAPTOP + sections) == [("conflicting-settings", underlined)]


@pytest.mark.parametrize(
    ("placed", "sections", "expected"),
    [
        ("", "adv_type: gae", ("missing-component", "gae")),
        ("", "adv_type: turn_gae", ("missing-component", "turn_gae")),
        ("", "kl_beta: 0.1", ("missing-component", "0.1")),
        (",critic", "adv_type: grpo", ("unused-component", "critic")),
        (",reference", "kl_beta: 0", ("unused-component", "reference")),
        (",critic", "adv_type: gae", None),
        (",critic", "adv_type: 'rlinf_core.suggest:near'", None),
        (",reference", "kl_beta: 0.1", None),
        ("", "adv_type: distillation", ("missing-component", "distillation")),
        (",teacher", "adv_type: grpo", ("unused-component", "teacher")),
        (",teacher", "adv_type: distillation", None),
        (",teacher", "{adv_type: distillation, filter_groups: true}", ("conflicting-settings", "true")),
        (",judge", "adv_type: grpo", ("unused-component", "judge")),
        (",critic,reference", "{adv_type: gae, kl_beta: 0.1, kl_in_reward: true}", None),
    ],
)
def test_keys_and_the_groups_that_they_need(
    findings: Any, placed: str, sections: str, expected: tuple[str, str] | None
) -> None:
    settings = f" {sections}\n" if sections.startswith("{") else f"\n  {sections}\n"
    text = LAPTOP.replace("actor,rollout,reward", f"actor,rollout,reward{placed}") + f"algorithm:{settings}"
    assert findings(text) == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("sections", "underlined"),
    [
        ("actor:\n  use_dynamic_bsz: true\n", "use_dynamic_bsz"),
        ("actor:\n  ppo_mini_batch_size: 64\n", "ppo_mini_batch_size"),
        ("actor:\n  ulysses_sequence_parallel_size: 2\n", "ulysses_sequence_parallel_size"),
        ("actor:\n  model: {lora_alpha: 32}\n", "lora_alpha"),
        ("actor:\n  model: {trust_remote_code: true}\n", "trust_remote_code"),
        ("critic:\n  cliprange_value: 0.5\n", "cliprange_value"),
        ("algorithm:\n  norm_adv_by_std_in_grpo: false\n", "norm_adv_by_std_in_grpo"),
        ("algorithm:\n  kl_ctrl: {kl_coef: 0.1}\n", "kl_ctrl"),
    ],
)
def test_keys_of_other_trainers_are_answered(findings: Any, sections: str, underlined: str) -> None:
    assert findings(LAPTOP + sections) == [("not-available", underlined)]


@pytest.mark.parametrize(
    ("key", "name", "code"),
    [
        ("adv_type", "my_lab:advantages", "missing-extra"),
        ("loss_type", "my_lab:loss", "missing-extra"),
        ("adv_type", "rlinf_core.suggest:advantages", "unknown-choice"),
        ("loss_type", "rlinf_core.suggest:loss", "unknown-choice"),
        ("loss_type", "rlinf_core.suggest:near", None),
    ],
)
def test_own_functions_of_the_algorithm_are_looked_up(findings: Any, key: str, name: str, code: str | None) -> None:
    assert findings(LAPTOP + f"algorithm:\n  {key}: '{name}'\n") == ([(code, f"'{name}'")] if code else [])


def test_passes_are_bounded_by_tokens_and_by_answers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{LAPTOP}actor: {{max_tokens_per_micro_batch: 512, micro_batch_size: 4}}\n")
    job = load_with_lint(str(path), (), environ={})
    job.raise_if_bad()
    actor = cast("MathConfig", job.config).actor
    assert (actor.max_tokens_per_micro_batch, actor.micro_batch_size) == (512, 4)


def test_the_adapterless_actor_is_a_reference(findings: Any) -> None:
    diagnostics = findings(LAPTOP + "algorithm:\n  kl_beta: 0.1\nactor:\n  model: {lora: {rank: 4}}\n", messages=True)
    assert not [diagnostic for diagnostic in diagnostics if "reference" in diagnostic[2]]


SHARED = """\
recipe: math
cluster:
  num_nodes: 1
  component_placement:
    actor: {{node_group: gpu, placement: 0-3}}
    rollout: {{node_group: engines, placement: {engines}}}
    reward: {{node_group: node, placement: 0}}
  node_groups:
    - {{label: gpu, node_ranks: 0, accelerators: {{per_node: 8}}}}
    - {{label: engines, node_ranks: 0, accelerators: {{per_node: 8}}}}
runner: {{max_staleness: {staleness}}}
"""


@pytest.mark.parametrize(("engines", "staleness", "warned"), [("3-4", 1, True), ("3-4", 0, False), ("4-7", 1, False)])
def test_engines_that_never_stop_want_accelerators_of_their_own(
    findings: Any, engines: str, staleness: int, warned: bool
) -> None:
    diagnostics = findings(SHARED.format(engines=engines, staleness=staleness), messages=True)
    assert any("they share accelerators" in diagnostic[2] for diagnostic in diagnostics) == warned


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
        ("ratio_clip_eps: 0.1", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        ("{ratio_clip_eps: 0.1, clip_ratio_high: 0.1}", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        ("{kl_penalty: low_var_kl, kl_beta: 0}", {"kl_penalty": "k3", "kl_beta": 0}),
        ("{tis_cap: 2, recompute_logprobs: true}", {"tis_cap": 2.0}),
    ],
)
def test_values_of_other_projects(tmp_path: Path, written: str, meant: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{LAPTOP}algorithm: {written if written.startswith('{') else '{' + written + '}'}\n")
    job = load_with_lint(str(path), (), environ={})
    job.raise_if_bad()
    algorithm = cast("MathConfig", job.config).algorithm
    assert {name: getattr(algorithm, name) for name in meant} == meant


@pytest.mark.parametrize(
    ("sections", "code", "underlined"),
    [
        ("algorithm:\n  reward_type: chunk_level\n", "unknown-key", "reward_type"),
        ("env:\n  train: {}\n", "unknown-key", "env"),
        ("rollout:\n  backend: vlm\n", "bad-value", "vlm"),
        ("reward:\n  reward_type: exakt\n", "unknown-choice", "exakt"),
    ],
)
def test_keys_and_choices_of_other_recipes(findings: Any, sections: str, code: str, underlined: str) -> None:
    assert findings(LAPTOP + sections) == [(code, underlined)]


@pytest.mark.parametrize(
    ("sections", "underlined"),
    [
        ("actor:\n  fsdp_config:\n    mixed_precision:\n      param_dtype: bf16\n", "param_dtype"),
        ("algorithm:\n  filter_rewards: true\n", "filter_rewards"),
    ],
)
def test_no_key_is_without_effect_in_silence(findings: Any, sections: str, underlined: str) -> None:
    assert findings(LAPTOP + sections) == [("not-available", underlined)]


@pytest.mark.parametrize(
    ("sections", "underlined"),
    [
        ("data:\n  type: reasoning_gym\n", "reasoning_gym"),
        ("data:\n  type: jsonl\n", "jsonl"),
        ("data:\n  type: sums\n  train_data_paths: some.jsonl\n", "some.jsonl"),
        ("data:\n  val_data_paths: some.jsonl\n", "some.jsonl"),
        ("data:\n  system_prompt: be brief\n", "be brief"),
        ("reward:\n  reward_type: reasoning_gym\n", "reasoning_gym"),
    ],
)
def test_sources_of_problems_are_whole(findings: Any, sections: str, underlined: str) -> None:
    diagnostics = findings(LAPTOP + sections)
    assert [diagnostic for diagnostic in diagnostics if diagnostic[0] == "conflicting-settings"] == [
        ("conflicting-settings", underlined)
    ]


@pytest.mark.parametrize(
    ("sections", "module", "code"),
    [
        ("data:\n  type: reasoning_gym\n  task: chain_sum\n", "reasoning_gym", "missing-extra"),
        ("reward:\n  reward_type: math\n", "math_verify", "missing-extra"),
        ("actor:\n  model:\n    lora: {rank: 4}\n", "peft", "missing-extra"),
        ("actor:\n  model:\n    hidden_dim: 64\n", "transformers", "missing-extra"),
    ],
)
def test_packages_that_this_python_lacks(
    findings: Any, monkeypatch: pytest.MonkeyPatch, sections: str, module: str, code: str
) -> None:
    for rules in ("problem_rules", "model_rules"):
        monkeypatch.setattr(
            f"recipes.language.rules.{rules}.missing_modules", lambda names: [name for name in names if name == module]
        )

    diagnostics = findings(LAPTOP + sections, messages=True)

    assert [
        (diagnostic[0], f"`{module}`" in diagnostic[2], "pip install" in diagnostic[3])
        for diagnostic in diagnostics
        if diagnostic[0] == code
    ] == [(code, True, True)]


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


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "no config.json"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "model-2.safetensors"}}', "lacks `model-2.safetensors`"),
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
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)

    diagnostics = findings(LAPTOP, f"actor.model.model_path={model}", messages=True)

    assert [diagnostic[0] for diagnostic in diagnostics] == ["unusable-path"]
    assert words in diagnostics[0][2]
    config: Any = load_with_lint("math_laptop", [f"actor.model.model_path={model}"], environ={}).config
    with pytest.raises(ConfigError, match=re.escape(words)):
        require_model(config)


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
    job = load_with_lint("math_laptop", ["actor.model.model_path=/nowhere/model"], environ={})

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


def test_a_reward_function_is_looked_for(findings: Any) -> None:
    reward = "reward:\n  reward_type: {}\n"
    assert findings(LAPTOP + reward.format("math:sqrt")) == []
    assert findings(LAPTOP + reward.format("nothing.there:score"))[0][0] == "missing-extra"
    assert findings(LAPTOP + reward.format("json.decoder:score"))[0][0] == "unknown-choice"


@pytest.mark.parametrize("name", ["math_laptop", "math_smollm"])
def test_a_shipped_config_travels_to_the_workers(name: str) -> None:
    config: Any = load_with_lint(name, (), environ={}).config

    assert pickle.loads(pickle.dumps(config)) == config


SERVER = "actor:\n  model: {model_path: /models/small}\nrollout:\n  backend: server\n"
URL = "  server: {url: 'http://127.0.0.1:8000', weight_updates: weights_path, weights_dir: /shared}\n"


@pytest.mark.parametrize(
    "sections",
    [
        "rollout:\n  backend: vllm\n",
        "rollout:\n  backend: vllm\n  sampling_params: {temperature: 0.7}\n",
        "rollout:\n  backend: vllm\n  tensor_parallel_size: 2\n  engine_options: {enforce_eager: true}\n",
        SERVER + URL,
        SERVER + "  server: {url: 'https://models.example', token_env: TOKEN}\nrunner:\n  only_eval: true\n",
    ],
)
def test_engines_are_taken_for_what_they_can_do(findings: Any, sections: str) -> None:
    # The folder and the packages are on another machine.
    assert {code for code, _ in findings(LAPTOP + sections)} <= {"unusable-path", "missing-extra"}


def test_engine_package_is_required_where_rollout_runs(findings: Any) -> None:
    diagnostics = findings(LAPTOP + "rollout:\n  backend: vllm\n", messages=True)
    assert [diagnostic[:2] for diagnostic in diagnostics] == [("missing-extra", "vllm")]
    assert "pip install vllm" in diagnostics[0][3]
    group = (
        "    - {label: other, node_ranks: 0, env_configs: [{node_ranks: 0, python_interpreter_path: /opt/python}]}\n"
    )
    own = (
        LAPTOP.replace(",rollout", "") + "    rollout: {node_group: other, placement: '0:0'}\n  node_groups:\n" + group
    )
    codes = {diagnostic[0] for diagnostic in findings(own + "rollout:\n  backend: vllm\n")}
    assert "missing-extra" not in codes


@pytest.mark.parametrize("section", ["rollout", "judge"])
def test_engine_that_was_there_once_is_named(findings: Any, section: str) -> None:
    diagnostics = findings(LAPTOP + f"{section}:\n  backend: sglang\n", messages=True)
    assert ("bad-value", "sglang") in [diagnostic[:2] for diagnostic in diagnostics]
    assert "write `vllm`" in next(diagnostic[3] for diagnostic in diagnostics if diagnostic[1] == "sglang")


@pytest.mark.parametrize(
    ("sections", "code", "underlined"),
    [
        ("rollout:\n  backend: vllm\n  sampling_params: {temperature: 0.7, top_k: 20}\n", "conflicting-settings", "20"),
        (
            "rollout:\n  backend: vllm\n  engine_options: {logprobs_mode: raw_logits}\n",
            "conflicting-settings",
            "raw_logits",
        ),
        ("rollout:\n  backend: server\n", "conflicting-settings", "server"),
        (SERVER + "  server: {url: 'http://127.0.0.1:8000'}\n", "conflicting-settings", "server"),
        (SERVER + URL + "  sampling_params: {temperature: 0.7}\n", "conflicting-settings", "0.7"),
        (
            SERVER + "  server: {url: 'http://10.0.0.1:80', token_env: TOKEN}\nrunner: {only_eval: true}\n",
            "conflicting-settings",
            "'http://10.0.0.1:80'",
        ),
        (SERVER + "  server: {url: 'https://me:secret@host'}\n", "bad-value", "'https://me:secret@host'"),
        (SERVER + "  server: {url: 'host:80'}\n", "bad-value", "'host:80'"),
        (SERVER + URL.replace("}", ", api_key: abc}"), "not-available", "api_key"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(findings: Any, sections: str, code: str, underlined: str) -> None:
    diagnostics = findings(LAPTOP + sections)
    assert (code, underlined) in diagnostics


def test_values_of_related_projects_that_mean_the_same_are_taken(findings: Any) -> None:
    theirs = """
data:
  type: math
  rollout_batch_size: 16
reward:
  reward_type: numeric
"""
    assert findings(LAPTOP + theirs) == []
    assert findings(LAPTOP + "reward:\n  reward_type: symbolic\n") == []


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("data", ("max_response_length", "truncation", "filter_overlong_prompts", "reward_fn_key", "image_key")),
        ("rollout", ("response_length", "val_kwargs", "do_sample", "max_num_seqs", "n", "name")),
        ("reward", ("reward_scale", "use_reward_model", "reward_manager")),
    ],
)
def test_keys_of_related_projects_are_answered_by_ours(findings: Any, section: str, keys: tuple[str, ...]) -> None:
    written = "".join(f"  {key}: 1\n" for key in keys)

    diagnostics = findings(f"{LAPTOP}{section}:\n{written}", messages=True)

    assert [diagnostic[1] for diagnostic in diagnostics] == list(keys)
    assert all("known keys" not in diagnostic[3] for diagnostic in diagnostics)


@pytest.mark.parametrize("key", ["actor_rollout_ref", "trainer", "reward_model", "custom_reward_function"])
def test_sections_of_related_projects_are_answered_by_ours(findings: Any, key: str) -> None:
    diagnostics = findings(f"{LAPTOP}{key}: {{}}\n", messages=True)

    assert [diagnostic[1] for diagnostic in diagnostics] == [key]
    assert "`" in diagnostics[0][3]
    assert "known keys" not in diagnostics[0][3]


@pytest.mark.parametrize(("partial", "expected"), [("true", [("conflicting-settings", "true")]), ("false", [])])
def test_an_engine_that_cannot_keep_unfinished_answers_ends_them(
    findings: Any, partial: str, expected: list[tuple[str, str]]
) -> None:
    server = "{url: 'http://127.0.0.1:1', weight_updates: weights_path, weights_dir: weights}"
    text = LAPTOP + f"runner: {{max_staleness: 1, partial_rollout: {partial}}}\n"
    text += f"rollout: {{backend: server, server: {server}, sampling_params: {{temperature: 1}}}}\n"
    text += "actor: {model: {model_path: nowhere}}\n"
    assert [diagnostic for diagnostic in findings(text) if diagnostic[0] != "unusable-path"] == expected


def test_a_server_takes_weights_from_one_worker(findings: Any) -> None:
    file = LAPTOP.replace(
        "actor,rollout,reward: " + NODE, f"actor,reward: {NODE}\n    rollout: {{node_group: node, placement: '0:0-1'}}"
    )
    assert "conflicting-settings" in {code for code, _ in findings(file + SERVER + URL)}
    only = SERVER + "  server: {url: 'http://127.0.0.1:8000'}\nrunner:\n  only_eval: true\n"
    assert "conflicting-settings" not in {code for code, _ in findings(file + only)}


@pytest.mark.parametrize(
    "key",
    [
        "actor.model.precision",
        "actor.fsdp_config.mixed_precision.reduce_dtype",
        "critic.model.precision",
    ],
)
def test_half_precision_whose_gradients_would_vanish_is_refused(key: str) -> None:
    critic = [
        "algorithm.adv_type=gae",
        "cluster.component_placement={'actor,rollout,reward,critic': {node_group: node, placement: 0}}",
        "critic.model={}",
    ]
    job = load_with_lint("math_laptop", [*critic, f"{key}=fp16"], environ={})
    results = [(diagnostic.code, diagnostic.help) for diagnostic in job.diagnostics if "fp16" in diagnostic.message]
    assert results == [("conflicting-settings", "write `bf16`, which has the range of fp32")]
    assert not job.diagnostics.ok


def test_half_precision_serves_an_evaluation() -> None:
    job = load_with_lint("math_laptop", ["runner.only_eval=true", "actor.model.precision=fp16"], environ={})
    assert not [diagnostic for diagnostic in job.diagnostics if "would lose gradients" in diagnostic.message]


@pytest.mark.parametrize(("rate", "is_usual"), [("10", False), ("0.06", False), ("0.01", True), ("1e-7", True)])
def test_learning_rates_far_off_are_reported(rate: str, is_usual: bool) -> None:
    job = load_with_lint("math_laptop", [f"actor.optim.lr={rate}"], environ={})
    assert ("unusual-value" not in {problem.code for problem in job.diagnostics}) == is_usual
    assert job.ok


MODEL, OWN = {"model_path": "/models/m"}, {"model_path": "/models/n"}
RATE = {"optim": {"lr": 5e-4}}


@pytest.mark.parametrize(
    ("actor", "critic", "rates"),
    [
        # Built on the spot, and with adapters.
        ({}, {}, (1e-4, 1e-4)),
        ({"model": {**MODEL, "is_lora": True}}, {}, (1e-4, 1e-4)),
        ({"model": {**MODEL, "lora": {"rank": 4}}}, {}, (1e-4, 1e-4)),
        # All weights of a pretrained model; the critic's is that of the actor, or one of its own.
        ({"model": MODEL}, {}, (1e-6, 1e-5)),
        ({"model": MODEL, "optim": {"clip_grad": 0.5}}, {}, (1e-6, 1e-5)),
        ({}, {"model": OWN}, (1e-4, 1e-5)),
        # What the file says.
        ({"model": MODEL, **RATE}, {}, (5e-4, 1e-5)),
        ({"model": MODEL}, RATE, (1e-6, 5e-4)),
    ],
)
def test_the_learning_rate_is_that_of_what_is_trained(
    actor: dict[str, Any], critic: dict[str, Any], rates: tuple[float, float]
) -> None:
    placed = {"actor,rollout,reward": {"node_group": "node", "placement": 0}}
    cluster = {"num_nodes": 1, "component_placement": placed}
    config = MathConfig.model_validate({"recipe": "math", "cluster": cluster, "actor": actor, "critic": critic})
    assert (config.actor.optim.lr, config.critic.optim.lr) == rates
    if "optim" in actor and "clip_grad" in actor["optim"]:
        assert config.actor.optim.clip_grad == 0.5


@pytest.mark.parametrize(
    ("data", "underlined"),
    [
        ("{train_data_paths: {path: a.jsonl, weight: 2}}", "train_data_paths"),
        ("{curriculum: {low: 0.9, high: 0.2}}", "0.9"),
    ],
)
def test_mixtures_and_curricula_that_choose_nothing(findings: Any, data: str, underlined: str) -> None:
    assert ("conflicting-settings", underlined) in findings(LAPTOP + f"data: {data}\n")


def test_a_pretrained_model_is_taught_by_one(findings: Any, tmp_path: Path) -> None:
    text = LAPTOP.replace("actor,rollout,reward", "actor,rollout,reward,teacher")
    text += f"algorithm: {{adv_type: distillation}}\nactor: {{model: {{model_path: {tmp_path / 'model'}}}}}\n"
    assert ("conflicting-settings", "distillation") in findings(text)


JUDGED = LAPTOP.replace("actor,rollout,reward", "actor,rollout,reward,judge") + "reward: {reward_type: judge}\n"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ("", ("conflicting-settings", "judge")),
        ("judge: {model_path: /nowhere}\n", ("unusable-path", "/nowhere")),
        ("judge: {model_path: /nowhere, template: hello}\n", ("conflicting-settings", "hello")),
        ("judge: {model_path: /nowhere, verdict: 'my_lab:read'}\n", ("conflicting-settings", "'my_lab:read'")),
        ("judge: {model_path: /nowhere, seq_length: 64, max_new_tokens: 64}\n", ("conflicting-settings", "64")),
        ("judge: {model_path: /nowhere, temperature: 1.0e-45}\n", ("bad-value", "1.0e-45")),
        (
            "judge: {model_path: /nowhere, apply_chat_template: false, system_prompt: Judge.}\n",
            ("conflicting-settings", "Judge."),
        ),
    ],
)
def test_a_judge_that_cannot_judge_is_refused(findings: Any, sections: str, expected: tuple[str, str]) -> None:
    assert expected in findings(JUDGED + sections)


def test_a_judge_needs_a_place(findings: Any) -> None:
    assert ("missing-component", "judge") in findings(LAPTOP + "reward: {reward_type: judge}\n")


ON_GPUS = """
recipe: math
cluster:
  num_nodes: 1
  component_placement:
    actor: {node_group: gpu, placement: 0-3}
    rollout,judge: {node_group: gpu, placement: 4-7}
    reward: {node_group: node, placement: "0:0-3"}
  node_groups:
    - {label: gpu, node_ranks: 0, accelerators: {per_node: 8}}
reward: {reward_type: judge}
rollout: {backend: vllm, gpu_memory_utilization: 0.6}
judge: {model_path: /nowhere, backend: vllm, gpu_memory_utilization: SHARE}
"""


@pytest.mark.parametrize(("share", "refused"), [("0.5", True), ("0.3", False)])
def test_two_engines_reserve_no_more_than_there_is(findings: Any, share: str, refused: bool) -> None:
    reported = findings(ON_GPUS.replace("SHARE", share))
    assert (("conflicting-settings", share) in reported) == refused


@pytest.mark.filterwarnings("error")
def test_weights_of_files_are_dumped_and_read(tmp_path: Path) -> None:
    files = [{"path": str(tmp_path / "a.jsonl"), "weight": 3.0}, str(tmp_path / "b.jsonl")]
    data = LanguageDataConfig.model_validate({"train_data_paths": files})
    assert data.train_files == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert data.train_weights == (3.0, None)
    dumped = data.model_dump(mode="json")
    assert dumped["train_data_paths"] == files
    assert LanguageDataConfig.model_validate(dumped) == data


@pytest.mark.parametrize(
    ("params", "code", "underlined"),
    [
        ('{stop: ["a", ""]}', "bad-value", '""'),
        ("{top_p: 0}", "bad-value", "0"),
        ("{temperature: 1.0e-45}", "bad-value", "1.0e-45"),
        ("{temperature: 1.0e-7}", "bad-value", "1.0e-7"),
        ("{max_new_tokens: 8, min_new_tokens: 99}", "bad-value", "99"),
        ("{temperature: 0}", "cannot-train", "0"),
        ("{temperature: 0.001}", "cannot-train", "0.001"),
        ("{top_k: 1}", "cannot-train", "1"),
        ("{top_p: 1.0e-9}", "cannot-train", "1.0e-9"),
        ("{max_new_tokens: 8, min_new_tokens: 8}", "cannot-train", "8"),
    ],
)
def test_draws_that_nothing_is_learned_from_are_refused(findings: Any, params: str, code: str, underlined: str) -> None:
    assert findings(LAPTOP + f"rollout:\n  sampling_params: {params}\n") == [(code, underlined)]


def test_evaluations_need_a_temperature_that_divides(findings: Any) -> None:
    text = LAPTOP + "rollout:\n  sampling_params: {temperature: 1.0e-40}\nrunner: {only_eval: true}\n"
    assert findings(text) == [("bad-value", "1.0e-40")]


@pytest.mark.parametrize("params", ["{temperature: 0}", "{top_k: 1}", "{max_new_tokens: 8, min_new_tokens: 8}"])
def test_evaluations_may_draw_greedily(findings: Any, params: str) -> None:
    assert findings(LAPTOP + f"rollout:\n  sampling_params: {params}\nrunner: {{only_eval: true}}\n") == []


def test_a_rate_that_ends_before_the_run_is_refused(findings: Any) -> None:
    optim = "actor:\n  optim: {lr_scheduler: cosine, total_training_steps: 7}\nrunner: {max_steps: 9}\n"
    assert findings(LAPTOP + optim) == [("cannot-train", "7")]
    assert findings(LAPTOP + optim.replace("cosine", "linear, min_lr_ratio: 0.1")) == []
