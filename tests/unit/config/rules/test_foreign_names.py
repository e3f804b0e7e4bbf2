"""Keys by the names of related projects: each is answered with ours, or with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from pydantic import BaseModel

from rlinf_cli.importing import foreign_names
from rlinf_cli.job.json_schema import json_schema
from rlinf_cli.job.load import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.model import ConfigModel
from rlinf_core.config.tree import MappingNode, Path, to_data
from rlinf_core.config.validating.model_fields import sections, written_fields
from rlinf_core.config.validating.pruning import Validated
from rlinf_core.config.validating.validation import validate
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import ClusterFile
from rlinf_core.scalars import Float, Int, Text

TreeOf = Callable[..., MappingNode]


class Optimizer(ConfigModel):
    rate: Float = 0.1
    beta: Float = 0.9
    token: Text = ""


class Part(ConfigModel):
    optim: Optimizer = Optimizer()
    others: tuple[Optimizer, ...] = ()
    by_name: dict[str, Optimizer] = {}  # noqa: RUF012


class File(ConfigModel):
    part: Part = Part()
    steps: Int = 1


NAMES = {
    "Optimizer": {
        "names": {"learning_rate": "rate", "nothing": "gone"},
        "unavailable": {"betas": "write `beta`", "beta": "never said: it is a key of ours"},
    },
    "Part": {"means": {"key": "part.optim.token"}},
    "File": {"names": {"piece": "part"}},
}


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names for the models of this module, besides those for ours."""
    tables = foreign_names.tables()
    monkeypatch.setattr(foreign_names, "tables", lambda: tables | NAMES)
    monkeypatch.setattr(foreign_names, "OURS", (*foreign_names.OURS, __name__.partition(".")[0]))
    foreign_names.names_of.cache_clear()
    yield
    foreign_names.names_of.cache_clear()


def check(
    tree: MappingNode, unresolved: tuple[Path, ...] = (), secret: tuple[Path, ...] = ()
) -> tuple[list[Diagnostic], Validated[File]]:
    diagnostics = Diagnostics()
    view = validate(File, tree, diagnostics, unresolved=unresolved, secret=secret)
    return list(diagnostics), view


IMPORT = "; `rlinf import` renames the keys of a file of RLinf or verl"


@pytest.mark.parametrize(
    ("text", "underlined", "ours"),
    [
        ("piece: {}\n", "piece", "part"),
        ("part: {optim: {learning_rate: fast}}\n", "learning_rate", "rate"),
        ("part: {optim: {rate: 1, learning_rate: 2}}\n", "learning_rate", "rate"),
        ("part: {others: [{learning_rate: 2}, {rate: 3}]}\n", "learning_rate", "rate"),
        ("part: {by_name: {a: {learning_rate: 4}}}\n", "learning_rate", "rate"),
    ],
)
def test_name_of_others_is_answered_with_ours(tree_of: TreeOf, text: str, underlined: str, ours: str) -> None:
    ((code, span, help),) = [(item.code, item.span.text, item.help) for item in check(tree_of(text))[0]]
    assert (code, span, help) == ("unknown-key", underlined, f"write `{ours}`{IMPORT}")


def test_secrets_and_broken_references_move_with_their_keys(tree_of: TreeOf) -> None:
    for unresolved, pruned in (((), set()), ((("part", "key"),), {("part", "optim", "token")})):
        findings, view = check(tree_of("part: {key: t0p}\n"), unresolved=unresolved, secret=(("part", "key"),))
        assert findings == []
        assert view.secret == {("part", "optim", "token")}
        assert view.pruned == pruned


def test_what_is_not_available_names_the_nearest_thing(tree_of: TreeOf) -> None:
    (result,), view = check(tree_of("part:\n  optim: {betas: [0.9], beta: 0.5}\n"))
    assert (result.code, result.span.text, result.help) == ("not-available", "betas", "write `beta`")
    assert result.message == "`part.optim.betas` is not available"
    assert view.model is not None
    assert view.model.part.optim.beta == 0.5


def test_editors_know_our_names_alone() -> None:
    assert set(json_schema(File)["$defs"]["Optimizer"]["properties"]) == {"rate", "beta", "token"}


