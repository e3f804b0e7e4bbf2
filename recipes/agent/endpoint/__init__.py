"""The endpoint of a run: the protocols by which agents of any framework speak to the model that learns."""

from __future__ import annotations

from recipes.agent.endpoint.server import ChatEndpoint, serve

__all__ = ["ChatEndpoint", "serve"]
