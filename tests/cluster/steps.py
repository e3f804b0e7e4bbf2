"""What a driver on a host does: one step of its script after the other, as `ray_hosts.Driver` asks for them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(steps: Mapping[str, Callable[..., Any]]) -> None:
    """Do steps, one for each line of input, until that ends; answer with what each returns or raises."""
    out = os.fdopen(os.dup(1), "w")
    # Ray forwards what workers print to this process's output.
    os.dup2(2, 1)
    for line in sys.stdin:
        step, *args = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": steps[step](*args)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)
