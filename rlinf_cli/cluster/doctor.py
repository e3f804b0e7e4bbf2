"""The preflight: probe every node in parallel, measure the links between them, and evaluate the checks.

It starts nothing but measurements and trial programs.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.cluster import checks, fact_rules
from rlinf_cli.cluster.checks import FAULT, OK, CheckVerdict, Finding, ProbedNode, Said, distinct
from rlinf_cli.cluster.inventory import NodeTarget, address_of
from rlinf_cli.cluster.node.node_requests import AgentReply, ask
from rlinf_cli.cluster.transport import CommandOutcome, Transport
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import PlacementError
from rlinf_core.job.recipe import Trial
from rlinf_core.node.cluster_records import ClusterRecord
from rlinf_core.node.node_facts import machine
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.resolve import resolve
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology, NodeInfo

# Seconds for a node to collect its facts: vendor tools may need 20 s.
LOOK_SECONDS: Final = 45.0
LINK_SECONDS: Final = 60.0

Notify = Callable[[str], None]
# The placements of processes, by component.
Placed: TypeAlias = Mapping[str, Sequence[Placement]]


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """The file and the nodes to examine.

    Attributes:
        cluster_id: the mark of this cluster's processes, which may hold its ports.
        here: the software of this machine's interpreter; see `questions.software`.
        own_recipe: the result of `node_probe.recipe_of` on this machine.
        recorded: the running cluster of this name, or None.
        link_seconds: time limit for measuring links; 0 to skip it.
        links_at_once: the number of links measured concurrently.
        trials: the recipe's programs to run where components are placed.
    """

    cluster: ClusterConfig
    nodes: tuple[NodeTarget, ...]
    cluster_id: str
    here: Mapping[str, Any]
    recipe: str | None = None
    own_recipe: Mapping[str, Any] | None = None
    recorded: ClusterRecord | None = None
    link_seconds: float = LINK_SECONDS
    links_at_once: int = 64
    trials: tuple[Trial, ...] = ()


class DoctorReport(NamedTuple):
    """The findings of all checks."""

    findings: tuple[Finding, ...]
    num_nodes: int
    num_reached: int
    seconds: float

    def count(self, verdict: CheckVerdict) -> int:
        return sum(finding.verdict is verdict for finding in self.findings)

    @property
    def reached(self) -> bool:
        return not self.count(CheckVerdict.UNREACHABLE)

    @property
    def ok(self) -> bool:
        return self.reached and not self.count(CheckVerdict.FAULT)


async def examine(request: DoctorRequest, transport: Transport, notify: Notify) -> DoctorReport:
    """Run all preflight checks."""
    begun = time.monotonic()
    names = tuple(request.here.get("packages") or ())
    probed, findings = await look_at(
        request.nodes, request.cluster_id, transport, notify, recipe=request.recipe, packages=names
    )
    findings += judge(probed, request)
    by_rank = {machine.node.rank: machine for machine in probed}
    placed = _placed(request.cluster, by_rank)
    findings += await _trials(request, by_rank, placed, transport, notify)
    if request.link_seconds and len(by_rank) > 1:
        findings += await _links(request, by_rank, placed, transport, notify)
    reached = len(request.nodes) - sum(finding.verdict is CheckVerdict.UNREACHABLE for finding in findings)
    return DoctorReport(tuple(findings), len(request.nodes), reached, time.monotonic() - begun)


async def look_at(
    nodes: Sequence[NodeTarget],
    cluster_id: str,
    transport: Transport,
    notify: Notify,
    *,
    recipe: str | None = None,
    packages: Sequence[str] = (),
) -> tuple[list[ProbedNode], list[Finding]]:
    """Return the nodes that answered, with the versions of `packages`, and a finding for each that did not."""
    connect = max(node.connect_seconds for node in nodes)
    count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    notify(f"asking {count}, {connect + LOOK_SECONDS:.0f} s at most")
    request = {"verb": "inspect", "cluster": cluster_id, "recipe": recipe, "packages": list(packages)}
    answers = await asyncio.gather(*(_look(node, request, transport) for node in nodes))
    probed = [answer for answer in answers if isinstance(answer, ProbedNode)]
    return probed, [answer for answer in answers if isinstance(answer, Finding)]


async def _look(node: NodeTarget, request: dict[str, Any], transport: Transport) -> ProbedNode | Finding:
    request = {
        **request,
        "env": node.env,
        "environments": [environment.request() for environment in node.environments],
        "ports": node.ports.fixed(head=node.is_head),
        "addresses": [list(address) for _, unit in node.robots for address in unit.addresses()],
        "cameras": list(checks.cameras_of(unit for _, unit in node.robots)),
        "camera_environment": next(
            (environment.request() for environment in node.environments if environment.has_robots), None
        ),
    }
    asked = time.time()
    answer = await ask(transport, node, request, deadline=node.connect_seconds + LOOK_SECONDS)
    return _unanswered(node, answer) if answer.data is None else ProbedNode(node, answer.data, asked, time.time())


def _unanswered(node: NodeTarget, answer: AgentReply) -> Finding:
    """Return the finding for a node without facts: unreachable, or with an unusable interpreter."""
    what = f"{answer.message}: {answer.why}" if answer.why and answer.why not in answer.message else answer.message
    if answer.result.kind is CommandOutcome.DONE:
        return Finding("interpreter", CheckVerdict.FAULT, what, node.rank, node.name, answer.help)
    data = {"kind": str(answer.result.kind)}
    return Finding("reach", CheckVerdict.UNREACHABLE, what, node.rank, node.name, answer.help, data)


def judge(probed: Sequence[ProbedNode], request: DoctorRequest) -> list[Finding]:
    """Return the findings of all checks on the nodes' facts. Pure, except for the token file and the environment."""
    here = fact_rules.of_cluster(request.recorded, request.cluster.forward_env, os.environ)
    if not probed:
        return here
    reference = fact_rules.reference_of(probed, request.here, machine(), request.recipe, request.own_recipe)
    findings = [
        *(
            node.finding("reach", Said(OK, "answers over ssh" if node.node.host else "is this machine"))
            for node in probed
        ),
        *fact_rules.machines(probed),
        *fact_rules.of_software(probed, reference),
        *fact_rules.of_machines(probed, reference),
        *checks.judged(probed),
    ]
    if len(probed) == len(request.nodes):
        findings += _placements(request.cluster, probed)
    head = next((node for node in probed if node.node.is_head), None)
    if head is not None and len(request.nodes) > 1:
        findings += fact_rules.head_address(head, address_of(head.facts, request.cluster.head_address))
    return distinct([*findings, *here])


