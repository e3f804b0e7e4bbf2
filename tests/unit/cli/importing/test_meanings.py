"""What keys of other projects become."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlinf_cli.importing.convert import OF_THIS_MACHINE
from rlinf_cli.importing.foreign_names import foreign_table
from rlinf_cli.importing.rule_rows import FUNCTIONS, rules_of
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.validating.model_fields import types_at
from rlinf_core.job.find_recipe import find_recipe
from tests.golden.command_line import rlinf

EVALUATION = """
cluster: {num_nodes: 1, component_placement: {"env,rollout": 0}}
runner: {task_type: embodied_eval, max_epochs: 1000, only_eval: True, logger: {log_path: ../results}}
env: {eval: {env_type: maniskill, init_params: {id: PickCube-v1}, total_num_envs: 16, max_steps_per_rollout_epoch: 48}}
rollout: {model: {model_type: mlp_policy, num_action_chunks: 4, model_path: /m, precision: "32"}}
"""
TRAINING = """
cluster: {num_nodes: 1, component_placement: {"actor,env,rollout": 0}}
runner: {task_type: embodied, max_epochs: 10, logger: {log_path: ../results}}
env:
  train: {env_type: franka_mujoco, total_num_envs: 32, max_steps_per_rollout_epoch: 2}
actor: {global_batch_size: 1024, model: {model_type: mlp_policy, precision: "32"}, critic_optim: {lr: 3e-4}}
algorithm:
  adv_type: embodied_sac
  loss_type: embodied_sac
  update_epoch: 32
  tau: 0.01
  entropy_tuning: {alpha_type: fixed_alpha, initial_alpha: 0.01}
  replay_buffer: {min_buffer_size: 3, cache_size: 100}
"""
DEMONSTRATIONS = """
cluster: {num_nodes: 1, component_placement: {"actor,env,rollout": 0}}
runner: {task_type: sft, max_steps: 10}
data: {train_data_paths: [{dataset_path: /shown, weight: 1.0}]}
actor: {global_batch_size: 8, micro_batch_size: 4, model: {model_type: mlp_policy, precision: fp32}}
"""
PROBLEMS = """
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": 0}}
runner: {task_type: reasoning, max_steps: 10, seq_length: 64}
data: {train_data_paths: [a.jsonl], rollout_batch_size: 4, prompt_key: problem, image_keys: [images]}
algorithm: {adv_type: grpo, group_size: 4, sampling_params: {max_new_tokens: 16}}
actor: {model: {model_path: /m}}
rollout: {rollout_backend: sglang}
"""
AGENTS = """
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": 0}}
runner: {task_type: reasoning, max_steps: 10, seq_length: 64}
data: {type: rstar2, train_data_paths: [a.jsonl], rollout_batch_size: 4, prompt_key: prompt}
algorithm: {adv_type: grpo_dynamic, group_size: 4, sampling_params: {max_new_tokens: 16, stop: [x]}}
agentloop: {toolcall_parser: rstar2-qwen, max_assistant_turns: 5}
tools: {codejudge: {host_addr: 127.0.0.1, host_port: 8000}}
reward: {reward_type: rstar2}
actor: {model: {model_path: /m}}
rollout: {rollout_backend: sglang}
"""
VERL = """
actor_rollout_ref:
  model: {path: /m, lora_rank: 0, lora: {rank: 0, alpha: 32}}
  rollout: {name: vllm, n: 4, tensor_model_parallel_size: 1}
  actor: {ppo_mini_batch_size: 64, policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean, clip_ratio_c: 3.0}
algorithm: {adv_estimator: grpo, filter_groups: {enable: true, _target_: x, max_inflight_gen_batches: 1}}
data: {train_files: a.parquet, train_batch_size: 256, max_prompt_length: 512, max_response_length: 512,
  image_key: images}
trainer: {nnodes: 1, n_gpus_per_node: 2, total_training_steps: 5}
distillation: {enabled: false}
reward: {reward_model: {enable: false}}
"""
FINE_TUNING = """
model: {path: /m, lora: {rank: 0, alpha: 32}}
optim: {lr: 1e-5, betas: [0.9, 0.95]}
engine: {ulysses_sequence_parallel_size: 1}
data: {train_files: a.parquet, train_batch_size: 64, max_length: 1024, truncation: right,
  apply_chat_template_kwargs: {}}
