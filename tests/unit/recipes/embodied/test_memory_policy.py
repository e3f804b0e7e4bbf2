"""Memory of a policy: what it takes to make it, to act and to learn, sizes by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.config import EmbodiedActorConfig, EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.memory.policy_memory import PolicyMemory
from recipes.embodied.models.policy_folder import BACKBONE, WEIGHTS, save_policy
from recipes.embodied.models.registry import make_model
from recipes.training.memory.host_memory import LARGEST_KEPT
from rlinf_core import load_job

STATES, ACTIONS, WIDTH = 21, 8, 64
SPEC = EnvSpec(STATES, ACTIONS)


def sizes(*overrides: str, imitates: bool = False) -> PolicyMemory:
    job = load_job("laptop", (f"actor.model.hidden_dim={WIDTH}", *overrides))
    job.raise_if_bad()
    config: Any = job.config
    return PolicyMemory(config.actor, SPEC, imitates=imitates)


def test_learning_keeps_what_the_backward_pass_needs() -> None:
    found = sizes()
    few, many = (found.learning(rows, 1) for rows in (1000, 2000))
    # Outputs of two hidden layers in two networks; gradients of one go when those of the one before are there.
    assert many - few >= 1000 * 4 * 4 * WIDTH
    assert many - few < 2 * 1000 * 4 * 4 * WIDTH


def test_a_second_pass_finds_all_gradients() -> None:
    found = sizes("actor.model.hidden_dim=512")
    assert found.learning(1, 2) >= found.learning(1, 1)


def test_weights_are_looked_at_for_infinities() -> None:
    width = 2048
    largest = 4 * width * width
    # Absolute values, and flags of three comparisons.
    assert sizes(f"actor.model.hidden_dim={width}").learning(1, 1) == largest + 3 * largest // 4


def test_blocks_that_are_too_large_are_not_kept() -> None:
    found = sizes()
    # Outputs of a layer are WIDTH numbers of 4 bytes a row.
    fit = LARGEST_KEPT // (4 * WIDTH)
    few, many = (found.learning(rows, 1) for rows in (fit, 2 * fit))
    assert found.kept(fit, fit, few) > few
    assert found.kept(2 * fit, 2 * fit, many) < many / 2


def test_acting_needs_less_than_learning() -> None:
    found = sizes()
    assert 0 < found.acting(1000) < found.learning(1000, 1)


def test_demonstrations_have_a_loss_of_their_own() -> None:
    # It needs no values.
    assert sizes(imitates=True).learning(1000, 1) < sizes().learning(1000, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trained_weights_are_float32(precision: str) -> None:
    policy = sizes(f"actor.model.precision={precision}")
    assert policy.weights == sizes().weights
    assert policy.making - policy.weights == 4 * 3 * WIDTH * WIDTH


def test_acting_weights_are_of_the_precision() -> None:
    job = load_job("laptop", ("actor.model.precision=bf16",))
    actor = job.config.actor  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    spec = EnvSpec(STATES, ACTIONS)
    assert 2 * PolicyMemory(actor, spec, acts=True).weights == PolicyMemory(actor, spec).weights


@pytest.mark.parametrize("kind", ["vlm_policy", "pi0"])
def test_a_folder_tells_the_sizes_without_its_weights(kind: str, tmp_path: Path) -> None:
    spec = EnvSpec(STATES, ACTIONS, cameras={"main": (32, 32, 3)}, has_instructions=True)
    model = {"model_type": kind, "hidden_dim": 32, "options": {"num_layers": 3}}
    section = EmbodiedModelConfig.model_validate(model)
    save_policy(make_model(section, spec), section, spec, tmp_path)
    (tmp_path / WEIGHTS).unlink()

    def read(**changes: Any) -> PolicyMemory:
        return PolicyMemory(EmbodiedActorConfig.model_validate({"model": {**model, **changes}}), spec)

    built = read()
    # The rest of the section is of another model.
    for folder in (tmp_path, tmp_path / BACKBONE):
        found = read(model_path=str(folder), hidden_dim=64, options={"num_layers": 1})
        assert found.weights == built.weights
        assert found.learning(2, 1) == built.learning(2, 1)
        assert found.notes == ()
    missing = read(model_path="/not/here")
    assert missing.weights == built.weights
    assert missing.notes == ("`/not/here` is not on this machine: sizes are those of a policy without a folder",)
