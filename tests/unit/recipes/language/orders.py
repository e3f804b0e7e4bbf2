"""Orders to an engine that never stops, as a test gives them."""

from __future__ import annotations

from typing import Any


class Script:
    """Orders that come when the engine has drawn so many steps: `(at, order)`, sorted."""

    def __init__(self, *orders: tuple[int, Any]) -> None:
        self.left = list(orders)
        self.now = 0

    def poll(self) -> list[Any]:
        results = [order for at, order in self.left if at <= self.now]
        self.left = [item for item in self.left if item[0] > self.now]
        self.now += 1
        return results

    def wait(self) -> Any:
        assert self.left, "waited for an order that never comes"
        self.now, order = self.left.pop(0)
        return order
