"""`rlinf explain`: codes, keys, and the schema of files."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from ruamel.yaml import YAML

from recipes.agent.agent_config import AgentConfig
from recipes.embodied.config import EmbodiedConfig
from recipes.math.config import MathConfig
from recipes.serve.config import ServeConfig
from recipes.sft.config import SftConfig
from recipes.sft_chat.config import ChatConfig
from rlinf_cli.codes import Code, Example, all_codes, codes_by_stage
from rlinf_cli.job.completion import DIALECT, file_schema, json_schema
from rlinf_cli.job.field_docs import UnknownFieldError, describe, fields_below
from rlinf_cli.job.findings import code_text
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import ClusterFile
from rlinf_core.scalars import Float, Int, Text
from tests.unit.cli.typed import Cli, text_file


def test_a_code_has_meaning_a_wrong_and_a_right_example(cli: Cli) -> None:
    ended = cli("explain", "unknown-key")
    assert ended.code == 0
    assert ended.out.startswith("error[unknown-key]\n")
    wrong, right = ended.out.index("\nWrong\n"), ended.out.index("\nRight\n")
    assert wrong < ended.out.index("^", wrong) < right
    assert "^" not in ended.out[right:]
    assert ended.err == ""


def test_the_caret_is_under_what_the_markers_enclose(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Example("a: 1\nbb: «two»\n", overrides=("a=«3»",), assume=("a800=8",), files=(("base.yaml", "c: «4»\n"),))
    text = code_text(Code("some-code", Severity.ERROR, "a title", "a meaning", wrong, Example("a: 1\n")))
    lines = text.splitlines()
    for shown in ("bb: two", "a=3", "c: 4"):
        index, line = next((i, line) for i, line in enumerate(lines) if line.rstrip().endswith(shown) or shown in line)
        value = shown[-3:] if shown == "bb: two" else shown[-1]
        column = line.index(shown) + shown.index(value)
        assert lines[index + 1].rstrip() == lines[index + 1][:column] + "^" * len(value)
    assert "«" not in text
    assert "--assume a800=8" in text


def test_every_code_is_shown_and_stays_in_its_width(cli: Cli) -> None:
    for name, code in all_codes().items():
        out = cli.out("explain", name)
        assert f"{code.severity}[{name}]" in out
        assert "«" not in out
        prose = out.partition("\n\nWrong\n")[0].splitlines()[1:]
        assert max(map(len, prose)) <= 100


@pytest.mark.parametrize("pasted", ["error[unknown-key]", "[unknown-key]", "error[unknown-key]:", " unknown-key "])
def test_a_code_may_be_pasted_as_it_was_printed(cli: Cli, pasted: str) -> None:
    assert cli("explain", pasted).out == cli("explain", "unknown-key").out


def test_without_a_topic_all_codes_by_stage(cli: Cli) -> None:
    lines = cli("explain").out.splitlines()
    for stage, codes in codes_by_stage().items():
        at = lines.index(stage)
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(codes)]] == [code.name for code in codes]


def test_a_field_with_its_type_default_and_meaning(cli: Cli) -> None:
    out = cli.out("explain", "cluster.node_groups.label")
    assert out.startswith("cluster.node_groups[].label: text\nrequired\n\nUnique, case-sensitive name")
    assert cli("explain", "cluster.node_groups[0].label").out == out
    assert "\n  python_interpreter_path: text" in cli("explain", "cluster.node_groups.env_configs").out


def test_recipes_that_differ_are_told_apart(cli: Cli) -> None:
    both = cli("explain", "actor.optim.lr").out
    assert "(recipe embodied, sft)" in both
    assert "(recipe agent, math)" in both
    one = cli("explain", "actor.optim.lr", "--recipe", "math").out
    assert "embodied" not in one
    assert one.startswith("actor.optim.lr: ")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("unknown-kee", ["did you mean `unknown-key`?"]),
        ("unknownkey", ["did you mean `unknown-key`?"]),
        # No code is like it: not `leading-zero`.
        ("learner", ["did you mean `runner`?"]),
        ("cluster.node_grups", ["did you mean `node_groups`?"]),
        ("acto", ["did you mean `actor`?"]),
        ("lr", ["`actor.optim.lr`"]),
        ("no-such-thing-at-all", ["`rlinf explain` lists them all"]),
        ("algorithm.off_policy", ["do: it is now `algorithm`"]),
        ("env.enable_offload", ["there is no `enable_offload` in `env`", "our environments use no accelerator"]),
        ("actor --recipe embodid", ["did you mean `embodied`?"]),
        ("--schema --recipe maths", ["did you mean `math`?"]),
    ],
)
def test_an_unknown_topic_is_2_and_gets_a_suggestion(cli: Cli, typed: str, said: list[str]) -> None:
    err = cli.refuses(2, "explain", *typed.split())
    assert [words for words in said if words not in err] == []
    assert "known keys" not in err or "." not in typed


def test_json(cli: Cli) -> None:
    listed = json.loads(cli("explain", "--json").out)
    assert listed["schema"] == "rlinf.explain/1"
    assert [code["code"] for code in listed["codes"]] == list(all_codes())
    code = json.loads(cli("explain", "unknown-key", "--json").out)
    assert code["code"]["name"] == "unknown-key"
    assert "«" not in json.dumps(code, ensure_ascii=False)
    (field,) = json.loads(cli("explain", "cluster.num_nodes", "--json").out)["fields"]
    assert (field["path"], field["required"]) == ("cluster.num_nodes", True)


def test_unknown_word_is_told_once_for_all_recipes(cli: Cli) -> None:
    err = cli.fails(2, "explain", "nope")
    assert "`nope` is neither a code nor a key at the top of a file" in err
    assert err.count("known keys") == err.count("`cluster`") == 1
    assert "`rlinf explain` lists the codes" in err
    near = cli("explain", "actr").err
    assert "did you mean `actor`?" in near
    assert "lists the codes" not in near


def test_one_recipe(cli: Cli) -> None:
    out = cli.out("explain", "--schema", "--recipe", "math")
    schema = jsonschema.Draft202012Validator(json.loads(out))
    config = {"recipe": "math", "cluster": {"num_nodes": 1}}
    assert schema.is_valid(config)
    assert not schema.is_valid(config | {"env": {}})


class Optimizer(BaseModel):
    """How weights move.

    More that nobody needs to know here.
    """

    lr: Annotated[Float, Field(gt=0, le=1)] = Field(default=1e-3, description="Learning rate.")
    kind: Literal["adam", "sgd"] = "adam"


class Toy(BaseModel):
    """A toy."""

    name: Text = Field(description="What it is called.")
    steps: Annotated[Int, Field(ge=1, multiple_of=2)] | None = None
    optimizer: Optimizer = Field(default_factory=Optimizer)
    tags: tuple[Text, ...] = ("a", "b")
    parts: dict[str, list[Optimizer]] = Field(default_factory=dict[str, list[Optimizer]])


def test_what_a_field_says() -> None:
    whole = describe(Toy)
    assert (whole.path, whole.description) == ("", "A toy.")
    assert [child.name for child in whole.children] == ["name", "steps", "optimizer", "tags", "parts"]
    name = describe(Toy, "name")
    assert (name.type, name.required, name.default, name.description) == ("text", True, None, "What it is called.")
    # A default is written as in a file, and a section without a description speaks through its model.
    defaults = {"tags": "[a, b]", "optimizer.lr": "0.001", "steps": None, "optimizer": None}
    assert {path: describe(Toy, path).default for path in defaults} == defaults
    assert describe(Toy, "optimizer").description == "How weights move."


def test_bounds_and_choices_are_told() -> None:
    assert describe(Toy, "optimizer.lr").type == "number, above 0, at most 1"
    assert describe(Toy, "optimizer.kind").type == "one of `adam`, `sgd`"
    # Completion gets nothing for a wrong path.
    assert fields_below(Toy, "zzz") == []
    assert [doc.name for doc in fields_below(Toy, "optimizer")] == ["lr", "kind"]


@pytest.mark.parametrize("path", ["parts.left", "parts.left[0]", "parts.left[]", 'parts."a.b"'])
def test_names_and_indexes_are_left_open(path: str) -> None:
    doc = describe(Toy, path)
    assert doc.path == "parts.NAME"
    assert doc.type == "list of sections"
    assert [child.path for child in doc.children] == ["parts.NAME[].lr", "parts.NAME[].kind"]


@pytest.mark.parametrize(
    ("path", "help"),
    [
        ("optimiser", "did you mean `optimizer`?"),
        ("lr", "there is `optimizer.lr`, `parts.NAME[].lr`"),
        ("name.lr", "there is `optimizer.lr`, `parts.NAME[].lr`"),
        ("name.zzz", "it has no fields"),
        ("zzz", "known keys: `name`, `steps`, `optimizer`, `tags`, `parts`"),
        ("a b", "names are separated by `.`"),
        ("[0]", None),
    ],
)
def test_wrong_path_says_what_was_meant(path: str, help: str | None) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        describe(Toy, path)
    assert caught.value.help == help


@pytest.mark.parametrize(
    ("path", "help"),
    [
        ("actor.optim.grad_clip", "it is `clip_grad` here"),
        ("runner.ckpt_path", "`resume_dir` names the checkpoint"),
        ("rollout.model_dir", "`actor.model.model_path`"),
        ("algorithm.off_policy", "it is now `algorithm`"),
    ],
)
def test_keys_of_others_are_explained(path: str, help: str) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        describe(find_recipe("embodied").config_model(), path)
    assert help in (caught.value.help or "")


def test_every_field_of_the_cluster_section_is_documented() -> None:
    pending = [describe(ClusterFile)]
    seen: set[str] = set()
    while pending:
        doc = pending.pop()
        assert doc.path not in seen
        seen.add(doc.path)
        assert doc.description or doc.name == "NAME", doc.path
        assert doc.type not in ("", "anything"), doc.path
        pending += [describe(ClusterFile, child.path) for child in doc.children]
    assert {"cluster.num_nodes", "cluster.node_groups[].env_configs[].env_vars"} <= seen
    assert "cluster.node_groups[].hardware.configs[].camera_serials" in seen
    assert "cluster.component_placement.NAME.placement" in seen


def test_losses_of_ones_own_are_among_the_kinds_that_have_a_key() -> None:
    text = describe(find_recipe("embodied").config_model(), "algorithm.options.gae_lambda").description
    assert text.endswith("Only with `loss_type`: `actor_critic`, `package.module:name`.")


CLUSTER = "cluster:\n  num_nodes: 18\n"
GROUP = CLUSTER + "  node_groups:\n    - label: 4090\n      node_ranks: 0\n"
FRANKA = CLUSTER + "  node_groups:\n    - label: arm\n      node_ranks: 0\n      hardware:\n        type: Franka\n"
EMBODIED = "recipe: embodied\n" + CLUSTER


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    models = {"agent": AgentConfig, "embodied": EmbodiedConfig, "math": MathConfig, "sft": SftConfig}
    return file_schema({**models, "serve": ServeConfig, "sft_chat": ChatConfig}, {"sft": find_recipe("sft").variants})


@pytest.fixture(scope="module")
def mistakes(schema: dict[str, Any]) -> Any:
    validator = Draft202012Validator(schema)

    def find(text: str) -> list[str]:
        return [error.message for error in validator.iter_errors(YAML(typ="safe", pure=True).load(text))]

    return find


def test_the_schema_is_one(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == DIALECT
    Draft202012Validator.check_schema(schema)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Draft202012Validator.check_schema(json_schema(MathConfig))
    assert json.loads(json.dumps(schema)) == schema
    silent = [
        f"{name}.{key}"
        for name, definition in schema["$defs"].items()
        if "." not in name  # a section, and not what a key holds
        for key, value in definition.get("properties", {}).items()
        if "description" not in value and "$ref" not in value
    ]
    assert silent == []


def test_check_jsonschema_accepts_every_shipped_file(schema: dict[str, Any], tmp_path: Path) -> None:
    path = text_file(tmp_path / "schema.json", json.dumps(schema))
    files = [str(file) for file in shipped_configs().values()]
    assert files
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--schemafile", str(path), *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text",
    [
        CLUSTER,
        CLUSTER + "runner: {anything: 1}\n",  # without a recipe nobody knows the other sections
        EMBODIED,
        GROUP,
        CLUSTER + "  component_placement: {a: ' 0 - 3 : 0 - 1 , 5', c: ['${env:A}', 'all:0-3'], d: 007}\n",
        CLUSTER + "  component_placement: {b: '${env:MAP:-0-3}', c: {placement: '0-${env:LAST}'}}\n",
        CLUSTER + "  node_groups: [{label: '${env:L}', node_ranks: '0-${cluster.num_nodes}'}]\n",
        GROUP + "      env_configs: [{node_ranks: '${env:R}', python_interpreter_path: '${env:VENV}/python'}]\n",
        *(
            CLUSTER + f"  node_groups: [{{label: a, node_ranks: {ranks}}}]\n"
            for ranks in ("3", "0-7", "'0-3,5'", "[0, 4-5]", "all")
        ),
        CLUSTER + "  component_placement: {'a,b': 0-3, env: 4, agent: [0, 2-3], b: {placement: all, node_group: 1}}\n",
        CLUSTER + "  component_placement: {a: {placement: 0, node_group: [4090, b]}}\n",
        GROUP + "      env_configs: [{node_ranks: 0, env_vars: [{A: 1}, {B: 2.50}, {C: true}, {D: text}]}]\n",
        GROUP + "      env_configs: [{node_ranks: 0, env_vars: {A: 1, B: text}, python_interpreter_path: null}]\n",
        GROUP + "      accelerators: {model: 4090, per_node: 8}\n",
        FRANKA + "        configs: [{node_rank: 0, robot_ip: 10.0.0.1, camera_serials: [322142001230]}]\n",
        CLUSTER + "  hosts: trainer[00-17]\n  ports: 30000-30100\n  ssh: {port: 2222, options: {ForwardAgent: true}}\n",
        "recipe: math\ncluster: {num_nodes: '${env:NODES}'}\nrunner: {max_steps: '${env:N:-5}', trace: '${env:T}'}\n",
        EMBODIED + "env: {train: {env_type: 'my.envs:Stack', options: {a: [1, {b: null}]}}}\n",
        EMBODIED
        + "algorithm: {adv_type: '${env:ADV}', options: {value_clip: null}}\n"
        + "runner: {max_steps: -1, task_type: embodied}\n",
        "extends: base.yaml\n",
        "extends: embodied/gymnasium-sac-laptop\nalgorithm: {update_to_data: 3, replay: {capacity: 1000}}\n",
        EMBODIED + "algorithm: {loss_type: sac, update_to_data: 3}\n",
        "extends: [a.yaml, b.yaml]\nrecipe: math\nactor: {optim: {lr: 1}}\n",
        "extends: base.yaml\ncluster: {component_placement: {env: {node_group: b}}}\nenv: {train: {seed: 3}}\n",
        "recipe: math\ncluster: {num_nodes: 1}\ndata: {train_data_paths: a.jsonl}\nrollout: {backend: vllm}\n",
        "recipe: math\ncluster: {num_nodes: 1}\ndata: {train_data_paths: [1.5, true], val_data_paths: 3}\n",
        CLUSTER + "  hosts: [10, 3]\n",
        EMBODIED + "runner: {max_steps: 10.0}\n",
        EMBODIED + "env: {enable_offload: false}\nrollout: {model_dir: /m, backend: huggingface}\n",
        EMBODIED + "algorithm: {kl_beta: 0.0, kl_penalty: low_var_kl}\nactor: {tokenizer: {tokenizer_model: /m}}\n",
    ],
)
def test_what_we_accept_it_accepts(mistakes: Any, text: str) -> None:
    assert mistakes(text) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}", "cluster"),
        ("recipe: embodied\n", "cluster"),
        ("recipe: embodyed\n" + CLUSTER, "embodyed"),
        ("cluster: {}\n", "num_nodes"),
        ("cluster: {num_nodes: 0}\n", "0 is"),
        ("cluster: {num_nodes: eight}\n", "eight"),
        ("cluster: {num_nodes: 1, nodes: 2}\n", "nodes"),
        (EMBODIED + "runer: {}\n", "runer"),
        (EMBODIED + "runner: {max_step: 3}\n", "max_step"),
        (EMBODIED + "runner: {max_steps: many}\n", "many"),
        (EMBODIED + "runner: {max_steps: 0}\n", "0"),
        (EMBODIED + "runner: {only_eval: yes}\n", "yes"),
        (EMBODIED + "runner: {seq_length: 3}\n", "seq_length"),  # that key is the math recipe's
        (EMBODIED + "algorithm: {gamma: 1.5}\n", "1.5"),
        (EMBODIED + "algorithm: {adv_type: gea}\n", "gea"),
        (EMBODIED + "extends: a.yaml\nalgorithm: {update_to_date: 3}\n", "update_to_date"),
        (EMBODIED + "algorithm: {loss_type: actor_critic, update_to_data: 3}\n", "update_to_data"),
        (EMBODIED + "reward: {}\n", "reward"),
        (EMBODIED + "env: {enable_offload: true}\n", "True"),
        (EMBODIED + "algorithm: {kl_beta: 0.1}\n", "0.1"),
        (EMBODIED.replace("embodied", "sft") + "algorithm: {gamma: 0.9}\n", "algorithm"),
        (CLUSTER + "  component_placement: {a: {node_group: b}}\n", "placement"),
        (CLUSTER + "  component_placement: {a: {placement: 0, on: b}}\n", "on"),
        (CLUSTER + "  node_groups: [{node_ranks: 0}]\n", "label"),
        (CLUSTER + "  node_groups: [{label: a, node_ranks: {}}]\n", "{}"),
        (GROUP + "      env_configs: [{node_ranks: 0, env_vars: [{A: 1, B: 2}]}]\n", "too many"),
        (GROUP + "      env_configs: [{node_ranks: 0, env_vars: [{A: null}]}]\n", "None"),
        (FRANKA.replace("Franka", "franka") + "        configs: []\n", "franka"),
        (FRANKA + "        configs: [{node_rank: 0}]\n", "not valid"),  # no robot_ip
        (FRANKA + "        configs: [{node_rank: 0, robot_ip: 10.0.0.1, robot_pi: 1}]\n", "robot_pi"),
        (CLUSTER + "  component_placement: {a: 0-6x}\n", "0-6x"),
        (CLUSTER + "  component_placement: {a: -1}\n", "-1"),
        (CLUSTER + "  component_placement: {a: 5000000000}\n", "5000000000"),
        (CLUSTER + "  component_placement: {a: {placement: 0, node_group: ''}}\n", "''"),
        (CLUSTER + "  component_placement: {a: {placement: '0:all'}}\n", "0:all"),
        (CLUSTER + "  component_placement: {a: [0, 1-]}\n", "1-"),
        (CLUSTER + "  node_groups: [{label: a, node_ranks: '7-'}]\n", "7-"),
        (CLUSTER + "  node_groups: [{label: a, node_ranks: '0:1'}]\n", "0:1"),
        (CLUSTER + "  node_groups: [{label: cluster, node_ranks: 0}]\n", "cluster"),
        (CLUSTER + "  node_groups: [{label: a b, node_ranks: 0}]\n", "a b"),
        (GROUP + "      env_configs: [{node_ranks: 0, python_interpreter_path: venv/bin/python}]\n", "venv/bin/python"),
        ("extends: base.yaml\nrunner: {max_step: 3}\n", "max_step"),
        ("extends: 3\n", "3"),
    ],
)
def test_what_is_a_mistake_it_refuses(mistakes: Any, text: str, what: str) -> None:
    diagnostics = mistakes(text)
    assert diagnostics
    assert what in " ".join(diagnostics)


def test_what_kinds_have_alike_is_described_once(schema: dict[str, Any]) -> None:
    kinds = [section for name, section in schema["$defs"].items() if name.endswith("TrainEnvironmentConfig")]
    intervention = {json.dumps(kind["properties"]["intervention"]) for kind in kinds}
    assert len(kinds) > 10
    (reference,) = intervention
    assert "$ref" in json.loads(reference)
    text = json.dumps(json_schema(EmbodiedConfig))
    assert text.count("Judge of episodes: source, options.") == 1
