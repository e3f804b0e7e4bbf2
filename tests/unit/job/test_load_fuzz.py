"""Whatever a file holds, loading it ends in findings that can be printed, never in an exception."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rlinf_cli.codes import all_codes
from rlinf_cli.job.field_docs import fields_below
from rlinf_cli.job.findings import to_github, to_json
from rlinf_cli.job.load import load_with_lint
from rlinf_core.config.render import render_text
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import Job

TEXT = """\
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
TOKENS = re.findall(r"[ \t]+|\n|\w+|[^\w\s]", TEXT)
STRANGE = (
    *(
        "",
        "\n",
        " ",
        "\t",
        ":",
        "-",
        ",",
        "[",
        "]",
        "{",
        "}",
        '"',
        "'",
        "#",
        "*env",
        "&x ",
        "!!str ",
        "<<",
        "---\n",
        "? ",
    ),
    *("null", "true", "-1", "0", "1e999", ".nan", "9" * 30, "${", "${cluster}", "${cluster.num_nodes}", "${env:NOPE}"),
    *("\x00", "\u2028", "节点", "\U0001f600", "a,b", "0-", "5-2", "0-1:0-2", "cluster", "node", "all", "|", ">"),
    *("extends", "recipe"),
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
    assert "".join(TOKENS) == TEXT
    job = load_with_lint("-", stdin=TEXT.encode(), environ={})
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
PATHS = [
    "cluster",
    "cluster.num_nodes",
    "cluster.component_placement",
    "cluster.component_placement.actor",
    "cluster.ssh.options",
    "cluster.component_placement.env.placement",
    "cluster.node_groups",
    "cluster.node_groups[0]",
    "cluster.node_groups[2]",
    "cluster.node_groups[0].env_configs",
    "cluster.node_groups[0].env_configs[0]",
    "cluster.node_groups[1].node_ranks",
    "cluster.node_groups[0].env_configs[0].env_vars",
    "cluster.node_groups[2].hardware",
    "cluster.hosts",
    "cluster.ssh",
    "cluster.node_groups[2].hardware.configs",
    "cluster.node_groups[2].hardware.configs[0]",
    "cluster.node_groups[1].label",
    "cluster.node_groups[0].hosts",
    "runner",
    "runner.max_steps",
    "actor.optim",
    "env.train.total_num_envs",
    "recipe",
    "nope",
]


@given(st.lists(st.tuples(st.sampled_from(PATHS), values), min_size=1, max_size=4))
def test_any_value_anywhere_never_raises(overrides: list[tuple[str, object]]) -> None:
    arguments = [f"{path}={json.dumps(value)}" for path, value in overrides]
    check_findings(load_with_lint("-", arguments, stdin=TEXT.encode(), environ={}))


@given(st.lists(st.text(max_size=30), max_size=3), st.lists(st.text(max_size=10), max_size=2))
def test_any_arguments_never_raise(overrides: list[str], assume: list[str]) -> None:
    check_findings(load_with_lint("-", overrides, assume=assume, stdin=TEXT.encode(), environ={}))


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
