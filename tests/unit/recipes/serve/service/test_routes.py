"""The routes of the SDK, spoken to over the wire: order, repetition, gradients, snapshots, tenants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.language.models.policy import plain_attention
from recipes.serve.service import routes
from recipes.serve.service.requests_and_results import SAMPLE_RESULT
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    datum,
    logprobs_of,
    model_fields,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)


async def test_loss_falls_and_a_resumed_model_is_equal(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        session = await ann.session()
        model = await ann.model(session)
        losses = []
        for seq in range(1, 9, 2):
            losses.append((await ann.learn(model, seq, shifted())).metrics["loss:sum"])
            assert set((await ann.step(model, seq + 1))["metrics"]) == {"grad_norm"}
        assert losses == sorted(losses, reverse=True)
        saved = await ann.save(model, 9, path="one")
        assert saved["path"] == f"tinker://{model}/weights/one"
        before = await ann.learn(model, 10, shifted(), forward_only=True)
        loading = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        other = (await ann.ask("load_weights", **loading))["model_id"]
        after = await ann.learn(other, 1, shifted(), forward_only=True)
        for one, two in zip(logprobs_of(before), logprobs_of(after), strict=True):
            np.testing.assert_array_equal(one, two)
        # With the state of the optimizer, both go on alike.
        for name, seq in ((model, 11), (other, 2)):
            await ann.train(name, seq)
        one, two = [await ann.learn(name, seq, shifted()) for name, seq in ((model, 13), (other, 4))]
        assert one.metrics["loss:sum"] == two.metrics["loss:sum"]
        assert len(service.steps) == 6


async def test_requests_wait_for_those_with_earlier_numbers(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        model, twin = await ann.model(), await ann.model()
        late = [await ann.post("optim_step", step_fields(model, 3)), await ann.send(pass_body(model, 2, shifted()))]
        await asyncio.sleep(0)
        assert service.state.ledger.pending("ann")[0] == 2
        first = await ann.send(pass_body(model, 1, shifted()))
        for answer in (first, late[1], late[0]):
            await ann.result(answer)
        for seq in (1, 2):
            await ann.learn(twin, seq, shifted())
        await ann.step(twin, 3)
        results = [await ann.learn(name, 4, shifted()) for name in (model, twin)]
        assert results[0].metrics["loss:sum"] == results[1].metrics["loss:sum"]


async def test_repeated_requests_are_served_once(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        session = await ann.session()
        created = [await ann.post("create_model", model_fields(session)) for _ in range(2)]
        assert created[0] == created[1]
        model = (await ann.result(created[0]))["model_id"]
        twin = await ann.model(session, 1)
        twice = [await ann.send(pass_body(model, 1, shifted())) for _ in range(2)]
        assert twice[0] == twice[1]
        steps = [await ann.post("optim_step", step_fields(model, 2)) for _ in range(2)]
        assert steps[0] == steps[1]
        norm = (await ann.result(steps[0]))["metrics"]["grad_norm"]
        await ann.learn(twin, 1, shifted())
        assert norm == (await ann.step(twin, 2))["metrics"]["grad_norm"]
        another = await ann.post("optim_step", step_fields(model, 2, rate=1.0))
        assert another.status == 422


async def test_gradients_add_up_until_the_step(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        whole, parts = await ann.model(), await ann.model()
        await ann.learn(whole, 1, shifted())
        for seq, row in enumerate(shifted(), 1):
            await ann.learn(parts, seq, [row])
        norms = [(await ann.step(name, seq))["metrics"]["grad_norm"] for name, seq in ((whole, 2), (parts, 5))]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert (await ann.step(whole, 3, rate=1.0))["metrics"]["grad_norm"] == 0


@pytest.mark.parametrize("overrides", [(), ("server.full_weights=ann",)])
async def test_gradient_equals_that_of_a_plain_loop(start: Start, overrides: tuple[str, ...]) -> None:
    async with start(*overrides) as service:
        ann = service.ann
        model = await ann.model()
        await ann.learn(model, 1, shifted())
        variants = service.state.actor.worker._variants
        mine = {name: weight.grad.clone() for name, weight in variants.parameters(model).items()}
        service.state.actor.worker.drop_gradients(model)
        loss = torch.zeros(())
        with variants.using(model) as policy, plain_attention(policy.causal):
            for row in ROWS:
                logits = policy.causal(input_ids=torch.tensor([row[:-1]])).logits[0]
                for place, target in enumerate(row[1:]):
                    loss = loss - logits[place].log_softmax(-1)[target]
            loss.backward()
        for name, weight in variants.parameters(model).items():
            torch.testing.assert_close(mine[name], weight.grad, atol=1e-5, rtol=1e-4)
        assert any(bool(gradient.abs().sum() > 0) for gradient in mine.values())


async def test_snapshot_keeps_its_weights(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        session = await ann.session()
        model = await ann.model(session)
        sampler = await ann.snapshot(model, 1)
        before = await ann.sample(sampler, 0, ROWS[0][:4], prompt_logprobs=True, temperature=0)
        await ann.train(model, 2, rate=0.1)
        after = await ann.sample(sampler, 1, ROWS[0][:4], prompt_logprobs=True, temperature=0)
        assert before == after
        path = (await ann.save(model, 4, "save_weights_for_sampler", path="final"))["path"]
        newer = await ann.sampler(session, 1, path)
        assert (await ann.get(f"samplers/{newer}")).content["model_path"] == path
        assert (await ann.sample(newer, 0, ROWS[0][:4], prompt_logprobs=True, temperature=0)) != before
        state = await ann.save(model, 5)
        trained = {"session_id": session, "sampling_session_seq_id": 2, "model_path": state["path"]}
        assert "save_weights_for_sampler" in (await ann.post("create_sampling_session", trained)).content["detail"]
        again = await ann.save(model, 6, "save_weights_for_sampler", path="final")
        assert "choose another name" in again["error"]


async def test_drawn_and_most_likely_tokens_are_those_of_passes(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        session = await ann.session()
        model = await ann.model(session)
        await ann.train(model, 1, rate=0.05)
        sampler = await ann.snapshot(model, 3)
        prompt, vocabulary = ROWS[1][:4], service.state.facts.vocabulary
        asked = sample_fields(sampler, 0, prompt, num_samples=2, max_tokens=3, stop=[], prompt_logprobs=True)
        asked |= {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "prompt_logprobs_last_n": 2}
        drawn = SAMPLE_RESULT.FromString(await ann.result(await ann.post("asample", asked)))
        ids, logprobs = top_of(drawn.prompt_top)
        # The first token has none, and the second was not asked about.
        assert logprobs[:2].tolist() == [[-99999.0] * 3] * 2
        scores = np.frombuffer(drawn.prompt_logprobs, np.float32)
        assert np.isnan(scores).tolist() == [True, True, False, False]
        for seq, answer in enumerate(drawn.sequences, start=4):
            own, own_logprobs = top_of(answer.top)
            tokens = [*prompt, *np.frombuffer(answer.tokens, np.int32).tolist()]
            targets = [list(range(vocabulary))] * (len(tokens) - 1)
            every = datum(tokens[:-1], target_tokens=targets, weights=np.ones((len(tokens) - 1, vocabulary)))
            right = logprobs_of(await ann.learn(model, seq, [every], forward_only=True))[0]
            np.testing.assert_allclose(
                np.frombuffer(answer.logprobs, np.float32), right[range(3, 6), tokens[4:]], atol=1e-5
            )
            np.testing.assert_allclose(scores[2:], right[range(1, 3), prompt[2:]], atol=1e-5)
            for place in (2, 3):
                best = np.argsort(-right[place - 1])[:3]
                assert ids[place].tolist() == best.tolist()
                np.testing.assert_allclose(logprobs[place], right[place - 1][best], atol=1e-5)
            for place in range(3):
                np.testing.assert_allclose(own_logprobs[place], -np.sort(-right[3 + place])[:2], atol=1e-5)
                np.testing.assert_allclose(own_logprobs[place], right[3 + place][own[place]], atol=1e-5)


def top_of(message: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the ids and log-probabilities of the most likely tokens, by place."""
    shape = message.length, message.k
    return np.frombuffer(message.ids, np.int32).reshape(shape), np.frombuffer(message.logprobs, np.float32).reshape(
        shape
    )


