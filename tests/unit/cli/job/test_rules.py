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
from rlinf_core.config.tree import SourceText, Span
from tests.unit.cli.typed import text_file
from tests.unit.config.texts import LINES, Found, check, env, faults_of, finding, groups
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
    # Robots that nothing is placed on are told of, too.
    arms = "{type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.1}]}"
    text = (
        "cluster:\n  num_nodes: 2\n  component_placement: {env: {node_group: LABEL, placement: 0}}\n"
        f"  node_groups: [{{label: arms, node_ranks: 1, hardware: {arms}}}]\n"
    )
    assert findings(text.replace("LABEL", "arms")) == []
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


def test_variables_of_a_group_that_places_nothing_are_reported() -> None:
    text = """\
cluster:
  num_nodes: 2
  component_placement: {env: {node_group: a, placement: 0-1}}
  node_groups:
    - {label: a, node_ranks: 0-1, accelerators: {per_node: 0}}
    - {label: b, node_ranks: 1, env_configs: [{node_ranks: 1, env_vars: {A: 1}}]}
"""
    (finding,) = findings(text)
    assert (finding.code, finding.span.text) == ("unused-interpreter", "env_vars")
    assert finding.message == "`b` places no process on node 1, for which it sets variables"


@pytest.mark.parametrize("others", ["env: '0-63:0-63'", "env: '0-63:0-31'", "env: 0-31\n    rollout: 32-63"])
def test_components_of_like_density_or_within_another_pass(others: str) -> None:
    text = EIGHT_NODES.format(map="0-63").replace("  node_groups:\n", f"    {others}\n  node_groups:\n")
    assert findings(text) == []


@pytest.mark.parametrize(
    ("placement", "meant"),
    [("[0, 63]", "0-63"), ("'0,63'", "0-63"), ("[8, 15]", "8-15"), ("[0, 1]", None), ("[0, 7, 63]", None)],
)
def test_two_ends_of_a_range_suggest_the_range(placement: str, meant: str | None) -> None:
    (idle,) = findings(EIGHT_NODES.format(map=placement))
    assert idle.code == "idle-accelerators"
    begins = f"`actor` is placed on two accelerators: did you mean `{meant}`? Otherwise " if meant else ""
    assert idle.help == f"{begins}place a component on them, or remove the nodes"
    # Resources counted from one are shifted.
    shifted = next(finding for finding in findings(EIGHT_NODES.format(map="1-64")) if finding.help)
    assert (shifted.help or "").endswith("; ranks begin at 0; did you mean 0-63?")


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


