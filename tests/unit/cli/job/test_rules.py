"""Findings that only commands report, and how findings are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.job.findings import to_github, to_json
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_cli.job.placement_rules import overlapping
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.ranks import merge_ranges
from rlinf_core.config.source import SourceText, Span
from tests.unit.cli.typed import text_file
from tests.unit.config.cluster_findings import check, env, faults_of, groups
from tests.unit.config.found import LINES, finding
from tests.unit.placement.found import EIGHT_NODES, findings


def test_idle_accelerators_are_counted_by_node() -> None:
    diagnostics = findings(EIGHT_NODES.format(map='"0-3,8-61"'))
    assert [diagnostic.code for diagnostic in diagnostics] == ["idle-accelerators"]
    assert diagnostics[0].message == ("6 accelerators of `a800` are used by no component: 4-7 on node 0, 6-7 on node 7")


def test_nodes_that_nothing_is_placed_on_are_told_of() -> None:
    text = (
        "cluster:\n  num_nodes: 5\n  component_placement: {env: {node_group: sim, placement: PLACES}}\n"
        "  node_groups:\n    - {label: sim, node_ranks: 1-3, accelerators: {per_node: 0}}\n"
        "    - {label: spare, node_ranks: 3-4, accelerators: {per_node: 0}}\n"
    )
    first, second = findings(text.replace("PLACES", "0"))
    assert (first.code, first.severity, first.span.text) == ("idle-nodes", Severity.WARNING, "sim")
    assert first.message == "no process is placed on nodes 2-3 of `sim`"
    # A node of two groups is told of once.
    assert second.message == "no process is placed on node 4 of `spare`"
    assert [finding.span.text for finding in findings(text.replace("PLACES", "0-2"))] == ["spare"]


def test_idle_nodes_in_no_group_are_reported() -> None:
    text = (
        "cluster:\n  num_nodes: 4\n  component_placement: {env: {node_group: GROUP, placement: 0}}\n"
        "  node_groups:\n    - {label: sim, node_ranks: 1, accelerators: {per_node: 0}}\n"
    )
    (idle,) = findings(text.replace("GROUP", "sim"))
    assert (idle.code, idle.span.text) == ("idle-nodes", "4")
    assert idle.message == "no process is placed on nodes 2-3 (in no node group)"
    # Accelerators that a component counts are unknown: they may be on any node.
    assert "idle-nodes" not in [finding.code for finding in findings(text.replace("GROUP", "cluster"))]


def test_robots_that_nothing_is_placed_on_are_told_of() -> None:
    arms = "{type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.1}]}"
    text = (
        "cluster:\n  num_nodes: 2\n  component_placement: {env: {node_group: LABEL, placement: 0}}\n"
        f"  node_groups: [{{label: arms, node_ranks: 1, hardware: {arms}}}]\n"
    )
    assert [diagnostic.code for diagnostic in findings(text.replace("LABEL", "arms"))] == []
    (idle,) = findings(text.replace("LABEL", "node"))
    assert (idle.code, idle.severity, idle.span.text) == ("idle-robots", Severity.WARNING, "arms")


def test_robots_and_nodes_do_not_make_accelerators_idle_twice() -> None:
    text = EIGHT_NODES.format(map="0-31").replace(
        "  node_groups:\n", "    agent: {node_group: node, placement: '0-7:0-799'}\n  node_groups:\n"
    )
    (note, idle) = sorted(findings(text), key=lambda item: item.severity is Severity.WARNING)
    assert idle.code == "idle-accelerators"
    assert (note.code, note.severity) == ("accelerators-not-reserved", Severity.NOTE)
    expected = "`agent` sees all accelerators of nodes 0-3, none reserved for it; `actor` holds some of them"
    assert note.message == expected


def test_env_configs_that_do_not_reach_a_component_are_noted() -> None:
    text = """\
cluster:
  num_nodes: 3
  component_placement:
    env: {node_group: node, placement: 0-2}
    actor: {node_group: a, placement: 0-1}
  node_groups:
    - {label: a, node_ranks: 0-1, ENV, env_configs: [{node_ranks: 0, env_vars: {A: 1}}]}
    - {label: b, node_ranks: 1-2, ENV, env_configs: [{node_ranks: 1-2, python_interpreter_path: /b}]}
