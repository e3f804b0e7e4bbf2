"""What rlinf uses of Harbor, in little: a trial whose agent is a function of the test."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipes.agent.harbor import trials


class BaseEnvironment:
    def __init__(self, *, environment_dir: Any = None, **named: Any) -> None:
        self.environment_dir, self._persistent_env = environment_dir, {}
        self._validate_definition()

    def _validate_definition(self) -> None: ...

    def _resolve_user(self, user: Any) -> Any:
        return user

    def _merge_env(self, env: Any) -> Any:
        return env


class BaseVerifier:
    def __init__(self, *, environment: Any, trial_paths: Any) -> None:
        self.environment, self.trial_paths = environment, trial_paths


class Outside:
    """An agent that runs beside the container."""


Outside.__module__ = "harbor.agents.outside"


class Installed:
    """An agent that is installed in the container."""


Installed.__module__ = "harbor.agents.installed.one"


class Factory:
    @staticmethod
    def get_agent_class_from_config(config: Any) -> type:
        if config.name not in ("outside", "terminus-2", "installed"):
            raise ValueError(f"unknown agent {config.name}")
        return Installed if config.name == "installed" else Outside

    @staticmethod
    def create_agent_from_config(config: Any, logs_dir: Any) -> None:
        if "parser_nam" in config.kwargs:
            raise ValueError("Unknown option 'parser_nam'.")


def install(monkeypatch: pytest.MonkeyPatch, agent: Callable[[Any, Any], Awaitable[None]]) -> list[Any]:
    """Let `import harbor` work with this agent, and return the configurations of the trials that follow."""
    configs: list[Any] = []

    class Trial:
        def __init__(self, config: Any) -> None:
            self._config = config

        @staticmethod
        async def create(config: Any) -> Trial:
            configs.append(config)
            return Trial(config)

        async def run(self) -> Any:
            module, _, name = self._config.environment.import_path.partition(":")
            made = getattr(import_module(module), name)(
                environment_dir=self._config.task.path / "environment", **self._config.environment.kwargs
            )
            ended = None
            await made.start(force_build=False)
            try:
                await agent(made, self._config)
            except Exception as error:
                ended = SimpleNamespace(exception_type=type(error).__name__, exception_message=str(error))
            finally:
                await made.stop(delete=True)
            return SimpleNamespace(exception_info=ended)

    names = ("AgentConfig", "TaskConfig", "EnvironmentConfig", "VerifierConfig", "TrialConfig")

    def keep(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"name": None, **values})

    modules: dict[str, dict[str, Any]] = {
        "harbor": {},
        "harbor.agents.factory": {"AgentFactory": Factory},
        "harbor.environments.base": {"BaseEnvironment": BaseEnvironment, "ExecResult": keep},
        "harbor.environments.capabilities": {
            "EnvironmentCapabilities": keep,
            "EnvironmentResourceCapabilities": keep,
        },
        "harbor.models.trial.config": dict.fromkeys(names, keep),
        "harbor.models.verifier.result": {"VerifierResult": keep},
        "harbor.trial.trial": {"Trial": Trial},
        "harbor.verifier.base": {"BaseVerifier": BaseVerifier},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "recipes.agent.harbor.plugin", raising=False)
    monkeypatch.setattr(trials, "missing_modules", lambda names: [])
    return configs