SHARED = groups("label: a, node_ranks: 0-1, hosts: [x, y]", "label: b, node_ranks: 1, hosts: y", num_nodes=2)
TWICE = groups("label: a, node_ranks: 0-1, hosts: [x]", "label: b, node_ranks: 1, hosts: [z]", num_nodes=3)
# Files, and of each finding the code, the line and the underlined text.
FAULTS: list[tuple[str, Found]] = [
    (groups("label: a, node_ranks: 0-1, hosts: [x, y]", num_nodes=2), []),
    (groups('label: a, node_ranks: 0-1, hosts: "x[0-2]"', num_nodes=2), [("hosts-count", 4, '"x[0-2]"')]),
    ("cluster:\n  num_nodes: 3\n  hosts: [x, y]\n", [("hosts-count", 3, "hosts")]),
    ("cluster:\n  num_nodes: 2\n  hosts: [x, y]\n", []),
    # Hosts given twice hide no mistake of a group.
    (TWICE.replace("  node_groups", "  hosts: [u, v, w]\n  node_groups"),
     [("hosts-twice", 3, "hosts"), ("hosts-count", 5, "hosts")]),
    # A host is one node, and groups that share a node share its host.
    (groups("label: a, node_ranks: 0, hosts: x", "label: b, node_ranks: 1, hosts: x", num_nodes=2),
     [("duplicate-host", 5, "x")]),
    (SHARED, []),
    (SHARED.replace("hosts: y", "hosts: z"), [("host-conflict", 5, "z")]),
    # An option of ssh has one value for a node.
    *((f"cluster:\n  num_nodes: 1\n  hosts: x\n  ssh: {{port: 22, options: {{{options}}}}}\n", expected)
      for options, expected in (
          ("Port: 2222", [("ssh-conflict", 4, "Port")]),
          ("ProxyJump: a, proxyjump: b", [("ssh-conflict", 4, "proxyjump")]),
          ("BatchMode: no", [("ssh-conflict", 4, "no")]),
          ("BatchMode: yes, ProxyJump: a", []),
      )),
    *((SHARED.replace("hosts: y", f"ssh: {ssh}").replace("[x, y]", "[x, y], ssh: {user: me}"), expected)
      for ssh, expected in (
          ("{user: you}", [("ssh-conflict", 5, "user")]),
          ("{options: {User: you}}", [("ssh-conflict", 5, "User")]),
          ("{user: me, port: 22}", []),
      )),
    (groups("label: a, node_ranks: 0, ssh: {user: me}", "label: b, node_ranks: 0, ssh: {}"), [(NO_EFFECT, 4, "ssh")]),
    ("cluster:\n  num_nodes: 1\n  hosts: []\n  ssh: {port: 22}\n", [(NO_EFFECT, 4, "ssh")]),
    # A head that nobody reaches.
    *((f"cluster:\n  num_nodes: 2\n  head_address: {address}\n", [("head-address-local", 3, address)])
      for address in ("127.0.0.1", "localhost", "127.8.8.8", "2001:db8::7")),
    ("cluster:\n  num_nodes: 1\n  head_address: localhost\n", []),
    # Variables as a plain map have places, too.
    (env("node_ranks: 0, env_vars: {A: 1, RANK: 2, HF_TOKEN: xyz}"),
     [("env-var-of-process", 4, "RANK"), ("secret-in-file", 4, "HF_TOKEN")]),
    ("cluster:\n  num_nodes: 1\n  forward_env: [HOME, RANK, HF_TOKEN, HOME]\n",
     [("env-var-of-process", 3, "RANK"), ("duplicate-env-var", 3, "HOME")]),
    # Values for a shell, and other signs.
    *((env(f"node_ranks: 0, env_vars: [X: '{value}']"), [("env-var-not-expanded", 4, f"'{value}'")])
      for value in ("/opt/lib:$LD_LIBRARY_PATH", "$HOME/x", "~/bin", "a:~/b")),
    *((env(f"node_ranks: 0, env_vars: [X: '{value}']"), []) for value in ("a$", "$1", "a~b", "100%", "x=${y}")),
    *((env(f"node_ranks: 0, python_interpreter_path: {path}"), [])
      for path in ("/opt/venv/bin/python3.11", "/usr/bin/python3.13t", "/opt/pypy3", "/opt/bin/with-modules", "/a.sh")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FAULTS)
def test_faults_of_a_file(text: str, expected: Found) -> None:
    assert faults_of(text) == expected


def test_a_host_that_is_two_nodes_names_both() -> None:
    diagnostics = check("cluster:\n  num_nodes: 6\n  hosts: ['a[0-1]', b, 'b,c', a1]\n")
    assert [(diagnostic.code, diagnostic.span.text, diagnostic.message) for diagnostic in diagnostics] == [
        ("duplicate-host", "'b,c'", "`b` is node 2 and node 3"),
        ("duplicate-host", "a1", "`a1` is node 1 and node 5"),
    ]
    assert [span.text for diagnostic in diagnostics for span, _ in diagnostic.related] == ["b", "'a[0-1]'"]
    (lacking,) = check(groups("label: a, node_ranks: [1, 3], hosts: [x, y]", num_nodes=6))
    assert lacking.message == "other nodes have a host, nodes 0,2,4-5 not"
    (shell,) = check(env("node_ranks: 0, env_vars: [X: '~/bin']"))
    assert shell.severity is Severity.WARNING


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
    (diagnostic,) = diagnosed(EMBODIED + GRPO + "  options: {normalize_advantages: false}\n")
    assert (diagnostic.code, diagnostic.severity, diagnostic.span.begin.line) == (NO_EFFECT, WARNING, 7)
    assert diagnostic.message == "`normalize_advantages` has no effect: `adv_type: grpo` compares samples within groups"
    assert diagnostic.help == "remove it; `adv_type: dr_grpo` does not divide by the standard deviation"
    assert [(str(place.begin), words) for place, words in diagnostic.related] == [("4:13", "`adv_type` is set at")]
    (diagnostic,) = diagnosed(EMBODIED + GRPO, ["algorithm.options.normalize_advantages=false"])
    assert (diagnostic.span.source.kind, diagnostic.span.text) == ("overrides", "false")
    # The configuration that a run keeps is no file of a user.
    job = load_with_lint(
        "-", stdin=(EMBODIED + GRPO + "  options: {normalize_advantages: false}\n").encode(), environ={}
    )
    assert job.tree is not None
    kept = resolved_text(job.tree, job.config)
    assert "update_epoch" in kept
    assert dead(kept) == []


JUDGE = "judge:\n  backend: vllm\n  engine_options:\n    seed: 3\n    swap_space: 4\n"
TRAIN = "env:\n  train: &train\n    auto_reset: false\n    seed: 3\n"
STRATEGY = "actor:\n  fsdp_config:\n    sharding_strategy: no_shard\n"
OWN = "actor: {model: {add_value_head: false}}\nalgorithm:\n  adv_type: reinforce_pp\n  loss_type: a.b:c\n"
OF_OWN = EMBODIED + OWN + "  options:\n    "
EVALUATION = "runner:\n  only_eval: true\n  max_steps: 3\nalgorithm:\n  gamma: 0.5\n  update_epoch: 2\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # A default that is written down is a note, as is what an evaluation alone does not read.
        (
            EMBODIED + GRPO + "  options: {normalize_advantages: true}\n",
            [("options: {normalize_advantages: true}", NOTE)],
        ),
        *(
            (OF_OWN + option, [(option, grave)])
            for option, grave in (("value_weight: 1.0", NOTE), ("value_weight: 2.0", WARNING))
        ),
        (EMBODIED + EVALUATION, [("max_steps: 3", NOTE), ("algorithm:", NOTE)]),
        # What says nothing is not told.
        *((MATH + section, []) for section in ("critic:\n", "critic: {}\n", "critic: {optim: {}}\n")),
        # A section is told once, and its only key by itself.
        (MATH + JUDGE, [("judge:", WARNING)]),
        (MATH + JUDGE.replace("  backend: vllm\n", ""), [("engine_options:", WARNING)]),
        (MATH + "judge:\n  engine_options:\n    seed: 3\n", [("seed: 3", WARNING)]),
        # A line that stands twice is read at one of its places.
        *((EMBODIED + TRAIN + f"  eval: {same}\n", []) for same in ("*train", "${env.train}")),
        (EMBODIED + TRAIN + "  eval:\n    <<: *train\n    seed: 4\n", []),
        # A shared file is read where several processes may; layers that compute with copies of the weights are FSDP's.
        (MATH + STRATEGY, [("sharding_strategy: no_shard", NOTE)]),
        (MATH + STRATEGY + "  model: {precision: bf16}\n", []),
        (MATH.replace("placement: 0", "placement: '0:0-1'") + STRATEGY, []),
    ],
)
def test_keys_without_effect(text: str, lines: list[tuple[str, Severity]]) -> None:
    assert dead(text) == lines


