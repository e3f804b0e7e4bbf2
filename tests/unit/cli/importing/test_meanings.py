"""What a file of another project means: evaluations stay such, near counterparts are named, and nothing is trained that
the file does not train.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_cli.importing.convert import Converted, convert
from rlinf_cli.importing.outcomes import Fate, KeyOutcome
from rlinf_cli.importing.sources import read_job
from rlinf_core.errors import ConfigError

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


def converted(folder: Path, text: str, *overrides: str) -> Converted:
    """Return the conversion of a file."""
    file = folder / "job.yaml"
    file.write_text(text)
    job = read_job(str(file), overrides, [], {})
    assert job.file is not None, list(job.diagnostics)
    return convert(job.file, {})


def outcome(result: Converted, key: str) -> KeyOutcome:
    """Return what became of a key."""
    return next(outcome for outcome in result.outcomes if outcome.source == key)


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
    assert outcome(result, "algorithm.replay_buffer.cache_size").fate is Fate.LEFT_OUT


def test_an_asynchronous_loss_is_named_as_another(tmp_path: Path) -> None:
    text = TRAINING.replace("embodied_sac\n  loss_type: embodied_sac", "gae\n  loss_type: decoupled_actor_critic")
    result = converted(tmp_path, text)
    assert "loss_type: actor_critic\n" in result.text
    assert "ratios are to the policy that acted" in str(outcome(result, "algorithm.loss_type").note)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("algorithm:", "agentloop: {group_name: a}\nalgorithm:"), "the agents of this file are programs of RLinf"),
        (("task_type: embodied", "task_type: coding_online_rl"), "`runner.task_type: coding_online_rl`"),
        (('"actor,env,rollout"', "env"), "this file records episodes of a person and trains nothing"),
    ],
)
def test_a_file_of_other_meaning_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
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
    assert "_target_" not in [target for other in result.outcomes for target in other.targets]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("data.image_key=images", "data.image_key"),
        ("distillation.enabled=true", "distillation"),
        ("reward.reward_model.enable=true", "reward.use_reward_model"),
    ],
)
def test_what_rlinf_cannot_train_makes_the_result_wrong(tmp_path: Path, override: str, path: str) -> None:
    errors = converted(tmp_path, VERL, override).errors
    assert [".".join(map(str, error.path)) for error in errors] == [path]


def test_a_reward_model_of_rlinf_makes_the_result_wrong(tmp_path: Path) -> None:
    errors = converted(tmp_path, f"{TRAINING}reward: {{use_reward_model: true}}\n").errors
    assert [".".join(map(str, error.path)) for error in errors] == ["reward"]


def test_fine_tuning_of_verl_becomes_a_chat_job(tmp_path: Path) -> None:
    result = converted(tmp_path, FINE_TUNING)
    assert (result.recipe, result.errors) == ("sft_chat", [])
    for line in ("global_batch_size: 64", "seq_length: 1024", "overlong: truncate", "adam_beta2: 0.95"):
        assert f"{line}\n" in result.text
    assert "after_each_epoch" in str(outcome(result, "trainer.save_freq").reason)


def test_a_key_below_a_reference_is_overridden(tmp_path: Path) -> None:
    reference = "'${oc.select:actor_rollout_ref.actor.deep,{}}'"
    text = VERL.replace("  rollout: {name", f"  ref: {{deep: {reference}}}\n  rollout: {{name")
    result = converted(tmp_path, text, "+actor_rollout_ref.ref.deep.inner=1")
    assert outcome(result, "actor_rollout_ref.ref.deep.inner").reason


def test_every_key_left_out_has_a_reason(tmp_path: Path) -> None:
    for text in (EVALUATION, TRAINING, VERL, FINE_TUNING):
        result = converted(tmp_path, text)
        left_out = [other for other in result.outcomes if other.fate in (Fate.LEFT_OUT, Fate.NOT_NEEDED)]
        assert left_out
        assert [other.source for other in left_out if not other.reason or "no such key" in other.reason] == []


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
