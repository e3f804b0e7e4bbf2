"""`rlinf serve` as a command: with the unmodified Tinker SDK, on several ranks, with vLLM's engine, and under deaths.

`RLINF_VLLM_PYTHON` names an interpreter with vLLM: see docs/language-models.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from recipes.serve.service.requests_and_results import SAMPLE_RESULT
from tests.integration.recipes.serve.service_command import (
    NO_SDK,
    PYTHON,
    RLINF,
    Service,
    client_environment,
    free_port,
    run_client,
    service,
)
from tests.rlinf_command import output_of
from tests.unit.recipes.serve.served import (
    ROWS,
    SMALL,
    Client,
    logprobs_of,
    model_fields,
    parsed,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)
from tests.waiting import until

PROGRAM = Path(__file__).with_name("tinker_program.py")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


async def check_answers(running: Service) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        client = Client(http, running.key)
        listed = (await client.get("get_server_capabilities")).content["supported_models"]
        assert listed[0]["model_name"] == "rlinf/base"
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        assert (await Client(http, "tml-x").post("create_session", fields)).status == 401
        session = await client.session()
        assert await client.model(session) == f"{session}:train:0"


def test_service_starts_answers_and_ends(tmp_path: Path) -> None:
    with service(tmp_path, "actor.model.hidden_dim=32", "actor.model.num_layers=1") as running:
        asyncio.run(check_answers(running))
    assert running.process.returncode == 130
    assert json.loads((running.folder / "run.json").read_text())["status"] == "interrupted"
    # No key reaches a log.
    assert [file for file in (running.folder / "logs").rglob("*.log") if running.key in file.read_text()] == []


def test_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [str(RLINF), "serve", "serve/sums-laptop", f"server.port={taken.getsockname()[1]}"]
        said = output_of(*command, cwd=tmp_path, timeout=240, code=2, errors=True)
    assert "is in use" in said
    assert "Traceback" not in said


def test_other_recipes_are_not_served(tmp_path: Path) -> None:
    assert "rlinf train" in output_of(RLINF, "serve", "math/sums-laptop", cwd=tmp_path, code=2, errors=True)


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason=NO_SDK)
def test_unmodified_sdk_trains_samples_and_resumes(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        run_client(running, [str(PROGRAM), str(tmp_path)], tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["losses"] == sorted(seen["losses"], reverse=True)
    assert seen["resumed_is_equal"]
    assert seen["answers"] == [5, 5, 5]
    assert seen["sums"]["importance_sampling"] == pytest.approx(-56.0, rel=1e-4)
    assert seen["two_shape"] == [8, 2]
    assert "stable_reinforce" in seen["refused"]
    assert "no step was taken" in seen["after_refusal"]
    assert seen["final"].endswith("/sampler_weights/final")
    assert seen["scores"][0] is None


TWO = tuple(
    f"cluster.component_placement.{component}={{node_group: node, placement: '0:0-1'}}"
    for component in ("actor", "rollout")
)
STEPS, PROMPTS = 4, 6


class Seen(NamedTuple):
    """What a client saw: losses and norms of gradients by step, last log-probabilities, and answers."""

    losses: list[float]
    norms: list[float]
    logprobs: list[Any]
    answers: list[list[bytes]]


async def seen_of(running: Service, tenant: str) -> Seen:
    """Train for some steps, then sample from base model and snapshot, all requests at once."""
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        client = Client(http, (running.folder / "service/keys" / tenant).read_text().strip())
        session = await client.session()
        model = await client.model(session)
        losses, norms = list[float](), list[float]()
        for step in range(STEPS):
            # Two passes a step: their gradients add up on each rank. One of them has a datum for one rank only.
            sent = [
                await client.send(pass_body(model, 3 * step + 1, shifted())),
                await client.send(pass_body(model, 3 * step + 2, shifted(ROWS[:1]))),
            ]
            stepped = await client.post("optim_step", step_fields(model, 3 * step + 3))
            losses += [parsed(await client.result(answer)).metrics["loss:sum"] for answer in sent]
            norms.append((await client.result(stepped))["metrics"]["grad_norm"])
        last = await client.learn(model, 3 * STEPS + 1, shifted(), forward_only=True)
        samplers = [await client.sampler(session), await client.snapshot(model, 3 * STEPS + 2, 1)]
        asked = [
            await client.post(
                "asample", sample_fields(sampler, n, ROWS[n % 4][: 1 + n], num_samples=3, seed=n, stop=[])
            )
            for sampler in samplers
            for n in range(PROMPTS)
        ]
        results = [SAMPLE_RESULT.FromString(await client.result(answer)) for answer in asked]
        answers = [[part.tokens for part in result.sequences] for result in results]
        return Seen(losses, norms, logprobs_of(last), answers)


@pytest.mark.nightly
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    seen: dict[tuple[str, str], Seen] = {}
    tenants = ("server.tenants=[adapters, full]", "server.full_weights=full", "server.max_pending=40")
    for name, overrides in (("one", ()), ("two", TWO)):
        (tmp_path / name).mkdir()
        with service(tmp_path / name, *SMALL, *tenants, *overrides) as running:
            for tenant in ("adapters", "full"):
                seen[name, tenant] = asyncio.run(seen_of(running, tenant))
    for tenant in ("adapters", "full"):
        one, two = seen["one", tenant], seen["two", tenant]
        # Ranks add up in another order; steps carry that on.
        np.testing.assert_allclose(two.losses, one.losses, rtol=1e-5)
        np.testing.assert_allclose(two.norms, one.norms, rtol=1e-4)
        for mine, theirs in zip(two.logprobs, one.logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert one.losses[0] > one.losses[-2]
        # Of the base model to the bit; of the snapshot, whose weights differ by rounding, with these seeds.
        assert two.answers == one.answers


VLLM_PYTHON = os.environ.get("RLINF_VLLM_PYTHON", "")
ENGINES = (
    "server.tenants=[default]",
    "rollout.backend=vllm",
    "server.max_rank=8",
    "cluster.node_groups=[{label: engines, node_ranks: 0, env_configs:"
    f" [{{node_ranks: 0, python_interpreter_path: {VLLM_PYTHON}}}]}}]",
    "cluster.component_placement.actor={node_group: node, placement: 0}",
    "cluster.component_placement.rollout={node_group: engines, placement: '0:0'}",
)


async def check(running: Service) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
        client = Client(http, running.key)
        session = await client.session()
        assert "train_unembed=False" in await client.refusal("create_model", model_fields(session))
        model = await client.model(session, train_unembed=False)
        for step in range(3):
            await client.train(model, 2 * step + 1)
        sampler = await client.snapshot(model, 7, 1)
        base = await client.sampler(session)
        for name in (base, sampler):
            drawn = await client.sample(name, 0, ROWS[0][:3], max_tokens=8, stop=[], seed=4, prompt_logprobs=True)
            (answer,) = drawn.sequences
            tokens = np.frombuffer(answer.tokens, np.int32).tolist()
            sampled = np.frombuffer(answer.logprobs, np.float32)
            prompt = np.frombuffer(drawn.prompt_logprobs, np.float32)[1:]
            if name == sampler:
                data = shifted([[*ROWS[0][:3], *tokens]])
                (passed,) = logprobs_of(await client.learn(model, 8, data, forward_only=True))
                np.testing.assert_allclose([*prompt, *sampled], passed, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM_PYTHON, reason="RLINF_VLLM_PYTHON names no interpreter with vllm")
def test_vllm_samples_what_the_actor_has_trained(tmp_path: Path) -> None:
    with service(tmp_path, *SMALL, *ENGINES) as running:
        asyncio.run(check(running))
    assert running.process.returncode == 130


SAVING = ("actor.model.hidden_dim=32", "actor.model.num_layers=1", "server.save_interval=3", "runner.max_restarts=100")


def workers_of(running: Service, seen: set[int]) -> list[int]:
    """Return the processes of the actor and the engine, in the order in which they began.

    Args:
        running: the service.
        seen: the processes that were workers at an earlier look. During a call Ray names a process by its method.
    """
    parents = dict[int, tuple[int, int]]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            values = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(values[1]), int(values[19])  # the parent, and when it began
    below = {running.process.pid}
    for _ in range(4):
        below |= {pid for pid, (parent, _) in parents.items() if parent in below}
    seen |= {pid for pid in below if is_worker(pid)}
    return sorted(seen & below, key=lambda pid: parents[pid][1])


def is_worker(pid: int) -> bool:
    """Return whether a process is that of a worker, and not of the manager, which Ray names by its own class."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::WorkerProcess")
    return False


