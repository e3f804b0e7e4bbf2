"""Every configuration that comes with rlinf is one to start from: whole, right, and without a warning."""

from __future__ import annotations

import pytest

from rlinf_cli.job.load import load_with_lint
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.render import render_text
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import load_job
from rlinf_core.placement.component import HybridComponentPlacement

BRING_YOUR_OWN = (
    "agent_hetero",
    "math_smollm",
    "math_eval",
    "serve_smollm",
    "sft_chat_smollm",
    "math_32b_8node",
    "math_moe_8gpu",
    "math_grpo_8gpu",
    "math_async_disaggregated",
    "math_ppo_vllm",
    "sft_laptop",
    "libero_sft",
    "libero_8gpu",
    "libero_disaggregated",
    "libero_4090_a800",
    "libero_pi0_ppo",
    "smolvla_sft_rl",
    "metaworld_press_sft",
    "franka_rlpd_sim",
    "franka_hil",
    "franka_real",
    "success_classifier",
    "franka_vision_sft",
)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_it_loads_without_a_finding(name: str) -> None:
    job = load_with_lint(name, environ={})
    # Models and data of its size come with no package.
    expected = "unusable-path" if name in BRING_YOUR_OWN else ""
    worth_saying = [
        diagnostic
        for diagnostic in job.diagnostics
        if diagnostic.severity is not Severity.NOTE and diagnostic.code != expected
    ]
    assert [render_text(item) for item in worth_saying] == []
    assert job.cluster is not None


def test_those_that_the_documents_name_are_there() -> None:
    assert {"hetero18", "collocated", "disaggregated", "hybrid", "laptop", "math_laptop"} <= set(shipped_configs())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_default_is_a_file_of_that_recipe(name: str) -> None:
    recipe = find_recipe(name)
    job = load_job(recipe.default_config, environ={})
    assert job.recipe is recipe
    assert isinstance(job.config, recipe.config_model())


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_the_three_modes_are_what_they_are_called(mode: str) -> None:
    job = load_job(mode, environ={})
    assert job.cluster is not None
    assert job.topology is not None
    placement = HybridComponentPlacement(job.cluster, job.topology)
    assert placement.placement_mode.name.lower() == mode


def test_the_heterogeneous_example_is_the_one_of_eighteen_nodes() -> None:
    cluster = load_job("hetero18", environ={}).cluster
    assert cluster is not None
    assert cluster.num_nodes == 18
    assert [(node_group.label, str(node_group.node_ranks)) for node_group in cluster.node_groups] == [
        ("a800", "0-7"),
        ("4090", "8-15"),
        ("franka", "16-17"),
    ]
    assert {name: (str(value.rank_map), value.node_group) for name, value in cluster.component_placement.items()} == {
        "actor": ("0-63", ("a800",)),
        "rollout": ("0-63", ("4090",)),
        "env": ("0-1", ("franka",)),
        "agent": ("0-1:0-199,2-3:200-399", ("node",)),
    }
    assert cluster.node_groups[0].env_configs[0].python_interpreter_path == "/opt/venv/openpi/bin/python3"


def test_language_models_train_while_others_answer() -> None:
    job = load_job("math_async_disaggregated", environ={})
    assert job.cluster is not None
    assert job.topology is not None
    placement = HybridComponentPlacement(job.cluster, job.topology)
    assert placement.placement_mode.name.lower() == "disaggregated"
    sizes = {name: placement.get_world_size(name) for name in ("actor", "rollout", "reward")}
    assert sizes == {"actor": 16, "rollout": 64, "reward": 64}
    assert {
        node_group.env_configs[0].python_interpreter_path
        for node_group in job.cluster.node_groups
        if node_group.label == "4090"
    } == {"/opt/venv/vllm/bin/python3"}
    assert job.config is not None
    assert (job.config.runner.max_staleness, job.config.runner.partial_rollout) == (2, True)  # type: ignore[attr-defined]
