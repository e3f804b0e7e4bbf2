"""Mistakes in files: many at once, drawn ones, and how they are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rlinf_cli.codes import all_codes
from rlinf_cli.job.field_docs import fields_below
from rlinf_cli.job.findings import to_github, to_json
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigModel
from rlinf_core.config.diagnostics import Diagnostics, Severity, render_text
from rlinf_core.config.tree import Composed, Path, to_data
from rlinf_core.config.validating.model_fields import Validated, alternatives, model_of
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import Job
from rlinf_core.job.report import FindingPlace, Report
from tests.unit.config.texts import tree_of

# A comment at the end of a line names what is found there: the code and the text that is underlined.
TEXT = """\
recipe: embodied
cluster:
  num_nodes: 18
  component_placment: {}                   #! unknown-key: component_placment
  component_placement:
    actor:
      node_group: a800
      placement: 0-64                      #! placement-out-of-range: 0-64
    rollout:
      node_group: 4091                     #! unknown-node-group: 4091
      placement: 0-63
    env:
      node_group: franka
      placement: 0-1
    agent:                                 #! unused-component: agent
      node_group: node
      placement: 0-1:0-199,2-3:201-400     #! process-ranks-gap: 2-3:201-400
    "critic,actor":                        #! component-twice: actor  #! unused-component: critic
      node_group: node
      placement: 0-1:0-2                   #! placement-counts-dont-divide: 0-1:0-2
    judge: 5-2                             #! rank-syntax: 5-2
  node_groups:
    - label: a800
      node_ranks: 0-7
      accelerators: {per_node: 8}
      env_configs:
        - node_ranks: 0-5
          python_interpreter_path: venv/bin/python3    #! interpreter-path: venv/bin/python3
          env_vars:
            - GLOO_SOCKET_IFNAME: eth0
            - NCCL_DEBUG:                  #! env-var-syntax: NCCL_DEBUG
            - GLOO_SOCKET_IFNAME: eth1     #! duplicate-env-var: GLOO_SOCKET_IFNAME
        - node_ranks: 4-7                  #! env-config-overlap: 4-7
          env_vars: [RANK: 0]              #! env-var-of-process: RANK
    - label: 4090
      node_ranks: 8-18                     #! node-rank-out-of-range: 8-18
      accelerators: {per_node: many}       #! wrong-type: many
    - label: franka
      node_ranks: 16-17
      hardware:
        type: Franka
        configs:
          - node_rank: 15                  #! hardware-outside-group: 15
            robot_ip: 10.10.10.1
          - node_rank: 17
            robot_ip: 10.10.10.1           #! hardware-shared: 10.10.10.1
            camera_type: zet               #! bad-value: zet
          - node_rank: 14                  #! hardware-outside-group: 14
            robot_ip: 10.10.10             #! bad-value: 10.10.10
    - label: node                          #! reserved-label: node
      node_ranks: 3,1                      #! node-ranks-order: 1
  ssh: {port: 99999}                       #! bad-value: 99999
runner:
  max_steps: ${runner.max_step}            #! unknown-reference: ${runner.max_step}
  loger: {log_path: x}                     #! unknown-key: loger
actor:
  seed: [1]                                #! wrong-type: seed
  seed: 3                                  #! duplicate-key: seed
