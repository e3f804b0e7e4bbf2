"""Keys that are documented and accepted: each has an effect in some file of its recipe, and product code reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

import recipes
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import ConfigModel, WorldSizes
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import Path as KeyPath
from rlinf_core.config.validating.model_fields import alternatives, sections, written_fields
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import Job
from rlinf_core.job.recipe import Recipe
from rlinf_core.job.report import is_given

SAC: Final = ("algorithm.loss_type=sac", "actor.model.model_type=squashed_policy")
DSRL: Final = (
    *("algorithm.loss_type=dsrl", "actor.model.model_type=steered_policy", "actor.model.model_path=/flow"),
    "actor.model.options.policy={model_type: flow_policy}",
)
OWN_LOSS: Final = "algorithm.loss_type=tests.unit.recipes.embodied.learning.test_learner:root_of_zero"
# In files of both recipes of policies, and of both of language models.
POLICY: Final[tuple[tuple[str, ...], ...]] = (
    ("actor.optim.lr_scheduler=cosine", "actor.model.model_type=openvla", "actor.model.lora={rank: 4}"),
    ("env.train.judge.source=keys", "env.eval.judge.source=keys", "actor.model.model_type=openvla"),
    ("runner.logger.logger_backends=[tensorboard]",),
    ("env.eval.video_cfg.save_video=true", "actor.model.model_type=openvla", "actor.model.lora={rank: 4}"),
    ("env.train.intervention.source=scripted", "env.train.env_type=metaworld", "env.eval.env_type=metaworld"),
    ("cluster.component_placement.actor={node_group: node, placement: 0:0-1}",),
)
PLAYED: Final = ("agent.run=env_agent", "data.type=episodes")
JUDGED: Final = ("cluster.component_placement.judge={node_group: node, placement: 0}", "reward.reward_type=judge")
LANGUAGE: Final[tuple[tuple[str, ...], ...]] = (
    ("cluster.component_placement.critic={node_group: node, placement: 0}", "algorithm.adv_type=gae"),
    ("cluster.component_placement.reference={node_group: node, placement: 0}", "algorithm.kl_beta=0.1"),
    ("cluster.component_placement.teacher={node_group: node, placement: 0}", "algorithm.adv_type=distillation"),
    (*JUDGED, "judge.model_path=/judge"),
    (*JUDGED, "judge={model_path: /judge, backend: vllm}", "reward.options={template: '{text}'}"),
    (
        "reward.reward_type=code",
        "data.curriculum={low: 0.1}",
        "algorithm={recompute_logprobs: true, options: {tis_cap: 2}}",
    ),
    ("algorithm.filter_groups=true", "algorithm.recompute_logprobs=true", "algorithm.adv_type=reinforce_pp"),
    ("runner.logger.logger_backends=[tensorboard]", "runner.max_staleness=1"),
    (
        "actor.model.lora={rank: 4}",
        "actor.optim.lr_scheduler=cosine",
        "data.type=reasoning_gym",
        "data.options.task=chain_sum",
    ),
    ("rollout.backend=server", "rollout.engine_options={url: 'http://127.0.0.1:1', weights_dir: /tmp}"),
    ("data.type=sums", "data.apply_chat_template=true", "algorithm={clip_ratio_low: 0.3, clip_ratio_high: 0.3}"),
    ("data.train_data_paths=problems.jsonl",),
    ("algorithm.loss_type=sapo", "runner.profiler.first_step=2"),
    (OWN_LOSS,),
)
# Further files of each recipe, overrides of its shortest configuration, in which keys of special cases have an effect.
PROFILED: Final = ("runner.profiler.first_step=2",)
ENSEMBLE: Final = (
    "actor.model={model_type: flow_policy, num_action_chunks: 4, options: {action_horizon: 9, ensemble: true}}",
)
SPECIAL: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "embodied": (
        *POLICY,
        (*SAC, "env.train.intervention.source=scripted"),
        DSRL,
        (*SAC, "algorithm.replay={storage: /tmp}"),
        ("algorithm.loss_type=td3", SAC[1], "actor.model.options.exploration_noise=0.1"),
        ("algorithm.loss_type=td3_bc", SAC[1], "actor.model.options.exploration_noise=0.1"),
        ("algorithm.loss_type=iql", SAC[1]),
        (OWN_LOSS,),
        PROFILED,
        ENSEMBLE,
    ),
    "sft": (*POLICY, PROFILED, ENSEMBLE),
    "sft_chat": (
        PROFILED,
        ("runner.logger.logger_backends=[tensorboard]",),
        ("actor.model.lora={rank: 4}", "actor.optim.lr_scheduler=cosine"),
        ("cluster.component_placement.actor={node_group: node, placement: 0:0-1}",),
        ("data={type: chat, train_data_paths: chat.jsonl}",),
    ),
    "math": LANGUAGE,
    "serve": (
        ("runner.logger.logger_backends=[tensorboard]",),
        ("server.full_weights=default",),
        ("rollout.backend=vllm",),
    ),
    "agent": (
        *LANGUAGE,
        ("agent.tools=[http, python]", "agent.http.allow=[example.org]"),
        PLAYED,
        (*PLAYED, "agent.environment.type=openenv", "agent.environment.options.url=http://a"),
        (*PLAYED, "agent.environment.type=verifiers", "agent.environment.options.taskset=a"),
        (*PLAYED, "agent.environment.type=harbor", "agent.environment.options.path=tasks"),
    ),
}
# Values of keys whose types do not tell them.
EXAMPLES: Final[dict[str, Any]] = {
    "data.columns": {"success": "done"},
    "data.cameras": {"main": "front"},
    "rollout.max_running_tokens": 4096,
    "server.full_weights": "default",
    "agent.mcp": {"clock": {"command": ["true"]}},
    "agent.tools": ["search"],
    "runner.max_restarts.within": "10m",
    "runner.snapshot_interval": "2m",
    "runner.profiler.components": ["actor"],
}
# What a rule reports at a key that it refuses.
REFUSALS: Final = ("not-available", "no-effect", "conflicting-settings")


class Context(NamedTuple):
    """A file in which keys are tried."""

    name: str
    config: Any
    world_sizes: WorldSizes


class Key(NamedTuple):
    """A key of a recipe that holds a value; `section` has it."""

    path: tuple[str, ...]
    section: type[BaseModel]

    @property
    def values(self) -> list[Any]:
        """Values that differ from the default."""
        field = self.section.model_fields[self.path[-1]]
        default = field.get_default(call_default_factory=True)
        example = EXAMPLES.get(".".join(self.path))
        tried = [] if example is None else [example]
        tried += [value for member in alternatives(field.annotation) for value in _samples(member, default)]
        return [value for value in tried if value != default]


def _samples(kind: object, default: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is tuple:
        choices = get_args(get_args(kind)[0])
        return [(choices[0],)] if get_origin(get_args(kind)[0]) is Literal else [("1",), (1,)]
    if get_origin(kind) is dict:
        return [{"x": 1}]
    number = default if isinstance(default, int | float) else 1
    return {bool: [True, False], int: [2 * number, 1, 3], float: [number / 2, 0.5, 2.0], str: ["x", ".", "a.b:c"]}.get(
        kind if isinstance(kind, type) else str, ["x"]
    )


@cache
def loaded(file: tuple[str, ...]) -> Job:
    return load_with_lint(file[0], file[1:], environ={})


@cache
def contexts(name: str) -> list[Context]:
    """Return the files of a recipe that keys are tried in: all that are shipped, and special ones."""
    files = [(shipped_config,) for shipped_config in sorted(shipped_configs())]
    files += [(find_recipe(name).default_config, *overrides) for overrides in SPECIAL.get(name, ())]
    return [
        Context(" ".join(file), job.partial_config, job.world_sizes)
        for file, job in zip(files, map(loaded, files), strict=True)
        if job.partial_config is not None and job.recipe is not None and job.recipe.name == name
    ]


@cache
def keys(name: str) -> list[Key]:
    """Return the keys of a recipe that hold a value rather than a section."""
    result: dict[tuple[KeyPath, str, str], Key] = {}
    # What is a section to one kind, such as `options`, may be any keys to another.
    nested = {place for place, _ in sections(find_recipe(name).config_model())}
    for place, section in sections(find_recipe(name).config_model()):
        # Options are checked here, and read by what they are handed to.
        if "[]" in place or "NAME" in place or place.startswith("cluster") or place.endswith("options"):
            continue
        for key, field in written_fields(section).items():
            path = (*place.split("."), key) if place else (key,)
            known = (path, str(field.annotation), str(field.metadata))
            if ".".join(path) not in nested and key not in ("recipe", "cluster"):
                result.setdefault(known, Key(path, section))
    return [*result.values()]


def with_value(model: Any, path: KeyPath, value: Any) -> Any:
    """Return a model with another value at a path; None where a section above it is not given.

    Raises:
        ValidationError: the section does not take it.
    """
    key = str(path[0])
    if len(path) > 1:
        below = getattr(model, key, None)
        changed = None if below is None else with_value(below, path[1:], value)
        return None if changed is None else model.model_copy(update={key: changed})
    inputs = {name: getattr(model, name) for name in model.model_fields_set} | {key: value}
    # A file has lists.
    return type(model).model_validate(
        {name: list(value) if isinstance(value, tuple) else value for name, value in inputs.items()}
    )


class Recorder:
    """Stands in for a report; keeps the places of refusals."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.places: set[KeyPath] = set()

    def __call__(self, at: Any, code: str, *_: Any, severity: Severity = Severity.ERROR, **__: Any) -> None:
        if code in REFUSALS and severity is Severity.ERROR:
            self.places.add(getattr(at, "path", at))

    def conflict(self, at: str, *_: Any, severity: Severity = Severity.ERROR, **__: Any) -> None:
        paths = [tuple(key.split(".")) for key in at.split()]
        place = next((path for path in paths if is_given(self.config, path)), paths[-1])
        self(place, "conflicting-settings", severity=severity)


