"""Keys that change nothing: which of them are told, where, and how gravely. The rules are those of the recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlinf_cli.job.job_file import load_with_lint
from rlinf_cli.job.no_effect import NO_EFFECT
from rlinf_core.config.composing.origins import resolved_text
from rlinf_core.config.diagnostics import Diagnostic, Severity

CLUSTER = "cluster: {num_nodes: 1, component_placement: {'actor,rollout,env': {node_group: node, placement: 0}}}\n"
MATH = (
    "recipe: math\n"
    "cluster: {num_nodes: 1, component_placement: {'actor,rollout,reward': {node_group: node, placement: 0}}}\n"
)
EMBODIED = f"recipe: embodied\n{CLUSTER}"
GRPO = "algorithm:\n  adv_type: grpo\n  loss_type: actor\n  group_size: 8\n"
WARNING, NOTE = Severity.WARNING, Severity.NOTE


def faults_of(text: str, overrides: Sequence[str] = ()) -> list[Diagnostic]:
    return list(load_with_lint("-", overrides, stdin=text.encode(), environ={}).diagnostics)


def dead(text: str, overrides: Sequence[str] = ()) -> list[tuple[str, Severity]]:
    """Return the lines of keys without effect, without blanks, and how grave each is."""
    diagnostics = [item for item in faults_of(text, overrides) if item.code == NO_EFFECT]
    return [
        (diagnostic.span.source.line(diagnostic.span.begin.line).strip(), diagnostic.severity)
        for diagnostic in diagnostics
    ]


def test_a_finding_says_what_makes_it_so_and_where() -> None:
    (diagnostic,) = faults_of(EMBODIED + GRPO + "  normalize_advantages: false\n")
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
    assert dead(MATH + "critic:\n  threads: 2\n  optim:\n    lr: 0.1\n") == [("critic:", WARNING)]
    assert dead(MATH + "critic:\n  optim:\n    lr: 0.1\n    clip_grad: 2\n") == [("optim:", WARNING)]
    assert dead(MATH + "critic:\n  optim:\n    lr: 0.1\n") == [("lr: 0.1", WARNING)]


def test_an_override_is_told_where_it_was_typed() -> None:
    (diagnostic,) = faults_of(EMBODIED + GRPO, ["algorithm.normalize_advantages=false"])
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
    file = tmp_path / "job.yaml"
    file.write_text("extends: math_laptop\nactor: {model: {model_path: .}}\n")
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
    assert [item.code for item in faults_of(EMBODIED + GRPO + "  normalize_advantages: [1]\n")] == ["wrong-type"]
    # Nothing follows from a value that is wrong.
    text = EMBODIED + "algorithm:\n  adv_type: grbo\n  normalize_advantages: false\n"
    assert [item.code for item in faults_of(text)] == ["unknown-choice"]


def test_what_asks_for_something_that_is_not_there_is_an_error() -> None:
    (diagnostic,) = faults_of(EMBODIED + "actor: {fsdp_config: {gradient_checkpointing: true}}\n")
    assert (diagnostic.code, diagnostic.severity, diagnostic.span.text) == ("not-available", Severity.ERROR, "true")
    (diagnostic,) = faults_of(EMBODIED + "actor: {fsdp_config: {gradient_checkpointing: false}}\n")
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
