"""What workers log: each line with the worker's address, to the process's output and to a file of its own."""

from __future__ import annotations

import logging
from pathlib import Path

from rlinf_core import env_vars
from rlinf_core.context import WorkerContext

LOGGER = logging.getLogger("rlinf")


def set_up_logging(context: WorkerContext) -> None:
    """Sends the lines of this worker where they belong; once in each process."""
    address = context.address
    formatter = logging.Formatter(f"%(asctime)s %(levelname)s [{address}] %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if context.session.log_folder:
        folder = Path(context.session.log_folder) / address.root_group_name
        folder.mkdir(parents=True, exist_ok=True)
        name = "_".join(map(str, address.ranks))
        handlers.append(logging.FileHandler(folder / f"rank_{name}.log", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(formatter)
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(env_vars.LOG_LEVEL.get())
    LOGGER.propagate = False
