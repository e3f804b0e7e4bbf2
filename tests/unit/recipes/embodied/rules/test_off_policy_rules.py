"""The rules of off-policy losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlinf_cli.job.job_file import load_with_lint

SAC = ("actor.model.model_type=squashed_policy", "algorithm.loss_type=sac")
REPLAY = "algorithm.replay"


def faults(*overrides: str) -> list[tuple[str, str]]:
    diagnostics = load_with_lint("laptop", (*SAC, *overrides), environ={}).diagnostics
    return [(diagnostic.code, diagnostic.message) for diagnostic in diagnostics]


@pytest.mark.parametrize(
    ("key", "help"),
    [
        ("prioritized: true", "drawn evenly"),
        ("priority_beta: 0.5", "drawn evenly"),
        ("memory_gib: 2", "write `storage`"),
        ("spill_path: rows", "write `storage`"),
        ("image_memory_gib: 1", "a smaller `capacity`"),
        ("interventions_capacity: 10", "the newest 100000 rows"),
    ],
)
def test_former_keys_of_the_buffer_name_what_there_is(key: str, help: str) -> None:
    diagnostics = load_with_lint("laptop", (*SAC, f"{REPLAY}={{{key}, capacity: 500}}"), environ={}).diagnostics
    (finding,) = [finding for finding in diagnostics if finding.code == "unknown-key"]
    assert (str(finding.path[-1]) in key, help in (finding.help or "")) == (True, True)


def test_td3_bc_needs_recorded_transitions_and_noise() -> None:
    reported = faults("algorithm.loss_type=td3_bc")
    missing = [message for code, message in reported if code == "missing-key"]
    assert any("learns from recorded transitions alone" in message for message in missing)
    assert any("`loss_type: td3_bc` explores with noise" in message for _, message in reported)


def test_iql_needs_recorded_transitions_and_targets() -> None:
    reported = faults("algorithm.loss_type=iql", "algorithm.critic_norm=batch")
    assert any(code == "missing-key" and "learns from recorded transitions alone" in text for code, text in reported)
    assert any(code == "bad-value" and "`critic_norm` must be one of" in text for code, text in reported)
    assert not any("explores with noise" in text for _, text in reported)


def test_td3_bc_has_no_share_of_demonstrations() -> None:
    reported = faults("algorithm.loss_type=td3_bc", f"{REPLAY}.demonstrations_share=0.25")
    assert any(code == "no-effect" and "learns from demonstrations alone" in message for code, message in reported)


DSRL = ("actor.model.model_type=steered_policy", "algorithm.loss_type=dsrl")


def steering(folder: Path, kind: str, *overrides: str) -> list[str]:
    """Return what is said of a job that steers a policy of some kind, which was saved to a folder."""
    (folder / "policy.json").write_text(json.dumps({"model": {"model_type": kind}}))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return reported_of(folder, *overrides)


def reported_of(folder: Path, *overrides: str) -> list[str]:
    """Return what is said of a job that steers the policy of a folder."""
    overrides = (*DSRL, f"actor.model.model_path={folder}", *overrides)
    return [diagnostic.message for diagnostic in load_with_lint("laptop", overrides, environ={}).diagnostics]


def test_dsrl_takes_policies_that_begin_with_noise(tmp_path: Path) -> None:
    assert steering(tmp_path, "flow_policy", "algorithm.noise_aliasing=true") == []
    (said,) = steering(tmp_path, "mlp_policy")
    assert "needs a policy that begins with noise, and the `mlp_policy` in" in said
    assert any("chooses the noise of a frozen policy" in message for _, message in faults("algorithm.loss_type=dsrl"))
    assert any("none is named" in message for _, message in faults(*DSRL))


def test_dsrl_guesses_no_policy_of_a_folder(tmp_path: Path) -> None:
    (missing,) = reported_of(tmp_path / "missing")
    assert "which is not on this machine" in missing
    (empty,) = reported_of(tmp_path)
    assert "it has no `policy.json`, which `steered_policy` needs" in empty


def test_dsrl_knows_no_noise_of_recorded_steps(tmp_path: Path) -> None:
    source = "env.train.intervention={source: scripted, options: {probability: 0.1, shortest: 2, longest: 5}}"
    assert any("not known of interventions" in message for message in steering(tmp_path, "flow_policy", source))


def test_a_sampler_that_draws_more_noise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"type": "diffusion", "noise_scheduler_type": "DDPM"}))
    drawn = [message for message in steering(tmp_path, "lerobot") if "cannot be steered" in message]
    assert ["draws more noise at each step" in message for message in drawn] == [True]
    sampler = "actor.model.options={policy: {options: {config: {noise_scheduler_type: DDIM}}}}"
    assert not [message for message in steering(tmp_path, "lerobot", sampler) if "cannot be steered" in message]


@pytest.mark.parametrize(
    ("file", "overrides", "words"),
    [
        ("laptop", ("actor.model.model_type=squashed_policy",), "cannot train a `squashed_policy`, which estimates"),
        (
            "laptop_grpo",
            ("actor.model.model_type=steered_policy", "actor.model.model_path=."),
            "cannot train a `steered_policy`, whose weights are frozen",
        ),
        (
            "sft_laptop",
            ("actor.model.model_type=steered_policy", "actor.model.model_path=."),
            "demonstrations train no `steered_policy`",
        ),
    ],
)
def test_other_losses_train_no_policy_of_off_policy(file: str, overrides: tuple[str, ...], words: str) -> None:
    messages = [finding.message for finding in load_with_lint(file, overrides, environ={}).diagnostics]
    assert any(words in message for message in messages), messages


def test_squashed_policy_may_learn_without_values() -> None:
    reported = load_with_lint("laptop_grpo", ("actor.model.model_type=squashed_policy",), environ={}).diagnostics
    assert not any("cannot train" in finding.message for finding in reported)


def test_states_are_normalized_off_policy_too() -> None:
    normalizes = "algorithm.normalize_observations=true"
    assert not [message for code, message in faults(normalizes) if "normalize" in message or "running" in message]
    model = "actor.model={model_type: squashed_policy}"
    diagnostics = load_with_lint("laptop", (model, "algorithm.loss_type=td3_bc", normalizes), environ={}).diagnostics
    assert not [result for result in diagnostics if "normalize_observations" in str(result)]


def test_a_policy_of_ones_own_may_normalize_states() -> None:
    own = "actor.model.model_type=recipes.embodied.models.small.feature_policy:MlpPolicy"
    diagnostics = load_with_lint("gymnasium_ppo", (own,), environ={}).diagnostics
    assert not [result for result in diagnostics if "normalize_observations" in str(result)]
