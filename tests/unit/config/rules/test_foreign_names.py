"""Keys by the names of related projects: each is answered with ours, or with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from recipes.agent.tool_config import TOOL_OPTIONS
from recipes.language.config.algorithm_config import AlgorithmOptions
from recipes.language.config.problem_config import PROBLEM_OPTIONS, REWARD_OPTIONS
from recipes.language.config.rollout_config import ENGINE_OPTIONS
from rlinf_cli.importing import foreign_names
from rlinf_cli.job.completion import json_schema
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.model import ConfigModel
from rlinf_core.config.tree import Composed, MappingNode, Path, to_data
from rlinf_core.config.validating.model_fields import Validated, sections, written_fields
from rlinf_core.config.validating.validation import validate
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import ClusterFile, Job
from rlinf_core.scalars import Float, Int, Text
from tests.unit.config.texts import tree_of


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
    view = validate(File, Composed(tree, unresolved=frozenset(unresolved), secret=frozenset(secret)), diagnostics)
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
def test_name_of_others_is_answered_with_ours(text: str, underlined: str, ours: str) -> None:
    ((code, span, help),) = [(item.code, item.span.text, item.help) for item in check(tree_of(text))[0]]
    assert (code, span, help) == ("unknown-key", underlined, f"write `{ours}`{IMPORT}")


def test_secrets_and_broken_references_move_with_their_keys() -> None:
    for unresolved, pruned in (((), set()), ((("part", "key"),), {("part", "optim", "token")})):
        findings, view = check(tree_of("part: {key: t0p}\n"), unresolved=unresolved, secret=(("part", "key"),))
        assert findings == []
        assert view.composed.secret == {("part", "optim", "token")}
        assert view.pruned == pruned


def test_what_is_not_available_names_the_nearest_thing() -> None:
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


MATH = EMBODIED.replace("embodied", "math").replace("env:", "reward:")
SFT = EMBODIED.replace("embodied", "sft")
MODELS = ("actor", "model", "model_path")
BOTH = "actor: {model: {model_path: /a}}\nrollout: {model_dir: /a}\n"


def loaded(text: str, *overrides: str) -> Job:
    return load_with_lint("-", overrides, stdin=text.encode(), environ={})


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (EMBODIED + "actor: {model: {model_path: ''}}\n", MODELS, None),
        (EMBODIED + "runner: {resume_dir: ''}\n", ("runner", "resume_dir"), None),
        (EMBODIED + "runner: {max_steps: null, logger: }\n", ("runner", "max_steps"), 150),
        (MATH + "algorithm: {options: {clip_ratio_c: null}}\n", ("algorithm", "settings", "clip_ratio_c"), None),
        (EMBODIED + "algorithm: {clip_ratio_c: 3.0}\n", MODELS, None),
        (EMBODIED + "env: \nactor: {optim: {lr: null}}\n", ("actor", "optim", "lr"), 1e-3),
        (MATH + "algorithm: {options: {kl_penalty: low_var_kl}}\n", ("algorithm", "settings", "kl_penalty"), "k3"),
        (MATH + "algorithm: {options: {kl_penalty: kl}}\n", ("algorithm", "settings", "kl_penalty"), "k1"),
        # `rollout.model_dir` of the seeds is `actor.model.model_path`, which it may repeat or refer to.
        (EMBODIED + "rollout: {model_dir: /a}\n", MODELS, "/a"),
        (EMBODIED + BOTH, MODELS, "/a"),
        (EMBODIED + BOTH.replace("path: /a", "path: '${rollout.model_dir}'"), MODELS, "/a"),
        # Keys that say what is so anyway are left out.
        (EMBODIED + "algorithm: {entropy_type: action_level}\n", MODELS, None),
        (EMBODIED + "algorithm: {logprob_type: token_level, entropy_type: token_level}\n", MODELS, None),
        (EMBODIED + "algorithm: {kl_beta: 0.0, kl_penalty: kl }\nenv: {enable_offload: false}\n", MODELS, None),
        (EMBODIED + "runner: {task_type: embodied}\nrollout: {backend: huggingface, model_dir: null}\n", MODELS, None),
        (EMBODIED + "actor: {training_backend: fsdp, tokenizer: {tokenizer_model: a}, model: {model_path: a}}\n",
         ("actor", "seed"), 1234),
        (EMBODIED + "env: {eval: {mask_after_success: false, intervention: {source: none}}}\n", MODELS, None),
        (EMBODIED + "env: {train: &a {mask_after_success: false, reset_each_pass: null}, eval: *a}\n", MODELS, None),
        (EMBODIED + "env: {train: &a {ignore_terminations: true, reward_coef: 2.0}, eval: *a}\n", MODELS, None),
        (EMBODIED + "env: {train: {video_cfg: {save_video: false, video_base_dir: null, fps: 20, episodes: 9}}}\n",
         MODELS, None),
        (EMBODIED + "algorithm: {group_size: 4}\nenv: {train: {group_size: 4}, eval: {group_size: 1}}\n",
         MODELS, None),
        (MATH + "runner: {task_type: reasoning, weight_sync_interval: 1}\nalgorithm: {filter_rewards: false}\n",
         MODELS, None),
        (MATH + "actor: {checkpoint_load_path: a, model: {model_path: a}}\n", ("actor", "seed"), 1234),
    ],
)  # fmt: skip
def test_files_of_others_mean_what_they_say(text: str, path: tuple[str, ...], value: object) -> None:
    job = loaded(text)
    assert [item.message for item in job.diagnostics if item.code not in (NO_EFFECT, "unusable-path")] == []
    config: object = job.config
    for name in path:
        config = getattr(config, name)
    assert config == value
    assert job.tree is not None
    assert "model_dir" not in str(to_data(job.tree))


@pytest.mark.parametrize("name", ["rollout.model_dir", "actor.model.model_path"])
def test_override_of_either_name_replaces_both(name: str) -> None:
    job: Any = loaded(EMBODIED + BOTH, f"{name}=/b")
    assert job.config.actor.model.model_path == "/b"


# The recipe, the text with the underlined key, the code of the finding, and what its help says.
ANSWERS = r"""
embodied | actor: {model: {model_path: /a}}\nrollout: {«model_dir»: /b} | duplicate-key |
embodied | algorithm: {«kl_beta»: 0.1} | not-available |
embodied | algorithm: {«kl_beta»: false} | not-available |
embodied | algorithm: {logprob_type: token_level, «entropy_type»: action_level} | not-available | logprob_type
embodied | algorithm: {off_policy: «[a]»} | wrong-type | `algorithm`
embodied | algorithm: {off_policy: «4»} | wrong-type | `algorithm`
embodied | algorithm: {«off_policy»: null} | former-key | remove it
embodied | algorithm: {group_size: 8, «off_policy»: {}} | former-key | remove it
embodied | algorithm: {«off_policy»: {critics: 3, replay: {capacity: 9}}} | former-key | write them there
embodied | algorithm: {«critics»: 3, n_steps: 1} | unknown-key | `sac`
embodied | algorithm: {«entropy_type»: token_level} | not-available | `algorithm.logprob_type`
embodied | env: {«enable_offload»: true} | not-available |
embodied | actor: {«tokenizer»: {tokenizer_model: a}, model: {model_path: b}} | not-available |
math | actor: {«training_backend»: megatron} | not-available |
math | algorithm: {«filter_rewards»: true} | not-available |
embodied | env: {train: {«mask_after_success»: true}} | not-available | `env.train.auto_reset: false`
embodied | env: {train: {«reset_each_pass»: true}} | not-available | `env.train.auto_reset: false`
embodied | env: {eval: {video_cfg: {«fps»: 10}}} | not-available | 20 frames
embodied | data: {«flip»: vertical} | not-available | `train_data_paths: {path: ..., flip: vertical}`
sft | data: {«state_keys»: [joints]} | former-key | write it there
embodied | algorithm: {options: {«gae_lamda»: 0.9}} | unknown-key | `gae_lambda`
embodied | algorithm: {«temperature»: 0.1} | unknown-key | `sac` and `dsrl`
embodied | env: {train: {auto_reset: true}, eval: {«auto_reset»: false}} | not-available | in `env.train`
embodied | env: {eval: {«ignore_terminations»: true}} | not-available | in `env.train`
embodied | env: {eval: {«group_size»: 8}} | not-available | no members of a group
embodied | env: {train: {«group_size»: 8}} | not-available | `algorithm.group_size`
sft | env: {train: {«group_size»: 8}} | not-available | nothing is compared
embodied | env: {train: {«video_cfg»: {save_video: true}}} | not-available | in `env.eval`
embodied | env: {eval: {video_cfg: {«video_base_dir»: films}}} | not-available | a folder of the run
embodied | data: {«episodes»: [0, 3]} | not-available | `train_data_paths: {path: ..., episodes: [...]}`
embodied | algorithm: {«huber_delta»: 10} | not-available | `algorithm.options.value_clip`
embodied | algorithm: {«target_noise»: 0.1} | not-available | 0.2, within 0.5
embodied | actor: {fsdp_config: {«reduce_each_micro_batch»: false}} | not-available | after each micro batch
sft | «algorithm»: {gamma: 0.9} | not-available |
embodied | «defaults»: [base] | not-available | extends
embodied | «task_type»: embodied | not-available | recipe
embodied | runner: {«ckpt_path»: a.pt} | not-available | resume_dir
embodied | rollout: {«model»: {model_path: a}} | not-available | actor.model.model_path
embodied | «weight_syncer»: {type: patch} | not-available | every training step
embodied | actor: {fsdp_config: {«strategy»: fsdp2}} | not-available | sharding_strategy
embodied | actor: {fsdp_config: {mixed_precision: {«buffer_dtype»: fp32}}} | not-available | param_dtype
embodied | actor: {model: {«action_dim»: 7}} | not-available | the environment defines
embodied | algorithm: {«kl_loss_coef»: 0} | not-available |
embodied | algorithm: {«kl_penalty_type»: kl} | not-available |
- | cluster:\n  num_nodes: 1\n  «tracer»: {} | not-available |
- | cluster:\n  num_nodes: 1\n  «profiling»: {} | not-available |
- | cluster:\n  num_nodes: 1\n  «net_emulation»: {} | not-available |
- | cluster:\n  num_nodes: 1\n  «auto_scheduler»: {} | not-available |
- | «defaults»: [base]\ncluster: {num_nodes: 1} | section-not-checked | `extends: FILE`
- | «cluster”»: 1\ncluster: {num_nodes: 1} | unknown-key | U+201D
embodied | actor: {optim: {«ppo_epochs»: 1}} | unknown-key | write `algorithm.update_epoch`; `rlinf import`
embodied | runner: {«max_grad_norm»: 1} | unknown-key | write `actor.optim.clip_grad`; `rlinf import`
embodied | rollout: {«simulator_type»: franka_kin} | unknown-key | write `env.train.env_type`; `rlinf import`
embodied | env: {train: {«loss_agg_mode»: token-mean}} | unknown-key | write `algorithm.loss_agg_func`; `rlinf import`
embodied | «total_epochs»: 3 | unknown-key | write `runner.max_epochs`; `rlinf import`
embodied | algorithm: {«lr_scheduler_type»: cosine} | unknown-key | write `actor.optim.lr_scheduler`; `rlinf import`
math | algorithm: {«sampling_params»: {top_k: 3}} | unknown-key | write `rollout.sampling_params`; `rlinf import`
embodied | data: {«type»: math} | unknown-key | known keys
embodied | env: {«type»: x} | unknown-key | known keys
embodied | actor: {model: {«action_dims»: 3}} | unknown-key | known keys
embodied | runner: {«num_nodes»: 1} | unknown-key | `num_nodes` belongs in `cluster`
embodied | actor: {«seeed»: 1} | unknown-key | did you mean `seed`?
embodied | actor: {«num_action_chunks»: 1} | unknown-key | `num_action_chunks` belongs in `actor.model`
embodied | actor: {«batch_size»: 1} | unknown-key | did you mean `global_batch_size`?
"""


@pytest.mark.parametrize("row", ANSWERS.strip().splitlines())
def test_keys_of_others_are_answered(row: str) -> None:
    recipe, marked, code, *help = (part.strip() for part in row.rstrip(" |").replace("\\n", "\n").split(" | "))
    head = {"embodied": EMBODIED, "math": MATH, "sft": SFT, "-": ""}[recipe]
    findings = loaded(f"{head}{marked.replace('«', '').replace('»', '')}\n").diagnostics
    # Recipe `sft` has more to say of the placement.
    (finding,) = [item for item in findings if item.code == code or (recipe != "sft" and item.code != "unusable-path")]
    underlined = marked[marked.index("«") + 1 : marked.index("»")]
    assert (finding.code, finding.span.text) == (code, underlined)
    assert all(words in (finding.help or "") for words in help)
    assert finding.help or code == "duplicate-key"


def test_a_null_of_a_former_key_is_its_value() -> None:
    config: Any = loaded(f"{MATH}algorithm: {{clip_ratio_c: null, tau_pos: null}}\n").config
    assert (config.algorithm.settings.clip_ratio_c, config.algorithm.settings.tau_pos) == (None, 1.0)


@pytest.mark.parametrize("written", ["temperature: 0.1", "off_policy: {temperature: 0.1, expectile: 0.5}"])
def test_keys_of_one_loss_are_read_as_its_options(written: str) -> None:
    """Those of a section that is gone may have moved since, or belong to another loss."""
    policy = "actor: {model: {model_type: squashed_policy}}\n"
    job = loaded(f"{EMBODIED}algorithm: {{loss_type: sac, {written}}}\n{policy}")
    assert {item.code for item in job.diagnostics if item.code != "unusable-path"} == {"former-key"}
    config: Any = job.config
    assert config.algorithm.options.temperature == 0.1


def test_keys_of_other_losses_in_a_lost_section_are_left_out() -> None:
    """An earlier rlinf wrote the keys of all losses, and those of this one elsewhere."""
    other = "off_policy: {critics: 3, temperature: 0.1, replay: {capacity: 9}}"
    job = loaded(f"{EMBODIED}algorithm: {{gae_lambda: 0.9, {other}}}\n")
    assert {item.code for item in job.diagnostics if item.code != "unusable-path"} == {"former-key"}
    config: Any = job.config
    assert config.algorithm.settings.gae_lambda == 0.9


def test_a_former_key_does_not_hide_a_value_of_another_type() -> None:
    job = loaded(f"{MATH}data: {{train_size: 9, options: 5}}\n")
    assert sorted(item.code for item in job.diagnostics) == ["former-key", "wrong-type"]


@pytest.mark.parametrize("written", ["{digits: 2}", "{digits: 2, spaced: null}"])
def test_a_section_that_became_options_is_read(written: str) -> None:
    config: Any = loaded(f"{MATH}data: {{task_config: {written}, train_size: null}}\n").config
    assert (config.data.settings.digits, config.data.settings.spaced) == (2, False)


@pytest.mark.parametrize(
    "written",
    [
        "type: verifiers, name: words, options: {game: chess}",
        "type: verifiers, options: {taskset: words, game: chess}",
    ],
)
def test_an_environment_reads_its_former_keys(written: str) -> None:
    agent = f"agent: {{run: env_agent, environment: {{{written}}}}}\ndata: {{type: episodes}}\n"
    config: Any = loaded(f"{MATH.replace('math', 'agent').replace('reward', 'reward,agent')}{agent}").config
    settings = config.agent.environment.settings
    assert (settings.taskset, settings.taskset_options) == ("words", {"game": "chess"})


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


OPTIONS = {"data.columns.state"} | {
    f"{place}.{field}"
    for place, models in (
        ("algorithm.options", [AlgorithmOptions]),
        ("rollout.engine_options", ENGINE_OPTIONS.values()),
        ("judge.engine_options", ENGINE_OPTIONS.values()),
        ("data.options", PROBLEM_OPTIONS.values()),
        ("reward.options", REWARD_OPTIONS.values()),
        ("agent.tool_options", TOOL_OPTIONS.values()),
    )
    for model in models
    for field in model.model_fields
}


@pytest.mark.parametrize("name", recipe_names())
def test_keys_that_moved_lead_to_keys(name: str) -> None:
    places = sections(find_recipe(name).config_model())
    paths = {f"{place}.{field}".strip(".") for place, section in places for field in written_fields(section)} | OPTIONS
    for place, section in places:
        moved = foreign_names.names_of(section).moved
        assert not set(moved) & {*written_fields(section), *foreign_names.names_of(section).names}, place
        assert {*moved.values(), *foreign_names.names_of(section).former.values()} <= paths, place


NAMED = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:: [^`]*)?`")
# What answers name besides keys of the models.
OTHERS = {"extends", "trace.json"}


@pytest.mark.parametrize("name", recipe_names())
def test_answers_name_keys_locally_or_by_full_path(name: str) -> None:
    model = find_recipe(name).config_model()
    paths = {f"{place}.{field}".strip(".") for place, section in sections(model) for field in written_fields(section)}
    paths |= OPTIONS
    wrong: list[str] = []
    for place, section in sections(model):
        for key, answer in foreign_names.names_of(section).unavailable.items():
            beside = {named for named in NAMED.findall(answer) if "." not in named and named in section.model_fields}
            unknown = {*NAMED.findall(answer)} - beside - paths - OTHERS
            wrong += [f"{place}.{key}: `{named}`" for named in sorted(unknown)]
    assert wrong == []