def test_what_a_reference_reads_is_read() -> None:
    referring = "env: {train: {auto_reset: '${algorithm.options.normalize_advantages}'}}\n"
    assert dead(EMBODIED + GRPO + "  options: {normalize_advantages: false}\n" + referring) == []
    # As a part of a section, too.
    files = "data:\n  cameras: {main: a}\n  columns: {success: '${data.cameras.main}'}\n"
    assert dead(EMBODIED + files) == [("columns: {success: '${data.cameras.main}'}", WARNING)]


def test_keys_of_a_shipped_configuration_are_not_the_users(tmp_path: Path) -> None:
    def unread(name: str, *overrides: str) -> list[str]:
        diagnostics = load_with_lint(name, overrides, environ={}).diagnostics
        return [diagnostic.span.text for diagnostic in diagnostics if diagnostic.code == NO_EFFECT]

    file = text_file(tmp_path / "job.yaml", "extends: math/sums-laptop\nactor: {model: {model_path: .}}\n")
    # The shipped file's warm start is for the model that this file replaces.
    assert unread(str(file)) == []
    assert unread("math/sums-laptop", "actor.model.model_path=.") == []
    file.write_text("extends: math/sums-laptop\nactor: {warm_start: {steps: 7}, model: {model_path: .}}\n")
    assert unread(str(file)) == ["7"]