"""
OVERRIDES = ("actor.optim.lr=fast", "+runner.max_steps=3")


def test_every_mistake_is_found_at_its_place_and_nothing_else() -> None:
    expected = {
        (code.strip(), number, underlined.strip())
        for number, line in enumerate(TEXT.splitlines(), start=1)
        for code, _, underlined in (words.partition(":") for words in line.split("#!")[1:])
    }
    places: dict[str, set[tuple[str, int, str]]] = {}
    for item in load_with_lint("-", OVERRIDES, stdin=TEXT.encode(), environ={}).diagnostics:
        places.setdefault(item.span.source.name, set()).add((item.code, item.span.begin.line, item.span.text))
    assert places["<stdin>"] == expected
    assert ("wrong-type", 1, "fast") in places["<overrides>"]
    assert {line for _, line, _ in places["<overrides>"]} == {1, 2}


DRAWN_TEXT = """\
recipe: embodied
cluster:
  num_nodes: 18
  component_placement:
    actor: {node_group: a800, placement: 0-63}
    rollout: {node_group: "4090", placement: [0-31, 32-63]}
    env: {node_group: franka, placement: 0-1:0-3}
  head_address: 10.0.0.1
  ports: 20000-20999
  ssh: {user: me, port: 22, connect_timeout: 2.5, options: {ProxyJump: gate}}
  forward_env: [HF_TOKEN]
  node_groups:
    - label: a800
      node_ranks: 0-7
      hosts: "trainer[00-07]"
      accelerators: {model: A800, per_node: 8}
      env_configs: &env
        - node_ranks: 0-7
          python_interpreter_path: /opt/venv/openpi/bin/python3
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth0"
            - NCCL_DEBUG: ${env:LEVEL:-INFO}
    - {label: 4090, node_ranks: [8-11, 12, 13-15], accelerators: {per_node: 8}}
    - label: franka
      node_ranks: 16-17
      hardware:
        type: Franka
        configs:
          - {robot_ip: 10.10.10.1, node_rank: 16, camera_serials: ["322142001230", 322142001231]}
          - {robot_ip: 10.10.10.2, node_rank: 17, camera_type: zed, disable_validate: true}
runner: {max_steps: 3, save_interval: -1, logger: {log_path: "runs/${recipe}"}}
actor: {global_batch_size: 25600, micro_batch_size: null, optim: {lr: 3.0e-4}}
rollout: {pipeline_stage_num: 2}
env: {train: {total_num_envs: 512}}
algorithm: {adv_type: grpo, loss_type: actor, group_size: 8}
"""
TOKENS = re.findall(r"[ \t]+|\n|\w+|[^\w\s]", DRAWN_TEXT)
STRANGE = (
    *("", "\n", " ", "\t", ":", "-", ",", "[", "]", "{", "}", '"', "'", "#", "*env", "&x ", "!!str ", "<<", "---\n"),
    *("? ", "null", "true", "-1", "0", "1e999", ".nan", "9" * 30, "${", "${cluster}", "${cluster.num_nodes}"),
    *("${env:NOPE}", "\x00", "\u2028", "节点", "\U0001f600", "a,b", "0-", "5-2", "0-1:0-2", "cluster", "node", "all"),
    *("|", ">", "extends", "recipe"),
)

mutations = st.lists(
    st.tuples(
        st.sampled_from(["delete", "repeat", "replace", "insert", "swap"]),
        st.integers(0, len(TOKENS) - 1),
        st.integers(1, 12),
        st.sampled_from((*STRANGE, *sorted(set(TOKENS)))),
    ),
    min_size=1,
    max_size=8,
)


def mutated(changes: list[tuple[str, int, int, str]]) -> str:
    tokens = list(TOKENS)
    for kind, at, size, token in changes:
        at = min(at, len(tokens))
        if kind == "delete":
            del tokens[at : at + size]
        elif kind == "repeat":
            tokens[at:at] = tokens[at : at + size]
        elif kind == "replace":
            tokens[at : at + 1] = [token]
        elif kind == "insert":
            tokens.insert(at, token)
        else:
            tokens[at : at + 2] = reversed(tokens[at : at + 2])
    return "".join(tokens)


def check_findings(job: Job) -> None:
    """Every finding has an entry and a place, and can be printed in every form."""
    known = all_codes()
    for diagnostic in job.diagnostics:
        assert diagnostic.code in known
        assert diagnostic.code != "broken-recipe", diagnostic.message
        assert diagnostic.message
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(diagnostic.span.source.text)
        for line in render_text(diagnostic).split("\n"):
            assert line.isprintable() or "\u3000" in line
        assert "\n" not in to_github(diagnostic)
    json.loads(json.dumps(to_json(job.diagnostics)))
    if job.ok:
        assert job.cluster is not None
        assert job.topology is not None


def test_text_that_is_mutated_is_sound_to_begin_with() -> None:
    assert "".join(TOKENS) == DRAWN_TEXT
    job = load_with_lint("-", stdin=DRAWN_TEXT.encode(), environ={})
    assert job.ok, [(diagnostic.code, diagnostic.message) for diagnostic in job.diagnostics]


@given(mutations)
def test_mutated_file_never_raises(changes: list[tuple[str, int, int, str]]) -> None:
    text = mutated(changes).encode("utf-8", "surrogatepass")
    check_findings(load_with_lint("-", stdin=text, environ={"LEVEL": "WARN"}))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(STRANGE) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(set(TOKENS))), inner, max_size=3)
    ),
    max_leaves=8,
)
PATHS = """
    cluster cluster.num_nodes cluster.component_placement cluster.component_placement.actor cluster.ssh.options
    cluster.component_placement.env.placement cluster.node_groups cluster.node_groups[0] cluster.node_groups[2]
    cluster.node_groups[0].env_configs cluster.node_groups[0].env_configs[0] cluster.node_groups[1].node_ranks
    cluster.node_groups[0].env_configs[0].env_vars cluster.node_groups[2].hardware cluster.hosts cluster.ssh
    cluster.node_groups[2].hardware.configs cluster.node_groups[2].hardware.configs[0] cluster.node_groups[1].label
    cluster.node_groups[0].hosts runner runner.max_steps actor.optim env.train.total_num_envs recipe nope
