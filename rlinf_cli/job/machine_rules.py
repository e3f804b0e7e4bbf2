"""Rules for machines: hosts, addresses and ports, and misleading environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core.config.ranks import common, format_range, intersect, merge_ranges, subtract
from rlinf_core.config.secrets import is_secret, url_secrets
from rlinf_core.config.sections.cluster import EnvConfig, SshConfig
from rlinf_core.config.sections.cluster_values import expand_hosts
from rlinf_core.config.sections.group_rules import CLUSTER, Claim, Site, contradictions, group_ranges, variable_paths
from rlinf_core.config.tree import Path, ScalarNode, SequenceNode, Span, find
from rlinf_core.hardware.accelerators import accelerator_names, get_accelerator

# Variables that rlinf sets per process, for which one value for a whole node would be wrong.
PROCESS_VARIABLES: Final = frozenset(
    ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
) | {"NODE_RANK", "NODE_LOCAL_RANK", "RLINF_NODE_RANK"}
# Paths of programs: interpreters by name, files in `bin` folders, and scripts.
_PROGRAM: Final = re.compile(r"/(python|pypy)[0-9.]*[a-z]?$|/bin/[^/]+$|\.(sh|exe)$")
_BIN: Final = re.compile(r"/bin/?$")
_SHELL: Final = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*|^~/|:~/")


def _variables(site: Site) -> None:
    taken = PROCESS_VARIABLES | _visibility_variables()
    _interpreter(site, (*CLUSTER, "python_interpreter_path"), site.cluster.python_interpreter_path)
    for path, group in site.groups():
        for index, config in enumerate(group.env_configs):
            at = (*path, "env_configs", index)
            _interpreter(site, (*at, "python_interpreter_path"), config.python_interpreter_path)
            _contents(site, at, config, taken)
    _forwarded(site, taken)


def _interpreter(site: Site, path: Path, value: str | None) -> None:
    """Warn about a path that looks like a folder; only its spelling is checked, since the nodes' files are not here."""
    if value is None or site.damaged(path) or _PROGRAM.search(value):
        return
    help = f"a folder? Its interpreter is `{value.rstrip('/')}/{'' if _BIN.search(value) else 'bin/'}python`"
    site.warn("interpreter-path", f"`{value}` does not look like the path of a Python interpreter", path, help=help)


def _contents(site: Site, at: Path, config: EnvConfig, taken: frozenset[str]) -> None:
    if not config.env_vars and config.python_interpreter_path is None and not site.damaged(at):
        help = "add `env_vars` or `python_interpreter_path`, or remove it"
        site.warn("env-config-empty", "this entry of `env_configs` sets nothing", at, help=help)
    for (name, value), path in zip(config.env_vars, variable_paths(site.view.tree, at), strict=False):
        _variable(site, path, name, value, taken)


def _variable(site: Site, path: Path, name: str, value: str, taken: frozenset[str]) -> None:
    if name in taken:
        message = f"rlinf sets `{name}` per process; this would set one value for all processes of these nodes"
        help = "remove it; `component_placement` decides ranks and visible devices"
        site.warn("env-var-of-process", message, path, span=site.key(path), help=help)
    written = _SHELL.search(value)
    if written:
        message = f"no shell expands `{name}`: `{written[0].lstrip(':')}` is used literally"
        help = "write the whole value; PATH and similar variables are prepended to the node's own"
        site.warn("env-var-not-expanded", message, path, help=help)
    node = find(site.view.tree, path)
    in_file = isinstance(node, ScalarNode) and "${" not in node.span.text
    if in_file and ((is_secret(name, value) and value) or url_secrets(value)):
        message = f"the secret value of `{name}` is written in the file"
        help = f"write `${{env:{name}}}`, or name it in `cluster.forward_env`"
        site.warn("secret-in-file", message, path, span=site.key(path), help=help)


def _visibility_variables() -> frozenset[str]:
    variables = (get_accelerator(name).visibility_variable for name in accelerator_names())
    return frozenset(name for name in variables if name)


def _forwarded(site: Site, taken: frozenset[str]) -> None:
    names: set[str] = set()
    for index, name in enumerate(site.cluster.forward_env):
        path = (*CLUSTER, "forward_env", index)
        if name in taken:
            message = f"rlinf sets `{name}` per process; this machine's value would be wrong elsewhere"
            site.warn("env-var-of-process", message, path, help="remove it")
        elif name in names:
            site.report("duplicate-env-var", f"`{name}` is listed twice", path, help="keep one of them")
        names.add(name)


