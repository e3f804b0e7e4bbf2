"""`rlinf env`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Cli = Callable[..., Any]


def test_each_simulator_is_listed_with_its_interpreter(cli: Cli) -> None:
    text = cli("env", "list")
    data = json.loads(cli("env", "list", "--output", "json").out)
    assert (text.code, data["schema"]) == (0, "rlinf.env-list/1")
    assert {"libero", "metaworld", "robosuite"} <= {simulator["env_type"] for simulator in data["simulators"]}
    for item in data["simulators"]:
        assert f"{item['env_type']}  " in text.out
        assert item["what"] in text.out


def test_an_unknown_simulator_is_refused_before_anything_is_made(cli: Cli) -> None:
    ended = cli("env", "setup", "metawrold")
    assert ended.code != 0
    assert "metaworld" in ended.err
    assert "Traceback" not in ended.err