trainer: {nnodes: 1, n_gpus_per_node: 1, total_epochs: 1, save_freq: after_each_epoch}
"""


class Imported(NamedTuple):
    """What `rlinf import` wrote and said of a file.

    Attributes:
        text: the new file.
        recipe: its recipe.
        keys: what became of each key.
        errors, lacking: errors of the new file, and of this machine.
    """

    text: str
    recipe: str
    keys: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    lacking: list[dict[str, Any]]


class RefusedError(Exception):
    """A file that `rlinf import` refuses."""


def converted(folder: Path, text: str, *overrides: str) -> Imported:
    """Import a file by the command."""
    old, new = folder / "job.yaml", folder / "new.yaml"
    old.write_text(text)
    _, output = rlinf("import", str(old), *overrides, "--out", str(new), "--replace", "--output", "json")
    (file,) = output["files"]
    if file["written"] is None:
        raise RefusedError(str(file["error"] or file["findings"]))
    errors = [finding for finding in file["validation"]["diagnostics"] if finding["severity"] == "error"]
    of_file = [error for error in errors if error["code"] not in OF_THIS_MACHINE]
    lacking = [error for error in errors if error["code"] in OF_THIS_MACHINE]
    return Imported(new.read_text(), file["recipe"], file["keys"], of_file, lacking)


def outcome(result: Imported, key: str) -> dict[str, Any]:
    """Return what became of a key."""
    return next(outcome for outcome in result.keys if outcome["key"] == key)


Change = str | tuple[str, str]
SAC = "embodied_sac\n  loss_type: embodied_sac"
ENV = "env_type: franka_mujoco"
MODEL = "model_type: mlp_policy"
HARDWARE = "num_nodes: 1, node_groups: [{{label: arm, node_ranks: 0, hardware: {}}}]"
FRANKA = HARDWARE.format("{type: Franka, configs: [{robot_ip: ROBOT_IP, node_rank: 0}]}")
TURTLE = HARDWARE.format("{type: Turtle2, configs: []}")
DUMMY = "env_type: realworld, init_params: {{id: {}}}, override_cfg: {{is_dummy: true}}"
ACTOR = "actor_rollout_ref.actor."
TEACHER = (
    "distillation.enabled=true",
    "+distillation.distillation_loss.use_policy_gradient=true",
    "+distillation.distillation_loss.use_task_rewards=false",
    "+distillation.distillation_loss.loss_max_clamp=10",
    "+distillation.teacher_models.one.model_path=/t",
)
CORRECTED = (
    "+algorithm.rollout_correction.rollout_is=sequence",
    "+algorithm.rollout_correction.rollout_is_threshold=2.0",
    "+algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
    "+algorithm.rollout_correction.rollout_rs_threshold='0.5_1.5,2.5'",
)
BYPASS = "+algorithm.rollout_correction.bypass_mode=true"
DEEP = "'${oc.select:actor_rollout_ref.actor.deep,{}}'"

# A file, what is changed in it or overridden; lines of the new file (after `-`: that it has not), and of some keys what
# is said. The new file is valid.
VALID: list[Any] = [
    pytest.param(
        EVALUATION, (),
        'actor: "0"|only_eval: True|model_path: /m|env_type: ${env.eval.env_type}|precision: fp32|-max_epochs: 1000',
        {}, id="an-evaluation-stays-one-beside-its-rollout",
    ),
    pytest.param(
        EVALUATION, [('"env,rollout": 0', 'actor: 0, "env,rollout": 0')],
        "total_num_envs: ${env.eval.total_num_envs}", {}, id="an-evaluation-may-place-an-actor-that-trains-nothing",
    ),
    pytest.param(
        EVALUATION, [("num_nodes: 1", FRANKA)], "robot_ip: ${env:ROBOT_IP}", {}, id="a-placeholder-becomes-a-variable",
    ),
    *(
        pytest.param(
            EVALUATION, [(MODEL, f"model_type: {written}")], f"model_type: {becomes}",
            {"rollout.model.model_type": "becomes"}, id=f"another-code-of-a-policy-becomes-ours-{written}",
        )
        for written, becomes in (
            ("openpi_rlinf, openpi: {config_name: pi05_libero}", "pi05"),
            ("openpi_rlinf, openpi: {config_name: pi0_libero}", "pi0"),
            ("dexbotic_pi", "pi0"), ("gr00t_n1d7", "flow_policy"),
        )
    ),
    pytest.param(
        TRAINING, (),
        "loss_type: sac|model_type: squashed_policy|target_rate: 0.01|value_lr: 3e-4|learning_starts: 6"
        "|learn_temperature: false",
        {"algorithm.update_epoch": "counts critic updates per environment step: 32 / (32 x 2 x 1 = 64)",
         "algorithm.replay_buffer.cache_size": "left_out"},
        id="soft-actor-critic-becomes-sac-with-its-arithmetic",
    ),
    pytest.param(
        TRAINING, [(SAC, "gae\n  loss_type: decoupled_actor_critic"), ("1024", "64")], "loss_type: actor_critic",
        {"algorithm.loss_type": "ratios are to the policy that acted"}, id="an-asynchronous-loss-is-named-as-another",
    ),
    pytest.param(
        TRAINING, [(ENV, "env_type: frankasim, gym_id: PandaPickCube-v0")], "task: pick", {},
        id="a-cube-that-is-picked-up-stays-one",
    ),
    pytest.param(
        TRAINING, [(ENV, DUMMY.format("PegInsertionEnv-v1"))], ENV, {}, id="a-dummy-arm-is-a-franka",
    ),
    pytest.param(
        TRAINING, [(SAC, "grpo\n  loss_type: actor\n  group_size: 8"), ("1024", "1600"),
                   ("total_num_envs: 32", "total_num_envs: 32, group_size: 1")],
        "group_size: 8", {"env.train.group_size": "`algorithm.group_size` says"},
        id="the-group-that-is-compared-is-the-group-that-starts",
    ),
    pytest.param(DEMONSTRATIONS, (), "recipe: sft|    actor: 0|path: /shown", {}, id="demonstrations-place-no-env"),
    pytest.param(
        AGENTS, (), "recipe: agent|    reward: 0|tools: [python]|max_turns: 5|reward_type: math|adv_type: grpo", {},
        id="agents-with-one-of-our-tools-stay-agents",
    ),
    pytest.param(
        VERL, (),
        "filter_groups: true|loss_agg_func: seq-mean-token-mean|clip_ratio_c: null|-lora", {},
        id="a-verl-file-trains-its-own-objective",
    ),
    pytest.param(
        VERL, ["++trainer.logger=[console,mlflow,clearml]"], "logger_backends: [mlflow]",
        {"trainer.logger": "clearml"}, id="loggers-that-are-missing-are-named",
    ),
    pytest.param(
        VERL, ["++trainer.logger=[clearml]"], "", {"trainer.logger": "clearml: not among tensorboard"},
        id="no-logger-is-left",
    ),
    pytest.param(
        VERL, [*TEACHER, "+distillation.distillation_loss.loss_mode=k1"],
        "adv_type: distillation|model_path: /t|teacher:",
        {"distillation.distillation_loss.loss_max_clamp": "left_out"}, id="one-teacher-by-log-ratios-is-distillation",
    ),
    *(
        pytest.param(
            VERL, [f"{ACTOR}policy_loss.loss_mode={mode}", *further], f"loss_type: {mode}|{lines}|-clip_ratio_c", {},
            id=mode,
        )
        for mode, further, lines in (
            ("cispo", [f"+{ACTOR}clip_ratio_low=10"], "clip_ratio_low: 1"),
            ("sapo", [f"+{ACTOR}policy_loss.tau_pos=2.0"], "tau_pos: 2.0"),
            ("geo_mean", [], "loss_agg_func: seq-mean-token-mean"),
        )
    ),
    *(
        pytest.param(
            VERL, [("n: 4", "n: 1"), f"algorithm.adv_estimator={estimator}"],
            "adv_type: reinforce_pp|    normalize_advantages: false", {},
            id=f"groups-of-one-of-{estimator}",
        )
        for estimator in ("grpo", "rloo")
    ),
    pytest.param(
        VERL, CORRECTED,
        "recompute_logprobs: true|correction_level: sequence|tis_cap: 2.0|reject_ratio_low: 0.5",
        {"algorithm.rollout_correction.rollout_rs": "not taken over: seq_max_k2"}, id="corrections-reject-by-token",
    ),
    pytest.param(VERL, [*CORRECTED, BYPASS], "-recompute_logprobs: true", {}, id="a-bypass"),
    pytest.param(
        VERL,
        [("  rollout: {name", f"  ref: {{deep: {DEEP}}}\n  rollout: {{name"), "+actor_rollout_ref.ref.deep.inner=1"],
        "", {"actor_rollout_ref.ref.deep.inner": "left_out"}, id="a-key-below-a-reference-is-overridden",
    ),
    pytest.param(
        FINE_TUNING, (),
        "recipe: sft_chat|global_batch_size: 64|seq_length: 1024|overlong: truncate|adam_beta2: 0.95",
        {"trainer.save_freq": "after_each_epoch"}, id="fine-tuning-of-verl-becomes-a-chat-job",
    ),
]  # fmt: skip


def changed(text: str, changes: Sequence[Change]) -> tuple[str, list[str]]:
    """Return a file with its changes, and the overrides among them."""
    for change in changes:
        if isinstance(change, tuple):
            assert change[0] in text
            text = text.replace(*change)
    return text, [change for change in changes if isinstance(change, str)]


@pytest.mark.parametrize(("text", "changes", "lines", "said"), VALID)
def test_meaning(tmp_path: Path, text: str, changes: Sequence[Change], lines: str, said: dict[str, str]) -> None:
    text, overrides = changed(text, changes)
    result = converted(tmp_path, text, *overrides)
    assert result.errors == []
    set_keys = result.text.partition("# Not carried over")[0]
    for line in filter(None, lines.split("|")):
        if line.startswith("-"):
            assert line[1:] not in set_keys
        else:
            assert f"{line}\n" in result.text
    for key, words in said.items():
        assert words in str(outcome(result, key))
    left_out = [key for key in result.keys if key["outcome"] in ("left_out", "not_needed")]
    assert [key["key"] for key in left_out if not key["reason"] or "no such key" in key["reason"]] == []


@pytest.mark.parametrize(
    ("text", "change", "says"),
    [
        (TRAINING, ("algorithm:", "agentloop: {group_name: a}\nalgorithm:"), "the agents of this file are programs"),
        (TRAINING, ("task_type: embodied", "task_type: coding_online_rl"), "`runner.task_type: coding_online_rl`"),
        (TRAINING, ('"actor,env,rollout"', "env"), "this file records episodes of a person and trains nothing"),
        (TRAINING, (MODEL, "model_type: openpi"), "the noise that steers a pi0, by soft actor-critic"),
        (TRAINING, (MODEL, "openpi: {use_rlt: true}"), "a token that summarizes the observations of pi0"),
        (TRAINING, (MODEL, "model_type: flow_policy"), "a policy by flow matching with soft actor-critic"),
        (AGENTS, ("agentloop: {", "agentloop: {workflow: mas, "), "section `agentloop`"),
    ],
)
def test_a_file_of_other_meaning_is_refused(tmp_path: Path, text: str, change: Change, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        converted(tmp_path, changed(text, [change])[0])


# What is converted and wrong: the path of the only error, or its message.
DISTILLED = "+distillation.distillation_loss.loss_mode="


@pytest.mark.parametrize(
    ("text", "changes", "error"),
    [
        (VERL, ["data.image_key=photos"], "data.image_key"),
        (VERL, ["actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct"], "data.image_key"),
        (VERL, ["distillation.enabled=true"], "distillation"),
        (VERL, [*TEACHER, f"{DISTILLED}forward_kl_topk"], "distillation"),
        (VERL, [*TEACHER, f"{DISTILLED}k1", "+distillation.teacher_models.two.model_path=/u"], "distillation"),
        (VERL, ["reward.reward_model.enable=true"], "reward.use_reward_model"),
        (VERL, [BYPASS, "+algorithm.rollout_correction.loss_type=reinforce"], "unknown loss_type `reinforce`"),
        (TRAINING, [("algorithm:", "reward: {use_reward_model: true}\nalgorithm:")], "reward"),
        (TRAINING, [("num_nodes: 1", TURTLE), (ENV, "env_type: realworld")], "unknown env_type `Turtle2`"),
        (TRAINING, [(ENV, DUMMY.format("DOSW1PickEnv-v1"))], "env.train.env_type"),
        (PROBLEMS, [], "data.image_key"),
        (AGENTS, [("rstar2}", "searchr1}")], "unknown reward_type `searchr1`"),
    ],
)
def test_what_cannot_be_trained_makes_the_result_wrong(
    tmp_path: Path, text: str, changes: Sequence[Change], error: str
) -> None:
    text, overrides = changed(text, changes)
    errors = converted(tmp_path, text, *overrides).errors
    assert {error} == {item["message"] if " " in error else item["path"] for item in errors}


def test_an_unset_search_path_is_guessed_from_the_place(tmp_path: Path) -> None:
    group = tmp_path / "examples" / "embodiment" / "config" / "env"
    group.mkdir(parents=True)
    (group / "pick.yaml").write_text("env_type: franka_mujoco\n")
    folder = tmp_path / "evaluations" / "arm"
    folder.mkdir(parents=True)
    search = "hydra: {searchpath: ['file://${oc.env:EMBODIED_PATH}/config/']}\ndefaults: [env/pick@env.train, _self_]\n"
    text = search + TRAINING.replace("env_type: franka_mujoco, ", "")
    assert "env_type: franka_mujoco\n" in converted(folder, text).text


def test_agents_that_search_need_their_documents(tmp_path: Path) -> None:
    search = "{search: {server_addr: 0.0.0.0:8000, topk: 3}}"
    result = converted(tmp_path, AGENTS.replace("{codejudge: {host_addr: 127.0.0.1, host_port: 8000}}", search))
    lacking = [finding["code"] for finding in result.lacking if "SEARCH_DOCUMENTS" in finding["message"]]
    assert lacking == ["unknown-variable"]
    assert "search_results: 3\n" in result.text


@pytest.mark.parametrize("actor", ["", "model: {model_path: /m}"], ids=["named for the rollout", "named twice"])
def test_model_folder_that_the_rollout_alone_names_is_trained(tmp_path: Path, actor: str) -> None:
    text = PROBLEMS.replace(", image_keys: [images]", "")
    text = text.replace("actor: {model: {model_path: /m}}", f"actor: {{{actor}}}")
    result = converted(tmp_path, text.replace("backend: sglang}", "backend: sglang, model: {model_path: /m}}"))
    assert "  model:\n    model_path: /m\n" in result.text
    assert result.text.count("    model_path: /m\n") == 1


KINDS = foreign_table()["rules"]
RECIPES = {"RLinf": "embodied", "sac": "embodied", "evaluation": "embodied", "verl": "math", "verl_sft": "sft_chat"}


def cases(row: Any) -> list[Any]:
    return [{"to": row}] if isinstance(row, str) else row if isinstance(row, list) else [row]


def test_every_rule_has_a_row() -> None:
    by_rows = {case["by"] for rows in KINDS.values() for row in rows.values() for case in cases(row) if "by" in case}
    returned = {name: function.__annotations__.get("return") for name, function in FUNCTIONS.items()}
    assert {name for name, kind in returned.items() if kind == "Result"} == by_rows


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_case_of_a_row_always_holds(kind: str) -> None:
    assert all(not {"is", "if"} & cases(row)[-1].keys() for row in KINDS[kind].values())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_lead_to_keys_of_the_recipe(kind: str) -> None:
    assert rules_of(kind)
    model = find_recipe(RECIPES.get(kind, kind)).config_model()
    words = [case.get("to", []) for row in KINDS[kind].values() for case in cases(row)]
    targets = {target for word in words for target in ([word] if isinstance(word, str) else word)}
    targets |= {path for row in KINDS[kind].values() for case in cases(row) for path in case.get("also", {})}
    # One that a recipe lacks is named all the same: its finding says why. Engines take arguments that no model has.
    named = {target for target in targets if "{key}" not in target}
    lacking = {target for target in named if not types_at(model, to_path(parse_path(target)[0]))}
    assert lacking <= {"reward.use_reward_model", "distillation.enabled", "rollout.engine_options.enforce_eager"}
