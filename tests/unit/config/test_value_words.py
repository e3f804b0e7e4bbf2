"""Values that are near what is wanted: they are read losslessly, or the message says what to write."""

from __future__ import annotations

import math

import pytest

from rlinf_cli.job.load import load_with_lint
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.machines.hosts import HostSyntaxError, expand_hosts
from rlinf_core.job.load import Job

GROUPED = "cluster:\n  num_nodes: 2\n  node_groups:\n    - {label: a, node_ranks: 0, "
LAPTOP = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n"
    "  component_placement: {'actor,rollout,env': {node_group: node, placement: 0}}\n"
)


def is_note(finding: Diagnostic) -> bool:
    return finding.severity is Severity.NOTE


def load(text: str) -> Job:
    return load_with_lint("-", stdin=text.encode(), environ={})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("[2001:db8::7]", ("2001:db8::7",)),
        ("me@[2001:db8::7]", ("me@2001:db8::7",)),
        ("[::1],gpu[1-2]", ("::1", "gpu1", "gpu2")),
        ("[fe80::1%eth0]", ("fe80::1%eth0",)),
        ("2001:db8::[1-2]", ("2001:db8::1", "2001:db8::2")),
    ],
)
def test_brackets_around_an_ipv6_address_are_taken_off(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


def test_port_behind_brackets_is_named() -> None:
    with pytest.raises(HostSyntaxError, match="has a port") as caught:
        expand_hosts("gpu1,[2001:db8::7]:22")
    assert "remove it: `2001:db8::7`" in (caught.value.help or "")


def test_head_address_may_have_brackets() -> None:
    job = load("cluster: {num_nodes: 1, head_address: '[2001:db8::7]'}\n")
    assert job.cluster is not None
    assert job.cluster.head_address == "2001:db8::7"


@pytest.mark.parametrize(
    ("group", "place", "help"),
    [
        ("accelerators: {gpus: 8}", "gpus", "did you mean `per_node`?"),
        ("accelerators: {num_gpus: 8, model: A800}", "num_gpus", "did you mean `per_node`?"),
        ("accelerators: 8", "8", "write `{per_node: 8}`"),
        ("accelerators: '4'", "'4'", "write `{per_node: 4}`"),
        ("memory_gib: 80GB", "80GB", "write the number alone: `80`"),
        ("memory_gib: 1.5 TiB", "1.5 TiB", "write the number alone: `1.5`"),
        ("memory_gib: '64,80'", "'64,80'", "write one of them; `rlinf train` trains with each"),
        ("memory_gib: '1,000'", "'1,000'", "write `1000`"),
        ("ssh: {key: ~/.ssh/id}", "key", "did you mean `identity_file`?"),
        ("ssh: {timeout: 3}", "timeout", "did you mean `connect_timeout`?"),
        ("ssh: {connect_timeout: 10s}", "10s", "write the number alone: `10`"),
        ("env_configs: [{node_ranks: 0, env_vars: [{FOO-BAR: 1}]}]", "FOO-BAR", "did you mean `FOO_BAR`?"),
        ("env_configs: [{node_ranks: 0, env_vars: {1A: 1}}]", "1A", "write it as in `NCCL_DEBUG`"),
        (
            "hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: arm1.lab}]}",
            "arm1.lab",
            "give the address that `getent hosts arm1.lab` shows",
        ),
    ],
)
def test_each_slip_is_one_finding_with_what_to_write(group: str, place: str, help: str) -> None:
    (diagnostic,) = load(f"{GROUPED}{group}}}\n").diagnostics
    assert (diagnostic.span.text, diagnostic.help) == (place, help)


def test_host_with_a_port_is_one_finding() -> None:
    text = f"{GROUPED}hosts: [gpu0]}}\n    - {{label: b, node_ranks: 1, hosts: ['gpu1:2222']}}\n"
    assert [diagnostic.code for diagnostic in load(text).diagnostics] == ["host-syntax"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("clip_grad", ".inf", "expected a finite number, found infinity"),
        ("clip_grad", "-.inf", "must be at least 0, found `-.inf`"),
        ("lr", ".nan", "`.nan`"),
        ("lr", "1e999", "must be a number below 1.8e308"),
        ("lr", "1" + "0" * 400, "must be a number below 1.8e308"),
        ("lr", "1" * 5000, "expected a number, found text"),
        ("lr_warmup_steps", "1" * 400, "at most 18 digits"),
        ("lr_warmup_steps", ".inf", "found infinity"),
        ("lr_warmup_steps", "1.5", "expected an integer"),
    ],
)
def test_numbers_beyond_numbers_are_named(key: str, value: str, words: str) -> None:
    (diagnostics,) = load(f"{LAPTOP}actor: {{optim: {{{key}: {value}}}}}\n").diagnostics
    assert words in diagnostics.message


def test_infinity_is_answered_with_the_value_for_none() -> None:
    (diagnostics,) = load(LAPTOP + "actor: {optim: {clip_grad: .inf}}\n").diagnostics
    assert diagnostics.help == "write 0 for none (no clipping)"


@pytest.mark.parametrize(("text", "steps"), [("1e3", 1000), ("10.0", 10), ("2E+2", 200)])
def test_float_that_is_an_integer_is_one(text: str, steps: int) -> None:
    job = load(f"{LAPTOP}runner: {{max_steps: {text}}}\n")
    assert job.config is not None
    assert job.config.runner.max_steps == steps  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "section",
    ["actor: {model: {model_type: TARGET}}", "env: {train: {env_type: TARGET}}"],
)
@pytest.mark.parametrize("target", ["os:path", "json.decoder:JSONDecoder"])
def test_standard_library_holds_nothing_of_a_user(section: str, target: str) -> None:
    diagnostics = [
        diagnostic
        for diagnostic in load(LAPTOP + section.replace("TARGET", target)).diagnostics
        if not is_note(diagnostic)
    ]
    assert [(diagnostic.code, "standard library" in diagnostic.message) for diagnostic in diagnostics] == [
        ("unknown-choice", True)
    ]


def test_infinity_where_it_is_allowed_stays() -> None:
    from pydantic import TypeAdapter

    from rlinf_core.scalars import Float, YamlFloat

    assert TypeAdapter(Float).validate_python(YamlFloat(math.inf, ".inf")) == math.inf