# Linux uses these for outgoing connections by default.
_EPHEMERAL: Final = range(32768, 61000)


def check(site: Site) -> None:
    """Report mistakes in the machines and the environments of a file."""
    _variables(site)
    _hosts(site)
    _ssh(site)
    _head(site)
    _ports(site)
    _empty_hardware(site)


def _empty_hardware(site: Site) -> None:
    for path, group in site.groups():
        configs = (*path, "hardware", "configs")
        if group.hardware is not None and not group.hardware.configs and not site.damaged(configs):
            help = "add an entry for each unit, or remove `hardware` to count accelerators or nodes"
            site.warn("hardware-empty", f"group `{group.label}` declares hardware but no units", configs, help=help)


def _hosts(site: Site) -> None:
    hosts_path: Path = (*CLUSTER, "hosts")
    with_hosts = [(path, group) for path, group in site.groups() if group.hosts]
    if site.cluster.hosts and with_hosts:
        first = (*with_hosts[0][0], "hosts")
        message = "hosts are set both for the cluster and for its groups"
        help = "keep only one: the groups' hosts or the cluster's"
        related = [(site.key(first), "a group's hosts are set at")]
        site.report("hosts-twice", message, hosts_path, span=site.key(hosts_path), help=help, related=related)
    elif site.cluster.hosts:
        count = site.num_nodes
        if count is not None and not site.damaged(hosts_path) and len(site.cluster.hosts) != count:
            _count(site, hosts_path, len(site.cluster.hosts), count, "`num_nodes` is")
            return
        _assign(site, [(hosts_path, site.cluster.hosts, [range(len(site.cluster.hosts))])])
        return
    claims: list[tuple[Path, tuple[str, ...], Sequence[range]]] = []
    for path, group in with_hosts:
        hosts = (*path, "hosts")
        if site.damaged(hosts) or site.damaged((*path, "node_ranks")):
            continue
        nodes = group_ranges(site, group.node_ranks)
        if group.node_ranks.ranges is None and site.num_nodes is None:
            continue
        size = sum(map(len, nodes))
        if len(group.hosts) != size:
            subject = f"the number of node_ranks of group `{group.label}` is"
            _count(site, hosts, len(group.hosts), size, subject, _shared(site, path, nodes))
        else:
            claims.append((hosts, group.hosts, nodes))
    _assign(site, claims)
    judged = len(claims) == len(with_hosts) and not any(site.damaged((*path, "hosts")) for path, _ in site.groups())
    if with_hosts and judged and not site.cluster.hosts:
        _without_host(site, [piece for _, _, nodes in claims for piece in nodes])


def _shared(site: Site, path: Path, nodes: Sequence[range]) -> str:
    """Return a clause on the nodes that a group shares with another one, to append to a remedy; empty without any."""
    for other, group in site.groups():
        shared = () if other == path else intersect(merge_ranges(nodes), group_ranges(site, group.node_ranks))
        if shared:
            plural, listed = "s" * (sum(map(len, shared)) > 1), ",".join(map(format_range, shared))
            verb = "overlap" if plural else "overlaps"
            return f"; node{plural} {listed} of `node_ranks` {verb} with group `{group.label}`"
    return ""


def _count(site: Site, path: Path, count: int, wanted: int, subject: str, overlap: str = "") -> None:
    message = f"{count} host{'' if count == 1 else 's'} for {wanted} node{'' if wanted == 1 else 's'}"
    help = f"{subject} {wanted}; list one host per node, in rank order{overlap}"
    site.report("hosts-count", message, path, help=help)


def _assign(site: Site, claims: list[tuple[Path, tuple[str, ...], Sequence[range]]]) -> None:
    @cache
    def items(path: Path) -> list[int]:
        """Return for each host of a list the index of the item that names it; empty if the value is a text."""
        node = find(site.view.tree, path)
        named = enumerate(node.items if isinstance(node, SequenceNode) else ())
        return [index for index, item in named if isinstance(item, ScalarNode) for _ in expand_hosts(item.raw)]

    def place(path: Path, number: int) -> Span:
        return site.place((*path, items(path)[number]) if items(path) else path)

    host_of: dict[int, tuple[str, Path, int]] = {}
    node_of: dict[str, tuple[int, Path, int]] = {}
    for path, hosts, nodes in claims:
        ranks = (rank for piece in nodes for rank in piece)
        for number, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
            known_host, first, at = host_of.setdefault(rank, (host, path, number))
            if known_host != host:
                message = f"node {rank} is `{host}` here and `{known_host}` in another group"
                help = "groups that share a node must name the same host for it"
                related = [(place(first, at), "the other host is set at")]
                site.report("host-conflict", message, path, span=place(path, number), help=help, related=related)
                continue
            known_rank, first, at = node_of.setdefault(host, (rank, path, number))
            if known_rank != rank:
                message = f"`{host}` is node {known_rank} and node {rank}"
                help = "every node must be a separate machine"
                related = [(place(first, at), "first given at")]
                site.report("duplicate-host", message, path, span=place(path, number), help=help, related=related)