"""


@given(st.lists(st.tuples(st.sampled_from(PATHS.split()), values), min_size=1, max_size=4))
def test_any_value_anywhere_never_raises(overrides: list[tuple[str, object]]) -> None:
    arguments = [f"{path}={json.dumps(value)}" for path, value in overrides]
    check_findings(load_with_lint("-", arguments, stdin=DRAWN_TEXT.encode(), environ={}))


@given(st.lists(st.text(max_size=30), max_size=3), st.lists(st.text(max_size=10), max_size=2))
def test_any_arguments_never_raise(overrides: list[str], assume: list[str]) -> None:
    check_findings(load_with_lint("-", overrides, assume=assume, stdin=DRAWN_TEXT.encode(), environ={}))


@given(st.binary(max_size=200))
def test_any_bytes_never_raise(data: bytes) -> None:
    check_findings(load_with_lint("-", stdin=data, environ={}))


def single_values(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Return the path of every value that a file of this model may hold outside lists and mappings of the user's
    keys.
    """
    for field in fields_below(model, path):
        if field.type == "section":
            yield from single_values(model, field.path)
        elif "[" not in field.path and "NAME" not in field.path:
            yield field.path


# Any of these once took minutes, or ended in an exception.
BEYOND_REASON = ("9" * 30, "-" + "9" * 400, "9e307", "9" * 400, "1e-320")


