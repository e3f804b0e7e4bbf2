"""vLLM keeps the contract of snapshots: a stand-in for its interface always, the real one where it is installed.

Run by `RLINF_VLLM_PYTHON=/opt/venvs/vllm/bin/python make nightly`, or by that interpreter's own pytest: see
docs/language-models.md.
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

from recipes.serve import vllm_snapshots
from recipes.serve.adapters import ModelVariants
from recipes.serve.snapshot_engines import SnapshotEngines, TorchSnapshots
from recipes.serve.snapshot_sampler import SnapshotSampler
from recipes.serve.values import AdapterSettings, request_of
from recipes.serve.vllm_snapshots import VllmSnapshots, make_vllm_snapshots
from tests.unit.recipes.language.engines.contract import VOCABULARY, contract_model
from tests.unit.recipes.language.in_threads import Hub, in_thread
from tests.unit.recipes.serve import fake_vllm
from tests.unit.recipes.serve.snapshot_contract import (
    ContractTokenizer,
    SnapshotContract,
    contract_config,
    drawing,
    run,
    write_adapters,
)

HAS_VLLM = importlib.util.find_spec("vllm") is not None
OTHER = os.environ.get("RLINF_VLLM_PYTHON", "")


def make(folder: Path) -> VllmSnapshots:
    config = contract_config(folder, rollout={"backend": "vllm"}, server={"max_rank": 8})
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
    assert (fake._drawn, fake._engine.prompts, fake._engine.places) == ({}, {}, {})


def test_cancelled_requests_are_not_drawn_on(fake: VllmSnapshots, snapshots: dict[str, str]) -> None:
    one, other = (drawing(name, folder, (3, 4), samples=2) for name, folder in snapshots.items())
    for begun in (one, other):
        fake.begin(begun, request_of(begun))
    fake.draw()
    fake.forget(one.request_id)
    assert fake._engine.unfinished == 2
    assert {answer.request_id for _ in range(8) for answer in fake.draw().answers} == {other.request_id}


def test_snapshots_in_memory_are_few(fake: VllmSnapshots, snapshots: dict[str, str]) -> None:
    fake._most = 1
    one = drawing("a", snapshots["small"], (3,))
    fake.begin(one, request_of(one))
    assert [fake.has_room(folder) for folder in (None, *snapshots.values())] == [True, True, False]
    fake.forget("a")
    assert fake.has_room(snapshots["large"])


def test_cut_distributions_are_refused(fake: VllmSnapshots) -> None:
    cut = drawing("a", None, (3,), top_k=2)
    with pytest.raises(ValueError, match="`top_k`"):
        fake.begin(cut, request_of(cut))
    assert fake._drawn == {}


def test_parameters_that_vllm_refuses_fail_alone(fake: VllmSnapshots) -> None:
    hot = drawing("a", None, (3,), temperature=3.0)
    with pytest.raises(ValueError, match="temperature"):
        fake.begin(hot, request_of(hot))
    assert len(run(fake, [drawing("b", None, (3,))])) == 1


def test_numbers_of_adapters_are_few(fake: VllmSnapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_snapshots, "_KNOWN", 2)
    numbers = [fake._engine._reference(folder).lora_int_id for folder in ("a", "b", "c", "a", "a")]
    assert len(set(numbers)) == 4
    assert numbers[3] == numbers[4]
    assert len(fake._engine._numbers) == 2


def test_adapters_of_the_output_layer_are_probed(fake: VllmSnapshots) -> None:
    assert not fake.adapts_output


class EngineGenerateError(Exception):
    """As vLLM's, which are told by their names."""


@pytest.mark.parametrize("error", [EngineGenerateError("a request is wrong"), KeyError(7)], ids=["generate", "other"])
def test_an_error_of_vllm_fails_the_request_that_brings_it(
    fake: VllmSnapshots, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    step = fake_vllm.LlmEngine.step

    def failing(self: fake_vllm.LlmEngine) -> Any:
        if any(13 in running.tokens[:1] for running in self._running.values()):
            raise error
        return step(self)

    sampler = in_thread(SnapshotSampler, "rollout", Hub(), 0, 1)(contract_config(Path()))
    sampler._engines = fake
    asked = [drawing(name, None, prompt) for name, prompt in (("a", (3, 4)), ("bad", (13, 5)), ("b", (5,)))]
    monkeypatch.setattr(fake_vllm.LlmEngine, "step", failing)
    done: dict[str, Any] = {}
    while len(done) < len(asked):
        done |= sampler.advance([] if done else asked, [], 60)
    assert {name for name, outcome in done.items() if outcome.failure} == {"bad"}
    assert type(error).__name__ in done["bad"].failure
    assert fake._drawn == {}


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


def make_torch(folder: Path, **sections: dict[str, Any]) -> TorchSnapshots:
    return TorchSnapshots(contract_config(folder, **sections), contract_model(), ContractTokenizer())


class TestTorchSnapshots(SnapshotContract):
    @pytest.fixture
    def engines(self, tmp_path: Path) -> SnapshotEngines:
        return make_torch(tmp_path)


def test_snapshots_of_torch_in_memory_are_few(tmp_path: Path, snapshots: dict[str, str]) -> None:
    engines = make_torch(tmp_path, rollout={"max_snapshots": 1})
    small, large = (drawing(name, folder, (3,), max_tokens=20) for name, folder in snapshots.items())
    engines.begin(small, request_of(small))
    # While one is drawn from, another waits; idle, it gives way.
    assert not engines.has_room(large.snapshot)
    assert engines.has_room(small.snapshot)
    while not engines.draw().answers:
        pass
    assert len(run(engines, [large])) == 1
    assert set(engines._engines) == {large.snapshot}


def test_snapshots_of_all_weights_count_apart(tmp_path: Path, snapshots: dict[str, str]) -> None:
    contract_model().save_pretrained(tmp_path / "model")
    variants = ModelVariants(contract_model(), 8.0, contract_model)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        variants.add(name, AdapterSettings(0, 0))
        variants.save(name, AdapterSettings(0, 0), tmp_path / name)
    engines = make_torch(tmp_path / "model", server={"max_full_models": 1}, rollout={"max_snapshots": 2})
    one, two = (drawing(name, str(tmp_path / name), (3,), max_tokens=20) for name in ("one", "two"))
    engines.begin(one, request_of(one))
    assert not engines.has_room(two.snapshot)
    assert engines.has_room(snapshots["small"])
    run(engines, [drawing("s", snapshots["small"], (3,))])
    while not engines.draw().answers:
        pass
    run(engines, [two])
    assert set(engines._engines) == {snapshots["small"], two.snapshot}
