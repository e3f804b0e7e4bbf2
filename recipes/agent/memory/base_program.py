"""The memory of an agent process without a conversation: run as a program, it prints its peaks by phase.

    python -m recipes.agent.memory.base_program COMPONENT MODULE < CONFIG

CONFIG is the pickled file of the job. The program imports the worker's MODULE, and loads the tasks and tools of the
file, or the index of `search`.
"""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from recipes.training.memory.empty_process import import_worker
from rlinf_core import ConfigError
from rlinf_core.process.process_memory import PeakMeter

if TYPE_CHECKING:
    from recipes.agent.config import AgentConfig


def main(component: str, module: str) -> None:
    """Print the peaks, in bytes: `start` and `init`."""
    meter = PeakMeter()
    import_worker(meter, module)
    config: AgentConfig = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - from the process that forecasts
    kept: list[Any] = []
    with meter.during("init"), suppress(ConfigError):  # files of another machine
        from recipes.agent.tasks.make_tools import make_search, make_tools
        from recipes.agent.tasks.tasks import load_tasks

        if component == "index":
            kept.append(make_search(config))
        else:
            kept += [load_tasks(config.data, evaluation=each) for each in (False, True)]
            kept.append(make_tools(_without_index(config)))
    print(json.dumps({phase: peak.rss for phase, peak in meter.peaks.items()}))


def _without_index(config: AgentConfig) -> AgentConfig:
    """Return the file of agents that leave `search` to the workers of the index, where there are some."""
    if not config.has_index:
        return config
    tools = tuple(each for each in config.agent.tools if each != "search")
    return config.model_copy(update={"agent": config.agent.model_copy(update={"tools": tools})})


if __name__ == "__main__":
    main(*sys.argv[1:])
