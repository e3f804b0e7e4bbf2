"""vLLM keeps the contract of snapshots: a stand-in for its interface always, the real one where it is installed.

Run by `RLINF_VLLM_PYTHON=/opt/venvs/vllm/bin/python make nightly`, or by that interpreter's own pytest: see
docs/engines.md.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.serve.workers.snapshot_engines import SnapshotEngines
from recipes.serve.workers.snapshot_sampler import request_of
from recipes.serve.workers.vllm_snapshots import VllmSnapshots, make_vllm_snapshots
from tests.unit.recipes.language.engines.contract import VOCABULARY, contract_model
from tests.unit.recipes.serve.workers import fake_vllm
from tests.unit.recipes.serve.workers.snapshot_contract import (
    ContractTokenizer,
    SnapshotContract,
    contract_config,
    drawing,
    run,
    write_adapters,
)

HAS_VLLM = importlib.util.find_spec("vllm") is not None
OTHER = os.environ.get("RLINF_VLLM_PYTHON", "")


def make(folder: Path, *overrides: str) -> VllmSnapshots:
    config = contract_config(folder, "rollout.backend=vllm", "server.max_rank=8", *overrides)
    engines, vocabulary = make_vllm_snapshots(config, ContractTokenizer(), torch.device("cpu"), "RolloutGroup:0")
    assert vocabulary == VOCABULARY
    return engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> VllmSnapshots:
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return make(folder)


class TestFakeVllm(SnapshotContract):
    @pytest.fixture
    def engines(self, fake: VllmSnapshots) -> SnapshotEngines:
        return fake


def test_nothing_is_kept_of_requests_that_ended(fake: VllmSnapshots, snapshots: dict[str, str]) -> None:
    one = drawing("a", snapshots["small"], (3, 4), prompt_logprobs=True, answer_top=2, samples=3)
    run(fake, [one])
    assert len(fake.prompt_logprobs(one)) == 2
    fake.forget("a")
    assert (fake._samples, fake._engine.prompts, fake._engine.places) == ({}, {}, {})


def test_cut_distributions_are_refused(fake: VllmSnapshots) -> None:
    cut = drawing("a", None, (3,), top_k=2)
    with pytest.raises(ValueError, match="`top_k`"):
        fake.begin(cut, request_of(cut))
    assert fake._samples == {}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(HAS_VLLM or not OTHER, reason="RLINF_VLLM_PYTHON names no interpreter with vllm")
def test_the_contract_in_the_interpreter_that_has_vllm() -> None:
    done = subprocess.run(
        [OTHER, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "--timeout=1700", __file__, "-k", "TestRealVllm"],
        cwd=Path(__file__).parents[5],
        capture_output=True,
        text=True,
        timeout=1750,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_VLLM, reason="this interpreter has no vllm")
class TestRealVllm(SnapshotContract):
    @pytest.fixture(scope="class")
    def engines(self, folder: Path) -> Iterator[Any]:
        """Start one engine for all tests: that takes ten seconds."""
        made = make(folder)
        yield made
        made._engine.stop()
