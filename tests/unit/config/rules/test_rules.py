"""The rules between places of the `cluster` section."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.ranks import common, merge_ranges
from rlinf_core.config.reading import decode, read
from rlinf_core.config.sections.group_rules import Claim, contradictions, outside
from rlinf_core.config.tree import Composed
from rlinf_core.config.validating.validation import validate
from rlinf_core.hardware import robots as units
from rlinf_core.hardware.robots import RobotUnit
from rlinf_core.job.load import ClusterFile, check_cluster
from tests.unit.config.texts import Found, check, env, faults_of, groups

SEED = """
cluster:
  num_nodes: 18
  component_placement: {actor: {node_group: a800, placement: 0-63}}
  node_groups:
    - label: a800
      node_ranks: 0-7
      env_configs:
        - node_ranks: 0-7
          python_interpreter_path: /opt/venv/openpi/bin/python3
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth0"
    - label: 4090
      node_ranks: 8-15
      env_configs:
        - node_ranks: 8-15
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth1"
    - label: franka
      node_ranks: 16-17
      hardware:
        type: Franka
        configs:
          - {robot_ip: 10.10.10.1, node_rank: 16, camera_serials: ["322142001230", "322142001231"]}
          - {robot_ip: 10.10.10.2, node_rank: 17, camera_serials: ["322142001232", "322142001233"]}