EMBODIED = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: {node_group: node,"
    " placement: 0}\n"
)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("actor: {model: {model_path: ''}}\n", ("actor", "model", "model_path"), None),
        ("runner: {resume_dir: ''}\n", ("runner", "resume_dir"), None),
        ("runner: {max_steps: null, logger: }\n", ("runner", "max_steps"), 150),
        ("algorithm: {clip_ratio_c: null}\n", ("algorithm", "clip_ratio_c"), None),
        ("env: \nactor: {optim: {lr: null}}\n", ("actor", "optim", "lr"), 1e-3),
    ],
)
def test_files_of_others_mean_what_they_say(text: str, path: tuple[str, ...], value: object) -> None:
    job = load_with_lint("-", stdin=(EMBODIED + text).encode(), environ={})
    assert [diagnostic.message for diagnostic in job.diagnostics if diagnostic.code != NO_EFFECT] == []
    config: object = job.config
    for name in path:
        config = getattr(config, name)
    assert config == value


MATH = EMBODIED.replace("embodied", "math").replace("env:", "reward:")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("algorithm: {kl_penalty: low_var_kl}\n", ("algorithm", "kl_penalty"), "k3"),
        ("algorithm: {kl_penalty: kl}\n", ("algorithm", "kl_penalty"), "k1"),
    ],
)
def test_files_of_language_models_mean_what_they_say(text: str, path: tuple[str, ...], value: object) -> None:
    job = load_with_lint("-", stdin=(MATH + text).encode(), environ={})
    assert [diagnostic.message for diagnostic in job.diagnostics if diagnostic.code != NO_EFFECT] == []
    config: object = job.config
    for name in path:
        config = getattr(config, name)
    assert config == value


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (EMBODIED, "algorithm: {kl_beta: 0.0, kl_penalty: kl }\nenv: {enable_offload: false}\n"),
        (EMBODIED, "runner: {task_type: embodied}\nrollout: {backend: huggingface, model_dir: null}\n"),
        (EMBODIED, "actor: {training_backend: fsdp, tokenizer: {tokenizer_model: a}, model: {model_path: a}}\n"),
        (EMBODIED, "env: {eval: {mask_after_success: false, intervention: {source: none}}}\n"),
        (EMBODIED, "env: {train: &a {mask_after_success: true, reset_each_pass: true}, eval: *a}\n"),
        (EMBODIED, "env: {train: {reset_each_pass: true}, eval: '${env.train}'}\n"),
        (MATH, "runner: {task_type: reasoning, weight_sync_interval: 1}\nalgorithm: {filter_rewards: false}\n"),
        (MATH, "actor: {checkpoint_load_path: a, model: {model_path: a}}\n"),
    ],
)
def test_keys_that_say_what_is_so_anyway_are_left_out(recipe: str, text: str) -> None:
    job = load_with_lint("-", stdin=(recipe + text).encode(), environ={})
    assert [diagnostic.message for diagnostic in job.diagnostics if diagnostic.severity is Severity.ERROR] == []
    assert job.ok
    assert job.config is not None


@pytest.mark.parametrize(
    ("recipe", "text", "underlined"),
    [
        (EMBODIED, "algorithm: {kl_beta: 0.1}\n", "kl_beta"),
        (EMBODIED, "algorithm: {kl_beta: false}\n", "kl_beta"),
        (EMBODIED, "env: {enable_offload: true}\n", "enable_offload"),
        (EMBODIED, "actor: {tokenizer: {tokenizer_model: a}, model: {model_path: b}}\n", "tokenizer"),
        (MATH, "actor: {training_backend: megatron}\n", "training_backend"),
        (MATH, "algorithm: {filter_rewards: true}\n", "filter_rewards"),
        (EMBODIED, "env: {eval: {mask_after_success: true}}\n", "mask_after_success"),
        (EMBODIED.replace("embodied", "sft"), "algorithm: {gamma: 0.9}\n", "algorithm"),
        (EMBODIED.replace("embodied", "sft"), "env: {train: {reset_each_pass: true}}\n", "reset_each_pass"),
    ],
)
def test_other_values_of_them_are_answered(recipe: str, text: str, underlined: str) -> None:
    job = load_with_lint("-", stdin=(recipe + text).encode(), environ={})
    diagnostics = [diagnostic for diagnostic in job.diagnostics if diagnostic.code == "not-available"]
    assert [diagnostic.span.text for diagnostic in diagnostics] == [underlined]
    assert all(diagnostic.help for diagnostic in diagnostics)