def kill(victim: str, running: Service, seen: set[int]) -> bool:
    """Kill the actor or the engine, where both are there; return whether they were."""
    workers = workers_of(running, seen)
    if len(workers) == 2:
        os.kill(workers[victim == "engine"], signal.SIGKILL)
    return len(workers) == 2


def seen_without_deaths(folder: Path, steps: int) -> list[object]:
    folder.mkdir()
    with service(folder, *SAVING) as running:
        run_client(running, [str(PROGRAM), str(folder), str(steps)], folder)
    return json.loads((folder / "seen.json").read_text())


def progress(folder: Path) -> int:
    file = folder / "progress"
    return int(file.read_text() or 0) if file.exists() else 0


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not PYTHON, reason=NO_SDK)
@pytest.mark.parametrize("seed", range(3))
def test_client_goes_on_through_ten_deaths(tmp_path: Path, seed: int) -> None:
    deaths = int(os.environ.get("RLINF_TEST_DEATHS", "10"))
    steps, draw, folder = 4 * deaths + 4, random.Random(seed), tmp_path / "killed"
    right = seen_without_deaths(tmp_path / "whole", steps)
    folder.mkdir()
    seen = set[int]()
    options, port = (*SAVING, f"server.state_dir={folder / 'state'}"), free_port()
    with ExitStack() as stack:
        running = stack.enter_context(service(folder, *options, port=port))
        command = [PYTHON, "-W", "ignore", str(PROGRAM), str(folder), str(steps)]
        client = subprocess.Popen(
            command, env=client_environment(running, folder), cwd=folder, stderr=subprocess.PIPE, text=True
        )
        stack.callback(client.kill)
        for death in range(deaths):
            at = 4 * death + draw.randint(1, 4)
            until(lambda at=at: progress(folder) >= at or client.poll() is not None, f"step {at}", 300)
            victim = draw.choice(["server", "actor", "engine"])
            sleep(0.2 * draw.random())  # the moment within the step
            assert client.poll() is None, client.communicate()[1][-3000:]
            if victim == "server":
                os.kill(running.process.pid, signal.SIGKILL)
                running.process.wait(60)
                running = stack.enter_context(service(folder, *options, port=port))
            else:
                # None is there while the service starts them again after the death before.
                until(lambda running=running, victim=victim: kill(victim, running, seen), "both workers", 240)
        errors = client.communicate(timeout=600)[1]
    assert client.returncode == 0, errors[-3000:]
    assert json.loads((folder / "seen.json").read_text()) == right