"""


def ranks(written: str) -> str:
    return groups(f"label: a, node_ranks: {written}")


def arms(*units: str, label: str = "arms") -> str:
    configs = ", ".join(f"{{{unit}}}" for unit in units)
    return f"label: {label}, node_ranks: 0-3, hardware: {{type: Franka, configs: [{configs}]}}"


def unit(words: str) -> str:
    """A file with a sound arm, and another one."""
    return groups(arms("node_rank: 0, robot_ip: 10.0.0.1, camera_serials: [c0, c1]", f"node_rank: {words}"))


# Files, and of each finding the code, the line and the underlined text.
FINDINGS: list[tuple[str, Found]] = [
    (SEED, []),
    (SEED.replace("num_nodes: 18", "num_nodes: 0").replace("label: 4090", "label: a800"),
     [("bad-value", 3, "0"), ("duplicate-label", 13, "a800")]),
    (ranks('"0-18"'), [("node-rank-out-of-range", 4, "0-18")]),
    (ranks('"0-3,18"'), [("node-rank-out-of-range", 4, "18")]),
    (ranks('"20-30,  40"'), [("node-rank-out-of-range", 4, "20-30"), ("node-rank-out-of-range", 4, "40")]),
    (ranks("[0, 5-19]"), [("node-rank-out-of-range", 4, "5-19")]),
    (ranks('"1,0"'), [("node-ranks-order", 4, "0")]),
    (ranks('"0-3,3"'), [("node-ranks-order", 4, "3")]),
    (ranks("[2, 2]"), [("node-ranks-order", 4, "2")]),
    (ranks('"all"'), []),
    (ranks('"17"'), []),
    (ranks('"999999999"'), [("node-rank-out-of-range", 4, "999999999")]),
    # Labels are compared as written.
    (groups("label: A, node_ranks: 0", "label: a, node_ranks: 1", "label: Node, node_ranks: 2"), []),
    (groups("label: 4090, node_ranks: 0", 'label: "4090", node_ranks: 1'), [("duplicate-label", 5, '"4090"')]),
    (groups("label: 1e3, node_ranks: 0", "label: 1000, node_ranks: 1"), []),
    (env('node_ranks: "0-3", env_vars: [A: 1]', "node_ranks: 4-7, env_vars: [A: 2]"), []),
    (env("node_ranks: all, env_vars: [A: 1]"), []),
    (env("node_ranks: 40, env_vars: [A: 1]"), [("node-rank-out-of-range", 4, "40")]),
    (env("node_ranks: all, env_vars: [A: 1]", "node_ranks: 3, env_vars: [B: 1]"), [("env-config-overlap", 4, "3")]),
    (env("node_ranks: 0, env_vars: [A: 1]", "node_ranks: 1, env_vars: [A: 2]"), []),
    (env("node_ranks: 0, env_vars: [A: 1, B: 2, A: 1]"), [("duplicate-env-var", 4, "A")]),
    # Groups that share a node agree on its accelerators; without a model, any will do.
    *((groups("label: a, node_ranks: 0-1, accelerators: {per_node: 8}",
              "label: b, node_ranks: 0, accelerators: {model: A800, per_node: 8}",
              f"label: c, node_ranks: {rest}"), expected)
      for rest, expected in (
          ("0-1, accelerators: {per_node: 8}", []),
          ("1, accelerators: {model: H100, per_node: 8}", []),
          ("0, accelerators: {model: H100, per_node: 8}", [("accelerators-conflict", 6, "accelerators")]),
          ("1, accelerators: {per_node: 4}", [("accelerators-conflict", 6, "accelerators")]),
      )),
    # Two groups on a node may differ.
    (groups("label: a, node_ranks: 0-3, env_configs:"
            " [{node_ranks: 0-3, env_vars: [A: 1], python_interpreter_path: /a/python}]",
            "label: b, node_ranks: 3-5, env_configs:"
            " [{node_ranks: 3-5, env_vars: [A: 2], python_interpreter_path: /b/python}]"), []),
    (groups(arms("node_rank: 0, robot_ip: 10.0.0.1", "node_rank: 0, robot_ip: 10.0.0.2")), []),
    (unit("4, robot_ip: 10.0.0.9"), [("hardware-outside-group", 4, "4")]),
    (unit("18, robot_ip: 10.0.0.9"), [("node-rank-out-of-range", 4, "18")]),
    (unit("0, robot_ip: 10.0.0.1"), [("hardware-shared", 4, "10.0.0.1")]),
    (unit("0, robot_ip: 10.0.0.9, camera_serials: [c2, c1]"), [("hardware-shared", 4, "c1")]),
    (unit("0, robot_ip: 10.0.0.9, camera_serials: [c3, c3]"), [("hardware-shared", 4, "c3")]),
    (unit("0, robot_ip: 10.0.0.9, workspace: [[0, 0, 0], [1, 1]]"), [("bad-value", 4, "[1, 1]")]),
    # A variable, a device file or a loopback address is another one on each node; an address in two spellings is one.
    (groups("label: a, node_ranks: 0-1, hardware: {type: SO-101, configs:"
            " [{node_rank: 0, device: /dev/ttyACM0}, {node_rank: 1, device: /dev/ttyACM0}]}"), []),
    (groups(arms("node_rank: 0, robot_ip: 127.0.0.1", "node_rank: 1, robot_ip: 127.0.0.1",
                 "node_rank: 0, robot_ip: 127.0.0.1")), [("hardware-shared", 4, "127.0.0.1")]),
    (groups(arms("node_rank: 0, robot_ip: $ARM_IP", "node_rank: 1, robot_ip: $ARM_IP")), []),
    (groups(arms("node_rank: 0, robot_ip: $ARM_IP", "node_rank: 1, robot_ip: $ARM_IP",
                 "node_rank: 0, robot_ip: $ARM_IP")), [("hardware-shared", 4, "$ARM_IP")]),
    (groups(arms('node_rank: 0, robot_ip: "fe80::1"', 'node_rank: 1, robot_ip: "fe80:0::1"')),
     [("hardware-shared", 4, '"fe80:0::1"')]),
    (groups(arms("node_rank: 1, robot_ip: 10.0.0.1"),
            arms("node_rank: 1, robot_ip: 10.0.0.2", "node_rank: 2, robot_ip: 10.0.0.1", label="more")),
     [("hardware-in-two-groups", 5, "1"), ("hardware-shared", 5, "10.0.0.1")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FINDINGS)
def test_findings_of_a_file(text: str, expected: Found) -> None:
    assert faults_of(text) == expected


def test_off_by_one_is_guessed() -> None:
    (verdict,) = check(groups("label: a, node_ranks: 0-18"))
    assert verdict.help == "18 nodes have the ranks 0-17; did you mean `0-17`?"
    assert [str(span) for span, _ in verdict.related] == ["job.yaml:2:14"]


def test_env_config_outside_its_group_names_the_strangers() -> None:
    (diagnostic,) = check(env("node_ranks: 4-9, env_vars: [A: 1]"))
    assert (diagnostic.code, diagnostic.span.text) == ("env-config-outside-group", "4-9")
    assert diagnostic.message == "nodes 8-9 are not in group `a`"


def test_overlap_is_reported_at_the_later_entry() -> None:
    (diagnostic,) = check(env("node_ranks: 4-6, env_vars: [A: 1]", "node_ranks: 0-4, env_vars: [B: 1]"))
    assert (diagnostic.code, diagnostic.span.text, diagnostic.message) == (
        "env-config-overlap",
        "0-4",
        "node 4 has two `env_configs` in group `a`",
    )
    assert [span.text for span, _ in diagnostic.related] == ["4-6"]


def test_units_that_nothing_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_registered", {})

    @units.register_hardware("TestGripper")
    class _Gripper(RobotUnit):
        color: str = "red"

    text = groups(
        "label: g, node_ranks: 0-1, hardware: {type: TestGripper, configs: [{node_rank: 0}, {node_rank: 1},"
        " {node_rank: 0, color: blue}, {node_rank: 0}]}"
    )
    assert faults_of(text) == [("hardware-shared", 4, "{node_rank: 0}")]


# What is wrong in itself must not be judged against others.
@pytest.mark.parametrize(
    "text",
    [
        SEED.replace("num_nodes: 18", "num_nodes: many"),
        SEED.replace("  num_nodes: 18\n", ""),
        SEED.replace("node_ranks: 0-7", "node_ranks: x", 1),
        SEED.replace("      node_ranks: 16-17\n", ""),
        SEED.replace("label: 4090", "label: a b"),
        SEED.replace("node_rank: 17", "node_rank: x"),
        SEED.replace("        - node_ranks: 8-15", "        - node_ranks: x-15"),
    ],
    ids=["num_nodes", "no num_nodes", "ranks", "no ranks", "label", "node_rank", "env ranks"],
)
def test_one_mistake_is_one_finding(text: str) -> None:
    assert text != SEED
    assert len(faults_of(text)) == 1


ranges = st.builds(lambda start, size: range(start, start + size), st.integers(0, 30), st.integers(1, 10))


@given(st.lists(st.tuples(ranges, st.sampled_from("abc")), max_size=12))
def test_contradictions_are_found_exactly_where_there_are_some(items: list[tuple[range, str]]) -> None:
    claims = [Claim(nodes, value, index) for index, (nodes, value) in enumerate(items)]
    pairs = contradictions(claims)
    for later, earlier in pairs:
        assert common(later.nodes, earlier.nodes)
        assert later.value != earlier.value
        assert later.place > earlier.place

    def contradicted() -> Iterator[int]:
        for first, second in combinations(claims, 2):
            if common(first.nodes, second.nodes) and first.value != second.value:
                yield max(first, second, key=lambda claim: (claim.nodes.start, claim.place)).place

    told_of = {claim.place for pair in pairs for claim in pair}
    assert set(contradicted()) <= told_of


@given(ranges, st.lists(ranges, max_size=6))
def test_outside_is_the_first_run_of_missing_numbers(piece: range, others: list[range]) -> None:
    inside = merge_ranges(others)
    have = {number for other in others for number in other}
    assert sorted(have) == [number for item in inside for number in item]
    missing = [number for number in piece if number not in have]
    result = outside(piece, inside)
    if not missing:
        assert result is None
    else:
        assert result is not None
        assert result[0] == missing[0]
        assert set(result) <= set(missing)
        assert result.stop == piece.stop or result.stop in have


@pytest.mark.parametrize("same", [False, True], ids=["apart", "on one node"])
def test_thousands_of_groups_are_no_burden(same: bool) -> None:
    count = 2_000
    items = (
        f"label: g{index}, node_ranks: {0 if same else index}, env_configs: [{{node_ranks: {0 if same else index},"
        f" env_vars: [A: {index}]}}]"
        for index in range(count)
    )
    diagnostics = Diagnostics()
    source = decode("job.yaml", groups(*items, num_nodes=count).encode(), diagnostics)
    assert source is not None
    tree = read(source, diagnostics)
    assert tree is not None
    view = validate(ClusterFile, Composed(tree), diagnostics)
    assert view.model is not None
    start = time.process_time()
    check_cluster(view.model.cluster, view, diagnostics)
    assert time.process_time() - start < 2
    assert len(diagnostics) == 0


def test_ranks_counted_from_one_are_one_mistake() -> None:
    text = groups(
        "label: sim, node_ranks: 3-4, hardware: {type: Franka, configs: [{node_rank: 4, robot_ip: 10.0.0.1}]}",
        "label: train, node_ranks: 1-2, env_configs: [{node_ranks: 1, env_vars: {A: 1}}]",
        num_nodes=4,
    )
    (finding,) = check(text)
    assert (finding.code, finding.span.text) == ("node-rank-out-of-range", "1-2")
    assert finding.message == "ranks begin at 0: 4 nodes have the ranks 0-3, and the groups name 1-4"
    assert finding.help == "write each rank one lower, here `0-1`"
    (pieces,) = check(groups("label: a, node_ranks: [1, 2-3]", num_nodes=3))
    assert pieces.help == "write each rank one lower, here `0,1-2`"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gpus: 4", "write `accelerators: {per_node: 4}`"),
        ("num_gpus: 8", "write `accelerators: {per_node: 8}`"),
        ("gpus_per_node: 2", "write `accelerators: {per_node: 2}`"),
        ("conda_env: sim", "write `env_configs: [{node_ranks: all, python_interpreter_path: /opt/venv/bin/python}]`"),
        ("venv: /opt/v", "write `env_configs: [{node_ranks: all, python_interpreter_path: /opt/venv/bin/python}]`"),
        ("env_configs: [{node_ranks: 0, conda_env: sim}]", "did you mean `python_interpreter_path`?"),
    ],
)
def test_words_of_other_systems_in_a_group_name_its_own(key: str, hint: str) -> None:
    assert hint in [finding.help for finding in check(groups(f"label: a, node_ranks: 0, {key}", num_nodes=1))]


def test_words_of_other_systems_in_the_cluster_name_its_own() -> None:
    text = "cluster:\n  num_nodes: 1\n  conda_env: sim\n  gpus: 8\n"
    helps = [finding.help for finding in check(text)]
    assert helps == ["did you mean `python_interpreter_path`?", "`per_node` of `node_groups[].accelerators` sets it"]
