"""Three steps of shipped jobs that run on any machine in seconds: their metrics by seed, and the folder they leave."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from recipes.serve.service.requests_and_results import SAMPLE_RESULT
from tests.golden.frozen import DATA, check_frozen, leaves
from tests.golden.jobs import ARITHMETIC, check_metrics, check_numbers, run_rlinf
from tests.integration.recipes.serve.service_command import Service, service
from tests.unit.recipes.serve.served import Client, logprobs_of, sample_fields, shifted

# One for each way to learn whose steps are bitwise the same each time: agents' requests come as they come, and what is
# drawn together decides the last bits. By night one that learns as another, but by more of the product.
JOBS: Final = (
    "embodied/cartpole-laptop",
    "math/sums-laptop",
    pytest.param("sft/sums-chat-laptop", marks=pytest.mark.nightly),
    pytest.param("embodied/pick-laptop", marks=pytest.mark.nightly),
)
# Objects whose keys are data, and folders whose files are of the format of transformers.
_FREE: Final = frozenset({"config", "digests", "env", "env_layers", "facts", "files", "metrics", "phases", "versions"})
_MODEL_FOLDERS: Final = frozenset({"huggingface", "model", "tokenizer"})
# Of runs, of sessions and of what they save.
_ID: Final = re.compile(r"-\d{8}-\d{6}(-\w+)?|\b[0-9a-f]{8}-[0-9a-f]{16}\b|(?<=snapshot)-[0-9a-f]{16}\b")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", JOBS)
def test_three_steps_end_as_before(job: str, tmp_path: Path) -> None:
    words = ("runner.max_steps=3", "runner.val_check_interval=-1", "runner.logger.log_path=.")
    run_rlinf("train", job, *words, folder=tmp_path)
    (run,) = (path.parent for path in tmp_path.glob("*/run.json"))
    check_frozen(f"folders/{job}", _folder(run))
    check_metrics(job, run / "metrics.jsonl")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_recordings_and_what_is_learned_from_them_are_as_before(tmp_path: Path) -> None:
    run_rlinf("record", "embodied/pick-laptop", "--out", "demonstrations/laptop", "-n", "8", folder=tmp_path)
    words = ("runner.max_steps=3", "runner.val_check_interval=-1", "runner.logger.log_path=runs")
    run_rlinf("train", "sft/pick-laptop", *words, folder=tmp_path)
    (run,) = (path.parent for path in tmp_path.glob("runs/*/run.json"))
    check_frozen("folders/sft/pick-laptop", _folder(run))
    check_metrics("sft/pick-laptop", run / "metrics.jsonl")


@pytest.mark.timeout(600)
def test_cartpole_goes_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    """Its steps are those of the run that was not interrupted, `data/longer`."""
    shutil.copytree(DATA / "first", tmp_path / "runs/first")
    run_rlinf("runs", "convert", "first", "--runs-dir", "runs", folder=tmp_path)
    words = ("runner.max_steps=4", "runner.val_check_interval=2", "env.eval.total_num_envs=4")
    run_rlinf("train", "embodied/cartpole-laptop", *words, "runner.resume_dir=runs/first", folder=tmp_path)
    check_metrics("cartpole_resumed", tmp_path / "runs/first/metrics.jsonl")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_cartpole_scores_as_before_from_an_older_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(DATA / "first", tmp_path / "runs/first")
    run_rlinf("runs", "convert", "first", "--runs-dir", "runs", folder=tmp_path)
    run_rlinf("eval", "first", "-n", "8", "--runs-dir", "runs", "-o", "evaluation", folder=tmp_path)
    facts = leaves(json.loads((tmp_path / "evaluation/eval.json").read_text()))
    kept = {path: json.loads(text) for path, text in facts if not path.startswith(("times", "versions"))}
    check_numbers("cartpole_evaluated", kept)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_service_learns_and_samples_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ARITHMETIC.items():
        monkeypatch.setenv(name, value)
    with service(tmp_path) as running:
        values = asyncio.run(_served(running))
    check_frozen("folders/serve/sums-laptop", _folder(running.folder))
    check_numbers("serve/sums-laptop", values)


async def _served(running: Service) -> dict[str, Any]:
    """Return what a client reads of three steps, of a pass after them, and of a sample of what was learned."""
    values: dict[str, Any] = {"loss": [], "grad_norm": []}
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        client = Client(http, running.key)
        model = await client.model()
        for step in range(3):
            learned = await client.learn(model, 2 * step + 1, shifted())
            values["loss"].append(learned.metrics["loss:sum"])
            values["grad_norm"].append((await client.step(model, 2 * step + 2, 1e-3))["metrics"]["grad_norm"])
        last = await client.learn(model, 7, shifted(), forward_only=True)
        values["logprobs"] = [array.tolist() for array in logprobs_of(last)]
        fields = {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 1}
        saved = await client.result(await client.post("save_weights_for_sampler", fields))
        sampler = saved["sampling_session_id"]
        asked = sample_fields(sampler, 9, [3, 4, 5], seed=1, stop=[], num_samples=2)
        result = SAMPLE_RESULT.FromString(await client.result(await client.post("asample", asked)))
        values["answers"] = [np.frombuffer(part.tokens, np.int32).tolist() for part in result.sequences]
    return values


def _folder(run: Path) -> Iterator[str]:
    """Yield every file of the run: of JSON the keys with the kinds of their values, of weights the shapes."""
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = _ID.sub("-ID", str(path.relative_to(run)))
        yield name
        yield from (f"{name}: {fact}" for fact in _facts(path))


def _facts(path: Path) -> list[str]:
    if path.suffix in (".json", ".jsonl") and path.parent.name not in _MODEL_FOLDERS:
        texts = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        return sorted({kind for text in texts for kind in _kinds(json.loads(text))})
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return [f"{name} {part.get_dtype()} {part.get_shape()}" for name, part in sorted(slices.items())]
    return []


def _kinds(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path and the kind of every value."""
    if isinstance(value, dict) and value and path.rpartition(".")[2] in _FREE:
        for item in value.values():
            yield f"{path}.* {_kind(item)}"
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _kinds(item, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for item in value:
            yield from _kinds(item, f"{path}[]")
    else:
        yield f"{path} {_kind(value)}"


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