""".replace("ENV", "accelerators: {per_node: 0}")
    results = {diagnostic.code: diagnostic for diagnostic in findings(text)}
    # Node 1 is in two groups: nobody would take the variables of either for those of the node. `actor` goes
    # through `a`: the file tells the two apart.
    messages = [diagnostic.message for diagnostic in findings(text) if diagnostic.code == "env-configs-unused"]
    assert messages == ["`env` is placed through `node`: the `env_configs` of `b` on node 2 do not apply"]
    assert results["env-configs-unused"].severity is Severity.NOTE
    assert (
        results["unused-interpreter"].message == "`b` places no process on nodes 1-2, for which it sets an interpreter"
    )


@pytest.mark.parametrize("other", ["0-63:0-63", "0-63:0-31"])
def test_components_of_like_density_are_not_suspicious(other: str) -> None:
    text = EIGHT_NODES.format(map="0-63").replace("  node_groups:\n", f"    env: '{other}'\n  node_groups:\n")
    assert findings(text) == []


def test_a_component_within_another_is_not_suspicious() -> None:
    text = EIGHT_NODES.format(map="0-63").replace(
        "  node_groups:\n", "    env: 0-31\n    rollout: 32-63\n  node_groups:\n"
    )
    assert findings(text) == []


ON_NUMBERS = "cluster:\n  num_nodes: 2\n  component_placement: {{actor: {map}}}\n  node_groups: [{group}]\n"


@pytest.mark.parametrize(
    ("map", "group", "code"),
    [
        ("0-1", "{label: a, node_ranks: 0}", "no-accelerator-found"),
        ("{node_group: a, placement: 0}", "{label: a, node_ranks: 0}", "no-accelerator-found"),
        ("0-3", "{label: a, node_ranks: 0}", "placement-out-of-range"),
        ("all", "{label: a, node_ranks: 0}", None),
        ("{node_group: node, placement: 0-1}", "{label: a, node_ranks: 0}", None),
        ("{node_group: a, placement: 0}", "{label: a, node_ranks: 0, ignore_hardware: true}", None),
        ("0-1", "{label: a, node_ranks: all, accelerators: {per_node: 0}}", None),
        ("{node_group: a, placement: 0}", "{label: a, node_ranks: 0, accelerators: {per_node: 0}}", None),
    ],
)
def test_unused_accelerators_are_reported_unless_declared(map: str, group: str, code: str | None) -> None:
    text = ON_NUMBERS.format(map=map, group=group)
    # Node 1 is idle where `a` alone is used.
    diagnostics = [diagnostic for diagnostic in findings(text, accelerators=0) if diagnostic.code != "idle-nodes"]
    assert [diagnostic.code for diagnostic in diagnostics] == ([code] if code else [])
    assert all("no accelerator found" in f"{diagnostic.message} {diagnostic.help}" for diagnostic in diagnostics)
    # Before the nodes were asked nobody can know.
    assert "no-accelerator-found" not in {diagnostic.code for diagnostic in findings(text)}


piece_lists = st.lists(st.builds(range, st.integers(0, 40), st.integers(0, 40)), max_size=6).map(merge_ranges)


@given(st.lists(piece_lists, max_size=5))
def test_overlapping(lists: list[tuple[range, ...]]) -> None:
    sets = [{number for piece in pieces for number in piece} for pieces in lists]
    expected = [(i, j) for j in range(len(sets)) for i in range(j) if sets[i] & sets[j]]
    assert overlapping(lists) == sorted(expected)


@pytest.mark.parametrize(
    ("placement", "meant"),
    [("[0, 63]", "0-63"), ("'0,63'", "0-63"), ("[8, 15]", "8-15"), ("[0, 1]", None), ("[0, 7, 63]", None)],
)
def test_two_ends_of_a_range_suggest_the_range(placement: str, meant: str | None) -> None:
    (idle,) = findings(EIGHT_NODES.format(map=placement))
    assert idle.code == "idle-accelerators"
    begins = f"`actor` is placed on two accelerators: did you mean `{meant}`? Otherwise " if meant else ""
    assert idle.help == f"{begins}place a component on them, or remove the nodes"


def test_resources_counted_from_one_are_shifted() -> None:
    finding = next(finding for finding in findings(EIGHT_NODES.format(map="1-64")) if finding.help)
    assert (finding.help or "").endswith("; ranks begin at 0; did you mean 0-63?")


def test_hosts_match_the_nodes() -> None:
    assert faults_of(groups("label: a, node_ranks: 0-1, hosts: [x, y]", num_nodes=2)) == []
    assert faults_of(groups('label: a, node_ranks: 0-1, hosts: "x[0-2]"', num_nodes=2)) == [
        ("hosts-count", 4, '"x[0-2]"')
    ]
    assert faults_of("cluster:\n  num_nodes: 3\n  hosts: [x, y]\n") == [("hosts-count", 3, "hosts")]
    assert faults_of("cluster:\n  num_nodes: 2\n  hosts: [x, y]\n") == []


def test_hosts_given_twice_hide_no_mistake_of_a_group() -> None:
    text = groups("label: a, node_ranks: 0-1, hosts: [x]", "label: b, node_ranks: 1, hosts: [z]", num_nodes=3)
    result = faults_of(text.replace("  node_groups", "  hosts: [u, v, w]\n  node_groups"))
    assert result == [("hosts-twice", 3, "hosts"), ("hosts-count", 5, "hosts")]


def test_a_host_is_one_node() -> None:
    diagnostics = check("cluster:\n  num_nodes: 6\n  hosts: ['a[0-1]', b, 'b,c', a1]\n")
    assert [(diagnostic.code, diagnostic.span.text, diagnostic.message) for diagnostic in diagnostics] == [
        ("duplicate-host", "'b,c'", "`b` is node 2 and node 3"),
        ("duplicate-host", "a1", "`a1` is node 1 and node 5"),
    ]
    assert [span.text for diagnostic in diagnostics for span, _ in diagnostic.related] == ["b", "'a[0-1]'"]
    text = groups("label: a, node_ranks: 0, hosts: x", "label: b, node_ranks: 1, hosts: x", num_nodes=2)
    assert faults_of(text) == [("duplicate-host", 5, "x")]


def test_groups_that_share_a_node_share_its_host() -> None:
    text = groups("label: a, node_ranks: 0-1, hosts: [x, y]", "label: b, node_ranks: 1, hosts: y", num_nodes=2)
    assert faults_of(text) == []
    assert faults_of(text.replace("hosts: y", "hosts: z")) == [("host-conflict", 5, "z")]


def test_nodes_without_host_are_named() -> None:
    verdict = check(groups("label: a, node_ranks: [1, 3], hosts: [x, y]", num_nodes=6))
    assert [result.message for result in verdict] == ["other nodes have a host, nodes 0,2,4-5 not"]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_head_that_nobody_reaches(address: str) -> None:
    text = f"cluster:\n  num_nodes: 2\n  head_address: {address}\n"
    assert faults_of(text) == [("head-address-local", 3, address)]
    assert faults_of(text.replace("2", "1", 1)) == []


def test_a_count_that_is_wrong_by_an_overlap_names_it() -> None:
    text = groups("label: train, node_ranks: 0-1, hosts: [x, y]", "label: sim, node_ranks: 1-3, hosts: [z, w]")
    (count,) = [finding for finding in check(text) if finding.code == "hosts-count"]
    assert (count.help or "").endswith("; node 1 of `node_ranks` overlaps with group `train`")
    (count,) = [finding for finding in check(text.replace("1-3", "0-3")) if finding.code == "hosts-count"]
    assert (count.help or "").endswith("; nodes 0-1 of `node_ranks` overlap with group `train`")
    (count,) = [finding for finding in check(text.replace("1-3", "2-4")) if finding.code == "hosts-count"]
    assert "overlap" not in (count.help or "")


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("root@sim1:2222", "root@sim1"),
        ("me@10.0.0.3:22", "me@10.0.0.3"),
        ("me@[2001:db8::7]:22", "me@2001:db8::7"),
        ("sim1:2222", "sim1"),
    ],
)
def test_a_host_loses_its_port_and_keeps_its_user(written: str, kept: str) -> None:
    (finding,) = check(f"cluster:\n  num_nodes: 1\n  hosts: ['{written}']\n")
    assert finding.help == f"remove it: `{kept}`; set the port of sshd with `port` of `ssh`"


def test_variables_as_a_plain_map_have_places_too() -> None:
    assert faults_of(env("node_ranks: 0, env_vars: {A: 1, RANK: 2, HF_TOKEN: xyz}")) == [
        ("env-var-of-process", 4, "RANK"),
        ("secret-in-file", 4, "HF_TOKEN"),
    ]


@pytest.mark.parametrize("value", ["/opt/lib:$LD_LIBRARY_PATH", "$HOME/x", "~/bin", "a:~/b"])
def test_value_for_a_shell_is_a_warning(value: str) -> None:
    (diagnostic,) = check(env(f"node_ranks: 0, env_vars: [X: '{value}']"))
    assert (diagnostic.code, diagnostic.severity) == ("env-var-not-expanded", Severity.WARNING)


@pytest.mark.parametrize("value", ["a$", "$1", "a~b", "100%", "x=${y}"])
def test_other_signs_are_left_alone(value: str) -> None:
    assert faults_of(env(f"node_ranks: 0, env_vars: [X: '{value}']")) == []


def test_forwarded_variables() -> None:
    text = "cluster:\n  num_nodes: 1\n  forward_env: [HOME, RANK, HF_TOKEN, HOME]\n"
    assert faults_of(text) == [("env-var-of-process", 3, "RANK"), ("duplicate-env-var", 3, "HOME")]


@pytest.mark.parametrize(
    ("path", "interpreter"),
    [
        ("/opt/venv/train", "/opt/venv/train/bin/python"),
        ("/opt/venvs/py311/", "/opt/venvs/py311/bin/python"),
        ("/home/me/.venv/bin", "/home/me/.venv/bin/python"),
        ("/opt/python-3.11/envs/sim", "/opt/python-3.11/envs/sim/bin/python"),
    ],
)
def test_a_folder_as_an_interpreter_is_a_warning(path: str, interpreter: str) -> None:
    texts = (
        env(f"node_ranks: 0, python_interpreter_path: {path}"),
        (f"cluster:\n  num_nodes: 1\n  python_interpreter_path: {path}\n"),
    )
    for text in texts:
        (finding,) = check(text)
        assert (finding.code, finding.severity, finding.span.text) == ("interpreter-path", Severity.WARNING, path)
        assert finding.help == f"a folder? Its interpreter is `{interpreter}`"


@pytest.mark.parametrize(
    "path", ["/opt/venv/bin/python3.11", "/usr/bin/python3.13t", "/opt/pypy3", "/opt/bin/with-modules", "/opt/run.sh"]
)
def test_programs_as_interpreters_are_left_alone(path: str) -> None:
    assert faults_of(env(f"node_ranks: 0, python_interpreter_path: {path}")) == []


CLUSTER = "cluster: {num_nodes: 1, component_placement: {'actor,rollout,env': {node_group: node, placement: 0}}}\n"
MATH = (
    "recipe: math\n"
    "cluster: {num_nodes: 1, component_placement: {'actor,rollout,reward': {node_group: node, placement: 0}}}\n"
)
EMBODIED = f"recipe: embodied\n{CLUSTER}"
GRPO = "algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: 8\n"
WARNING, NOTE = Severity.WARNING, Severity.NOTE


def diagnosed(text: str, overrides: Sequence[str] = ()) -> list[Diagnostic]:
    return list(load_with_lint("-", overrides, stdin=text.encode(), environ={}).diagnostics)


def dead(text: str, overrides: Sequence[str] = ()) -> list[tuple[str, Severity]]:
    """Return the lines of keys without effect, without blanks, and how grave each is."""
    diagnostics = [item for item in diagnosed(text, overrides) if item.code == NO_EFFECT]
    return [
        (diagnostic.span.source.line(diagnostic.span.begin.line).strip(), diagnostic.severity)
        for diagnostic in diagnostics
    ]


def test_a_finding_says_what_makes_it_so_and_where() -> None:
    (diagnostic,) = diagnosed(EMBODIED + GRPO + "  normalize_advantages: false\n")
    assert (diagnostic.code, diagnostic.severity, diagnostic.span.begin.line) == (NO_EFFECT, WARNING, 7)
    assert diagnostic.message == "`normalize_advantages` has no effect: `adv_type: grpo` compares samples within groups"
    assert diagnostic.help == "remove it; `adv_type: dr_grpo` does not divide by the standard deviation"
    assert [(str(place.begin), words) for place, words in diagnostic.related] == [("4:13", "`adv_type` is set at")]


def test_a_default_that_is_written_down_is_a_note() -> None:
    assert dead(EMBODIED + GRPO + "  normalize_advantages: true\n") == [("normalize_advantages: true", NOTE)]


@pytest.mark.parametrize("text", ["critic:\n", "critic: {}\n", "critic: {optim: {}}\n"])
def test_what_says_nothing_is_not_told(text: str) -> None:
    assert dead(MATH + text) == []


def test_a_section_is_told_once_and_its_only_key_by_itself() -> None:
    assert dead(MATH + "teacher:\n  hidden_dim: 64\n  warm_start:\n    steps: 3\n") == [("teacher:", WARNING)]
    assert dead(MATH + "teacher:\n  warm_start:\n    steps: 3\n    lr: 0.1\n") == [("warm_start:", WARNING)]
    assert dead(MATH + "teacher:\n  warm_start:\n    steps: 3\n") == [("steps: 3", WARNING)]


def test_an_override_is_told_where_it_was_typed() -> None:
    (diagnostic,) = diagnosed(EMBODIED + GRPO, ["algorithm.normalize_advantages=false"])
    assert (diagnostic.span.source.kind, diagnostic.span.text) == ("overrides", "false")


def test_what_a_reference_reads_is_read() -> None:
    referring = "env: {train: {auto_reset: '${algorithm.normalize_advantages}'}}\n"
    assert dead(EMBODIED + GRPO + "  normalize_advantages: false\n" + referring) == []
    # As a part of a section, too.
    files = "data:\n  cameras: {main: a}\n  state_keys: ['${data.cameras.main}']\n"
    assert dead(EMBODIED + files) == [("state_keys: ['${data.cameras.main}']", WARNING)]


def test_line_that_stands_twice_is_read_at_one_of_its_places() -> None:
    train = "env:\n  train: &train\n    mask_after_success: true\n    seed: 3\n"
    assert dead(EMBODIED + train + "  eval: *train\n") == []
    assert dead(EMBODIED + train + "  eval:\n    <<: *train\n    seed: 4\n") == []
    assert dead(EMBODIED + train + "  eval: ${env.train}\n") == []


def test_keys_of_a_shipped_configuration_are_not_the_users(tmp_path: Path) -> None:
    file = text_file(tmp_path / "job.yaml", "extends: math_laptop\nactor: {model: {model_path: .}}\n")
    # The shipped file's warm start is for the model that this file replaces.
    codes = [diagnostic.code for diagnostic in load_with_lint(str(file), environ={}).diagnostics]
    assert NO_EFFECT not in codes
    codes = [
        diagnostic.code
        for diagnostic in load_with_lint("math_laptop", ["actor.model.model_path=."], environ={}).diagnostics
    ]
    assert NO_EFFECT not in codes
    file.write_text("extends: math_laptop\nactor: {warm_start: {steps: 7}, model: {model_path: .}}\n")
    diagnostics = [
        diagnostic for diagnostic in load_with_lint(str(file), environ={}).diagnostics if diagnostic.code == NO_EFFECT
    ]
    assert [diagnostic.span.text for diagnostic in diagnostics] == ["7"]


def test_the_configuration_that_a_run_keeps_is_no_file_of_a_user() -> None:
    job = load_with_lint("-", stdin=(EMBODIED + GRPO + "  normalize_advantages: false\n").encode(), environ={})
    assert job.tree is not None
    kept = resolved_text(job.tree, job.config)
    assert "filter_rewards" in kept
    assert dead(kept) == []


def test_what_is_wrong_in_itself_is_told_once() -> None:
    assert [item.code for item in diagnosed(EMBODIED + GRPO + "  normalize_advantages: [1]\n")] == ["wrong-type"]
    # Nothing follows from a value that is wrong.
    text = EMBODIED + "algorithm:\n  adv_type: grbo\n  normalize_advantages: false\n"
    assert [item.code for item in diagnosed(text)] == ["unknown-choice"]


def test_what_asks_for_something_that_is_not_there_is_an_error() -> None:
    (diagnostic,) = diagnosed(EMBODIED + "actor: {fsdp_config: {gradient_checkpointing: true}}\n")
    assert (diagnostic.code, diagnostic.severity, diagnostic.span.text) == ("not-available", Severity.ERROR, "true")
    (diagnostic,) = diagnosed(EMBODIED + "actor: {fsdp_config: {gradient_checkpointing: false}}\n")
    assert (diagnostic.code, diagnostic.severity) == (NO_EFFECT, NOTE)


def test_an_evaluation_alone_is_a_note() -> None:
    result = dead(
        EMBODIED + "runner:\n  only_eval: true\n  max_steps: 3\nalgorithm:\n  gamma: 0.5\n  update_epoch: 2\n"
    )
    assert result == [("max_steps: 3", NOTE), ("algorithm:", NOTE)]


def test_shared_file_is_read_where_several_processes_may() -> None:
    strategy = "actor:\n  fsdp_config:\n    sharding_strategy: no_shard\n"
    assert dead(MATH + strategy) == [("sharding_strategy: no_shard", NOTE)]
    # Layers that compute with copies of the weights are FSDP's, of however many ranks.
    assert dead(MATH + strategy + "  model: {precision: bf16}\n") == []
    assert dead(MATH.replace("placement: 0", "placement: '0:0-1'") + strategy) == []


def test_json_counts_from_one_and_ends_after_the_last_character() -> None:
    diagnostic = finding(LINES, "0-64", help="help")
    report = to_json([diagnostic, finding(LINES, "8", severity=Severity.WARNING)])
    assert json.loads(json.dumps(report)) == report
    assert (report["schema"], report["ok"], report["errors"], report["warnings"]) == ("rlinf.validate/1", False, 1, 1)
    assert report["diagnostics"][0] == {
        "code": "placement-out-of-range",
        "severity": "error",
        "message": diagnostic.message,
        "file": "configs/hetero.yaml",
        "line": 9,
        "column": 18,
        "end_line": 9,
        "end_column": 22,
        "path": "cluster[0]",
        "help": "help",
        "related": [],
    }


def test_json_is_ok_with_warnings_only() -> None:
    assert to_json([finding(LINES, "8", severity=Severity.WARNING)])["ok"] is True
    assert to_json([])["diagnostics"] == []


def test_github_annotation_is_escaped() -> None:
    diagnostic = finding("a: 5\n", "5", name="a,b:c%.yaml", message="100%\nsure: yes", help="do")
    assert to_github(diagnostic) == (
        "::error title=rlinf (placement-out-of-range),file=a%2Cb%3Ac%25.yaml,line=1,col=4,endLine=1,endColumn=5"
        "::a,b:c%25.yaml:1:4: 100%25%0Asure: yes%0Ado"
    )


def test_github_annotation_without_a_file_names_none() -> None:
    span = Span(SourceText("<overrides>", "a=1", "overrides"), 0, 1)
    shown = to_github(Diagnostic("unknown-key", Severity.NOTE, "m", span))
    assert shown == "::notice title=rlinf (unknown-key)::<overrides>:1:1: m"
