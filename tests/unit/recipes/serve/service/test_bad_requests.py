"""Requests that cannot be served: each gets one clear error, takes its number, and costs nobody else anything."""

from __future__ import annotations

import json
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
        await service.ann.learn(model, 1, shifted())
        refused = await service.ann.learn(model, 2, data, loss)
        assert words in refused["error"]
        assert refused["category"] == "user"
        # Its number is taken, the gradients before it are dropped, and nobody else notices.
        assert "no step was taken" in (await service.ann.step(model, 3))["error"]
        assert (await service.ann.step(model, 4))["metrics"]["grad_norm"] == 0
        assert (await service.ann.learn(model, 5, shifted())).metrics["loss:sum"] > 0
        assert (await service.ben.learn(other, 1, shifted())).metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": 0.1}, "not a setting of the loss ppo"),
        ({"clip_low_threshold": NAN}, "finite"),
        ({"clip_low_threshold": 1.5}, "`clip_low_threshold` is 1.5, above `clip_high_threshold` 1.2"),
        ({"clip_high_threshold": 0.2}, "above `clip_high_threshold` 0.2"),
    ],
)
async def test_settings_of_a_loss_are_checked(start: Start, settings: dict[str, float], words: str) -> None:
    async with start() as service:
        model = await service.ann.model()
        assert words in (await service.ann.learn(model, 1, [policy_datum()], "ppo", **settings))["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"eps": "small"}, "eps"),
        ({"amsgrad": True}, "`adam_params` has `amsgrad`, which is not read here"),
    ],
)
async def test_settings_of_a_step_are_checked(start: Start, changes: dict[str, Any], words: str) -> None:
    async with start() as service:
        fields = step_fields(await service.ann.model(), 1)
        fields["adam_params"] |= changes
        assert words in (await service.ann.ask("optim_step", **fields))["error"]


async def test_nan_is_no_json_and_is_refused_before_it_has_a_number(start: Start) -> None:
    async with start() as service:
        fields = json.dumps(step_fields(await service.ann.model(), 1, NAN))
        response = await service.http.post("/api/v1/optim_step", content=fields, headers=service.ann._headers)
        assert response.status_code == 400


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", ".hidden", "", "a/b", "x" * 200, "a\0b"])
async def test_name_of_weights_stays_in_its_folder(start: Start, tmp_path: Path, name: str) -> None:
    async with start() as service:
        model = await service.ann.model()
        for seq, path in ((1, "save_weights"), (2, "save_weights_for_sampler")):
            assert "a name of weights has" in (await service.ann.save(model, seq, path, path=name))["error"]
        load = {"model_id": model, "seq_id": 3, "path": f"tinker://{model}/weights/{name}", "optimizer": False}
        assert "error" in await service.ann.ask("load_weights", **load)
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
    "setting_that_is_not_read": ({"min_p": 0.1}, "`sampling_params` has `min_p`, which is not read here"),
}


@pytest.mark.parametrize("name", SAMPLES)
async def test_sample_that_is_refused_is_told_at_once(start: Start, name: str) -> None:
    changes, words = SAMPLES[name]

    async with start() as service:
        sampler = await service.ann.sampler(await service.ann.session())
        prompt = changes.get("prompt", [3])
        params = {key: value for key, value in changes.items() if key != "prompt"}
        assert words in await service.ann.refusal("asample", sample_fields(sampler, 0, prompt, **params))
        assert len((await service.ann.sample(sampler, 1, [3])).sequences) == 1


@pytest.mark.parametrize("field", ["target_prompt_logprobs", "prompt_alt_tokens_k", "model_path", "base_model"])
async def test_unserved_fields_of_samples_are_refused(start: Start, field: str) -> None:
    async with start() as service:
        sampler = await service.ann.sampler(await service.ann.session())
        assert field in await service.ann.refusal("asample", {**sample_fields(sampler, 0, [3]), field: 5})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"rank": 10**5}}, "rank"),
        ({"lora_config": {"rank": 4, "alpha": 8}}, "`lora_config` has `alpha`, which is not read here"),
        ({"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}}, "train_attn"),
        ({"base_model": "Qwen/Qwen3-8B"}, "rlinf/base"),
        ({"optimizer_config": {"type": "dimuon"}}, "adamw"),
    ],
)
async def test_model_that_is_refused_is_told_at_once(start: Start, changes: dict[str, Any], words: str) -> None:
    async with start() as service:
        fields = {**model_fields(await service.ann.session()), **changes}
        assert words in await service.ann.refusal("create_model", fields)


async def test_models_of_a_tenant_are_bounded(start: Start) -> None:
    async with start() as service:
        session = await service.ann.session()
        for number in range(3):
            await service.ann.model(session, number)
        assert "max_models" in await service.ann.refusal("create_model", model_fields(session, 3))
        assert await service.ben.model()


@pytest.mark.parametrize("seq", [0, -1, 2**31, 20_000, "1", None])
async def test_number_that_cannot_be_taken_is_refused(start: Start, seq: Any) -> None:
    async with start() as service:
        model = await service.ann.model()
        assert "seq_id" in await service.ann.refusal("optim_step", {**step_fields(model, 1), "seq_id": seq})


async def test_compressed_and_malformed_bodies_are_refused(start: Start) -> None:
    async with start() as service:
        model, ann = await service.ann.model(), service.ann
        body = pass_body(model, 1, shifted())
        assert (await ann.send(body, **{"Content-Encoding": "zstd"})).status == 415
        assert (await ann.send(b"\xff\xff\xff")).status == 400
        assert (await ann.send(body, **{"Content-Type": "application/json"})).status == 415


async def test_image_and_sparse_tensors_out_of_bounds_are_refused(start: Start) -> None:
    from recipes.serve.service.requests_and_results import PASS_MESSAGE

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
        assert "not served" in await service.ann.refusal("billing/usage", {}, 404)


async def test_adapter_that_the_engine_cannot_take_is_refused(start: Start) -> None:
    async with start("server.full_weights=ben") as service:
        service.state.facts = service.state.facts._replace(adapts_output=False)
        fields = model_fields(await service.ann.session())
        assert "pass train_unembed=False" in await service.ann.refusal("create_model", fields)
        assert await service.ann.model(train_unembed=False)
        # All weights need no adapter.
        assert await service.ben.model()
