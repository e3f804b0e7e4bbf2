"""`env.train.intervention`: who may take over where, found before anything starts."""

from __future__ import annotations

import pytest

from recipes.embodied.config import EmbodiedConfig
from rlinf_cli.job.job_file import load_with_lint

SAC = ("actor.model.model_type=squashed_policy", "algorithm.loss_type=sac", "env.train.total_num_envs=1")
BROWSER = "env.train.intervention={source: browser, options: {token_file: /tmp/token}}"


def faults_of(*overrides: str) -> list[tuple[str, str]]:
    """Return code and message of each error and warning."""
    return [
        (diagnostic.code, diagnostic.message)
        for diagnostic in load_with_lint("laptop", overrides, environ={}).diagnostics
    ]


def test_a_person_takes_over_in_training_and_not_in_evaluations() -> None:
    job = load_with_lint("laptop", (*SAC, BROWSER), environ={})
    assert not faults_of(*SAC, BROWSER)
    assert isinstance(job.config, EmbodiedConfig)
    assert job.config.env.train.intervention.source == "browser"
    assert "intervention" not in type(job.config.env.eval).model_fields
    assert not faults_of(*SAC[:2], "env.train.intervention.source=scripted", "env.train.total_num_envs=4")


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        ((BROWSER,), "conflicting-settings", "learns only from actions that its own policy chose"),
        ((*SAC, BROWSER, "env.train.total_num_envs=4"), "conflicting-settings", "a person controls one environment"),
        ((*SAC, "env.train.intervention.source=spacemuse"), "unknown-choice", "`spacemuse`"),
        ((*SAC, "env.train.intervention.source=browser"), "missing-key", "`token_file`"),
        ((*SAC, "env.train.intervention.source=remote"), "unknown-choice", "`remote`"),
        ((*SAC, BROWSER, "env.train.intervention.options.prot=1"), "unknown-key", "`prot`"),
        (
            (*SAC, "env.train.intervention={source: scripted, options: {shortest: 9, longest: 2}}"),
            "bad-value",
            "exceeds",
        ),
        ((*SAC, "env.train.intervention.source=nowhere:Source"), "missing-extra", "nowhere"),
        ((*SAC, "env.train.intervention.options.seed=1"), "unknown-key", "`seed` in `env.train.intervention.options`"),
        (("env.train.judge.options.path=x",), "unknown-key", "`path` in `env.train.judge.options`"),
        (("env.train.judge.source=classifier",), "missing-key", "`env.train.judge.options` needs `path`"),
        (("env.train.judge={source: classifier, options: {in_a_row: 0}}",), "missing-key", "needs `path`"),
        ((*SAC, "algorithm.replay.interventions_share=0.5"), "no-effect", "there are no interventions"),
    ],
)
def test_what_cannot_be_is_told(overrides: tuple[str, ...], code: str, said: str) -> None:
    results = [message for item, message in faults_of(*overrides) if item == code]
    assert any(said in message for message in results), faults_of(*overrides)


def test_a_package_that_is_missing_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.embodied.rules.intervention_rules.missing_modules", list)
    ((code, message),) = faults_of(*SAC, "env.train.intervention.source=spacemouse")
    assert code == "missing-extra"
    assert "`hidapi`" in message
