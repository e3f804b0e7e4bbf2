"""The math recipe's file: what does not fit together is found before anything runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.math.config import MathConfig
from rlinf_core.job.load import load_job

NODE = "{node_group: node, placement: 0}"
LAPTOP = f"recipe: math\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,reward: {NODE}\n"


def test_a_cluster_is_enough(findings: Any) -> None:
    assert findings(LAPTOP) == []


def test_reward_needs_a_place(findings: Any) -> None:
    found = findings(LAPTOP.replace(",reward", ""), messages=True)
    assert [(each[0], each[3]) for each in found] == [("missing-component", "add `reward: 0`")]


def test_the_samples_of_a_step(findings: Any) -> None:
    found = findings(LAPTOP + "data:\n  rollout_batch_size: 30\nactor:\n  global_batch_size: 256\n", messages=True)
    assert found == [
        (
            "batch-not-divisible",
            "256",
            "a step has rollout_batch_size 30 x group_size 8 = 240 answers, which `actor.global_batch_size` 256 does"
            " not divide",
            "`actor.global_batch_size` could be 240",
        )
    ]
    assert findings(LAPTOP + "data:\n  rollout_batch_size: 30\n") == []


def test_minibatches_are_counted_once(findings: Any) -> None:
    both = "actor:\n  global_batch_size: 128\nalgorithm:\n  n_minibatches: {}\n"
    assert findings(LAPTOP + both.format(2)) == []
    found = findings(LAPTOP + both.format(4), messages=True)
    assert [each[0] for each in found] == ["conflicting-settings"]
    assert "32 x group_size 8 = 256 answers / `actor.global_batch_size` 128 = 2" in found[0][2]


def test_sequences_hold_prompt_and_answer(findings: Any) -> None:
    found = findings(LAPTOP + "rollout:\n  sampling_params:\n    max_new_tokens: 1500\n", messages=True)
    assert found == [
        (
            "conflicting-settings",
            "1500",
            "max_prompt_length 1024 + max_new_tokens 1500 = 2524 tokens, more than `runner.seq_length` 2048",
            "`runner.seq_length` could be 2524",
        )
    ]


@pytest.mark.parametrize(
    ("sections", "underlined"),
    [
        ("algorithm:\n  loss_type: actor_critic\n", "actor_critic"),
        ("algorithm:\n  group_size: 1\n", "1"),
        ("algorithm:\n  group_size: 1\n  adv_type: rloo\n", "1"),
        ("algorithm:\n  ratio_clip_eps: 0.1\n  clip_ratio_low: 0.2\n", "0.1"),
        ("algorithm:\n  tis_cap: 2\n", "2"),
        ("algorithm:\n  loss_type: decoupled_actor\n", "decoupled_actor"),
        ("algorithm:\n  kl_in_reward: true\n", "true"),
        ("algorithm:\n  normalize_advantages: true\n", "true"),
        ("algorithm:\n  loss_type: gspo\n", "gspo"),
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
        (",critic", "adv_type: 'my_lab:advantages'", None),
        (",reference", "kl_beta: 0.1", None),
        (",critic,reference", "{adv_type: gae, kl_beta: 0.1, kl_in_reward: true}", None),
    ],
)
def test_keys_and_the_groups_that_they_need(
    findings: Any, placed: str, sections: str, expected: tuple[str, str] | None
) -> None:
    settings = f" {sections}\n" if sections.startswith("{") else f"\n  {sections}\n"
    text = LAPTOP.replace("actor,rollout,reward", f"actor,rollout,reward{placed}") + f"algorithm:{settings}"
    assert findings(text) == ([] if expected is None else [expected])


def test_the_adapterless_actor_is_a_reference(findings: Any) -> None:
    assert findings(LAPTOP + "algorithm:\n  kl_beta: 0.1\nactor:\n  model: {lora: {rank: 4}}\n") == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("adv_estimator: reinforce_plus_plus", {"adv_type": "reinforce_pp"}),
        ("adv_type: reinpp_baseline", {"adv_type": "reinforce_pp_baseline"}),
        ("loss_mode: vanilla", {"loss_type": "actor"}),
        ("cliprange: 0.1", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        ("{ratio_clip_eps: 0.1, clip_ratio_high: 0.1}", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        ("{kl_loss_type: low_var_kl, kl_loss_coef: 0}", {"kl_penalty": "k3", "kl_beta": 0}),
        ("{tis_imp_ratio_cap: 2, recompute_logprobs: true}", {"tis_cap": 2.0}),
        ("{lam: 0.95, cliprange_value: 0.3}", {"gae_lambda": 0.95, "value_clip": 0.3}),
    ],
)
def test_keys_and_values_of_other_projects(tmp_path: Path, written: str, meant: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{LAPTOP}algorithm: {written if written.startswith('{') else '{' + written + '}'}\n")
    job = load_job(str(path), (), environ={})
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
        ("rollout:\n  backend: vllm\n", "vllm"),
        ("rollout:\n  enable_offload: true\n", "true"),
        ("actor:\n  micro_batch_size: 4\n", "4"),
        ("algorithm:\n  filter_rewards: true\n", "true"),
        ("runner:\n  max_staleness: 1\n", "1"),
    ],
)
def test_no_key_is_without_effect_in_silence(findings: Any, sections: str, underlined: str) -> None:
    assert findings(LAPTOP + sections) == [("not-available", underlined)]


@pytest.mark.parametrize(
    ("sections", "underlined"),
    [
        ("data:\n  type: reasoning_gym\n", "reasoning_gym"),
        ("data:\n  type: jsonl\n", "jsonl"),
        ("data:\n  system_prompt: be brief\n", "be brief"),
        ("reward:\n  reward_type: reasoning_gym\n", "reasoning_gym"),
    ],
)
def test_sources_of_problems_are_whole(findings: Any, sections: str, underlined: str) -> None:
    assert findings(LAPTOP + sections) == [("conflicting-settings", underlined)]


@pytest.mark.parametrize("name", ["math_laptop", "math_smollm"])
def test_a_shipped_config_travels_to_the_workers(name: str) -> None:
    config: Any = load_job(name, (), environ={}).config

    assert pickle.loads(pickle.dumps(config)) == config