def test_what_is_wrong_in_itself_is_told_once() -> None:
    assert [item.code for item in diagnosed(EMBODIED + GRPO + "  options: {normalize_advantages: [1]}\n")] == [
        "wrong-type"
    ]
    # Nothing follows from a value that is wrong.
    text = EMBODIED + "algorithm:\n  adv_type: grbo\n  options: {normalize_advantages: false}\n"
    assert [item.code for item in diagnosed(text)] == ["unknown-choice"]


def test_what_asks_for_something_that_is_not_there_is_an_error() -> None:
    (diagnostic,) = diagnosed(EMBODIED + "actor: {fsdp_config: {gradient_checkpointing: true}}\n")
    assert (diagnostic.code, diagnostic.severity, diagnostic.span.text) == ("not-available", Severity.ERROR, "true")
    (diagnostic,) = diagnosed(EMBODIED + "actor: {fsdp_config: {gradient_checkpointing: false}}\n")
    assert (diagnostic.code, diagnostic.severity) == (NO_EFFECT, NOTE)


def test_json_counts_from_one_and_ends_after_the_last_character() -> None:
    diagnostic = finding(LINES, "0-64", help="help")
    warning = finding(LINES, "8", severity=Severity.WARNING)
    report = to_json([diagnostic, warning])
    assert json.loads(json.dumps(report)) == report
    assert (report["schema"], report["ok"], report["errors"], report["warnings"]) == ("rlinf.validate/1", False, 1, 1)
    assert report["diagnostics"][0] == {
        "code": "placement-out-of-range", "severity": "error", "message": diagnostic.message,
        "file": "configs/hetero.yaml", "line": 9, "column": 18, "end_line": 9, "end_column": 22,
        "path": "cluster[0]", "help": "help", "related": [],
    }  # fmt: skip
    assert to_json([warning])["ok"] is True
    assert to_json([])["diagnostics"] == []


def test_github_annotation_is_escaped() -> None:
    diagnostic = finding("a: 5\n", "5", name="a,b:c%.yaml", message="100%\nsure: yes", help="do")
    assert to_github(diagnostic) == (
        "::error title=rlinf (placement-out-of-range),file=a%2Cb%3Ac%25.yaml,line=1,col=4,endLine=1,endColumn=5"
        "::a,b:c%25.yaml:1:4: 100%25%0Asure: yes%0Ado"
    )
    # Without a file it names none.
    span = Span(SourceText("<overrides>", "a=1", "overrides"), 0, 1)
    shown = to_github(Diagnostic("unknown-key", Severity.NOTE, "m", span))
    assert shown == "::notice title=rlinf (unknown-key)::<overrides>:1:1: m"