def _without_host(site: Site, covered: list[range]) -> None:
    """Warn about nodes without a host if others have one, since `rlinf up` cannot start them."""
    count = site.num_nodes
    if count is None:
        return
    missing = subtract((range(count),), merge_ranges(covered))
    if missing:
        number = sum(map(len, missing))
        site.warn(
            "node-without-host",
            f"other nodes have a host, node{'' if number == 1 else 's'} {','.join(map(format_range, missing))} not",
            (*CLUSTER, "num_nodes"),
            help="`rlinf up` starts only nodes that have a host; put the others into a group with `hosts`",
        )


def _ssh(site: Site) -> None:
    """Report options of ssh that are set twice for a node, of which ssh would take one."""
    claims: dict[str, list[Claim[str, Path]]] = {}
    lists = [(CLUSTER, site.cluster.hosts), *((path, group.hosts) for path, group in site.groups())]
    hosts = any(listed or site.damaged((*path, "hosts")) for path, listed in lists)
    for path, ssh, nodes in _ssh_sections(site):
        if not hosts and any(ssh.settings()):
            site.warn(NO_EFFECT, "`ssh` has no effect: no node has a host to log in to", path, help="write `hosts`")
        first: dict[str, Path] = {}
        for option, value, at in ssh.settings():
            earlier = first.setdefault(option, (*path, *at))
            if earlier != (*path, *at) and option != "identityfile":  # ssh tries all keys
                _ssh_twice(site, f"`{earlier[-1]}` and `{at[-1]}` set the same option of ssh", (*path, *at), earlier)
            elif option == "batchmode" and value.lower() != "yes":
                help = "remove it; let an agent or a key without a passphrase answer"
                site.report("ssh-conflict", "rlinf never lets ssh ask, whatever `BatchMode` is", earlier, help=help)
            claims.setdefault(option, []).extend(Claim(piece, value, earlier) for piece in nodes)
    for later, earlier in (pair for of_option in claims.values() for pair in contradictions(of_option)):
        node = common(later.nodes, earlier.nodes).start
        _ssh_twice(
            site, f"two groups of node {node} set `{later.place[-1]}` to different values", later.place, earlier.place
        )


def _ssh_sections(site: Site) -> Iterator[tuple[Path, SshConfig, Sequence[range]]]:
    """Yield each `ssh` section, and the nodes of its group; none for the cluster's, which groups override."""
    yield (*CLUSTER, "ssh"), site.cluster.ssh, ()
    for path, group in site.groups():
        if group.ssh is not None:
            damaged = site.damaged((*path, "node_ranks"))
            yield (*path, "ssh"), group.ssh, () if damaged else group_ranges(site, group.node_ranks)


def _ssh_twice(site: Site, message: str, path: Path, earlier: Path) -> None:
    related = [(site.key(earlier), "first set at")]
    site.report("ssh-conflict", message, path, span=site.key(path), help="keep one of them", related=related)


def _head(site: Site) -> None:
    address, count = site.cluster.head_address, site.num_nodes
    if address is None:
        return
    if ":" in address:
        message = f"`{address}` is an IPv6 address, and nodes reach each other over IPv4"
    elif count not in (None, 1) and (address == "localhost" or address.startswith("127.")):
        message = f"other nodes cannot reach the head at `{address}`"
    else:
        return
    help = "set the address at which the other nodes reach node 0"
    site.report("head-address-local", message, (*CLUSTER, "head_address"), help=help)


def _ports(site: Site) -> None:
    ports = site.cluster.ports
    path: Path = (*CLUSTER, "ports")
    if find(site.view.tree, path) is not None and ports.start < _EPHEMERAL.stop and ports.stop > _EPHEMERAL.start:
        message = f"ports {format_range(_EPHEMERAL)} are used for outgoing connections: any of them may be taken"
        site.warn("ports-ephemeral", message, path, help="choose ports below 32768")
