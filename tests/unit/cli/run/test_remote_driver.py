"""The driver on a remote head: what it is sent besides the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_cli.cluster.transports import head_driver
from rlinf_cli.run.remote_driver import train_there
from rlinf_cli.sweep.queue import _environment as environment  # pyright: ignore[reportPrivateUsage]
from rlinf_core.config.composing import origins


@pytest.mark.parametrize("claims", ["wait", "no-wait", "share"])
def test_a_point_of_a_sweep_is_of_its_group_on_the_head(
    claims: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Mapping[str, str]] = []

    def run(*_: object, env: Mapping[str, str], **__: object) -> int:
        sent.append(env)
        return 0

    monkeypatch.setattr(head_driver, "run_on_head", run)
    monkeypatch.setattr(origins, "resolved_text", repr)
    record: Any = SimpleNamespace(nodes=[SimpleNamespace(host="head")])
    job: Any = SimpleNamespace(cluster=SimpleNamespace(forward_env=()), tree=None)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        monkeypatch.setenv("RLINF_CLAIMS", claims)
        monkeypatch.setenv("RLINF_CLAIMS", environment(folder, 2, waits=True)["RLINF_CLAIMS"])
        train_there(record, job, detached=False)
    first, second, another = (env["RLINF_CLAIMS"] for env in sent)
    if claims == "wait":
        assert first == second != another
        assert first.startswith("group:")
    else:
        assert {first, second, another} == {claims}
    monkeypatch.setenv("RLINF_CLAIMS", "wait")
    assert environment(tmp_path, 1, waits=False)["RLINF_CLAIMS"] == "no-wait"
