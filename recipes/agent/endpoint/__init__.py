"""The endpoint of a run, by whose protocols agents of any framework call the trained model."""

from __future__ import annotations

from recipes.agent.endpoint.server import ChatEndpoint, serve

__all__ = ["ChatEndpoint", "serve"]