async def test_equal_requests_without_seed_differ(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        sampler = await ann.sampler(await ann.session())

        async def drawn(seq: int, **params: Any) -> list[bytes]:
            result = await ann.sample(sampler, seq, [3, 4], num_samples=2, max_tokens=20, stop=[], **params)
            return [answer.tokens for answer in result.sequences]

        free, again, seeded, same = [await drawn(0), await drawn(1), await drawn(2, seed=7), await drawn(3, seed=7)]
        assert free != again
        assert seeded == same
        assert seeded[0] != seeded[1]
        assert len(free[0]) == 4 * 20


async def test_stop_ends_an_answer(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        sampler = await ann.sampler(await ann.session())
        whole = await ann.sample(sampler, 0, [3, 4], temperature=0, max_tokens=8, stop=[])
        tokens = np.frombuffer(whole.sequences[0].tokens, np.int32).tolist()
        cut = await ann.sample(sampler, 1, [3, 4], temperature=0, max_tokens=8, stop=[tokens[2]])
        (answer,) = cut.sequences
        assert np.frombuffer(answer.tokens, np.int32).tolist() == tokens[: tokens.index(tokens[2]) + 1]
        assert answer.reason == 0
        assert whole.sequences[0].reason == 1


async def test_targets_may_have_two_dimensions(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        model = await ann.model()
        row = ROWS[0]
        pairs = [[token, 5] for token in row[1:]]
        both = datum(row[:-1], target_tokens=pairs, weights=[[0.75, 0.25]] * 6)
        result = await ann.learn(model, 1, [both])
        (two,) = logprobs_of(result)
        singles = [
            logprobs_of(await ann.learn(model, seq, [datum(row[:-1], target_tokens=targets, weights=[1.0] * 6)]))
            for seq, targets in ((2, row[1:]), (3, [5] * 6))
        ]
        np.testing.assert_allclose(two, np.stack([single[0] for single in singles], axis=1), atol=1e-6)
        right = -(two * np.asarray([[0.75, 0.25]])).sum()
        assert result.metrics["loss:sum"] == pytest.approx(right, rel=1e-5)


async def test_another_tenants_ids_do_not_exist(start: Start) -> None:
    async with start() as service:
        ann, ben = service.ann, service.ben
        session = await ann.session()
        model, sampler = await ann.model(session), await ann.sampler(session)
        path = (await ann.save(model, 1, path="a"))["path"]
        open_request = (await ann.send(pass_body(model, 2, shifted()))).content["request_id"]
        asked = [
            await ben.post("get_info", {"model_id": model}),
            await ben.post("optim_step", step_fields(model, 3)),
            await ben.send(pass_body(model, 3, shifted())),
            await ben.post("asample", sample_fields(sampler, 0, [3])),
            await ben.get(f"samplers/{sampler}"),
            await ben.post("retrieve_future", {"request_id": open_request}),
            await ben.post("session_heartbeat", {"session_id": session}),
            await ben.post(f"sessions/{session}/finish", {}),
            await ben.post("weights_info", {"tinker_path": path}),
        ]
        assert {answer.status for answer in asked} <= {404, 410}
        missing = await ben.post("retrieve_future", {"request_id": "b007-0"})
        assert asked[5] == missing
        assert (await ann.post("weights_info", {"tinker_path": path})).content["lora_rank"] == 4
        no_key = await service.http.post("/api/v1/create_session", json={}, headers={"X-API-Key": "tml-x"})
        assert no_key.status_code == 401


async def test_finished_session_frees_its_models(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        session = await ann.session()
        model = await ann.model(session)
        waiting = await ann.post("optim_step", step_fields(model, 2))
        assert (await ann.post(f"sessions/{session}/finish", {})).status == 200
        assert "finished" in (await ann.result(waiting))["error"]
        assert (await ann.post("session_heartbeat", {"session_id": session})).status == 410
        await ann.model()
        assert model not in service.state.actor.worker._variants


async def test_unfinished_result_is_asked_for_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as service:
        ann = service.ann
        model = await ann.model()
        late = await ann.post("optim_step", step_fields(model, 2))
        monkeypatch.setattr(routes, "HOLD_SECONDS", 0.01)
        answer = await ann.post("retrieve_future", {"request_id": late.content["request_id"]})
        assert answer.status == 408
        assert answer.content["queue_state"] == "active"


async def test_too_many_unfinished_requests_are_held_off(start: Start) -> None:
    async with start() as service:
        ann = service.ann
        model = await ann.model()
        taken = [await ann.post("optim_step", step_fields(model, seq)) for seq in range(2, 6)]
        assert {answer.status for answer in taken} == {200}
        assert (await ann.post("optim_step", step_fields(model, 6))).status == 429
        sampler = await ann.sampler(await ann.session())
        assert (await ann.post("asample", sample_fields(sampler, 0, [3]))).status == 429
        # Another tenant's requests, and the one that all others wait for, are taken.
        assert await service.ben.model()
        await ann.result(await ann.post("optim_step", step_fields(model, 1)))
        assert "metrics" in await ann.result(taken[-1])


async def test_telemetry_is_accepted_and_not_kept(start: Start, tmp_path: Path) -> None:
    async with start() as service:
        answer = await service.ann.post("telemetry", {"events": [{"request_headers": {"x-api-key": "tml-secret"}}]})
        assert answer.content == {"status": "accepted"}
    assert [file for file in tmp_path.rglob("*") if file.is_file() and b"tml-secret" in file.read_bytes()] == []


async def test_unknown_sdk_version_is_warned_of(start: Start) -> None:
    async with start() as service:
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.51.0"}
        assert "0.51.0" in (await service.ann.post("create_session", fields)).content["warning_message"]
