"""The waits in the steps of a run that are worth a look at another placement."""

from __future__ import annotations

import shlex

from rlinf_cli.live.run_summary import shown
from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding, finding


def slow_steps(facts: RunFacts) -> list[RunFinding]:
    """Return what the steps wait for: components on idle hardware, and the longest answers."""
    findings: list[RunFinding] = []
    waits = [wait for wait in facts.waits if wait.matters]
    if waits:
        others = [f"{wait.words} (`{wait.source}`)" for wait in waits[1:]]
        evidence = [f"`{waits[0].source}`, the newest 100 steps", *others]
        do = f"{_advice(facts)} predicts the steps of every other placement"
        findings.append(finding("idle-hardware", waits[0].words, evidence, do, kind=FindingKind.SPEED))
    tail = facts.tail
    if tail is not None and tail.matters:
        ahead = f"{facts.number('runner.max_staleness') or 1:.0f}"
        do = f"{_advice(facts, '--staleness', ahead)} predicts what rollouts gain that go on meanwhile"
        evidence = [f"profile.json: {tail.lengths}"]
        findings.append(finding("long-tail", tail.cost, evidence, do, kind=FindingKind.SPEED))
    return findings


def _advice(facts: RunFacts, *options: str) -> str:
    run = shown(facts.path)
    return f"`{shlex.join(['rlinf', 'inspect', 'placement', run, '--advise', run, *options])}`"
