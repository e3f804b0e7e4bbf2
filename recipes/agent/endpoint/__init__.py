"""The endpoint of a run, by whose protocols agents of any framework call the trained model."""

from __future__ import annotations

from rlinf_core import ConfigError
from rlinf_core.process.requirements import install_command, missing_modules

if missing := missing_modules(["starlette", "uvicorn"]):
    raise ConfigError(
        f"the endpoint of a run needs the package {missing[0]}", help=f"run `{install_command(*missing)}`"
    )

from recipes.agent.endpoint.server import ChatEndpoint, serve, token_variable

__all__ = ["ChatEndpoint", "serve", "token_variable"]