class TestModelDir:
    """`rollout.model_dir` of the seeds is `actor.model.model_path`."""

    def test_names_the_model_of_the_actor(self) -> None:
        job = load_with_lint("-", ("rollout.model_dir=/models/vla",), stdin=EMBODIED.encode(), environ={})
        assert job.ok
        assert job.config.actor.model.model_path == "/models/vla"  # type: ignore[union-attr]
        assert job.tree is not None
        assert "model_dir" not in str(to_data(job.tree))

    def test_may_repeat_the_path_of_the_actor(self) -> None:
        text = EMBODIED + "actor: {model: {model_path: /models/vla}}\nrollout: {model_dir: /models/vla}\n"
        assert load_with_lint("-", stdin=text.encode(), environ={}).ok

    def test_contradicts_the_path_of_the_actor(self) -> None:
        text = EMBODIED + "actor: {model: {model_path: /a}}\nrollout: {model_dir: /b}\n"
        diagnostics = [
            diagnostic
            for diagnostic in load_with_lint("-", stdin=text.encode(), environ={}).diagnostics
            if diagnostic.code != "unusable-path"
        ]
        assert [(diagnostic.code, diagnostic.span.text) for diagnostic in diagnostics] == [
            ("duplicate-key", "model_dir")
        ]

    def test_is_replaced_by_an_override_of_either_name(self) -> None:
        text = EMBODIED + "actor: {model: {model_path: /a}}\nrollout: {model_dir: /a}\n"
        for name in ("rollout.model_dir", "actor.model.model_path"):
            job = load_with_lint("-", (f"{name}=/b",), stdin=text.encode(), environ={})
            assert job.config.actor.model.model_path == "/b"  # type: ignore[union-attr]

    def test_reference_to_it_is_resolved(self) -> None:
        text = EMBODIED + "actor: {model: {model_path: '${rollout.model_dir}'}}\nrollout: {model_dir: /a}\n"
        job = load_with_lint("-", stdin=text.encode(), environ={})
        assert job.config.actor.model.model_path == "/a"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "underlined", "words"),
    [
        ("defaults: [base]\n", "defaults", "extends"),
        ("task_type: embodied\n", "task_type", "recipe"),
        ("runner: {ckpt_path: a.pt}\n", "ckpt_path", "resume_dir"),
        ("rollout: {model: {model_path: a}}\n", "model", "actor.model.model_path"),
        ("weight_syncer: {type: patch}\n", "weight_syncer", "weight_sync_interval"),
        ("actor: {fsdp_config: {strategy: fsdp2}}\n", "strategy", "sharding_strategy"),
        ("actor: {fsdp_config: {mixed_precision: {buffer_dtype: fp32}}}\n", "buffer_dtype", "param_dtype"),
        ("actor: {model: {action_dim: 7}}\n", "action_dim", "the environment defines"),
    ],
)
def test_keys_of_others_are_answered(text: str, underlined: str, words: str) -> None:
    (diagnostic,) = load_with_lint("-", stdin=(EMBODIED + text).encode(), environ={}).diagnostics
    assert (diagnostic.code, diagnostic.span.text) == ("not-available", underlined)
    assert words in (diagnostic.help or "")


@pytest.mark.parametrize("key", ["tracer", "profiling", "net_emulation", "auto_scheduler"])
def test_missing_cluster_keys_are_answered_without_a_recipe(key: str) -> None:
    (diagnostic,) = load_with_lint(
        "-", stdin=f"cluster:\n  num_nodes: 1\n  {key}: {{}}\n".encode(), environ={}
    ).diagnostics
    assert (diagnostic.code, diagnostic.span.text) == ("not-available", key)


def test_a_file_of_hydra_without_a_recipe_is_told_of_extends() -> None:
    job = load_with_lint("-", stdin=b"defaults: [base]\ncluster: {num_nodes: 1}\n", environ={})
    (diagnostics,) = job.diagnostics
    assert "`extends: FILE`" in (diagnostics.help or "")
    assert job.ok


@pytest.mark.parametrize("name", ["kl_loss_coef: 0", "kl_penalty_type: kl"])
def test_idle_key_of_others_is_answered(name: str) -> None:
    (diagnostic,) = load_with_lint("-", stdin=f"{EMBODIED}algorithm: {{{name}}}\n".encode(), environ={}).diagnostics
    assert diagnostic.code == "not-available"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("data: {type: math}\n", None),
        ("env: {type: x}\n", None),
        ("actor: {model: {action_dims: 3}}\n", None),
        ("runner: {num_nodes: 1}\n", "`num_nodes` belongs in `cluster`"),
        ("actor: {seeed: 1}\n", "did you mean `seed`?"),
        ("actor: {num_action_chunks: 1}\n", "`num_action_chunks` belongs in `actor.model`"),
        ("actor: {batch_size: 1}\n", "did you mean `global_batch_size`?"),
    ],
)
def test_a_key_is_guessed_only_where_it_means_the_same(text: str, hint: str | None) -> None:
    (diagnostic,) = load_with_lint("-", stdin=(EMBODIED + text).encode(), environ={}).diagnostics
    assert diagnostic.code == "unknown-key"
    assert (diagnostic.help or "").startswith(hint or "known keys")


