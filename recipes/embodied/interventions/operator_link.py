"""An operator elsewhere: their token, their messages between two steps, and an arm whose operator falls silent. No
sockets.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.person import Controls
from recipes.embodied.interventions.source_options import BrowserOptions


def read_token(file: str) -> str:
    """Return the token in a file.

    Raises:
        InterventionError: it cannot be read, is empty, or is readable by other users.
    """
    how = "create one with `(umask 077; openssl rand -hex 32 > FILE)`, with the same content on both sides"
    try:
        mode = os.stat(file).st_mode
        token = Path(file).read_text("utf-8").strip().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise InterventionError("the token cannot be read", where=file, why=str(error), help=how) from error
    if stat.S_IMODE(mode) & 0o077:
        raise InterventionError("other users may read the token", where=file, help=f"run `chmod 600 {file}`")
    if len(token) < 16:
        raise InterventionError("the token is shorter than 16 characters", where=file, help=how)
    return token


def cannot_listen(source: str, options: BrowserOptions, error: OSError) -> InterventionError:
    """Return the error for an address on which a source of interventions cannot be reached."""
    return InterventionError(
        f"cannot listen on {options.host}:{options.port}",
        where=source,
        why=error.strerror or str(error),
        help="choose an address of this node and a free port; each env worker of a node needs its own",
    )


def merged(controls: Sequence[Controls]) -> Controls | None:
    """Return the newest controls with every button that was pressed in them; None: there are none."""
    if not controls:
        return None
    # Buttons count, however soon after them the next message came.
    return controls[-1]._replace(
        verdict=next((control.verdict for control in controls if control.verdict is not None), None),
        toggles_gripper=sum(control.toggles_gripper for control in controls) % 2 == 1,
        rewards=any(control.rewards for control in controls),
    )


class OperatorLink:
    """Holds an arm whose operator falls silent while in charge, and ends the run if that lasts.

    Args:
        options: `hold_steps`, after which the arm stands still, at once where the connection has ended; `lost_steps`,
            after which the run ends.
        where: the source and its address, for errors.
    """

    def __init__(self, options: BrowserOptions, where: str) -> None:
        self._options, self._where = options, where
        self._silent = 0
        self._last = Controls()

    def step(self, heard: Controls | None, *, connected: bool) -> Controls:
        """Return the controls of a step.

        Args:
            heard: what came since the last step; None: nothing did.
            connected: whether the operator's connection stands.

        Raises:
            InterventionError: the operator was in charge, and has been silent for too long.
        """
        if heard is not None:
            self._silent, self._last = 0, heard
            return heard
        self._silent += 1
        if not self._last.engaged and not any((*self._last.linear, *self._last.angular)):
            return Controls()
        if self._silent >= self._options.lost_steps:
            raise InterventionError(
                f"the operator has been silent for {self._silent} steps",
                where=self._where,
                help="reconnect in time, or release control before leaving",
            )
        if self._silent >= self._options.hold_steps or not connected:
            return Controls(engaged=True)
        return Controls(self._last.linear, self._last.angular, engaged=True)