async def _trials(
    request: DoctorRequest, by_rank: Mapping[int, ProbedNode], placed: Placed, transport: Transport, notify: Notify
) -> list[Finding]:
    """Run the recipe's trial programs, on all nodes in parallel."""
    wanted: list[tuple[Trial, ProbedNode]] = []
    for trial in request.trials:
        variables: dict[int, list[dict[str, str]]] = {}
        for placement in placed.get(trial.component, ()):
            variables.setdefault(placement.cluster_node_rank, []).append(placement.environment())
        for rank in sorted(variables.keys() & by_rank.keys()):
            last = (json.dumps(variables[rank]),) if trial.each_process else ()
            wanted.append((trial._replace(arguments=(*trial.arguments, *last)), by_rank[rank]))
    if not wanted:
        return []
    names = ", ".join(dict.fromkeys(trial.what for trial, _ in wanted))
    notify(f"trying: {names}, {max(trial.seconds for trial, _ in wanted):.0f} s at most")
    return list(await asyncio.gather(*(_try(trial, machine, request, transport) for trial, machine in wanted)))


async def _try(trial: Trial, probed: ProbedNode, request: DoctorRequest, transport: Transport) -> Finding:
    labels = request.cluster.component_placement[trial.component].node_group or ()
    own = next((own for own in probed.node.environments if own.label in labels), None)
    request_data: dict[str, Any] = {
        "verb": "try",
        "cluster": request.cluster_id,
        "env": probed.node.env,
        "module": trial.module,
        "arguments": list(trial.arguments),
        "seconds": trial.seconds,
        "environment": own.request() if own is not None else None,
    }
    deadline = probed.node.connect_seconds + trial.seconds + LOOK_SECONDS
    answer = await ask(transport, probed.node, request_data, deadline=deadline)
    reply = answer.data or {"fault": answer.message}
    if "found" in reply:
        report = reply["found"]
        said = Said(CheckVerdict(report["verdict"]), report["what"], report["help"], report)
    else:
        interpreter = own.interpreter if own is not None else probed.node.interpreter
        said = Said(FAULT, f"`{interpreter}` cannot run `{trial.module}`: {reply['fault']}")
    return probed.finding(trial.what, said)