def covers(rule_keys: tuple[str, ...], path: KeyPath) -> bool:
    return any(path[: len(key)] == key for key in (tuple(rule_key.split(".")) for rule_key in rule_keys))


def has_no_effect(model: Any, path: KeyPath, sizes: WorldSizes) -> bool:
    """Return whether a rule of the sections around a key says that it changes nothing."""
    for start in range(len(path)):
        for rule in type(model).no_effect if isinstance(model, ConfigModel) else ():
            if covers(rule.keys, path[start:]) and rule.when(model, sizes):
                return True
        model = getattr(model, str(path[start]))
    return False


def is_refused(recipe: Recipe, context: Context, key: Key, value: Any) -> bool:
    """Return whether a value of a key is refused, or changes nothing, in a file."""
    check = recipe.load(recipe.check)
    assert check is not None
    try:
        config = with_value(context.config, key.path, value)
    except ValidationError:
        return True  # no value of this key: others are tried
    if config is None or has_no_effect(config, key.path, context.world_sizes):
        return True
    recorder = Recorder(config)
    check(config, context.world_sizes, recorder)
    return any(key.path[: len(place)] == place for place in recorder.places)


@pytest.mark.parametrize("name", recipe_names())
def test_no_key_is_always_refused(name: str) -> None:
    recipe = find_recipe(name)
    refused = [
        ".".join(key.path)
        for key in keys(name)
        if all(is_refused(recipe, context, key, value) for context in contexts(name) for value in key.values)
    ]
    assert refused == []


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_has_a_choice(name: str) -> None:
    kinds = {".".join(key.path): key.section.model_fields[key.path[-1]].annotation for key in keys(name)}
    assert [path for path, kind in kinds.items() if get_origin(kind) is Literal and len(get_args(kind)) == 1] == []


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_is_read_by_its_recipe(name: str) -> None:
    read = frozenset[str]().union(*(source_of(file).names for file in modules_of(name)))
    assert {".".join(key.path) for key in keys(name) if key.path[-1] not in read} == set()


