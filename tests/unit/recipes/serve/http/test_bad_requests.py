"""Requests that cannot be served: each gets one clear error, takes its number, and costs nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    datum,
    model_fields,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)

pytestmark = pytest.mark.security
NAN, INF = float("nan"), float("inf")
TOKENS = [3, 4, 5]


def policy_datum(**values: Any) -> Any:
    return datum(TOKENS, target_tokens=TOKENS, **{"logprobs": [-1.0] * 3, "advantages": [1.0] * 3, **values})


PASSES: dict[str, tuple[Sequence[Any], str, str]] = {
    "token_too_large": ([datum([3, 10**7], target_tokens=[3, 4], weights=[1.0, 1.0])], "cross_entropy", "10000000"),
    "token_negative": ([datum([-1], target_tokens=[3], weights=[1.0])], "cross_entropy", "-1"),
    "target_too_large": ([datum([3], target_tokens=[999], weights=[1.0])], "cross_entropy", "target_tokens"),
    "no_tokens": ([datum([], target_tokens=np.zeros(0, int), weights=[])], "cross_entropy", "none"),
    "no_data": ([], "cross_entropy", "no datum"),
    "too_long": (shifted([[3] * 70]), "cross_entropy", "context of 64"),
    "short_targets": ([datum(TOKENS, target_tokens=[3], weights=[1.0])], "cross_entropy", "targets for 1"),
    "short_weights": ([datum(TOKENS, target_tokens=TOKENS, weights=[1.0])], "cross_entropy", "shape"),
    "no_weights": ([datum(TOKENS, target_tokens=TOKENS)], "cross_entropy", "needs `weights`"),
    "unread_input": ([policy_datum(weights=[1.0] * 3)], "ppo", "does not read `weights`"),
    "nan_weight": ([datum(TOKENS, target_tokens=TOKENS, weights=[NAN, 1, 1])], "cross_entropy", "NaN"),
    "infinite_advantage": ([policy_datum(advantages=[INF, 1, 1])], "ppo", "infinite"),
    "unknown_input": ([policy_datum(reward=[1.0] * 3)], "ppo", "reward"),
    "unknown_loss": (shifted(), "stable_reinforce", "importance_sampling"),
    "custom_loss": (shifted(), "custom", "forward_backward_custom"),
}


@pytest.mark.parametrize("name", PASSES)
async def test_pass_that_is_refused_fails_its_result(start: Start, name: str) -> None:
    data, loss, words = PASSES[name]

    async with start() as service:
        model, other = await service.ann.model(), await service.ben.model()
        refused = await service.ann.learn(model, 1, data, loss)
        assert words in refused["error"]
        assert refused["category"] == "user"
        # Its number is taken, and nobody else notices.
        assert "no step was taken" in (await service.ann.step(model, 2))["error"]
        assert (await service.ann.learn(model, 3, shifted())).metrics["loss:sum"] > 0
        assert (await service.ben.learn(other, 1, shifted())).metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"beta": 0.1}, "not a setting of the loss ppo"), ({"clip_low_threshold": NAN}, "finite")],
)
async def test_settings_of_a_loss_are_checked(start: Start, settings: dict[str, float], words: str) -> None:
    async with start() as service:
        model = await service.ann.model()
        assert words in (await service.ann.learn(model, 1, [policy_datum()], "ppo", **settings))["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": NAN}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"eps": "small"}, "eps"),
    ],
)
def test_settings_of_a_step_are_checked(start: Start, changes: dict[str, Any], words: str) -> None:
    async def work() -> None:
        async with start() as service:
            model = await service.ann.model()
            fields = step_fields(model, 1)
            fields["adam_params"] |= changes
            if changes.get("learning_rate") is not None and np.isnan(changes["learning_rate"]):
                # No JSON has it: it is refused before it has a number.
                response = await service.http.post(
                    "/api/v1/optim_step",
                    content=str(fields).replace("'", '"').replace("nan", "NaN"),
                    headers=service.ann._headers,
                )
                assert response.status_code == 400
                return
            assert words in (await service.ann.result(await service.ann.post("optim_step", fields)))["error"]

    asyncio.run(work())


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", ".hidden", "", "a/b", "x" * 200, "a\0b"])
async def test_name_of_weights_stays_in_its_folder(start: Start, tmp_path: Path, name: str) -> None:
    async with start() as service:
        model = await service.ann.model()
        for seq, path in ((1, "save_weights"), (2, "save_weights_for_sampler")):
            fields = {"model_id": model, "seq_id": seq, "path": name}
            result = await service.ann.result(await service.ann.post(path, fields))
            assert "a name of weights has" in result["error"]
        load = {"model_id": model, "seq_id": 3, "path": f"tinker://{model}/weights/{name}", "optimizer": False}
        assert "error" in await service.ann.result(await service.ann.post("load_weights", load))
    assert not (tmp_path / "weights").exists()


SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "token_too_large": ({"prompt": [10**7]}, "10000000"),
    "empty_prompt": ({"prompt": []}, "none"),
    "long_prompt": ({"prompt": [3] * 64}, "no room"),
    "many_samples": ({"num_samples": 10**6}, "num_samples"),
    "no_samples": ({"num_samples": 0}, "num_samples"),
    "many_tokens": ({"max_tokens": 10**9}, "context"),
    "negative_temperature": ({"temperature": -1.0}, "temperature"),
    "temperature_below_float32": ({"temperature": 1e-45}, "1e-06"),
    "temperature_of_a_denormal_double": ({"temperature": 5e-324}, "1e-06"),
    "temperature_that_logits_cannot_be_divided_by": ({"temperature": 1e-38}, "1e-06"),
    "top_k_of_nothing": ({"top_k": 0}, "top_k"),
    "top_p_of_nothing": ({"top_p": 0.0}, "top_p"),
    "stop_of_numbers": ({"stop": [1.5]}, "stop"),
}


@pytest.mark.parametrize("name", SAMPLES)
async def test_sample_that_is_refused_is_told_at_once(start: Start, name: str) -> None:
    changes, words = SAMPLES[name]

    async with start() as service:
        sampler = await service.ann.sampler(await service.ann.session())
        prompt = changes.get("prompt", [3])
        params = {key: value for key, value in changes.items() if key != "prompt"}
        answer = await service.ann.post("asample", sample_fields(sampler, 0, prompt, **params))
        assert answer.status == 422
        assert words in answer.content["detail"]
        assert len((await service.ann.sample(sampler, 1, [3])).sequences) == 1


@pytest.mark.parametrize("field", ["target_prompt_logprobs", "prompt_alt_tokens_k"])
async def test_unserved_fields_of_samples_are_refused(start: Start, field: str) -> None:
    async with start() as service:
        sampler = await service.ann.sampler(await service.ann.session())
        answer = await service.ann.post("asample", {**sample_fields(sampler, 0, [3]), field: 5})
        assert answer.status == 422
        assert field in answer.content["detail"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"rank": 10**5}}, "rank"),
        ({"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}}, "train_attn"),
        ({"base_model": "Qwen/Qwen3-8B"}, "rlinf/base"),
        ({"optimizer_config": {"type": "dimuon"}}, "adamw"),
    ],
)
async def test_model_that_is_refused_is_told_at_once(start: Start, changes: dict[str, Any], words: str) -> None:
    async with start() as service:
        fields = {**model_fields(await service.ann.session()), **changes}
        answer = await service.ann.post("create_model", fields)
        assert answer.status == 422
        assert words in answer.content["detail"]


async def test_models_of_a_tenant_are_bounded(start: Start) -> None:
    async with start() as service:
        session = await service.ann.session()
        for number in range(3):
            await service.ann.model(session, number)
        answer = await service.ann.post("create_model", model_fields(session, 3))
        assert answer.status == 422
        assert "max_models" in answer.content["detail"]
        assert await service.ben.model()


@pytest.mark.parametrize("seq", [0, -1, 2**31, 20_000, "1", None])
async def test_number_that_cannot_be_taken_is_refused(start: Start, seq: Any) -> None:
    async with start() as service:
        model = await service.ann.model()
        answer = await service.ann.post("optim_step", {**step_fields(model, 1), "seq_id": seq})
        assert answer.status == 422
        assert "seq_id" in answer.content["detail"]


async def test_compressed_and_malformed_bodies_are_refused(start: Start) -> None:
    async with start() as service:
        model, ann = await service.ann.model(), service.ann
        body = pass_body(model, 1, shifted())
        assert (await ann.send(body, **{"Content-Encoding": "zstd"})).status == 415
        assert (await ann.send(b"\xff\xff\xff")).status == 400
        assert (await ann.send(body, **{"Content-Type": "application/json"})).status == 415


async def test_image_and_sparse_tensors_out_of_bounds_are_refused(start: Start) -> None:
    from recipes.serve.wire.requests_and_results import PASS_MESSAGE

    def with_image(message: Any) -> None:
        message.data[0].input.add().image = b"png"

    def with_large_shape(message: Any) -> None:
        del message.data[0].values["weights"].shape[:]
        message.data[0].values["weights"].shape.append(2**40)

    def with_column_outside(message: Any) -> None:
        tensor = message.data[0].values["weights"]
        del tensor.shape[:]
        tensor.shape.extend([6, 2])
        tensor.sparse.values = np.ones(1, np.float32).tobytes()
        tensor.sparse.columns = np.asarray([9], np.int64).tobytes()
        tensor.sparse.rows = np.asarray([0, 1, 1, 1, 1, 1, 1], np.int64).tobytes()

    async with start() as service:
        model = await service.ann.model()
        cases = (
            (with_image, "text tokens"),
            (with_large_shape, "the body claims 8 TiB up to datum 0, `weights`"),
            (with_column_outside, "column index"),
        )
        for seq, (change, words) in enumerate(cases, 1):
            message = PASS_MESSAGE.FromString(pass_body(model, seq, shifted(ROWS[:1])))
            change(message)
            result = await service.ann.result(await service.ann.send(message.SerializeToString()))
            assert words in result["error"]


async def test_unserved_routes_are_told(start: Start) -> None:
    async with start() as service:
        answer = await service.ann.post("billing/usage", {})
        assert answer.status == 404
        assert "not served" in answer.content["detail"]


async def test_adapter_that_the_engine_cannot_take_is_refused(start: Start) -> None:
    async with start("server.full_weights=ben") as service:
        service.state.facts = service.state.facts._replace(adapts_output=False)
        refused = await service.ann.post("create_model", model_fields(await service.ann.session()))
        assert refused.status == 422
        assert "pass train_unembed=False" in refused.content["detail"]
        assert await service.ann.model(train_unembed=False)
        # All weights need no adapter.
        assert await service.ben.model()