async def _links(
    request: DoctorRequest, by_rank: Mapping[int, ProbedNode], placed: Placed, transport: Transport, notify: Notify
) -> list[Finding]:
    nodes_of = {
        name: sorted({placement.cluster_node_rank for placement in placements}) for name, placements in placed.items()
    }
    wanted = checks.links_of(nodes_of, len(request.nodes))
    usable = [link for link in wanted if link.one in by_rank and link.other in by_rank]
    notify(f"measuring {len(usable)} links between them, {request.link_seconds:.0f} s at most")
    measured, left = await checks.measure(
        usable,
        by_rank,
        transport,
        seconds=request.link_seconds,
        head_address=request.cluster.head_address,
        most=request.links_at_once,
    )
    return checks.findings_of(measured, left, by_rank)


def _placements(cluster: ClusterConfig, probed: Sequence[ProbedNode]) -> list[Finding]:
    """Check that the components can be placed on the hardware found."""
    try:
        topology = ClusterTopology.from_nodes([checks.node_info(machine) for machine in probed], cluster)
    except PlacementError:
        return []  # the hardware found contradicts the declarations, which is its own finding
    findings: list[Finding] = []
    for name, entry in cluster.component_placement.items():
        resolution = resolve(name, entry.rank_map, entry.node_group, topology)
        if resolution.problems:
            first = resolution.problems[0]
            findings.append(Finding("placement", CheckVerdict.FAULT, first.message, help=first.help or ""))
        elif resolution.lacks_accelerators:
            what = f"no accelerator found: `{name}` is placed by rank, and would run on the CPU"
            findings.append(
                Finding("placement", CheckVerdict.WARNING, what, help="write `node_group: node` if that is intended")
            )
    return findings


def _placed(cluster: ClusterConfig, probed: Mapping[int, ProbedNode]) -> Placed:
    """Return the placement of each component, by declared hardware, else by hardware found."""
    topology = ClusterTopology.from_config(cluster)
    if any(group.unit is None for group in topology.groups.values()):
        nodes = [_with_found(node, probed.get(node.rank)) for node in topology.nodes]
        try:
            topology = ClusterTopology.from_nodes(nodes, cluster)
        except PlacementError:
            return {}  # the hardware found contradicts the declarations, which is its own finding
    by_component: dict[str, list[Placement]] = {}
    for name in cluster.component_placement:
        alone = cluster.model_copy(update={"component_placement": {name: cluster.component_placement[name]}})
        try:
            by_component[name] = ComponentPlacement(alone, topology).get_strategy(name).get_placement(topology)
        except PlacementError:
            continue
    return by_component


def _with_found(node: NodeInfo, probed: ProbedNode | None) -> NodeInfo:
    reply = probed.facts["accelerators"].get("found") if probed is not None else None
    if reply is None or node.num_accelerators is not None:
        return node if node.num_accelerators is not None else node._replace(num_accelerators=0)
    count = len(reply["models"])
    return node._replace(num_accelerators=count, accelerator_type=reply["type"] if count else None)