@pytest.mark.parametrize("recipe", ["embodied", pytest.param("math", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "number",
    ["9" * 17, *(pytest.param(number, marks=pytest.mark.nightly) for number in BEYOND_REASON)],
)
def test_a_number_beyond_reason_ends_in_findings_at_once(recipe: str, number: str) -> None:
    offered = find_recipe(recipe)
    for path in single_values(offered.config_model()):
        check_findings(load_with_lint(offered.default_config, [f"{path}={number}"], environ={}))


A: Path = ("section", "a")
B: Path = ("section", "b")


@pytest.mark.parametrize(
    ("pruned", "at", "about", "expected"),
    [
        (set(), A, [], True),
        ({B}, A, [], True),
        ({A}, A, [], False),
        ({B}, A, [B], False),
        ({("section",)}, A, [], False),
        ({("other",)}, A, [B], True),
        ({B}, FindingPlace(A, (A, B)), [], False),
        ({B}, FindingPlace(A, (A, ("section",))), [], True),
    ],
)
def test_what_a_finding_is_about_decides(
    pruned: set[Path], at: Path | FindingPlace, about: list[Path], expected: bool
) -> None:
    diagnostics = Diagnostics()
    tree = tree_of("section: {a: 1, b: 2}\nother: 3\n")
    view: Validated[object] = Validated(None, tree, frozenset(pruned), {}, Composed(tree))  # type: ignore[type-var]
    words = "`b` and `other` are named here"
    Report(view, diagnostics)(at, "toy-rule", words, about=about, severity=Severity.WARNING)
    assert bool(len(diagnostics)) is expected


class Pair(ConfigModel):
    """Two keys that may contradict each other."""

    a: int = 0
    b: int = 0


class Whole(ConfigModel):
    """A file with them."""

    section: Pair = Pair()
    pairs: tuple[Pair, ...] = ()


@pytest.mark.parametrize(
    ("written", "at", "underlined"),
    [
        ("section: {a: 1, b: 2}", "section.a section.b", "1"),
        ("section: {b: 2}", "section.a section.b", "2"),
        ("section: {}", "section.a section.b", "section"),
        ("pairs: [{a: 3}, {a: 4}]", "pairs.0.b pairs.1.a", "4"),
    ],
)
def test_a_conflict_blames_the_key_that_is_written(written: str, at: str, underlined: str) -> None:
    diagnostics, tree = Diagnostics(), tree_of(f"{written}\n")
    view: Validated[Any] = Validated(Whole.model_validate(to_data(tree)), tree, frozenset(), {}, Composed(tree))
    Report(view, diagnostics).conflict(at, "these two contradict each other")
    (finding,) = diagnostics
    assert (finding.code, finding.span.text) == ("conflicting-settings", underlined)


EMBODIED = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: {node_group: node,"
    " placement: 0}\n"
)
SECTIONS = ("runner", "actor", "rollout", "env", "algorithm")
GRPO = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=8")


@pytest.mark.parametrize("key", ["component_placment", "component_placement"])
def test_a_misspelt_section_is_one_mistake(key: str) -> None:
    text = EMBODIED.replace("component_placement", key).replace("num_nodes: 1", "num_nodes: 1\n  hosts: [a, b]")
    diagnostics = load_with_lint("-", stdin=text.encode(), environ={}).diagnostics
    others = [diagnostic.code for diagnostic in diagnostics if diagnostic.code != "unknown-key"]
    assert len(diagnostics) - len(others) == (key == "component_placment")
    assert others == ["hosts-count"]


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = [
            section for alternative in alternatives(field.annotation) if (section := model_of(alternative)) is not None
        ]
        at = f"{path}.{name}" if path else name
        if below:
            yield from (leaf for section in below for leaf in leaves(section, at))
        elif path:
            yield at


@pytest.mark.parametrize("base", [(), GRPO, ("algorithm.options.normalize_advantages=false", "runner.max_steps=-1")])
def test_one_wrong_value_is_one_finding(base: tuple[str, ...]) -> None:
    model = find_recipe("embodied").config_model()
    sections = {name: model_of(model.model_fields[name].annotation) for name in SECTIONS}
    # The kinds of a section share most of their keys.
    keys = dict.fromkeys(leaf for name, section in sections.items() for leaf in leaves(section or BaseModel, name))
    assert len(keys) > 60
    wrong: dict[str, list[str]] = {}
    for key in keys:
        overrides = (*(item for item in base if not item.startswith(f"{key}=")), f"{key}=[[]]")
        job = load_with_lint("-", overrides, stdin=EMBODIED.encode(), environ={})
        findings = [
            f"{diagnostic.code}: {diagnostic.message}"
            for diagnostic in job.diagnostics
            if diagnostic.severity is Severity.ERROR
        ]
        if len(findings) > 1:
            wrong[key] = findings
    assert wrong == {}
