"""The summary of a run: keys of its file that changed nothing."""

from __future__ import annotations

from pathlib import Path

from rlinf_cli.job.findings import without_effect
from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.run_summary import summary_record, summary_text

JOB = b"""\
recipe: embodied
cluster: {num_nodes: 1, component_placement: {'actor,rollout,env': {node_group: node, placement: 0}}}
algorithm:
  adv_type: grpo
  loss_type: actor
  group_size: 8
  normalize_advantages: false
actor:
  optim: {value_lr: 1.0e-4}
"""


def test_keys_without_effect_are_named() -> None:
    unread = without_effect(load_with_lint("-", stdin=JOB, environ={}).diagnostics)
    text = summary_text(RunProgress(), Path("/runs/one"), unread=unread)
    (line,) = [line for line in text.splitlines() if line.strip().startswith("no effect")]
    assert line.endswith("algorithm.normalize_advantages (<stdin>:7), actor.optim.value_lr (<stdin>:9)")
    results = summary_record("finished", "embodied", Path("/runs/one"), unread=unread)["no_effect"]
    assert [result["key"] for result in results] == ["algorithm.normalize_advantages", "actor.optim.value_lr"]
    assert results[0]["place"] == "<stdin>:7:25"


def test_without_such_keys_there_is_no_line() -> None:
    assert "no effect" not in summary_text(RunProgress(), Path("/runs/one"))
    assert summary_record("finished", "embodied", Path("/runs/one"))["no_effect"] == []


def test_summary_tells_why_a_run_did_not_learn() -> None:
    text = summary_text(RunProgress(), Path("/runs/one"), causes=[("learning", "the learning rate is 0")])
    assert "  learning    the learning rate is 0\n              `rlinf why /runs/one` shows the evidence" in text
