"""One run tells every mistake of a file, each at its place."""

from __future__ import annotations

import pytest

from rlinf_cli.job.load import load_with_lint

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
EXPECTED_OF_OVERRIDES = {("wrong-type", 1, "fast")}


def expected() -> set[tuple[str, int, str]]:
    result: set[tuple[str, int, str]] = set()
    for number, line in enumerate(TEXT.splitlines(), start=1):
        for words in line.split("#!")[1:]:
            code, _, text = words.partition(":")
            result.add((code.strip(), number, text.strip()))
    return result


@pytest.fixture(scope="module")
def mistakes() -> dict[str, set[tuple[str, int, str]]]:
    job = load_with_lint("-", OVERRIDES, stdin=TEXT.encode(), environ={})
    by_source: dict[str, set[tuple[str, int, str]]] = {}
    for diagnostic in job.diagnostics:
        place = (diagnostic.code, diagnostic.span.begin.line, diagnostic.span.text)
        by_source.setdefault(diagnostic.span.source.name, set()).add(place)
    return by_source


def test_there_are_at_least_twenty_different_mistakes() -> None:
    assert len({code for code, _, _ in expected()}) >= 20


def test_every_mistake_is_found_at_its_place(mistakes: dict[str, set[tuple[str, int, str]]]) -> None:
    assert expected() - mistakes["<stdin>"] == set()


def test_nothing_else_is_found(mistakes: dict[str, set[tuple[str, int, str]]]) -> None:
    assert mistakes["<stdin>"] - expected() == set()


def test_mistakes_of_the_command_line_are_found_in_the_same_run(mistakes: dict[str, set[tuple[str, int, str]]]) -> None:
    assert mistakes["<overrides>"] >= EXPECTED_OF_OVERRIDES
    assert {line for _, line, _ in mistakes["<overrides>"]} == {1, 2}
