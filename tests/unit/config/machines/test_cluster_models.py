"""The models of the cluster section: what each value may be, and where in it a mistake stands."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlinf_core.config.ranks import (
    MAX_RANK,
    NodeRanks,
    RankMap,
    RankMapPart,
    format_range,
    format_ranks,
    intersect,
    merge_ranges,
    parse_rank_map,
    parse_ranks,
    subtract,
)
from rlinf_core.config.sections.cluster import ClusterConfig, SshConfig
from rlinf_core.config.sections.cluster_values import expand_hosts
from rlinf_core.config.tree import NotationError, to_data
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.topology import ClusterTopology
from tests.unit.config.texts import check, faults_of, tree_of


def load(text: str) -> ClusterConfig:
    """Return the `cluster` section given as YAML, with numbers that remember how they were written."""
    return ClusterConfig.model_validate(to_data(tree_of(text)))


def mistakes(text: str) -> list[tuple[str, tuple[Any, ...], str | None]]:
    """Code, path and offending piece of every mistake."""
    with pytest.raises(ValidationError) as caught:
        load(text)
    result: list[tuple[str, tuple[Any, ...], str | None]] = []
    for error in caught.value.errors():
        context = error.get("ctx", {})
        raw = str(getattr(error["input"], "raw", error["input"]))
        piece = raw[context["start"] : context["end"]] if "start" in context else None
        result.append((error["type"], error["loc"], piece))
    return result


def group(rest: str = "", label: str = "a", ranks: str = "0") -> str:
    lines = "".join(f"    {line}\n" for line in rest.splitlines())
    return f"num_nodes: 18\nnode_groups:\n  - label: {label}\n    node_ranks: {ranks}\n{lines}"


HEAD = "env_configs:\n  - node_ranks: 0\n"


class TestText:
    def test_what_looks_like_a_number_stays_as_written(self) -> None:
        cluster = load(
            group(
                "env_configs:\n  - node_ranks: 0\n    env_vars:\n      - A: 2.50\n      - B: on\n      - C: True\n"
                '      - D: 010\n      - E: ""\n      - F: 1e3\n',
                label="4090",
            )
        )
        assert cluster.node_groups[0].label == "4090"
        values = dict(cluster.node_groups[0].env_configs[0].env_vars)
        assert values == {"A": "2.50", "B": "on", "C": "True", "D": "010", "E": "", "F": "1e3"}

    def test_serials_keep_their_leading_zero(self) -> None:
        cluster = load(
            group(
                "hardware:\n  type: Franka\n  configs:\n    - node_rank: 0\n      robot_ip: 10.0.0.1\n"
                "      camera_serials: [0322142001230]\n"
            )
        )
        assert cluster.node_groups[0].hardware is not None
        assert cluster.node_groups[0].hardware.configs[0].model_dump()["camera_serials"] == ("0322142001230",)


class TestNodeRanks:
    @pytest.mark.parametrize(
        ("text", "ranks"),
        [
            ("3", [3]),
            ('"0-7"', list(range(8))),
            ("0-3,5", [0, 1, 2, 3, 5]),
            ("0-3, 5", [0, 1, 2, 3, 5]),
            ("[0, 1]", [0, 1]),
            ('["0-3", 5]', [0, 1, 2, 3, 5]),
            ("all", list(range(18))),
        ],
    )
    def test_every_form(self, text: str, ranks: list[int]) -> None:
        assert list(load(group(ranks=text)).node_groups[0].node_ranks.resolve(18)) == ranks

    def test_a_huge_range_costs_nothing(self) -> None:
        ranks = NodeRanks.parse("0-999999999")
        assert ranks.resolve(4) == (0, 1, 2, 3)
        assert 999_999_999 in ranks
        assert 10**9 not in ranks

    @given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30))
    def test_resolving_yields_the_listed_nodes_that_exist(self, listed: list[int], num_nodes: int) -> None:
        expected = tuple(sorted({rank for rank in listed if rank < num_nodes}))
        text = ",".join(map(str, listed))
        assert NodeRanks.parse(text).resolve(num_nodes) == expected
        assert NodeRanks.parse(listed).resolve(num_nodes) == expected
        assert all(
            text[place.start : place.end] == str(rank)
            for place, rank in zip(NodeRanks.parse(text).parts, listed, strict=True)
        )


class TestPlacement:
    def test_every_form(self) -> None:
        placed = load(
            "num_nodes: 1\ncomponent_placement:\n  actor, rollout: 0-3\n  env: 3\n  agent: [0-1:0-3, 2]\n"
            "  reward: {placement: all, node_group: [4090, a800]}\n  critic: {placement: 0, node_group: 'b, c'}\n"
        ).component_placement
        assert list(placed) == ["actor", "rollout", "env", "agent", "reward", "critic"]
        assert placed["actor"] == placed["rollout"]
        assert str(placed["env"].rank_map) == "3"
        assert [str(part) for part in placed["agent"].rank_map.parts] == ["0-1:0-3", "2"]
        assert [part.item for part in placed["agent"].rank_map.parts] == [0, 1]
        assert [placed[name].node_group for name in ("actor", "reward", "critic")] == [(), ("4090", "a800"), ("b", "c")]

    def test_one_and_thirty_is_no_base_sixty_number(self) -> None:
        part = load("num_nodes: 1\ncomponent_placement: {env: 1:30}").component_placement["env"].rank_map.parts[0]
        assert (part.resources, part.processes) == (range(1, 2), range(30, 31))

    def test_spares_or_an_elastic_component_survive_losses(self) -> None:
        text = "num_nodes: 2\ncomponent_placement: {actor: 0, env: {node_group: node, placement: 0, elastic: false}}\n"
        assert not load(text).survives_losses
        assert load(f"{text}spare_nodes: 1\n").survives_losses
        assert load(text.replace("false", "true")).survives_losses

    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=5))
    def test_parts_know_where_they_stand(self, ranges: list[tuple[int, int]]) -> None:
        pieces = [f"{start}-{start + extra}:0-{extra}" for start, extra in ranges]
        text = " , ".join(pieces)
        assert [text[part.start : part.end] for part in RankMap.parse(text).parts] == pieces
        assert [(part.item, part.start) for part in RankMap.parse(pieces).parts] == [(i, 0) for i in range(len(pieces))]


class TestEnvConfigs:
    def test_variables_as_a_list_or_a_map(self) -> None:
        as_list = load(group(HEAD + "    env_vars: [{A: 1}, {B: x}]"))
        as_map = load(group(HEAD + "    env_vars: {A: 1, B: x}"))
        assert as_list == as_map
        assert as_list.node_groups[0].env_configs[0].env_vars == (("A", "1"), ("B", "x"))

    def test_the_same_variable_twice_is_kept_for_the_rules(self) -> None:
        cluster = load(group(HEAD + "    env_vars: [{A: 1}, {A: 2}]"))
        assert cluster.node_groups[0].env_configs[0].env_vars == (("A", "1"), ("A", "2"))

    def test_a_path_may_hold_what_a_shell_would_mind(self) -> None:
        text = group(HEAD + "    python_interpreter_path: /opt/my venv/$x/bin/python3")
        assert load(text).node_groups[0].env_configs[0].python_interpreter_path == "/opt/my venv/$x/bin/python3"


class TestHardware:
    def test_units_are_dumped_with_their_own_fields(self) -> None:
        cluster = load(group("hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1}]}"))
        dumped = cluster.model_dump()["node_groups"][0]["hardware"]["configs"][0]
        assert dumped["robot_ip"] == "10.0.0.1"

    def test_declared_accelerators(self) -> None:
        cluster = load(group("accelerators: {model: 4090, per_node: 8}"))
        assert cluster.node_groups[0].accelerators is not None
        assert cluster.node_groups[0].accelerators.model_dump() == {"model": "4090", "per_node": 8, "memory_gib": None}


class TestMachines:
    def test_hosts_and_ports_and_head(self) -> None:
        cluster = load("num_nodes: 4\nhosts: trainer[08-10],me@spare\nports: 30000-30099\nhead_address: 10.0.0.1")
        assert cluster.hosts == ("trainer08", "trainer09", "trainer10", "me@spare")
        assert (cluster.ports, cluster.head_address) == (range(30000, 30100), "10.0.0.1")

    @pytest.mark.parametrize("host", ["fe80::1", "me@fe80::1%eth0", "10.0.0.3", "4090", "trainer.lab", "3com.lab"])
    def test_hosts_are_names_and_addresses(self, host: str) -> None:
        assert load(f"num_nodes: 1\nhosts: ['{host}']").hosts == (host,)

    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("r[0-1]n[0,2]", "r0n0 r0n2 r1n0 r1n2"),
            # Brackets around an IPv6 address are taken off.
            ("[2001:db8::7]", "2001:db8::7"),
            ("me@[2001:db8::7]", "me@2001:db8::7"),
            ("[::1],gpu[1-2]", "::1 gpu1 gpu2"),
            ("[fe80::1%eth0]", "fe80::1%eth0"),
            ("2001:db8::[1-2]", "2001:db8::1 2001:db8::2"),
        ],
    )
    def test_brackets_multiply_or_are_taken_off(self, text: str, hosts: str) -> None:
        assert expand_hosts(text) == tuple(hosts.split())

    def test_port_behind_brackets_is_named(self) -> None:
        assert load("num_nodes: 1\nhead_address: '[2001:db8::7]'").head_address == "2001:db8::7"
        with pytest.raises(NotationError, match="has a port") as caught:
            expand_hosts("gpu1,[2001:db8::7]:22")
        assert "remove it: `2001:db8::7`" in (caught.value.help or "")

    def test_default_ports_lie_below_the_ephemeral_range(self) -> None:
        ports = load("num_nodes: 1").ports
        assert (ports.start, ports.stop - 1) == (20000, 20999)
        assert ports.stop <= 32768

    def test_ssh_options_are_spelled_as_ssh_spells_them(self) -> None:
        options = load("num_nodes: 1\nssh: {options: {ForwardAgent: true, Port: 2222}}").ssh.options
        assert options == {"ForwardAgent": "yes", "Port": "2222"}

    def test_a_groups_ssh_wins_value_by_value(self) -> None:
        base = SshConfig(user="me", port=22, options={"ProxyJump": "gate", "Compression": "yes"})
        # To ssh the names are equal, and the first value counts.
        mine = SshConfig(port=2222, options={"proxyjump": "other"})
        assert mine.over(base) == SshConfig(user="me", port=2222, options={"proxyjump": "other", "Compression": "yes"})
        assert SshConfig().over(base) == base

    @given(st.integers(0, 200), st.integers(0, 40), st.integers(1, 4))
    def test_host_ranges_count_and_keep_their_width(self, first: int, rest: int, width: int) -> None:
        start, end = str(first).zfill(width), str(first + rest)
        hosts = expand_hosts(f"n[{start}-{end}].lab, last")
        assert len(hosts) == rest + 2
        assert [int(host[1:-4]) for host in hosts[:-1]] == list(range(first, first + rest + 1))
        assert hosts[0] == f"n{start}.lab"
        assert all(len(host) >= len(hosts[0]) for host in hosts[:-1])

    @given(st.text(alphabet="ab09[]-,@ .", max_size=12))
    def test_any_text_is_hosts_or_a_mistake_inside_it(self, text: str) -> None:
        place = (0, 0)
        try:
            assert all(expand_hosts(text))
        except NotationError as error:
            place = (error.start, error.end)
        assert 0 <= place[0] <= place[1] <= len(text)

    @pytest.mark.parametrize("text", ["n[0-99999999999]", "a[0-999]b[0-999]", "n[0-999999999]"])
    def test_a_bomb_of_hosts_is_refused_at_once(self, text: str) -> None:
        with pytest.raises(NotationError, match="more than 100000 hosts"):
            expand_hosts(text)


ranges = st.builds(lambda start, size: range(start, start + size), st.integers(0, 10**6), st.integers(1, 10**5))
blanks = st.sampled_from(["", " ", "  ", "\t"])


IN_GROUP = ("node_groups", 0)
ENV = (*IN_GROUP, "env_configs", 0)
VARIABLES = (*ENV, "env_vars")
UNITS = (*IN_GROUP, "hardware", "configs")
UNIT = "hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: x}, {robot_ip: 10.0.0.1, ip: 1}]}"
# A section, and of each mistake the code, the path and the piece. Of one group the rest is written here alone.
REFUSED: list[tuple[str, list[tuple[str, tuple[Any, ...], str | None]]]] = [
    *((f"num_nodes: {number}", [(code, ("num_nodes",), None)])
      for number, code in (("0", "greater_than_equal"), ("1000000000", "less_than_equal"), ("'3'", "wrong-type"),
                           ("true", "wrong-type"))),
    *((group(ranks=ranks), [("rank-syntax", (*IN_GROUP, "node_ranks", *path), piece)])
      for ranks, path, piece in (("0-3,5..7", (), "5..7"), ("0-3:1", (), ":"), ("0,all", (), "all"), ("1.5", (), "1.5"),
                                 ("[all]", (0,), "all"), ("-1", (), "-1"))),
    (group(ranks="[x, 1, 7-5]"), [("rank-syntax", (*IN_GROUP, "node_ranks", index), piece)
                                  for index, piece in ((0, "x"), (2, "7-5"))]),
    *((group(ranks=ranks), [("wrong-type", (*IN_GROUP, "node_ranks", *path), None)])
      for ranks, path in (("{a: 1}", ()), ("null", ()), ("[[0]]", (0,)))),
    *((f"num_nodes: 1\ncomponent_placement: {{{entry}}}", [(code, ("component_placement", *path), piece)])
      for entry, code, path, piece in (
          ("a: 0-", "rank-syntax", ("a", "placement"), "0-"),
          ("a: [0, 0-1:all]", "rank-syntax", ("a", "placement", 1), "all"),
          ("a: {placement: 0, on: b}", "extra_forbidden", ("a", "on"), None),
          ("a: {node_group: b}", "missing", ("a", "placement"), None),
          ("a: {placement: 0, node_group: 'b,c d'}", "name-syntax", ("a", "node_group"), " "),
          ("a: {placement: 0, node_group: [b, 'c:']}", "name-syntax", ("a", "node_group", 1), ":"),
          ("a: {placement: 0, node_group: []}", "name-syntax", ("a", "node_group"), None),
          ("'a,,b': 0", "name-syntax", ("a,,b", "[key]"), ""),
          ("'a:b': 0", "name-syntax", ("a:b", "[key]"), ":"),
          ('"a\\e[31m": 0', "name-syntax", ("a\x1b[31m", "[key]"), "a\x1b[31m"),
          ('a: {placement: 0, node_group: "b\\u202e"}', "name-syntax", ("a", "node_group"), "b\u202e"),
          ("a: null", "wrong-type", ("a", "placement"), None),
      )),
    *((group(f"{HEAD}    env_vars: {value}"), [(code, (*VARIABLES, *path), piece)])
      for value, code, path, piece in (
          ("[{A: null}]", "env-var-syntax", (0, "A"), None),
          ("[{A: [1]}]", "env-var-syntax", (0, "A"), None),
          ("[{A: 1, B: 2}]", "env-var-syntax", (0,), None),
          ("[A=1]", "env-var-syntax", (0,), None),
          ("[{'A=B': 1}]", "env-var-syntax", (0, "A=B", "[key]"), None),
          ("[{A B: 1}]", "env-var-syntax", (0, "A B", "[key]"), None),
          ('{A: "x\\0"}', "env-var-syntax", ("A",), None),
          ('{"A\\e[31m": x}', "env-var-syntax", ("A\x1b[31m", "[key]"), None),
          ("A=1", "wrong-type", (), None),
      )),
    *((group(f"{HEAD}    python_interpreter_path: {path}"),
       [("interpreter-path", (*ENV, "python_interpreter_path"), None)])
      for path in ("python3", "./venv/bin/python", "~/venv/bin/python", '"/a\\nb"', '"/a\\eb"')),
    # An unknown type hides its units but nothing else, and every unit is judged.
    (group("hardware: {type: Frank, configs: [{nonsense: 1}]}\nignore_hardware: 3"),
     [("unknown-hardware-type", (*IN_GROUP, "hardware", "type"), None),
      ("wrong-type", (*IN_GROUP, "ignore_hardware"), None)]),
    (group(UNIT), [("bad-value", (*UNITS, 0, "robot_ip"), None), ("missing", (*UNITS, 1, "node_rank"), None),
                   ("extra_forbidden", (*UNITS, 1, "ip"), None)]),
    (group("memory_gib: 1e308"), [("less_than_equal", (*IN_GROUP, "memory_gib"), None)]),
    (group("accelerators: {per_node: -1}"), [("greater_than_equal", (*IN_GROUP, "accelerators", "per_node"), None)]),
    *((f"num_nodes: 2\n{text}", [(code, path, piece)])
      for text, code, path, piece in (
          ("hosts: trainer[0-1", "host-syntax", ("hosts",), "[0-1"),
          ("hosts: [a, -oProxyCommand=x]", "host-syntax", ("hosts", 1), "-oProxyCommand=x"),
          ("hosts: a,,b", "host-syntax", ("hosts",), ""),
          ("hosts: 'n[0,ab]'", "host-syntax", ("hosts",), "ab"),
          ("hosts: 'n[0,,1]'", "host-syntax", ("hosts",), ","),
          ("hosts: {a: 1}", "wrong-type", ("hosts",), None),
          ("hosts: ['trainer:22']", "host-syntax", ("hosts", 0), "trainer:22"),
          ("ports: 20000-x", "bad-value", ("ports",), "20000-x"),
          *((f"hosts: {host}", "host-syntax", ("hosts",), host.strip("'"))
            for host in ("me@10.0.0.3:22", "'trainer:'", "10.0.0.999", "10.0.0", "10.0.0.[254-256]", "0.0.0.0",
                         "255.255.255.255", "'1:2:3'")),
          *((f"head_address: {address}", "host-syntax", ("head_address",), piece)
            for address, piece in (("me@head", "me@"), ("0.0.0.0", "0.0.0.0"), ("'::'", "::"),
                                   ("10.0.0.1:6379", "10.0.0.1:6379"))),
          *((f"ports: {ports}", "bad-value", ("ports",), None) for ports in ("3", "20000-20098", "60000-70000")),
          ("forward_env: [A=1]", "env-var-syntax", ("forward_env", 0), None),
          ("ssh: {port: 0}", "greater_than_equal", ("ssh", "port"), None),
          ("ssh: {user: '-x'}", "bad-value", ("ssh", "user"), None),
          ("ssh: {options: {'Proxy Jump': gate}}", "bad-value", ("ssh", "options", "Proxy Jump"), None),
          ("ssh: {options: {ProxyJump: [gate]}}", "wrong-type", ("ssh", "options", "ProxyJump"), None),
          ("num_node: 3", "extra_forbidden", ("num_node",), None),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_what_is_refused(text: str, expected: list[tuple[str, tuple[Any, ...], str | None]]) -> None:
    assert mistakes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [range(3, 4)]),
        ("0-7", [range(8)]),
        ("0-3,5", [range(4), range(5, 6)]),
        (" 0 - 3 , 5 ", [range(4), range(5, 6)]),
        ("007", [range(7, 8)]),
        ("5,0-3,2", [range(5, 6), range(4), range(2, 3)]),
        (str(MAX_RANK), [range(MAX_RANK, MAX_RANK + 1)]),
        ("  all ", None),
    ],
)
def test_ranges_are_kept_as_written(text: str, expected: list[range] | None) -> None:
    ranges = parse_ranks(text)
    assert (None if ranges is None else list(ranges)) == expected
    assert (parse_rank_map(text)[0].resources is None) == (expected is None)


@given(st.lists(ranges, min_size=1, max_size=5), blanks)
def test_ranges_survive_printing_and_reading(written: list[range], blank: str) -> None:
    text = f"{blank},{blank}".join(format_range(piece) for piece in written)
    assert list(parse_ranks(blank + text + blank) or ()) == written


@given(st.sets(st.integers(0, 200), min_size=1))
def test_the_shortest_expression_names_the_same_ranks(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks))
    pieces = parse_ranks(text) or ()
    assert {rank for piece in pieces for rank in piece} == ranks
    assert all(after.start > before.stop for before, after in pairwise(pieces))


@given(st.lists(st.tuples(st.none() | ranges, st.none() | ranges), min_size=1, max_size=5), blanks)
def test_rank_maps_survive_printing_and_reading(written: list[tuple[range | None, range | None]], blank: str) -> None:
    text = f"{blank},{blank}".join(str(RankMapPart(*pair, 0, 0)) for pair in written)
    parts = parse_rank_map(text, item=2)
    assert [(part.resources, part.processes, part.item) for part in parts] == [(*pair, 2) for pair in written]
    # Every part knows where it stands.
    assert [text[part.start : part.end] for part in parts] == [str(part) for part in parts]


@given(st.lists(st.builds(range, st.integers(0, 60), st.integers(0, 60)), max_size=8))
def test_merged_ranges_hold_the_same_numbers_without_touching(pieces: list[range]) -> None:
    merged = merge_ranges(pieces)
    assert [number for piece in merged for number in piece] == sorted({number for piece in pieces for number in piece})
    assert all(after.start > before.stop for before, after in pairwise(merged))


@pytest.mark.parametrize(
    ("text", "wrong", "help"),
    [
        ("0-3,x", "x", "write `3`, `0-7` or `0-3,5`"),
        ("0-3, 1.5 ,7", "1.5", "write"),
        ("-1", "-1", "write"),
        ("0--3", "0--3", "write"),
        ("1:2:3", ":3", "RESOURCES:PROCESSES"),
        ("0-3: all", "all", "`all:0-7`"),
        ("7-0", "7-0", "did you mean `0-7`?"),
        ("0-3:9-4", "9-4", "did you mean `4-9`?"),
        ("0-9999999999", "0-9999999999", None),
        (f"{MAX_RANK + 1}", f"{MAX_RANK + 1}", None),
        ("٣", "٣", "write"),
        ("allx", "allx", "write"),
        ("All", "All", "write"),
    ],
)
def test_a_mistake_is_found_where_it_is(text: str, wrong: str, help: str | None) -> None:
    with pytest.raises(NotationError) as caught:
        parse_rank_map(text)
    assert text[caught.value.start : caught.value.end] == wrong
    assert (help in (caught.value.help or "")) if help else caught.value.help is None


@pytest.mark.parametrize(("text", "at"), [("", 0), ("0-3,", 4), (",0", 0), ("0,,1", 2), ("0:", 2), (":0", 0)])
def test_a_missing_piece_is_found_where_it_should_be(text: str, at: int) -> None:
    with pytest.raises(NotationError, match="missing here") as caught:
        parse_rank_map(text)
    assert (caught.value.start, caught.value.end) == (at, at)


@given(st.text(alphabet="0123456789-:, alx", max_size=12))
def test_any_text_is_read_or_refused_within_itself(text: str) -> None:
    refused: NotationError | None = None
    parts: tuple[RankMapPart, ...] = ()
    try:
        parts = parse_rank_map(text)
    except NotationError as error:
        refused = error
    if refused is not None:
        assert 0 <= refused.start <= refused.end <= len(text)
    else:
        again = parse_rank_map(",".join(map(str, parts)))
        assert [str(part) for part in again] == [str(part) for part in parts]


# Arithmetic on lists of ranges, against sets

piece_lists = st.lists(st.builds(range, st.integers(0, 40), st.integers(0, 40)), max_size=6).map(merge_ranges)


def numbers(ranges: tuple[range, ...]) -> list[int]:
    return [number for piece in ranges for number in piece]


@given(piece_lists, piece_lists)
def test_intersect(a: tuple[range, ...], b: tuple[range, ...]) -> None:
    assert numbers(intersect(a, b)) == sorted(set(numbers(a)) & set(numbers(b)))


@given(piece_lists, piece_lists)
def test_subtract(a: tuple[range, ...], b: tuple[range, ...]) -> None:
    assert numbers(subtract(a, b)) == sorted(set(numbers(a)) - set(numbers(b)))


FRANKA = "hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.9}]}"


def file(*groups: str, num_nodes: int = 3, spare_nodes: int = 1) -> str:
    lines = ["cluster:", f"  num_nodes: {num_nodes}", f"  spare_nodes: {spare_nodes}", "  node_groups:"]
    return "\n".join([*lines, *(f"    - {{{group}}}" for group in groups), ""])


def test_no_process_is_placed_on_a_spare() -> None:
    section = {
        "num_nodes": 4,
        "spare_nodes": 1,
        "node_groups": [{"label": "sim", "node_ranks": "1-3", "accelerators": {"per_node": 2}}],
        "component_placement": {
            "env": {"node_group": "sim", "placement": "all"},
            "agent": {"node_group": "node", "placement": "all"},
        },
    }
    cluster = ClusterConfig.model_validate(section)
    topology = ClusterTopology.from_config(cluster, ["0"])
    placement = ComponentPlacement(cluster, topology)
    assert (topology.num_nodes, cluster.spare_ranks) == (3, range(3, 4))
    nodes = [item.cluster_node_rank for item in placement.get_strategy("env").get_placement(topology)]
    assert nodes == [1, 1, 2, 2]
    assert placement.get_world_size("agent") == 3


def test_topology_leaves_probed_spares_out() -> None:
    cluster = ClusterConfig.model_validate({"num_nodes": 3, "spare_nodes": 1})
    nodes = ClusterTopology.from_config(ClusterConfig.model_validate({"num_nodes": 3}), ["0"]).nodes
    assert ClusterTopology.from_nodes(nodes, cluster).num_nodes == 2
    assert ClusterTopology.from_nodes(nodes[:2], cluster).num_nodes == 2


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        (file("label: sim, node_ranks: 1-2"), []),
        (file("label: train, node_ranks: 0", num_nodes=3), []),
        (file("label: sim, node_ranks: 1"), [("spare-cannot-serve", 3, "1")]),
        (file("label: all, node_ranks: all", num_nodes=2), [("spare-cannot-serve", 3, "1")]),
        (file(f"label: arm, node_ranks: 1-2, {FRANKA}"), [("spare-cannot-serve", 3, "1")]),
        (file("label: sim, node_ranks: 1-2", spare_nodes=3), [("spare-nodes-count", 3, "3")]),
        (file("label: sim, node_ranks: 1-9"), [("node-rank-out-of-range", 5, "1-9")]),
    ],
    ids=["same-group", "no-group", "other-group", "head-only", "robot", "all-spares", "out-of-range"],
)
def test_spare_must_fit_a_node(text: str, findings: list[tuple[str, int, str]]) -> None:
    assert faults_of(text) == findings


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ("label: sim, node_ranks: 1", "the only other node without a group is 0, the head"),
        ("label: sim, node_ranks: 2", "no other node is in `sim`"),
        (f"label: arm, node_ranks: 1-2, {FRANKA}", "the other nodes in `arm` have robots"),
    ],
)
def test_a_spare_that_replaces_no_node_says_why(group: str, why: str) -> None:
    (diagnostic,) = check(file(group))
    assert why in diagnostic.message
