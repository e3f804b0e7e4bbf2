"""The sections of a job: what they take, what they refuse, and that every key says what it means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from recipes.embodied.config import EmbodiedConfig, PolicyActorConfig
from recipes.embodied.config.env_config import EVAL_SEED_OFFSET, EnvironmentConfig, EnvSection
from recipes.language.config.problem_config import LanguageDataConfig, LanguageRewardConfig
from recipes.math.config import MathConfig
from recipes.sections.actor import OptimConfig
from recipes.sections.checks import near_divisors, near_multiples
from recipes.sections.values import KnownOrOwn
from rlinf_cli.importing.foreign_names import names_at
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.model import ConfigModel
from rlinf_core.config.sections.runner import RolloutRunnerConfig, RunnerConfig
from rlinf_core.config.sections.values import StepsOrNever
from rlinf_core.config.validating.model_fields import alternatives, model_of, step
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.scalars import Int, Text, YamlBool, YamlInt

CLUSTER = {"num_nodes": 1, "component_placement": {"actor": "0"}}
RECIPES = [EmbodiedConfig, MathConfig]
# The keys that people type from memory, as the recipes' specification lists them.
FIRST_CLASS = {
    EmbodiedConfig: """
        rollout.model_dir actor.tokenizer.tokenizer_model actor.checkpoint_load_path actor.checkpoint_save_path
        runner.logger.log_path runner.max_epochs runner.max_steps actor.global_batch_size actor.micro_batch_size
        runner.task_type runner.logger.project_name runner.logger.experiment_name runner.logger.logger_backends
        runner.val_check_interval runner.save_interval runner.resume_dir runner.only_eval runner.weight_sync_interval
        runner.max_staleness runner.max_restarts runner.trace
        actor.group_name actor.training_backend actor.seed actor.enable_offload actor.model.model_type
        actor.model.model_path actor.model.precision actor.model.num_action_chunks actor.model.hidden_dim
        actor.model.add_value_head actor.model.is_lora actor.model.lora_rank actor.optim.lr actor.optim.value_lr
        actor.optim.adam_beta1 actor.optim.adam_beta2 actor.optim.adam_eps actor.optim.weight_decay
        actor.optim.clip_grad actor.fsdp_config.sharding_strategy actor.fsdp_config.cpu_offload
        actor.fsdp_config.reshard_after_forward actor.fsdp_config.mixed_precision
        actor.fsdp_config.gradient_checkpointing
        rollout.group_name rollout.backend rollout.pipeline_stage_num rollout.enable_offload
        env.group_name env.train.env_type env.train.total_num_envs env.train.max_episode_steps
        env.train.rollout_epoch env.train.auto_reset
        env.train.ignore_terminations env.train.group_size env.train.seed env.train.video_cfg env.eval.env_type
        algorithm.adv_type algorithm.loss_type algorithm.loss_agg_func algorithm.group_size algorithm.update_epoch
        algorithm.normalize_advantages algorithm.gamma algorithm.gae_lambda algorithm.clip_ratio_low
        algorithm.clip_ratio_high algorithm.clip_ratio_c algorithm.value_clip algorithm.huber_delta
        algorithm.entropy_bonus algorithm.kl_beta algorithm.kl_penalty algorithm.bootstrap_type
        algorithm.reward_type algorithm.logprob_type algorithm.entropy_type algorithm.filter_rewards
    """,
    MathConfig: """
        rollout.model_dir actor.tokenizer.tokenizer_model runner.seq_length rollout.sampling_params.temperature
        rollout.sampling_params.top_k rollout.sampling_params.top_p rollout.sampling_params.max_new_tokens
        data.train_data_paths data.val_data_paths data.prompt_key data.answer_key data.max_prompt_length
        data.rollout_batch_size data.shuffle data.seed algorithm.clip_ratio_high algorithm.kl_penalty
        reward.reward_type reward.timeout actor.model.is_lora
    """,
}


def models_below(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield at, model
    for name, field in model.model_fields.items():
        for member in alternatives(field.annotation):
            below = model_of(member)
            if below is not None:
                yield from models_below(below, f"{at}.{name}".lstrip("."))


def fails(model: type[BaseModel], value: dict[str, Any]) -> list[tuple[str, tuple[Any, ...]]]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    return [(error["type"], error["loc"]) for error in caught.value.errors()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cluster_alone_is_a_whole_file(recipe: type[BaseModel]) -> None:
    config = recipe.model_validate({"recipe": "x", "cluster": CLUSTER})
    assert set(config.model_dump()) == set(recipe.model_fields)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_says_what_it_means(recipe: type[BaseModel]) -> None:
    silent = [
        f"{at}.{name}"
        for at, model in models_below(recipe)
        for name, field in model.model_fields.items()
        if not re.fullmatch(r"[A-Za-z].*[.)]", field.description or "")
    ]
    assert silent == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_section_refuses_unknown_keys_and_never_changes(recipe: type[BaseModel]) -> None:
    for _, model in models_below(recipe):
        assert (model.model_config.get("extra"), model.model_config.get("frozen")) == ("forbid", True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_keys_that_people_know_are_there(recipe: type[BaseModel]) -> None:
    missing: list[str] = []
    for key in FIRST_CLASS[recipe].split():
        places: list[object] = [recipe]
        for segment in key.split("."):
            # Without a field of its own it may still say what is so anyway.
            accepted = segment in names_at([member for place in places for member in alternatives(place)]).accepted
            places = [below for place in places for below in step(place, segment)]
            if accepted:
                break
        if not places and not accepted:
            missing.append(key)
    assert missing == []


@pytest.mark.parametrize("value", [0, -2])
def test_a_number_of_steps_is_positive_or_minus_one(value: int) -> None:
    adapter: TypeAdapter[int] = TypeAdapter(StepsOrNever)
    assert [adapter.validate_python(good) for good in (-1, 1, 300)] == [-1, 1, 300]
    with pytest.raises(ValidationError, match="-1 for never"):
        adapter.validate_python(value)


class TestKnownOrOwn:
    ADAPTER: TypeAdapter[str] = TypeAdapter(
        Annotated[Text, KnownOrOwn("colour", ("red", "green"), instead={"rouge": "write `red`"})]
    )

    @pytest.mark.parametrize("name", ["red", "my_lab.colours:Teal", "colours:blue"])
    def test_ours_and_your_own(self, name: str) -> None:
        assert self.ADAPTER.validate_python(name) == name

    @pytest.mark.parametrize(
        ("name", "help"),
        [
            ("gren", "did you mean `green`? your own: `package.module:name`"),
            ("blue", "known: `red`, `green`; your own: `package.module:name`"),
            ("my lab:Teal", "known: `red`, `green`; your own: `package.module:name`"),
            ("colours:", "known: `red`, `green`; your own: `package.module:name`"),
            ("rouge", "write `red`"),
        ],
    )
    def test_another_name(self, name: str, help: str) -> None:
        with pytest.raises(ValidationError) as caught:
            self.ADAPTER.validate_python(name)
        error = caught.value.errors()[0]
        assert (error["type"], error["ctx"]["help"]) == ("unknown-choice", help)


class TestEnv:
    def test_an_evaluation_is_like_training_where_it_says_nothing(self) -> None:
        section = EnvSection.model_validate(
            {
                "train": {"env_type": "gymnasium", "task": "CartPole-v1", "seed": 7, "rollout_epoch": 4},
                "eval": {"total_num_envs": 3, "max_episode_steps": 500},
            }
        )
        inputs = {"total_num_envs": 3, "max_episode_steps": 500}
        own = {"seed": 7 + EVAL_SEED_OFFSET, "rollout_epoch": 1}
        shared = type(section.train).model_fields.keys() & type(section.eval).model_fields.keys()
        common = {name: value for name, value in section.train.model_dump().items() if name in shared}
        films = {"save_video": False, "fps": 20, "episodes": 9}
        alone = {"inference": {"chunking": "wait"}, "video_cfg": films}
        assert section.eval.model_dump() == {**common, **own, **inputs, **alone}
        assert section.eval.in_training is section.train
        assert section.eval.model_fields_set == set(inputs)

    def test_an_evaluation_that_nobody_mentions(self) -> None:
        section = EnvSection.model_validate({"train": {"task": "reach"}})
        assert (section.eval.task, section.eval.seed) == ("reach", EVAL_SEED_OFFSET)
        assert "eval" not in section.model_fields_set

    @pytest.mark.parametrize(
        ("train", "env_type", "task", "options"),
        [
            ({"env_type": "my.pkg:Cls", "task": "T", "options": {"a": 1}}, "panda_gym", None, {}),
            ({"env_type": "my.pkg:Cls", "task": "T", "options": {"a": 1}}, "CartPole-v1", "CartPole-v1", {}),
            ({"env_type": "gymnasium", "task": "A-v1", "options": {"a": 1}}, "envpool", "A-v1", {}),
            ({"env_type": "franka_mujoco", "task": "push"}, "franka_kin", None, {}),
            ({"env_type": "franka_mujoco", "task": "reach"}, "franka_kin", "reach", {}),
            ({"env_type": "panda_gym", "task": "P-v3", "options": {"a": 1}}, "panda_gym", "P-v3", {"a": 1}),
            ({"env_type": "panda_gym", "task": "P-v3", "options": {"a": 1}}, None, "P-v3", {"a": 1}),
        ],
    )
    def test_an_evaluation_of_another_kind_has_its_own_options(
        self, train: dict[str, Any], env_type: str | None, task: str | None, options: dict[str, Any]
    ) -> None:
        written = {"total_num_envs": 2} if env_type is None else {"env_type": env_type}
        evaluation = EnvSection.model_validate({"train": train, "eval": written}).eval
        assert (evaluation.task, evaluation.options) == (task, options)

    def test_it_may_have_its_own_seed(self) -> None:
        assert EnvSection.model_validate({"eval": {"seed": 5}}).eval.seed == 5

    def test_a_mistake_in_training_is_reported_once(self) -> None:
        result = fails(EnvSection, {"train": {"total_num_envs": 0}, "eval": {"seed": 3}})
        assert result == [("greater_than_equal", ("train", "total_num_envs"))]

    def test_options_are_plain_values(self) -> None:
        options = {"a": YamlInt(3, "3"), "b": [YamlBool(True, "true")]}
        config = EnvironmentConfig.model_validate({"options": options})
        assert config.options == {"a": 3, "b": [True]}
        assert type(config.options["a"]) is int
        assert type(config.options["b"][0]) is bool


@pytest.mark.parametrize(
    ("runner", "underlined"),
    [
        ("{resume_dir: gone/global_step_3}", "gone/global_step_3"),
        ("{resume_dir: job.yaml}", "job.yaml"),
        ("{logger: {log_path: job.yaml}}", "job.yaml"),
        ("{logger: {log_path: job.yaml/runs}}", "job.yaml/runs"),
        ("{resume_dir: here}", "here"),
        ("{resume_dir: whole, logger: {log_path: not/yet}}", None),
        ("{resume_dir: whole/global_step_4}", None),
        ("{resume_dir: other}", "other"),
        ("{resume_dir: torn}", "torn"),
        ("{resume_dir: auto}", None),
    ],
)
def test_folders_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, underlined: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for name, size in (("whole", 128), ("other", 32), ("torn", 128)):
        store = CheckpointStore(tmp_path / name)
        (store.begin(4) / "weights").write_bytes(b"1234")
        store.commit(4, Manifest(step=4, facts={"actor.model.hidden_dim": size}))
    (tmp_path / "torn" / "global_step_4" / "weights").write_bytes(b"12")
    place = "{node_group: node, placement: 0}"
    cluster = f"cluster: {{num_nodes: 1, component_placement: {{'actor,rollout,env': {place}}}}}\n"
    (tmp_path / "job.yaml").write_text(f"recipe: embodied\n{cluster}runner: {runner}\n")
    results = [
        (diagnostic.code, diagnostic.span.text) for diagnostic in load_with_lint("job.yaml", environ={}).diagnostics
    ]
    assert results == ([("unusable-path", underlined)] if underlined else [])


@pytest.mark.parametrize(
    "value", [{"adam_beta1": 1.0}, {"adam_beta2": 1}, {"adam_beta2": -0.1}, {"lr": 0}, {"adam_eps": 0},
              {"weight_decay": -1}, {"clip_grad": -1}, {"lr": float("inf")}, {"weight_decay": float("nan")}]
)  # fmt: skip
def test_optimizer_ranges(value: dict[str, Any]) -> None:
    assert [where for _, where in fails(OptimConfig, value)] == [tuple(value)]


@pytest.mark.parametrize(
    ("model", "value", "code"),
    [
        (RunnerConfig, {"resume_dir": " "}, "bad-value"),
        (RolloutRunnerConfig, {"max_staleness": -1}, "greater_than_equal"),
        (RunnerConfig, {"logger": {"logger_backends": ["tensorbord"]}}, "literal_error"),
        (RunnerConfig, {"trace": "yes"}, "wrong-type"),
        (PolicyActorConfig, {"global_batch_size": 0}, "greater_than_equal"),
        (PolicyActorConfig, {"global_batch_size": 8.5}, "wrong-type"),
        (PolicyActorConfig, {"global_batch_size": 8, "seed": -1}, "greater_than_equal"),
        (LanguageDataConfig, {"train_data_paths": ["a.jsonl", ""]}, "bad-value"),
        (LanguageRewardConfig, {"reward_type": "exakt"}, "unknown-choice"),
        (LanguageRewardConfig, {"timeout": 0}, "greater_than"),
    ],
)
def test_what_is_refused(model: type[BaseModel], value: dict[str, Any], code: str) -> None:
    assert [kind for kind, _ in fails(model, value)] == [code]


def test_one_path_or_a_list() -> None:
    assert LanguageDataConfig(train_data_paths="a.jsonl") == LanguageDataConfig(train_data_paths=["a.jsonl"])  # type: ignore[arg-type]


def test_another_default_keeps_the_description() -> None:
    class Base(ConfigModel):
        size: Int = Field(default=1, description="How large.")
        colour: Text = Field(default="red", description="Which colour.")

    class Other(Base):
        size: Int = 2
        colour: Text = Field(default="green", description="Its own words.")

    assert (Other().size, Other.model_fields["size"].description) == (2, "How large.")
    assert Other.model_fields["colour"].description == "Its own words."
    assert Other.model_json_schema()["properties"]["size"]["description"] == "How large."


@pytest.mark.parametrize(
    ("value", "wanted", "text"),
    [
        (3200, 900, "800 or 1600"),
        (3200, 3200, "1600"),
        (7, 3, "1 or 7"),
        (25600, 3, "2 or 4"),
        (3200, 5000, "3200"),
        (10**50, 3, "2 or 4"),
    ],
)
def test_near_divisors(value: int, wanted: int, text: str) -> None:
    assert near_divisors(value, wanted) == text


def test_near_multiples() -> None:
    assert [near_multiples(*pair) for pair in ((62, 8), (5, 8), (64, 8))] == ["56 or 64", "8", "64 or 72"]
