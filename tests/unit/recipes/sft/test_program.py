"""The program of recipe `sft`, `recipes.sft.sft_program`: which workers it starts, and what it refuses before that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.sft import sft_program as module
from recipes.sft.config import SftConfig
from rlinf_core import ConfigError
from tests.unit.recipes.sft.conftest import ALONE


@pytest.fixture
def launched(config_of: Callable[..., SftConfig], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Launches nothing, and tells the components that would have been."""

    def launch(*overrides: str) -> list[str]:
        config = config_of(*overrides)
        placed: list[str] = []
        strategies: Any = SimpleNamespace(get_strategy=lambda name: placed.append(name))
        monkeypatch.setattr(module, "HybridComponentPlacement", lambda *arguments: strategies)
        monkeypatch.setattr(module, "launch_together", lambda cluster, groups: None)
        monkeypatch.setattr(module, "SftRunner", lambda config, groups, record: groups)
        groups: Any = module.launch(config, SimpleNamespace(), SimpleNamespace())  # pyright: ignore[reportArgumentType]
        assert list(groups) == placed
        return placed

    return launch


@pytest.mark.parametrize(
    ("overrides", "components"),
    [
        ((), ["actor", "rollout", "env"]),
        (("runner.val_check_interval=-1",), ["actor"]),
        (ALONE, ["actor"]),
    ],
)
def test_only_a_run_that_evaluates_has_environments(
    launched: Callable[..., list[str]], overrides: tuple[str, ...], components: list[str]
) -> None:
    assert launched(*overrides) == components


def test_missing_folder_ends_the_run_before_it_starts(
    config_of: Callable[..., SftConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    model = config.actor.model.model_copy(update={"model_path": str(tmp_path / "model")})
    job: Any = SimpleNamespace(
        config=config.model_copy(update={"actor": config.actor.model_copy(update={"model": model})})
    )
    started: list[Any] = []
    monkeypatch.setattr(module, "run_job", lambda *arguments: started.append(arguments))
    with pytest.raises(ConfigError, match="does not exist"):
        module.program(job, SimpleNamespace(), lambda event: None)  # pyright: ignore[reportArgumentType]
    assert started == []
    module.program(SimpleNamespace(config=config), SimpleNamespace(), lambda event: None)  # pyright: ignore
    assert len(started) == 1
