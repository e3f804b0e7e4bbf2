"""`rlinf serve` with vLLM's own engine in an interpreter of its own.

`RLINF_VLLM_PYTHON` names the interpreter: see docs/language-models.md.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.integration.recipes.serve.service_command import Service, service
from tests.unit.recipes.serve.served import ROWS, SMALL, Client, datum, logprobs_of, model_fields, shifted

PYTHON = os.environ.get("RLINF_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="RLINF_VLLM_PYTHON names no interpreter with vllm"),
]
ENGINES = (
    "server.tenants=[default]",
    "rollout.backend=vllm",
    "server.max_rank=8",
    "cluster.node_groups=[{label: engines, node_ranks: 0, env_configs:"
    f" [{{node_ranks: 0, python_interpreter_path: {PYTHON}}}]}}]",
    "cluster.component_placement.actor={node_group: node, placement: 0}",
    "cluster.component_placement.rollout={node_group: engines, placement: '0:0'}",
)


async def check(running: Service) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
        client = Client(http, running.key)
        session = await client.session()
        refused = await client.post("create_model", model_fields(session))
        assert "train_unembed=False" in refused.content["detail"]
        model = await client.model(session, train_unembed=False)
        for step in range(3):
            await client.learn(model, 2 * step + 1, shifted())
            await client.step(model, 2 * step + 2)
        fields = {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 1}
        sampler = (await client.result(await client.post("save_weights_for_sampler", fields)))["sampling_session_id"]
        base = await client.sampler(session)
        for name in (base, sampler):
            drawn = await client.sample(name, 0, ROWS[0][:3], max_tokens=8, stop=[], seed=4, prompt_logprobs=True)
            (answer,) = drawn.sequences
            tokens = np.frombuffer(answer.tokens, np.int32).tolist()
            sampled = np.frombuffer(answer.logprobs, np.float32)
            prompt = np.frombuffer(drawn.prompt_logprobs, np.float32)[1:]
            if name == sampler:
                row = [*ROWS[0][:3], *tokens]
                data = [datum(row[:-1], target_tokens=row[1:], weights=[1.0] * (len(row) - 1))]
                (passed,) = logprobs_of(await client.learn(model, 8, data, forward_only=True))
                np.testing.assert_allclose([*prompt, *sampled], passed, atol=1e-3)


def test_vllm_samples_what_the_actor_has_trained(tmp_path: Path) -> None:
    with service(tmp_path, *SMALL, *ENGINES) as running:
        asyncio.run(check(running))
    assert running.process.returncode == 130
