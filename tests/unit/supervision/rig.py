"""A job in one process: its manager, and clients in the place of a driver and of workers, over real endpoints."""

from __future__ import annotations

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.context import Session
from rlinf_core.supervision.client import ManagerClient
from rlinf_core.supervision.manager import ManagerProcess

SECONDS = 10.0


class Job:
    """The manager of a job and the clients that have joined it."""

    def __init__(self, log_folder: str | None = None) -> None:
        self._session = Session("job", b"0123456789abcdef" * 2, log_folder=log_folder)
        self._manager = ManagerProcess("job", self._session.secret, "127.0.0.1", None)
        self._clients: list[ManagerClient] = []

    def join(
        self, name: str, incarnation: int = 0, *, rank: int = 0, settings: Settings | None = None
    ) -> ManagerClient:
        """Return the client of a process: the driver, an inspector, or a worker in one of its lives."""
        address = WorkerAddress.from_name(name)
        client = ManagerClient(
            self._session, self._manager.info(), address, ip="127.0.0.1", has_main=not address.ranks, settings=settings
        )
        self._clients.append(client)
        client.announce(incarnation, f"node {rank} (127.0.0.1)", rank)
        return client

    def worker(self, driver: ManagerClient, name: str) -> ManagerClient:
        """Return the only worker of a group that the driver launches, once it is known."""
        address = WorkerAddress.from_name(name)
        client = self.join(name, driver.open_group(str(address.get_parent_address()), 1, SECONDS))
        driver.lookup(address, SECONDS)
        return client

    def end_manager(self) -> None:
        self._manager._endpoint.close(linger=0.0)  # pyright: ignore[reportPrivateUsage] - as its process would end

    def close(self) -> None:
        for client in self._clients:
            client.close(linger=0.0)
        self.end_manager()


def die(client: ManagerClient) -> None:
    """End a client as a process ends: its connections break without a word."""
    for connection in client.endpoint._connections.all():  # pyright: ignore[reportPrivateUsage] - nothing else ends so
        connection.shut()


def cause_of_death(client: ManagerClient, name: str, incarnation: int) -> str | None:
    """Return why a worker died, as far as a client hears of it."""
    news = client.deaths.wait(name, incarnation)
    return news.cause if news is not None else None
