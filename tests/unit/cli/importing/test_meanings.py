"""What keys of other projects become."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlinf_cli.importing.convert import OF_THIS_MACHINE
from rlinf_cli.importing.foreign_names import foreign_table
from rlinf_cli.importing.rules.rows import FUNCTIONS, rules_of
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


def test_an_evaluation_stays_one_beside_its_rollout(tmp_path: Path) -> None:
    result = converted(tmp_path, EVALUATION)
    assert result.errors == []
    taken = "env_type: ${env.eval.env_type}"
    for line in ('actor: "0"', "only_eval: True", "model_path: /m", taken, "precision: fp32"):
        assert f"{line}\n" in result.text
    assert "max_epochs: 1000\n" not in result.text.partition("# Not carried over")[0]


def test_soft_actor_critic_becomes_sac_with_its_arithmetic(tmp_path: Path) -> None:
    result = converted(tmp_path, TRAINING)
    assert result.errors == []
    for line in ("loss_type: sac", "model_type: squashed_policy", "target_rate: 0.01", "value_lr: 3e-4"):
        assert f"{line}\n" in result.text
    assert "counts critic updates per environment step: 32 / (32 x 2 x 1 = 64)" in result.text
    assert "learning_starts: 6\n" in result.text
    assert "learn_temperature: false\n" in result.text
    assert outcome(result, "algorithm.replay_buffer.cache_size")["outcome"] == "left_out"


def test_an_asynchronous_loss_is_named_as_another(tmp_path: Path) -> None:
    text = TRAINING.replace("embodied_sac\n  loss_type: embodied_sac", "gae\n  loss_type: decoupled_actor_critic")
    result = converted(tmp_path, text)
    assert "loss_type: actor_critic\n" in result.text
    assert "ratios are to the policy that acted" in str(outcome(result, "algorithm.loss_type")["note"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("algorithm:", "agentloop: {group_name: a}\nalgorithm:"), "the agents of this file are programs of RLinf"),
        (("task_type: embodied", "task_type: coding_online_rl"), "`runner.task_type: coding_online_rl`"),
        (('"actor,env,rollout"', "env"), "this file records episodes of a person and trains nothing"),
        (("model_type: mlp_policy", "model_type: openpi"), "the noise that steers a pi0, by soft actor-critic"),
        (("model_type: mlp_policy", "openpi: {use_rlt: true}"), "a token that summarizes the observations of pi0"),
    ],
)
def test_a_file_of_other_meaning_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        converted(tmp_path, TRAINING.replace(*change))


def test_a_placeholder_becomes_a_variable(tmp_path: Path) -> None:
    hardware = "hardware: {type: Franka, configs: [{robot_ip: ROBOT_IP, node_rank: 0}]}"
    groups = f"num_nodes: 1, node_groups: [{{label: arm, node_ranks: 0, {hardware}}}]"
    result = converted(tmp_path, EVALUATION.replace("num_nodes: 1", groups))
    assert "robot_ip: ${env:ROBOT_IP}\n" in result.text


def test_an_unset_search_path_is_guessed_from_the_place(tmp_path: Path) -> None:
    group = tmp_path / "examples" / "embodiment" / "config" / "env"
    group.mkdir(parents=True)
    (group / "pick.yaml").write_text("env_type: franka_mujoco\n")
    folder = tmp_path / "evaluations" / "arm"
    folder.mkdir(parents=True)
    search = "hydra: {searchpath: ['file://${oc.env:EMBODIED_PATH}/config/']}\ndefaults: [env/pick@env.train, _self_]\n"
    text = search + TRAINING.replace("env_type: franka_mujoco, ", "")
    assert "env_type: franka_mujoco\n" in converted(folder, text).text


def test_a_verl_file_trains_its_own_objective(tmp_path: Path) -> None:
    result = converted(tmp_path, VERL)
    assert result.errors == []
    for line in ("filter_groups: true", "loss_agg_func: seq-mean-token-mean", "clip_ratio_c: null"):
        assert f"{line}\n" in result.text
    assert "lora" not in result.text.partition("# Not carried over")[0]
    assert "_target_" not in [target for other in result.keys for target in other["paths"]]


def test_loggers_that_are_missing_are_named(tmp_path: Path) -> None:
    kept = converted(tmp_path, VERL, "++trainer.logger=[console,mlflow,clearml]")
    assert "logger_backends: [mlflow]\n" in kept.text
    assert "clearml" in (outcome(kept, "trainer.logger")["note"] or "")
    none = converted(tmp_path, VERL, "++trainer.logger=[clearml]")
    assert "clearml: not among tensorboard" in (outcome(none, "trainer.logger")["reason"] or "")


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("data.image_key=photos", "data.image_key"),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "data.image_key"),
        ("distillation.enabled=true", "distillation"),
        ("reward.reward_model.enable=true", "reward.use_reward_model"),
    ],
)
def test_what_rlinf_cannot_train_makes_the_result_wrong(tmp_path: Path, override: str, path: str) -> None:
    errors = converted(tmp_path, VERL, override).errors
    assert [error["path"] for error in errors] == [path]


TEACHER = (
    "distillation.enabled=true",
    "+distillation.distillation_loss.use_policy_gradient=true",
    "+distillation.distillation_loss.use_task_rewards=false",
    "+distillation.distillation_loss.loss_max_clamp=10",
    "+distillation.teacher_models.one.model_path=/t",
)


def test_one_teacher_by_log_ratios_is_distillation(tmp_path: Path) -> None:
    result = converted(tmp_path, VERL, *TEACHER, "+distillation.distillation_loss.loss_mode=k1")
    assert result.errors == []
    for line in ("adv_type: distillation", "model_path: /t", "teacher:"):
        assert f"{line}\n" in result.text
    assert outcome(result, "distillation.distillation_loss.loss_max_clamp")["outcome"] == "left_out"


@pytest.mark.parametrize(
    "other", ["loss_mode=forward_kl_topk", "loss_mode=k1 +distillation.teacher_models.two.model_path=/u"]
)
def test_other_distillation_makes_the_result_wrong(tmp_path: Path, other: str) -> None:
    errors = converted(tmp_path, VERL, *TEACHER, *f"+distillation.distillation_loss.{other}".split()).errors
    assert [error["path"] for error in errors] == ["distillation"]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (("loss_mode=cispo", "clip_ratio_low=10"), ("loss_type: cispo", "clip_ratio_low: 1")),
        (("loss_mode=sapo", "policy_loss.tau_pos=2.0"), ("loss_type: sapo", "tau_pos: 2.0")),
        (("loss_mode=geo_mean",), ("loss_type: geo_mean", "loss_agg_func: seq-mean-token-mean")),
    ],
)
def test_losses_of_verl_without_ppo_s_clip(tmp_path: Path, overrides: tuple[str, ...], lines: tuple[str, ...]) -> None:
    actor = "actor_rollout_ref.actor."
    written = [
        f"{'' if 'mode' in key else '+'}{actor}{'policy_loss.' if 'mode' in key else ''}{key}" for key in overrides
    ]
    result = converted(tmp_path, VERL, *written)
    assert result.errors == []
    for line in lines:
        assert f"  {line}\n" in result.text
    assert "clip_ratio_c" not in result.text.partition("# Not carried over")[0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_groups_of_one_have_the_reward_as_advantage(tmp_path: Path, estimator: str) -> None:
    result = converted(tmp_path, VERL.replace("n: 4", "n: 1"), f"algorithm.adv_estimator={estimator}")
    assert result.errors == []
    assert "  adv_type: reinforce_pp\n  normalize_advantages: false\n" in result.text


CORRECTED = (
    "+algorithm.rollout_correction.rollout_is=sequence",
    "+algorithm.rollout_correction.rollout_is_threshold=2.0",
    "+algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
    "+algorithm.rollout_correction.rollout_rs_threshold='0.5_1.5,2.5'",
)


def test_corrections_of_verl_recompute_and_reject_by_token(tmp_path: Path) -> None:
    result = converted(tmp_path, VERL, *CORRECTED)
    assert result.errors == []
    for line in ("recompute_logprobs: true", "correction_level: sequence", "tis_cap: 2.0", "reject_ratio_low: 0.5"):
        assert f"  {line}\n" in result.text
    assert "not taken over: seq_max_k2" in str(outcome(result, "algorithm.rollout_correction.rollout_rs")["note"])


def test_a_bypass_takes_ratios_to_what_drew_the_tokens(tmp_path: Path) -> None:
    bypass = "+algorithm.rollout_correction.bypass_mode=true"
    result = converted(tmp_path, VERL, *CORRECTED, bypass)
    assert result.errors == []
    assert "recompute_logprobs: true" not in result.text
    errors = converted(tmp_path, VERL, bypass, "+algorithm.rollout_correction.loss_type=reinforce").errors
    assert [error["message"] for error in errors] == ["unknown loss_type `reinforce`"]


def test_a_reward_model_of_rlinf_makes_the_result_wrong(tmp_path: Path) -> None:
    errors = converted(tmp_path, f"{TRAINING}reward: {{use_reward_model: true}}\n").errors
    assert [error["path"] for error in errors] == ["reward"]


def test_a_flow_policy_by_sac_is_refused_as_one_thing(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="a policy by flow matching with soft actor-critic"):
        converted(tmp_path, TRAINING.replace("model_type: mlp_policy", "model_type: flow_policy"))


@pytest.mark.parametrize(
    ("task", "becomes"), [("PegInsertionEnv-v1", "franka_mujoco"), ("DOSW1PickEnv-v1", "DOSW1PickEnv-v1")]
)
def test_a_dummy_arm_is_a_franka_only_where_the_task_is(tmp_path: Path, task: str, becomes: str) -> None:
    dummy = f"env_type: realworld, init_params: {{id: {task}}}, override_cfg: {{is_dummy: true}}"
    result = converted(tmp_path, TRAINING.replace("env_type: franka_mujoco", dummy))
    assert f"env_type: {becomes}\n" in result.text
    assert bool(result.errors) == (becomes == task)


def test_a_cube_that_is_picked_up_stays_one(tmp_path: Path) -> None:
    simulated = "env_type: frankasim, gym_id: PandaPickCube-v0"
    result = converted(tmp_path, TRAINING.replace("env_type: franka_mujoco", simulated))
    assert result.errors == []
    assert "task: pick\n" in result.text


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ("openpi_rlinf, openpi: {config_name: pi05_libero}", "pi05"),
        ("openpi_rlinf, openpi: {config_name: pi0_libero}", "pi0"),
        ("dexbotic_pi", "pi0"),
        ("gr00t_n1d7", "flow_policy"),
    ],
)
def test_another_code_of_a_policy_becomes_ours(tmp_path: Path, written: str, becomes: str) -> None:
    text = EVALUATION.replace("model_type: mlp_policy", f"model_type: {written}")
    result = converted(tmp_path, text)
    assert result.errors == []
    assert f"model_type: {becomes}\n" in result.text
    assert "becomes" in str(outcome(result, "rollout.model.model_type")["note"])


def test_demonstrations_alone_place_nothing_that_acts(tmp_path: Path) -> None:
    result = converted(tmp_path, DEMONSTRATIONS)
    assert (result.recipe, result.errors) == ("sft", [])
    assert "    actor: 0\n" in result.text
    assert "path: /shown" in result.text


def test_pictures_of_a_language_model_make_the_result_wrong(tmp_path: Path) -> None:
    errors = converted(tmp_path, PROBLEMS).errors
    assert [error["path"] for error in errors] == ["data.image_key"]


def test_agents_with_one_of_our_tools_stay_agents(tmp_path: Path) -> None:
    result = converted(tmp_path, AGENTS)
    assert (result.recipe, result.errors) == ("agent", [])
    for line in ("tools: [python]", "max_turns: 5", "reward_type: math", "adv_type: grpo"):
        assert f"{line}\n" in result.text


def test_agents_that_search_need_their_reward_and_documents(tmp_path: Path) -> None:
    search = "{search: {server_addr: 0.0.0.0:8000, topk: 3}}"
    result = converted(tmp_path, AGENTS.replace("{codejudge: {host_addr: 127.0.0.1, host_port: 8000}}", search))
    assert [error["message"] for error in converted(tmp_path, AGENTS.replace("rstar2}", "searchr1}")).errors] == [
        "unknown reward_type `searchr1`"
    ]
    assert [finding["code"] for finding in result.lacking if "SEARCH_DOCUMENTS" in finding["message"]] == [
        "unknown-variable"
    ]
    assert "search_results: 3\n" in result.text


def test_agents_of_a_workflow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="section `agentloop`"):
        converted(tmp_path, AGENTS.replace("agentloop: {", "agentloop: {workflow: mas, "))


def test_another_robot_than_a_franka_is_named_as_missing(tmp_path: Path) -> None:
    groups = "num_nodes: 1, node_groups: [{label: arm, node_ranks: 0, hardware: {type: Turtle2, configs: []}}]"
    text = TRAINING.replace("num_nodes: 1", groups).replace("env_type: franka_mujoco", "env_type: realworld")
    assert "unknown env_type `Turtle2`" in [error["message"] for error in converted(tmp_path, text).errors]


def test_the_group_that_is_compared_is_the_group_that_starts(tmp_path: Path) -> None:
    text = TRAINING.replace("embodied_sac\n  loss_type: embodied_sac", "grpo\n  loss_type: actor\n  group_size: 8")
    text = text.replace("total_num_envs: 32", "total_num_envs: 32, group_size: 1")
    result = converted(tmp_path, text)
    assert "  group_size: 8\n" in result.text
    assert "`algorithm.group_size` says" in str(outcome(result, "env.train.group_size")["reason"])


def test_an_evaluation_may_place_an_actor_that_trains_nothing(tmp_path: Path) -> None:
    result = converted(tmp_path, EVALUATION.replace('"env,rollout": 0', 'actor: 0, "env,rollout": 0'))
    assert result.errors == []
    assert "total_num_envs: ${env.eval.total_num_envs}\n" in result.text


def test_fine_tuning_of_verl_becomes_a_chat_job(tmp_path: Path) -> None:
    result = converted(tmp_path, FINE_TUNING)
    assert (result.recipe, result.errors) == ("sft_chat", [])
    for line in ("global_batch_size: 64", "seq_length: 1024", "overlong: truncate", "adam_beta2: 0.95"):
        assert f"{line}\n" in result.text
    assert "after_each_epoch" in str(outcome(result, "trainer.save_freq")["reason"])


def test_a_key_below_a_reference_is_overridden(tmp_path: Path) -> None:
    reference = "'${oc.select:actor_rollout_ref.actor.deep,{}}'"
    text = VERL.replace("  rollout: {name", f"  ref: {{deep: {reference}}}\n  rollout: {{name")
    result = converted(tmp_path, text, "+actor_rollout_ref.ref.deep.inner=1")
    assert outcome(result, "actor_rollout_ref.ref.deep.inner")["reason"]


def test_every_key_left_out_has_a_reason(tmp_path: Path) -> None:
    for text in (EVALUATION, TRAINING, VERL, FINE_TUNING):
        result = converted(tmp_path, text)
        left_out = [other for other in result.keys if other["outcome"] in ("left_out", "not_needed")]
        assert left_out
        assert [other["key"] for other in left_out if not other["reason"] or "no such key" in other["reason"]] == []


@pytest.mark.parametrize("actor", ["", "model: {model_path: /m}"], ids=["named for the rollout", "named twice"])
def test_model_folder_that_the_rollout_alone_names_is_trained(tmp_path: Path, actor: str) -> None:
    result = converted(
        tmp_path,
        f"""
cluster: {{num_nodes: 1, component_placement: {{"actor,rollout,reward": 0}}}}
runner: {{task_type: reasoning, max_epochs: 1, seq_length: 64, logger: {{log_path: ../results}}}}
rollout: {{rollout_backend: sglang, model: {{model_path: /m}}}}
actor: {{{actor}}}
algorithm: {{adv_type: grpo, group_size: 4}}
data: {{type: math, train_data_paths: [/d.jsonl], max_prompt_length: 32}}
""",
    )
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
    # One that a recipe lacks is named all the same: its finding says why.
    named = {target for target in targets if "{key}" not in target}
    lacking = {target for target in named if not types_at(model, to_path(parse_path(target)[0]))}
    assert lacking <= {"reward.use_reward_model", "distillation.enabled"}
