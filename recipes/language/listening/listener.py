"""Serving an ASGI application on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.server import ServerState

from recipes.language.listening import limits
from recipes.language.listening.limits import LARGEST_HEAD, TimedConnection
from rlinf_core.foreign.strangers import Unproven

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_IDLE_SECONDS: Final = 60


@asynccontextmanager
async def listening(app: ASGIApp, port: int = 0) -> AsyncGenerator[int]:
    """Serve `app` on loopback within the context, whose value is the port.

    Args:
        app: the application.
        port: the port to listen on; 0: any free port.

    Raises:
        OSError: the port is in use.
    """
    # Do not use `uvicorn.Server`, which installs signal handlers and polls about ten times a second.
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
    )
    config.load()
    state = ServerState()
    most = limits.MOST_CONNECTIONS
    owned = Unproven[TimedConnection](2 * most, from_one=most)
    # Let asyncio create the socket: it disables Nagle's algorithm only on its own connections.
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TimedConnection(config, state, owned), "127.0.0.1", port, backlog=most)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(state.connections):
            connection.transport.abort()
