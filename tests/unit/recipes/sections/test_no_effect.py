"""The tables of keys without effect: what they find, that they name keys there are, and that no key is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from recipes.embodied.config.env_types import ENV_TYPES
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core.config.diagnostics import Diagnostic, Severity, render_text
from rlinf_core.config.model import ConfigModel, IgnoredKeys
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.config.validating.model_fields import sections, types_at, value_type, written_fields
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.registry import import_target

EMBODIED = ("recipe=embodied", "cluster.component_placement={'actor,rollout,env': {node_group: node, placement: 0}}")
SFT = ("recipe=sft", EMBODIED[1], "data.train_data_paths=set")
MATH = ("recipe=math", "cluster.component_placement={'actor,rollout,reward': {node_group: node, placement: 0}}")
GRPO = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=8")
SAC = ("algorithm.loss_type=sac", "actor.model.model_type=squashed_policy")
OWN = (*GRPO[::2], "algorithm.loss_type=os:getcwd")
NO_VALUES = (*OWN, "actor.model.add_value_head=false")
TD3 = ("algorithm.loss_type=td3", SAC[1], "actor.model.options.exploration_noise=0.1")
FILES = ("data.train_data_paths=problems.jsonl",)
GYM = ("data.type=reasoning_gym", "data.task=chain_sum")
NEVER = ("runner.val_check_interval=-1",)
ALONE = ("cluster.component_placement={actor: {node_group: node, placement: 0}}",)
CRITIC = (
    "cluster.component_placement={'actor,rollout,reward,critic': {node_group: node, placement: 0}}",
    "algorithm.adv_type=gae",
)

JUDGE = (
    "cluster.component_placement={'actor,rollout,reward,judge': {node_group: node, placement: 0}}",
    "reward.reward_type=judge",
    "judge.model_path=.",
)
TEACHER = (
    "cluster.component_placement={'actor,rollout,reward,teacher': {node_group: node, placement: 0}}",
    "algorithm.adv_type=distillation",
)

# The settings of a file, and the one among them that changes nothing.
INJECTED: tuple[tuple[tuple[str, ...], str], ...] = (
    ((*EMBODIED, "algorithm.update_epoch=1"), "algorithm.target_kl=0.1"),
    ((*EMBODIED, *GRPO), "algorithm.normalize_advantages=false"),
    ((*EMBODIED, *GRPO), "actor.optim.value_lr=0.1"),
    ((*EMBODIED, *OWN), "algorithm.gae_lambda=0.9"),
    ((*EMBODIED, *NO_VALUES), "algorithm.value_clip=0.1"),
    ((*EMBODIED, *NO_VALUES), "algorithm.value_weight=0.5"),
    ((*EMBODIED, *GRPO, "actor.model.add_value_head=false"), "algorithm.gamma=0.5"),
    (EMBODIED, "data.normalization=quantile"),
    (EMBODIED, "actor.optim.min_lr_ratio=0.1"),
    (EMBODIED, "actor.optim.total_training_steps=50"),
    ((*EMBODIED, "actor.model.model_type=openvla"), "actor.model.lora_rank=4"),
    (EMBODIED, "actor.fsdp_config.sharding_strategy=no_shard"),
    ((*EMBODIED, "actor.model.model_type=openvla", "actor.model.model_path=."), "actor.model.hidden_dim=64"),
    ((*EMBODIED, "actor.model.model_type=openvla", "actor.model.model_path=."), "actor.model.options.num_layers=3"),
    ((*EMBODIED, *SAC), "actor.model.add_value_head=false"),
    ((*EMBODIED, *SAC), "algorithm.replay.demonstrations_share=0.25"),
    ((*EMBODIED, *SAC, "algorithm.critic_norm=batch"), "algorithm.target_rate=0.01"),
    ((*EMBODIED, *SAC, "algorithm.learn_temperature=false"), "algorithm.target_entropy=-1"),
    ((*EMBODIED, "env.train.env_type=gymnasium", "env.train.task=CartPole-v1"), "env.train.simulator_timeout=7"),
    ((*EMBODIED, *NEVER), "env.eval.total_num_envs=8"),
    ((*EMBODIED, *NEVER), "runner.val_before_train=false"),
    ((*EMBODIED, "runner.save_interval=-1", "runner.save_on_interrupt=false"), "runner.keep_checkpoints=9"),
    ((*EMBODIED, "runner.save_interval=-1", "runner.save_on_interrupt=false"), "actor.checkpoint_save_path=kept"),
    (EMBODIED, "runner.logger.project_name=mine"),
    (EMBODIED, "cluster.ssh.user=me"),
    ((*EMBODIED, "runner.only_eval=true"), "algorithm.update_epoch=3"),
    ((*EMBODIED, "runner.only_eval=true"), "runner.max_steps=3"),
    ((*SFT, *ALONE), "runner.val_check_interval=5"),
    ((*SFT, *ALONE), "env.eval.total_num_envs=8"),
    ((*SFT, *NEVER), "rollout.pipeline_stage_num=2"),
    (MATH, "algorithm.gamma=0.5"),
    (MATH, "algorithm.gae_lambda=0.5"),
    (MATH, "algorithm.normalize_advantages=false"),
    (MATH, "algorithm.kl_in_reward=true"),
    (MATH, "algorithm.kl_penalty=k1"),
    (MATH, "algorithm.max_refills=1"),
    (MATH, "algorithm.correction_level=sequence"),
    (MATH, "judge.threads=2"),
    (MATH, "reward.program_memory_mib=512"),
    ((*MATH, *JUDGE), "reward.timeout=9"),
    ((*MATH, *JUDGE), "judge.tensor_parallel_size=2"),
    (MATH, "algorithm.value_clip=0.1"),
    (MATH, "algorithm.huber_delta=1"),
    (MATH, "critic.threads=2"),
    (MATH, "critic.optim.lr=0.1"),
    (MATH, "reference.model_path=."),
    (MATH, "teacher.hidden_dim=64"),
    ((*MATH, *TEACHER), "algorithm.gamma=0.5"),
    ((*MATH, *TEACHER), "algorithm.gae_lambda=0.5"),
    ((*MATH, *TEACHER), "reward.soft_overlong=2"),
    ((*MATH, *TEACHER, "teacher.model_path=."), "teacher.warm_start.steps=3"),
    ((*MATH, "actor.model.model_path=."), "actor.model.num_layers=3"),
    ((*MATH, "actor.model.model_path=."), "actor.warm_start.steps=3"),
    ((*MATH, "actor.warm_start.steps=0"), "actor.warm_start.lr=0.1"),
    ((*MATH, "actor.model.lora={rank: 4}"), "actor.model.lora_rank=4"),
    ((*MATH, "runner.max_steps=-1"), "actor.optim.lr_scheduler=cosine"),
    ((*MATH, "actor.fsdp_config.sharding_strategy=no_shard"), "actor.fsdp_config.cpu_offload=true"),
    ((*MATH, "actor.fsdp_config.sharding_strategy=no_shard"), "actor.fsdp_config.cpu_offload=true"),
    ((*MATH, *CRITIC), "critic.fsdp_config.sharding_strategy=no_shard"),
    (MATH, "runner.partial_rollout=false"),
    ((*MATH, "runner.sample_interval=-1"), "runner.max_samples=3"),
    (MATH, "rollout.tensor_parallel_size=2"),
    (MATH, "rollout.gpu_memory_utilization=0.5"),
    (MATH, "rollout.engine_options.seed=1"),
    (MATH, "rollout.server.timeout=9"),
    ((*MATH, "rollout.sampling_params.temperature=0"), "rollout.sampling_params.top_k=9"),
    (MATH, "data.prompt_key=question"),
    (MATH, "data.task=chain_sum"),
    (MATH, "data.train_size=9"),
    ((*MATH, *FILES), "data.generated_digits=2"),
    ((*MATH, *FILES), "data.val_size=9"),
    ((*MATH, *FILES, "data.shuffle=false"), "data.seed=9"),
    ((*MATH, *GYM), "data.answer_key=solution"),
    ((*MATH, *NEVER), "data.val_samples=4"),
)


# The settings of a file that choose the kind of a section, and a key of another kind.
OF_OTHERS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((*EMBODIED, *GRPO), "algorithm.gae_lambda=0.9"),
    ((*EMBODIED, *GRPO), "algorithm.value_clip=0.1"),
    ((*EMBODIED, *GRPO), "algorithm.value_weight=0.5"),
    ((*EMBODIED, *SAC), "algorithm.target_kl=0.1"),
    (EMBODIED, "algorithm.critics=3"),
    ((*EMBODIED, *SAC), "algorithm.gae_lambda=0.9"),
    ((*EMBODIED, *SAC), "algorithm.update_epoch=3"),
    ((*EMBODIED, *TD3), "algorithm.temperature=0.5"),
)


def diagnostics_of(settings: tuple[str, ...], injected: str, folder: Path) -> tuple[list[Diagnostic], int]:
    """Return what is found in a file of these settings, and the line of the injected one."""
    tree: dict[str, Any] = {"cluster": {"num_nodes": "1"}}
    for setting in (*settings, injected):
        key, _, value = setting.partition("=")
        *above, name = key.split(".")
        at = tree
        for segment in above:
            at = at.setdefault(segment, {})
        at[name] = value
    written = list(_written(tree))
    path, _, value = injected.partition("=")
    name = path.rpartition(".")[2]
    line = max(number for number, item in enumerate(written, 1) if item.strip() == f"{name}: {value}")
    file = folder / "job.yaml"
    file.write_text("\n".join(written) + "\n")
    return list(load_with_lint(str(file), environ={}).diagnostics), line


def _written(tree: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _written(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value}"


def test_size_of_held_out_problems_beside_files_names_a_key(tmp_path: Path) -> None:
    output, _ = diagnostics_of((*MATH, *FILES), "data.val_size=9", tmp_path)
    (finding,) = [message for message in output if message.path == ("data", "val_size")]
    assert finding.help == "name the file of the held-out problems in `val_data_paths`, and remove it"


@pytest.mark.parametrize(("settings", "injected"), INJECTED, ids=[f"{s[0][7:]}-{item}" for s, item in INJECTED])
def test_a_key_without_effect_is_found_with_its_line(settings: tuple[str, ...], injected: str, tmp_path: Path) -> None:
    output, line = diagnostics_of(settings, injected, tmp_path)
    path = tuple(injected.partition("=")[0].split("."))
    mine = [
        (message.path, message.span.begin.line)
        for message in output
        if message.code == NO_EFFECT and message.path == path
    ]
    assert mine == [(path, line)], "\n".join(map(render_text, output))
    assert "broken-recipe" not in {message.code for message in output}
    # The other settings are what makes it so, and have an effect.
    assert (
        len([message for message in output if message.code == NO_EFFECT and message.severity is Severity.WARNING]) <= 1
    )


@pytest.mark.parametrize(("settings", "injected"), OF_OTHERS, ids=[f"{s[0][7:]}-{item}" for s, item in OF_OTHERS])
def test_a_key_of_another_kind_is_unknown(settings: tuple[str, ...], injected: str, tmp_path: Path) -> None:
    output, line = diagnostics_of(settings, injected, tmp_path)
    path = tuple(injected.partition("=")[0].split("."))
    unknown = [finding for finding in output if finding.path == path]
    assert [(finding.code, finding.span.begin.line) for finding in unknown] == [("unknown-key", line)]
    assert all("it is a key of" in (finding.help or "") for finding in unknown)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_nothing_is_told_of_a_shipped_configuration(name: str) -> None:
    # As a file of a user's own: nothing is told of the keys of one that came with the package.
    text = shipped_configs()[name].read_bytes()
    assert [
        render_text(diagnostic)
        for diagnostic in load_with_lint("-", stdin=text, environ={}).diagnostics
        if diagnostic.code == NO_EFFECT
    ] == []


def rules() -> Iterator[tuple[str, KeyPath, type[ConfigModel], IgnoredKeys]]:
    for recipe in recipe_names():
        model = find_recipe(recipe).config_model()
        for place, section in sections(model):
            for rule in section.no_effect if issubclass(section, ConfigModel) else ():
                yield recipe, tuple(place.split(".")) if place else (), section, rule


def test_rules_name_keys_that_there_are() -> None:
    count = 0
    for _, _, section, rule in rules():
        for key in (*rule.keys, *rule.because):
            *above, name = key.split(".")
            holders = types_at(section, tuple(above))
            known = [holder for holder in holders if isinstance(holder, type) and issubclass(holder, BaseModel)]
            named = any(name in written_fields(item) for item in known)
            assert named or any(value_type(holder) for holder in holders), (section, key)
            count += 1
    assert count > 100


@pytest.mark.parametrize("name", recipe_names())
def test_every_rule_can_be_asked(name: str) -> None:
    job = load_with_lint(find_recipe(name).default_config, environ={})
    for recipe, place, kind, rule in rules():
        section: Any = job.config
        for segment in place:
            section = getattr(section, segment, None)
        if recipe == name and isinstance(section, kind):
            assert rule.when(section, {}) in (True, False, None) or rule.when(section, {})
            assert rule.reason(section)


@pytest.mark.parametrize("name", sorted(ENV_TYPES))
def test_the_table_of_environments_knows_their_processes(name: str) -> None:
    entry = ENV_TYPES[name]
    try:
        target: Any = import_target(entry.target, "env_type")
    except Exception:
        pytest.skip("its package is not installed")
    processes = target.processes if issubclass(target, SimulatedEnv) else None
    assert entry.processes == processes
