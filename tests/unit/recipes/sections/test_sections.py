"""Sections of a job: what they take and refuse, that keys say what they mean, and rules of keys without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from recipes.agent.tool_config import HarborOptions, VerifiersOptions
from recipes.embodied.config import EmbodiedConfig, PolicyActorConfig
from recipes.embodied.config.algorithm_config import ActorCriticConfig, PolicyGradientOptions
from recipes.embodied.config.env_config import EVAL_SEED_OFFSET, EnvironmentConfig, EnvSection
from recipes.embodied.config.env_types import ENV_TYPES
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.language.config.algorithm_config import AlgorithmOptions, LanguageAlgorithmConfig
from recipes.language.config.problem_config import LanguageDataConfig, LanguageRewardConfig, ProblemOptions
from recipes.language.config.rollout_config import EngineOptions
from recipes.math.config import MathConfig
from recipes.sections.algorithm import AlgorithmConfig
from recipes.sections.values import KnownOrOwn
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core import Recipe
from rlinf_core.config.diagnostics import render_text
from rlinf_core.config.model import ConfigModel, IgnoredKeys
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.config.sections.values import StepsOrNever
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.config.validating.model_fields import (
    alternatives,
    model_of,
    sections,
    types_at,
    value_type,
    written_fields,
)
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.registry import import_target
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
from rlinf_core.scalars import Int, Text, YamlBool, YamlInt
from tests.unit.recipes.typed_recipes import RECIPES as TYPED

CLUSTER = {"num_nodes": 1, "component_placement": {"actor": "0"}}
RECIPES = [EmbodiedConfig, MathConfig]


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
def test_every_key_says_what_it_means(recipe: type[BaseModel]) -> None:
    silent = [
        f"{at}.{name}"
        for at, model in models_below(recipe)
        for name, field in model.model_fields.items()
        if not re.fullmatch(r"[A-Za-z].*[.)]", field.description or "")
    ]
    assert silent == []


# Beside these options may stand those of a loss of the user's own, of vLLM, a task or an agent; their section refuses
# others.
WITH_OTHERS = (
    *(PolicyGradientOptions, AlgorithmOptions, EngineOptions),
    *(ProblemOptions, VerifiersOptions, HarborOptions),
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_section_refuses_unknown_keys_and_never_changes(recipe: type[BaseModel]) -> None:
    for _, model in models_below(recipe):
        extra = "allow" if issubclass(model, WITH_OTHERS) else "forbid"
        assert (model.model_config.get("extra"), model.model_config.get("frozen")) == (extra, True)


@pytest.mark.parametrize("kind", [LanguageAlgorithmConfig, ActorCriticConfig])
def test_an_own_option_may_be_named_like_a_key(kind: type[AlgorithmConfig]) -> None:
    section = kind(loss_type="lab.losses:mine", options={"group_size": 3, "gae_lambda": 0.5})
    assert (section.inputs.group_size, section.inputs.gae_lambda) == (kind().group_size, 0.5)
    assert section.own_options == {"group_size": 3}


@pytest.mark.parametrize("value", [0, -2])
def test_a_number_of_steps_is_positive_or_minus_one(value: int) -> None:
    adapter: TypeAdapter[int] = TypeAdapter(StepsOrNever)
    assert [adapter.validate_python(good) for good in (-1, 1, 300)] == [-1, 1, 300]
    with pytest.raises(ValidationError, match="at least 1, or -1, found"):
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
        alone = {"video_cfg": {"save_video": False}}
        assert section.eval.model_dump() == {**common, **own, **inputs, **alone}
        assert section.eval.in_training is section.train
        assert section.eval.model_fields_set == set(inputs)

    def test_an_evaluation_unmentioned_or_with_its_own_seed(self) -> None:
        section = EnvSection.model_validate({"train": {"task": "reach"}})
        assert (section.eval.task, section.eval.seed) == ("reach", EVAL_SEED_OFFSET)
        assert "eval" not in section.model_fields_set
        assert EnvSection.model_validate({"eval": {"seed": 5}}).eval.seed == 5

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
        ("{}\nactor: {checkpoint_save_path: job.yaml/here}", "job.yaml/here"),
        ("{}\nactor: {checkpoint_save_path: not/yet}", None),
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
    results = [(item.code, item.span.text) for item in load_with_lint("job.yaml", environ={}).diagnostics]
    assert results == ([("unusable-path", underlined)] if underlined else [])


@pytest.mark.parametrize(
    ("model", "value", "code"),
    [
        (RunnerConfig, {"resume_dir": " "}, "bad-value"),
        (RunnerConfig, {"logger": {"logger_backends": ["tensorbord"]}}, "literal_error"),
        (RunnerConfig, {"trace": "yes"}, "wrong-type"),
        (PolicyActorConfig, {"global_batch_size": 8.5}, "wrong-type"),
        (LanguageDataConfig, {"train_data_paths": ["a.jsonl", ""]}, "bad-value"),
        (LanguageRewardConfig, {"reward_type": "exakt"}, "unknown-choice"),
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


_NO_PARTS = {"name", "summary", "default_config", "training_data", "variants", "elastic"}


def test_all_recipes_are_typed() -> None:
    assert [recipe.name for recipe in TYPED] == recipe_names()


@pytest.mark.parametrize("typed", TYPED, ids=[recipe.name for recipe in TYPED])
def test_named_parts_are_the_typed_functions(typed: Recipe) -> None:
    recipe = find_recipe(typed.name)
    parts = [name for name in Recipe._fields if name not in _NO_PARTS]
    assert {name: recipe.load(getattr(recipe, name)) for name in parts} == {
        name: getattr(typed, name) for name in parts
    }