def sections_of_all() -> dict[str, type[BaseModel]]:
    models = [ClusterFile, *(find_recipe(name).config_model() for name in recipe_names())]
    results = {base for model in models for _, section in sections(model) for base in section.__mro__}
    return {section.__name__: section for section in results if issubclass(section, ConfigModel)}


def test_every_table_is_of_a_section() -> None:
    assert set(foreign_names.tables()) - set(NAMES) <= set(sections_of_all())


def test_models_hold_our_own_names_only() -> None:
    names = {"other_names", "moved", "not_available"}
    assert not [name for name, section in sections_of_all().items() if names & set(vars(section))]


@pytest.mark.parametrize("name", sorted(foreign_names.tables()))
def test_foreign_names_map_to_fields_and_none_is_unavailable(name: str) -> None:
    section, table = sections_of_all()[name], foreign_names.tables()[name]
    below = [item for item in sections_of_all().values() if issubclass(item, section)]
    known = {field for item in below for field in written_fields(item)}
    assert set(table.get("names", {}).values()) <= known
    assert {*table.get("accepted", {}), *table.get("same", {}), *table.get("means", {})} <= {
        *foreign_names.names_of(section).unavailable,
        *known,
    }
    fields = set(written_fields(section))
    assert not fields & {*table.get("names", {}), *table.get("moved", {}), *table.get("unavailable", {})}


@pytest.mark.parametrize("name", recipe_names())
def test_keys_that_moved_lead_to_keys(name: str) -> None:
    places = dict(sections(find_recipe(name).config_model()))
    paths = {f"{place}.{field}".strip(".") for place, section in places.items() for field in written_fields(section)}
    for place, section in places.items():
        moved = foreign_names.names_of(section).moved
        assert not set(moved) & {*written_fields(section), *foreign_names.names_of(section).names}, place
        assert set(moved.values()) <= paths, place


def test_a_key_that_moved_is_answered_with_its_path() -> None:
    text = "recipe: math\ncluster: {num_nodes: 1}\nalgorithm: {sampling_params: {top_k: 3}}\n"
    results = {
        diagnostic.path: diagnostic.help
        for diagnostic in load_with_lint("-", stdin=text.encode(), environ={}).diagnostics
    }
    assert results["algorithm", "sampling_params"] == f"write `rollout.sampling_params`{IMPORT}"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("actor: {optim: {ppo_epochs: 1}}\n", "algorithm.update_epoch"),
        ("runner: {max_grad_norm: 1}\n", "actor.optim.clip_grad"),
        ("rollout: {simulator_type: franka_kin}\n", "env.train.env_type"),
        ("env: {train: {loss_agg_mode: token-mean}}\n", "algorithm.loss_agg_func"),
        ("total_epochs: 3\n", "runner.max_epochs"),
        ("algorithm: {lr_scheduler_type: cosine}\n", "actor.optim.lr_scheduler"),
    ],
)
def test_moved_key_is_answered_with_its_full_path(text: str, path: str) -> None:
    (diagnostic,) = load_with_lint("-", stdin=(EMBODIED + text).encode(), environ={}).diagnostics
    assert (diagnostic.code, diagnostic.help) == ("unknown-key", f"write `{path}`{IMPORT}")


NAMED = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:: [^`]*)?`")
# What answers name besides keys of the models.
OTHERS = {"extends", "trace.json"}


@pytest.mark.parametrize("name", recipe_names())
def test_answers_name_keys_locally_or_by_full_path(name: str) -> None:
    model = find_recipe(name).config_model()
    paths = {f"{place}.{field}".strip(".") for place, section in sections(model) for field in written_fields(section)}
    wrong: list[str] = []
    for place, section in sections(model):
        for key, answer in foreign_names.names_of(section).unavailable.items():
            beside = {named for named in NAMED.findall(answer) if "." not in named and named in section.model_fields}
            unknown = {*NAMED.findall(answer)} - beside - paths - OTHERS
            wrong += [f"{place}.{key}: `{named}`" for named in sorted(unknown)]
    assert wrong == []
