"""Values that server and workers exchange, in calls and in files beside saved weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from recipes.language.answers.sequences import Request, SamplingParams
from recipes.training.arrays import Array
from rlinf_core.foreign.files import FileModel, Moment, Name, read_model

FloatArray = npt.NDArray[np.floating[Any]]


RECORD: Final = "rlinf_saved.json"
ADAPTER: Final = "rlinf_adapter.json"


class Datum(NamedTuple):
    """A sequence to learn from.

    Attributes:
        tokens: int64 [N], token ids.
        values: inputs of the loss by name: `target_tokens`, int64 [N] or [N, K], and float32 tensors of that shape.
    """

    tokens: npt.NDArray[np.int64]
    values: Mapping[str, Array]


class PassOutcome(NamedTuple):
    """The result of a pass over a batch.

    Attributes:
        logprobs: the log-probabilities of the target tokens of each datum, in their shapes.
        metrics: the metrics by name and, after a colon, the client's reduction over batches.
    """

    logprobs: list[FloatArray]
    metrics: dict[str, float]


class RankOutcome(NamedTuple):
    """One rank's part of a pass: log-probabilities by number of the datum, and the summed loss."""

    logprobs: dict[int, FloatArray]
    loss: float


class AdapterSettings(NamedTuple):
    """The settings of an adapter.

    Attributes:
        rank: the rank; 0: no adapter, but all weights of a copy of the model are trained.
        seed: the seed of the initial values.
        train_attn, train_mlp, train_unembed: whether attention, MLP and output layers have adapters.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class SavedRecord(FileModel):
    """The record of saved weights.

    Attributes:
        base_model: the name of the base model.
        expires: the time of removal; None: never.
        seq_id: the number of the saving request among those of its model.
        user_metadata: the client's metadata of the run.
    """

    base_model: Name
    expires: Moment | None = None
    seq_id: int | None = None
    user_metadata: dict[str, Any] = Field(default_factory=dict)


class _SavedAdapter(FileModel):
    rank: Annotated[int, Field(ge=0, lt=2**31)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def read_record(folder: Path) -> SavedRecord:
    """Return the record of saved weights.

    Raises:
        OSError: the record does not exist or is damaged.
    """
    return read_model(folder / RECORD, SavedRecord)


def read_adapter(folder: Path) -> AdapterSettings:
    """Return the settings of a saved adapter.

    Raises:
        OSError: the settings do not exist or are damaged.
    """
    return AdapterSettings(**read_model(folder / ADAPTER, _SavedAdapter).model_dump())


class AdamSettings(NamedTuple):
    """The settings of one AdamW step; a `grad_clip_norm` of 0 clips nothing."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class ServedFacts(NamedTuple):
    """Facts of the model.

    Attributes:
        vocabulary: the number of token ids.
        stops: the tokens that end an answer.
        adapts_output: whether adapters of the output layer are supported.
    """

    vocabulary: int
    stops: tuple[int, ...]
    adapts_output: bool = True


class Drawing(NamedTuple):
    """A request for answers.

    Attributes:
        request_id: the id of the request, returned with the outcome.
        snapshot: the folder of an adapter or of all weights; None: the base model.
        prompt: the token ids of the prompt.
        samples: the number of answers.
        max_tokens: the maximum tokens of an answer.
        temperature, top_k, top_p, seed: the sampling settings.
        stop_tokens, stop_texts: the tokens and texts that end an answer.
        prompt_logprobs: whether log-probabilities of the prompt are requested.
        prompt_top, answer_top: the number of most likely tokens to return per position; 0: none.
        prompt_last: the number of tokens at the end of the prompt that `prompt_logprobs` and `prompt_top` cover.
    """

    request_id: str
    snapshot: str | None
    prompt: tuple[int, ...]
    samples: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...]
    stop_texts: tuple[str, ...]
    prompt_logprobs: bool
    prompt_top: int = 0
    answer_top: int = 0
    prompt_last: int = 0


def request_of(drawing: Drawing) -> Request:
    """Return the engine's form of a request.

    Raises:
        ValueError: a sampling setting is invalid.
    """
    params = SamplingParams(
        temperature=drawing.temperature,
        top_k=drawing.top_k,
        top_p=drawing.top_p,
        max_new_tokens=drawing.max_tokens,
        stop_token_ids=drawing.stop_tokens,
        stop=drawing.stop_texts,
        seed=drawing.seed,
    )
    return Request(
        request_id=drawing.request_id,
        prompt=drawing.prompt,
        params=params,
        group_size=drawing.samples,
        metadata={"drawing": drawing},
    )


class TopTokens(NamedTuple):
    """The most likely tokens at each position, ids int32 [N, K] and log-probabilities float32 [N, K]."""

    ids: npt.NDArray[np.int32]
    logprobs: FloatArray


class DrawnAnswer(NamedTuple):
    """An answer: token ids, log-probabilities, finish reason, and the most likely tokens if requested."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Literal["stop", "length"]
    top: TopTokens | None = None


class SampleOutcome(NamedTuple):
    """The answers to a prompt.

    Attributes:
        answers: the answers in the order of their numbers.
        prompt_logprobs: the log-probability of each prompt token, NaN for the first; None: not requested.
        failure: why there are no answers; "" if there are.
        prompt_top: the most likely tokens at each position of the prompt, none at the first; None: not requested.
    """

    answers: list[DrawnAnswer]
    prompt_logprobs: FloatArray | None = None
    failure: str = ""
    prompt_top: TopTokens | None = None


class AdapterTraining(Protocol):
    """A worker that trains adapters. Every call goes to all ranks."""

    def init_worker(self, tokenizer_folder: str) -> ServedFacts: ...
    def create(self, model: str, settings: AdapterSettings, /) -> None: ...
    def restore(self, model: str, folder: str, optimizer: bool, /) -> None: ...
    def learn(
        self, model: str, data: list[Datum], loss: str, settings: Mapping[str, float], backward: bool, /
    ) -> RankOutcome: ...
    def drop_gradients(self, model: str, /) -> None: ...
    def step(self, model: str, adam: AdamSettings, number: int, /) -> dict[str, float]: ...
    def save(self, model: str, folder: str, optimizer: bool, /) -> None: ...
    def remove(self, model: str, /) -> None: ...


class SnapshotSampling(Protocol):
    """A worker that samples from snapshots."""

    def init_worker(self) -> ServedFacts: ...
    def advance(self, requests: list[Drawing], cancelled: list[str], seconds: float, /) -> dict[str, SampleOutcome]: ...


LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"


class ServedLoss(NamedTuple):
    """The inputs of a loss.

    Attributes:
        needs: the tensors that a datum must have.
        takes: the tensors that a datum may have.
        settings: the settings of the loss, with defaults.
    """

    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()
    settings: Mapping[str, float] = MappingProxyType({})


_POLICY: Final = ("target_tokens", "logprobs", "advantages")
# Bounds of the ratio of probabilities, not of its distance from 1.
_CLIPS: Final[Mapping[str, float]] = {LOW: 0.8, HIGH: 1.2}
LOSS_INPUTS: Final[Mapping[str, ServedLoss]] = {
    "cross_entropy": ServedLoss(("target_tokens", "weights")),
    "importance_sampling": ServedLoss(_POLICY),
    "ppo": ServedLoss(_POLICY, (LOW, HIGH), _CLIPS),
    "cispo": ServedLoss(_POLICY, (LOW, HIGH), _CLIPS),
    "dro": ServedLoss(_POLICY, (), {"beta": 0.05}),
    "gspo": ServedLoss(_POLICY, (LOW, HIGH, "sequence_ratio_mask"), _CLIPS),
}
