"""The steps of a run that are profiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config.sections.runner import ProfilerConfig
from rlinf_core.errors import ConfigError
from rlinf_core.runners import runner
from rlinf_core.runners.runner import ProfiledSteps


class Group:
    """A group that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def start_profile(self, kind: str, folder: str, name: str) -> str:
        self.asked.append(("start", kind, folder, name))
        return name

    def stop_profile(self) -> str:
        self.asked.append(("stop",))
        return ""


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def done(*handles: Any) -> None:
        assert all(isinstance(handle, str) for handle in handles)

    monkeypatch.setattr(runner, "wait_together", done)


def run(config: ProfilerConfig | None, steps: range, last: int) -> dict[str, list[tuple[int, str]]]:
    """Return when each group was asked for what."""
    groups = {"actor": Group(), "env": Group()}
    seen: dict[str, list[tuple[int, str]]] = {name: [] for name in groups}
    profiles = ProfiledSteps(config, Path("profiles"), groups)
    for step in steps:
        profiles.begin(step)
        profiles.end(step, last=step == last)
        for name, group in groups.items():
            seen[name] += [(step, one[0]) for one in group.asked]
            group.asked.clear()
    return seen


@pytest.mark.parametrize(
    ("config", "steps", "asked"),
    [
        (None, range(1, 5), []),
        (ProfilerConfig(), range(1, 5), [(2, "start"), (2, "stop")]),
        (ProfilerConfig(first_step=2, last_step=3), range(1, 5), [(2, "start"), (3, "stop")]),
        (ProfilerConfig(first_step=2, last_step=9), range(1, 5), [(2, "start"), (4, "stop")]),
        # Resumed in the midst of them, and after them.
        (ProfilerConfig(first_step=1, last_step=3), range(3, 5), [(3, "start"), (3, "stop")]),
        (ProfilerConfig(first_step=1, last_step=2), range(3, 5), []),
    ],
)
def test_profile_covers_its_steps(config: ProfilerConfig | None, steps: range, asked: list[tuple[int, str]]) -> None:
    assert run(config, steps, 4) == {"actor": asked, "env": asked}


def test_unknown_component_is_refused() -> None:
    with pytest.raises(ConfigError, match="names `reward`"):
        run(ProfilerConfig(components=("reward",)), range(1, 2), 4)


def test_profile_of_a_component_leaves_the_others_alone() -> None:
    seen = run(ProfilerConfig(components=("env",)), range(1, 5), 4)
    assert seen == {"actor": [], "env": [(2, "start"), (2, "stop")]}
