"""Messages of the SDK on the wire, as values and back."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.language.listening.request_error import RequestError
from recipes.serve.values import DrawnAnswer, PassOutcome, SampleOutcome
from recipes.serve.wire.messages import PASS_MESSAGE, PASS_RESULT, SAMPLE_RESULT
from recipes.serve.wire.requests_and_results import pass_bytes, read_data, read_pass, sample_bytes
from tests.unit.recipes.serve.served import datum, logprobs_of, pass_body


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