def modules_of(name: str) -> set[Path]:
    """Return the source files that a recipe runs: what its parts import, at whatever depth, core and command line."""
    root = Path(str(recipes.__file__)).parent.parent
    results = {file for package in ("rlinf_core", "rlinf_cli") for file in (root / package).rglob("*.py")}
    pending = [root / f"recipes/{name}/__init__.py"]
    while pending:
        file = pending.pop()
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        if file not in results and file.exists():
            results.add(file)
            pending += (root / f"{module.replace('.', '/')}.py" for module in source_of(file).modules)
    return {result for result in results if not result.stem.endswith(("rules", "no_effect", "checks"))}


class Source(NamedTuple):
    """What a source file reads and imports: names of attributes, and modules of recipes."""

    names: frozenset[str]
    modules: frozenset[str]


@cache
def source_of(file: Path) -> Source:
    names: set[str] = set()
    modules: set[str] = set()
    for node in _nodes(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names |= {
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            }
        elif isinstance(node, ast.ImportFrom):
            modules |= {str(node.module), *(f"{node.module}.{item.name}" for item in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules.add(node.value.partition(":")[0])  # parts of a recipe are named by `package.module:name`
    return Source(frozenset(names), frozenset(module for module in modules if re.fullmatch(r"recipes[.\w]+", module)))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Return what is in a syntax tree, without lambdas, which are rules."""
    yield node
    for below in ast.iter_child_nodes(node):
        if not isinstance(below, ast.Lambda):
            yield from _nodes(below)