HERE = Path(__file__).parent


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason=NO_SDK)
def test_sdk_has_the_stored_surface() -> None:
    installed = json.loads(output_of(PYTHON, "-W", "ignore", HERE / "sdk_surface.py", timeout=60))
    stored = json.loads((HERE / "sdk_surface.json").read_text())
    assert changes(stored, installed) == []


def changes(stored: dict[str, Any], installed: dict[str, Any]) -> list[str]:
    """Return the paths, requests and messages that differ, each by a line."""
    lines = [f"path {path}" for path in sorted(set(stored["paths"]) ^ set(installed["paths"]))]
    for part in ("requests", "messages"):
        for name in sorted({*stored[part], *installed[part]}):
            before, now = stored[part].get(name), installed[part].get(name)
            if before != now:
                lines.append(f"{name}: {before} is now {now}")
    return lines


def test_changes_are_named() -> None:
    stored = {"paths": ["a", "b"], "requests": {"R": ["x"]}, "messages": {"M": {"f": "1 9"}}}
    installed = {"paths": ["a", "c"], "requests": {"R": ["x", "y"]}, "messages": {"M": {"f": "1 9"}}}
    assert changes(stored, stored) == []
    assert changes(stored, installed) == ["path b", "path c", "R: ['x'] is now ['x', 'y']"]
