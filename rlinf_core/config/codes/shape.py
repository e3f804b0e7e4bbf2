"""Codes of the stage `shape`: every value by itself, its type and its syntax."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity


def _error(name: str, title: str, meaning: str, wrong: str, right: str) -> Code:
    return Code(name, Severity.ERROR, title, meaning, Example(wrong), Example(right))


_KEYS = (
    _error(
        "unknown-key",
        "the key is not known here",
        "Every section knows its keys, so that a mistyped one is not silently ignored. The finding names the nearest "
        "known key that the file does not give yet, or says where a key of this name belongs. `rlinf explain "
        "cluster.node_groups` lists what may stand in a section. Without `recipe` only `cluster` is checked in this "
        "way.",
        "cluster:\n  num_nodes: 1\n  «node_group»: []\n",
        "cluster:\n  num_nodes: 1\n  node_groups: []\n",
    ),
    _error(
        "missing-key",
        "a required key is missing",
        "The key has no default. The finding is at the section, or the first line of the list item, that should hold "
        "it. When the same section holds an unknown key of a similar name, only that one is reported.",
        "cluster:\n  num_nodes: 2\n  node_groups:\n    - «label: a800»\n",
        "cluster:\n  num_nodes: 2\n  node_groups:\n    - label: a800\n      node_ranks: 0-1\n",
    ),
)

_VALUES = (
    _error(
        "wrong-type",
        "the value is of another kind than the key wants",
        "A number is not text, a list is not a single value, and `yes` is text in YAML 1.2: the booleans are `true` "
        "and `false`. A key with nothing behind it holds null, which is no value either.",
        "cluster:\n  num_nodes: «eight»\n",
        "cluster:\n  num_nodes: 8\n",
    ),
    _error(
        "bad-value",
        "the value is of the right kind but cannot be used",
        "It is out of bounds, not one of the choices, or not of the form that the key wants. The message says what "
        "the key takes and what it found.",
        "cluster:\n  num_nodes: «0»\n",
        "cluster:\n  num_nodes: 1\n",
    ),
    Code(
        "leading-zero",
        Severity.WARNING,
        "an integer is written with leading zeros",
        "YAML 1.2, which is read here, takes `010` for ten. YAML 1.1 loaders, PyYAML and OmegaConf among them, take it "
        "for octal, which is eight. Without the zeros all agree. Text keeps its zeros: labels, serial numbers and "
        "values of environment variables are used as written.",
        Example("cluster:\n  num_nodes: «010»\n"),
        Example("cluster:\n  num_nodes: 10\n"),
    ),
    _error(
        "rank-syntax",
        "the text is not a rank expression",
        "Node ranks and resource ranks are written `3`, `0-7` (both ends included), `0-3,5`, as a list of such, or "
        "`all`. In `component_placement` each part may name its processes behind a colon: `0-1:0-199`. The caret is "
        "under the piece that cannot be read.",
        "cluster:\n  num_nodes: 8\n  node_groups:\n    - label: a800\n      node_ranks: 0-3,«5..7»\n",
        "cluster:\n  num_nodes: 8\n  node_groups:\n    - label: a800\n      node_ranks: 0-3,5-7\n",
    ),
    _error(
        "name-syntax",
        "a name holds what a name cannot hold",
        "Labels and component names are joined with `,` and stand before `:` elsewhere, so they can hold neither, nor "
        "white space. An empty name is none.",
        'cluster:\n  num_nodes: 1\n  node_groups:\n    - label: "a800«:»big"\n      node_ranks: 0\n',
        'cluster:\n  num_nodes: 1\n  node_groups:\n    - label: "a800-big"\n      node_ranks: 0\n',
    ),
    _error(
        "host-syntax",
        "the text is not a host or a list of hosts",
        "A host is a name, an address, or `user@host`, as ssh takes it. `trainer[00-07]` stands for eight of them, "
        "and keeps leading zeros; several are joined by commas or written as a list.",
        "cluster:\n  num_nodes: 2\n  hosts: trainer«[0-1»\n",
        "cluster:\n  num_nodes: 2\n  hosts: trainer[0-1]\n",
    ),
    _error(
        "interpreter-path",
        "the interpreter is not an absolute path",
        "`python_interpreter_path` is used on the nodes, where neither this machine's working directory nor its PATH "
        "mean anything. That the file exists there is checked on the node itself, before Ray starts.",
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: a\n      node_ranks: 0\n      env_configs:\n"
        "        - node_ranks: 0\n          python_interpreter_path: «venv/bin/python3»\n",
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: a\n      node_ranks: 0\n      env_configs:\n"
        "        - node_ranks: 0\n          python_interpreter_path: /opt/venv/bin/python3\n",
    ),
    _error(
        "env-var-syntax",
        "this is not an environment variable with a value",
        "`env_vars` is a list of one-key maps, `- NAME: value`; a plain map is read too. A value is one scalar, taken "
        'as it is written; null and nested values are errors. Write `""` for an empty value.',
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: a\n      node_ranks: 0\n      env_configs:\n"
        "        - node_ranks: 0\n          env_vars:\n            - NCCL_DEBUG: «null»\n",
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: a\n      node_ranks: 0\n      env_configs:\n"
        "        - node_ranks: 0\n          env_vars:\n            - NCCL_DEBUG: INFO\n",
    ),
    _error(
        "unknown-hardware-type",
        "no hardware type of this name is registered",
        "`hardware.type` is case sensitive. `Franka` comes with rlinf; a package of your own adds a type with "
        "`register_hardware` and an entry point of the group `rlinf.hardware`.",
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: arms\n      node_ranks: 0\n      hardware:\n"
        "        type: «franka»\n        configs: [{node_rank: 0, robot_ip: 10.0.0.1}]\n",
        "cluster:\n  num_nodes: 1\n  node_groups:\n    - label: arms\n      node_ranks: 0\n      hardware:\n"
        "        type: Franka\n        configs: [{node_rank: 0, robot_ip: 10.0.0.1}]\n",
    ),
)

CODES: tuple[Code, ...] = (*_KEYS, *_VALUES)
