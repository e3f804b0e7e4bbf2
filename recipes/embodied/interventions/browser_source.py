"""A person at a web page, over a WebSocket with a token: the env worker's side.

The server listens on loopback unless the job file says otherwise. From another machine, a tunnel (`ssh -L
17321:127.0.0.1:17321 robot-pc`) is the safe way: the connection itself is not encrypted, and browsers give gamepads
only to pages of loopback.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from recipes.embodied.config.intervention_types import BrowserOptions
from recipes.embodied.interventions.intervention import Steerable, Takeover
from recipes.embodied.interventions.operator_desk import OperatorDesk, OperatorLink, cannot_listen, read_token
from recipes.embodied.interventions.page_server import PageServer
from recipes.embodied.interventions.person import Controls, PersonSource
from rlinf_core.process.known_secrets import remember

# After this many seconds without a message, another person may take over; the page sends several per second.
ALIVE_SECONDS: Final = 2.0
_log = logging.getLogger("rlinf.interventions")


class BrowserSource(PersonSource):
    """Controls of a web page for one operator at a time, who sees the camera images."""

    options_model = BrowserOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        token = read_token(options.token_file)
        remember([token])
        self._desk = OperatorDesk(ALIVE_SECONDS)
        try:
            self._server = PageServer(
                options.host, options.port, token, self._desk, hz=self._hz, quality=options.quality
            )
        except OSError as error:
            raise cannot_listen("browser", options, error) from error
        self._link = OperatorLink(options, f"browser {options.host}:{self._server.port}")
        self._picture_due = 0.0
        _log.warning("steer at %s with the token of %s", self.url, options.token_file)

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{self._server.port}/"

    @property
    def picture_seconds(self) -> list[float]:
        """The latest delays from the sending of an image to its display, in seconds."""
        return list(self._server.round_trips)

    def poll(self) -> Controls:
        """See `PersonSource`. If the person in charge falls silent, the arm is held in place."""
        heard, connected = self._desk.take()
        now = time.monotonic()
        if connected and now >= self._picture_due:
            period = 1 / self.options.picture_hz
            self._picture_due = max(self._picture_due, now - period) + period
            self._server.exhibit.show(self.env.views(0))
        return self._link.step(heard, connected=connected)

    def read(self) -> Takeover | None:
        takeover = super().read()
        acts = takeover is not None and bool(takeover.rows[0])
        self._tell("you" if acts else "policy")
        return takeover

    def wait_for_person(self) -> None:
        self._tell("waiting")
        super().wait_for_person()

    def close(self) -> None:
        self._server.close()

    def _tell(self, acts: str) -> None:
        progress = self.env.progress
        self._server.exhibit.tell(
            {
                "acts": acts,
                "episode": int(progress.episode[0]),
                "reset": int(progress.reset),
                "step": int(progress.steps[0]),
                "gripper_closed": self._engagement.gripper_closed,
            }
        )
