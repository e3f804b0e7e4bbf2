"""The end of a run in its folder: status, reason and last step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rlinf_core.errors import RLinfError

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder

# Seconds that the end of a run waits for room in its folder, and between two tries.
_ROOM_SECONDS: Final = 10.0
_ROOM_PAUSE: Final = 0.25


def record_end(
    folder: RunFolder, step: int | None, status: str, reason: str = "", *, at_once: bool = False
) -> RLinfError | None:
    """Write the end status and the last finished step; return the error that prevents it, if any.

    A file system without room may have some again in seconds: why the run ended is worth a wait.

    Args:
        folder: the folder of the run.
        step: the last finished step; None: the run had not started.
        status: the end status.
        reason: why it ended.
        at_once: whether there is no time for a wait, as after a second signal.
    """
    deadline = time.monotonic() + (0.0 if at_once else _ROOM_SECONDS)
    while True:
        try:
            if step is not None:
                folder.update(step=step)
            folder.end(status, reason)
        except RLinfError as error:
            if not _lacks_room(error) or time.monotonic() >= deadline:
                return error
            time.sleep(_ROOM_PAUSE)
        else:
            return None


def _lacks_room(error: RLinfError) -> bool:
    from rlinf_core.foreign.write_fault import NO_ROOM

    return isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM
