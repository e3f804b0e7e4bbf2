"""The file of recipe `serve`, and messages of the SDK on the wire, as values and back."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.language.loopback_server import RequestError
from recipes.serve.config import inputs
from recipes.serve.service import requests_and_results
from recipes.serve.service.requests_and_results import (
    PASS_MESSAGE,
    PASS_RESULT,
    SAMPLE_RESULT,
    pass_bytes,
    read_data,
    read_pass,
    sample_bytes,
)
from recipes.serve.values import DrawnAnswer, PassOutcome, SampleOutcome
from rlinf_core.job.load import load_job
from tests.unit.recipes.serve.served import config_of, datum, empty_tensors, logprobs_of, pass_body


def messages(*overrides: str) -> list[str]:
    job = load_job("serve/sums-laptop", overrides, environ={})
    return [f"{diagnostic.code}: {diagnostic.message}" for diagnostic in job.diagnostics]


def test_shipped_file_is_valid() -> None:
    assert messages() == []


@pytest.mark.parametrize("name", ["../x", "a b", "", ".", "x" * 65])
def test_tenant_names_a_file(name: str) -> None:
    assert any(name in message or "empty" in message for message in messages(f"server.tenants=['{name}']"))


def test_tenant_is_named_once() -> None:
    assert messages("server.tenants=[ann, ben, ann]") == ["conflicting-settings: `ann` is listed twice"]


def test_folder_of_the_model_must_be_there() -> None:
    (message,) = messages("actor.model.model_path=/nowhere")
    assert "/nowhere" in message


def test_inputs_are_the_folders_that_are_read() -> None:
    assert inputs(config_of()) == []
    read = inputs(config_of("actor.model.model_path=/model", "actor.tokenizer.tokenizer_model=/tokenizer"))
    assert [str(path) for path in read] == ["/model", "/tokenizer"]


def test_full_weights_are_a_tenants() -> None:
    assert messages("server.tenants=[ann, ben]", "server.full_weights=ben") == []
    (message,) = messages("server.tenants=[ann, ben]", "server.full_weights=eve")
    assert "`eve` is not one of the tenants: ann, ben" in message


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM is installed."""
    monkeypatch.setattr("recipes.sections.imports.missing_modules", lambda modules: [])


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.full_weights=default", "not from models whose weights are all their own"),
        ("server.max_rank=600", "of a rank up to 512"),
        ("rollout.engine_options={max_lora_rank: 8}", "the recipe sets `max_lora_rank`"),
        ("rollout.engine_options={dtype: half}", "the recipe sets `dtype`"),
    ],
)
def test_vllm_refuses_what_it_cannot_serve(override: str, message: str) -> None:
    assert messages("rollout.backend=vllm", "rollout.engine_options={max_loras: 2}") == []
    (refusal,) = messages("rollout.backend=vllm", override)
    assert message in refusal


def test_vllm_must_be_installed() -> None:
    (message,) = messages("rollout.backend=vllm")
    assert "needs the package `vllm`" in message


SURFACE = Path(__file__).parents[3] / "integration/recipes/serve/sdk_surface.json"
STORED: dict[str, dict[str, str]] = json.loads(SURFACE.read_text())["messages"]
# Types that are written alike on the wire: integers of all kinds, and enumerations.
VARINTS = {3: 5, 13: 5, 14: 5}


def check_like(descriptor: Any, name: str) -> int:
    """Check the fields of a message against those of the SDK with the same numbers; return how many there are."""
    theirs = {int(field.split()[0]): field.split()[1:] for field in STORED[name].values()}
    count = 0
    for field in descriptor.fields:
        kind, *message = theirs[field.number]
        assert VARINTS.get(field.type, field.type) in (VARINTS.get(int(kind), int(kind)), 12), field.name
        count += 1
        # Messages that are only told apart are bytes here, and the types of maps are not listed.
        if message and field.message_type is not None and message[0] in STORED:
            count += check_like(field.message_type, message[0])
    return count


@pytest.mark.parametrize(
    ("message", "name", "fields"),
    [
        (PASS_MESSAGE, "ForwardBackwardRequest", 13),
        (PASS_RESULT, "ForwardBackwardOutput", 6),
        (SAMPLE_RESULT, "SampleResponse", 15),
    ],
)
def test_messages_have_the_numbers_of_the_sdk(message: Any, name: str, fields: int) -> None:
    assert check_like(message.DESCRIPTOR, name) == fields


def test_pass_is_read_as_it_was_written() -> None:
    data = [datum([3, 4], target_tokens=[[4, 5], [5, 6]], weights=[[1.0, 0.0], [0.5, 0.25]])]
    request = read_pass(pass_body("m", 7, data, "ppo", forward_only=True, clip_low_threshold=0.5))
    (read,) = read_data(request)
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == ("m", 7, "ppo", True)
    assert request.settings == {"clip_low_threshold": 0.5}
    assert read.tokens.tolist() == [3, 4]
    assert read.values["target_tokens"].tolist() == [[4, 5], [5, 6]]
    assert read.values["weights"].tolist() == [[1.0, 0.0], [0.5, 0.25]]


def test_sparse_tensor_is_dense_with_zeros() -> None:
    message = PASS_MESSAGE.FromString(pass_body("m", 1, [datum([3, 4], target_tokens=[4, 5])]))
    tensor = message.data[0].values["weights"]
    tensor.dtype = 1
    tensor.shape.extend([2, 3])
    tensor.sparse.values = np.asarray([2.0, 3.0], np.float32).tobytes()
    tensor.sparse.rows = np.asarray([0, 1, 2], np.int64).tobytes()
    tensor.sparse.columns = np.asarray([2, 0], np.int64).tobytes()
    (read,) = read_data(read_pass(message.SerializeToString()))
    assert read.values["weights"].tolist() == [[0, 0, 2], [3, 0, 0]]


@pytest.mark.security
@pytest.mark.parametrize(
    ("name", "count", "rows", "width", "words"),
    [
        ("weights", 64, 1, 1 << 20, "claims 136 MiB up to datum 16, `weights`"),
        ("target_tokens", 64, 4, 1 << 18, "claims 136 MiB up to datum 16, `target_tokens`"),
        ("advantages", 1, 2, 1 << 60, "claims 16777216 TiB up to datum 0, `advantages`"),
    ],
)
def test_shapes_are_added_up_before_a_tensor_is_made(name: str, count: int, rows: int, width: int, words: str) -> None:
    request = read_pass(empty_tensors(name, count, rows, width))
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=words):
            read_data(request)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.security
@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * 5000,  # data
        b"\x1a\xd8\x36" + b"\x0a\x00" * 3500,  # chunks of one datum
        b"\x2a\x00" * 5000,  # settings
        b"\x78\x00" * 5000,  # fields that nobody knows
        b"\x1a\xdc\x9c\x01\x12\xd8\x9c\x01\x12\xd4\x9c\x01\x22\xd0\x9c\x01" + b"\x01" * 20048,  # sizes of one tensor
    ],
)
def test_parts_of_a_message_are_counted_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(requests_and_results, "LARGEST_DECODED", 1 << 17)
    with pytest.raises(RequestError, match=r"the body claims .* a body may take 128 KiB"):
        read_pass(body)


def test_tensor_of_many_dimensions_and_many_settings_are_refused() -> None:
    message = PASS_MESSAGE.FromString(pass_body("m", 1, [datum([3], target_tokens=[4])]))
    message.data[0].values["target_tokens"].shape.extend([1] * 1000)
    with pytest.raises(RequestError, match="1001 dimensions"):
        read_data(read_pass(message.SerializeToString()))
    settings = {f"s{number}": 1.0 for number in range(17)}
    with pytest.raises(RequestError, match="at most 16 settings"):
        read_pass(pass_body("m", 1, [], **settings))


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_body_that_ends_within_a_field_is_refused(cut: int) -> None:
    with pytest.raises(RequestError, match="not a protobuf message"):
        read_pass(pass_body("m", 1, [datum([3], target_tokens=[4])])[:-cut])


def test_newer_settings_replace_older_ones() -> None:
    message = PASS_MESSAGE(model_id="m", seq_id=1, loss="ppo")
    message.numbers["beta"] = 1.0
    message.settings["beta"].number = 2.0
    message.settings["alpha"].text = "x"
    assert read_pass(message.SerializeToString()).settings == {"beta": 2.0, "alpha": "x"}


def test_same_request_has_the_same_digest() -> None:
    data = [datum([3, 4], target_tokens=[4, 5], weights=[1.0, 1.0])]
    turned = [([3, 4], dict(reversed(data[0][1].items())))]
    assert read_pass(pass_body("m", 1, data)).digest_bytes == read_pass(pass_body("m", 1, turned)).digest_bytes


@pytest.mark.parametrize("length", [1, 3])
def test_tokens_of_a_broken_length_are_refused(length: int) -> None:
    message = PASS_MESSAGE(model_id="m", seq_id=1)
    message.data.add().input.add().text.tokens = b"\0" * length
    with pytest.raises(RequestError, match="not a whole number of int32"):
        read_data(read_pass(message.SerializeToString()))


def test_results_of_unlike_shapes_are_written_apart() -> None:
    arrays = [np.ones(3, np.float32), np.zeros(2, np.float32), np.full((2, 2), 5, np.float32)]
    result = PASS_RESULT.FromString(pass_bytes(PassOutcome(arrays, {"loss:sum": 1.5})))
    assert [record.count for record in result.outputs] == [2, 1]
    assert dict(result.metrics) == {"loss:sum": 1.5}
    for written, read in zip(arrays, logprobs_of(result), strict=True):
        np.testing.assert_array_equal(written, read)


def test_answers_are_written_with_their_reasons() -> None:
    answers = [DrawnAnswer((3, 4), (-1.0, -2.0), "length"), DrawnAnswer((5,), (-0.5,), "stop")]
    result = SAMPLE_RESULT.FromString(sample_bytes(SampleOutcome(answers, np.asarray([np.nan, -1.0], np.float32))))
    assert [answer.reason for answer in result.sequences] == [1, 0]
    assert np.frombuffer(result.sequences[0].tokens, np.int32).tolist() == [3, 4]
    assert np.isnan(np.frombuffer(result.prompt_logprobs, np.float32)[0])
