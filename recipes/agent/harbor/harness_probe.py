"""A probe, in the interpreter of agents, of whether a Harbor agent can be made with its options.

    python -m recipes.agent.harbor.harness_probe HARNESS OPTIONS CONTEXT

OPTIONS are JSON. The last output line is a JSON record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from recipes.agent.harbor.trials import check_harness
from rlinf_core import ConfigError


def look(harness: str, options: Mapping[str, Any], context: int) -> dict[str, str]:
    """Return whether an agent can be made, for `rlinf doctor`: `verdict`, `what` and `help`."""
    try:
        check_harness(harness, options, context)
    except ConfigError as error:
        what = f"{error.message}: {error.why}" if error.why else error.message
        return {"verdict": "fault", "what": what, "help": error.help or ""}
    return {"verdict": "ok", "what": f"Harbor's agent `{harness}` can be made with its options", "help": ""}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
