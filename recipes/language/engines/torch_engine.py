"""The built-in engine: batched decoding with a HuggingFace model in this process, and its start-up check."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.config.rollout_config import MIN_SAVED
from recipes.language.engines.engine import Answer, PauseMode, QueuedEngine, RequestQueue
from recipes.language.engines.engine_weights import ModelWeights
from recipes.language.engines.kv_batch import KvBatch, NewRow, Reservation
from recipes.language.engines.kv_cache import ForwardPass, Prefix, Tokens
from recipes.language.engines.rows import Rows
from recipes.language.engines.sampling import draw
from recipes.language.models.architecture import longest_exact, sees_all_before, stretched, use_exact_attention
from recipes.language.models.policy import plain_attention, refusing, rounding
from recipes.training.typed_tensors import integers
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Entry = tuple[Answer, NewRow]

# The maximum tokens of one prefill, with padding.
_PREFILL_TOKENS = 8192
# A shorter common prefix is not worth a separate pass.
_MIN_COMMON = 8
# Ended rows stay until they are one in this many rows: dropping them copies all others.
_ENDED_SHARE = 8
# The share of a GPU's free memory for the KV cache, without a limit of running tokens.
_CACHE_SHARE = 0.6


class TorchEngine(QueuedEngine):
    """An engine that decodes all running answers together and computes common prefixes of prompts once.

    Args:
        model: a causal language model in evaluation mode.
        stop_token_ids: tokens that end every answer, such as the tokenizer's end of sequence.
        decode: returns the text of token ids; needed for `SamplingParams.stop`.
        max_running_tokens: the maximum prompt and answer tokens of all running answers; 0: no limit.
        max_sequence_tokens: the maximum length of prompt and answer together; 0, or more than the model's positions:
            the model's positions.
        share_prefixes: whether common prefixes of prompts are computed and stored once. A model that counts columns,
            such as one with a sliding window, never shares.
        adapter_scale: alpha / rank of LoRA adapters to load.
        min_saved: the token copies that storing a prompt once for several answers must save.
    """

    continues: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_token_ids: Iterable[int] = (),
        decode: Callable[[SequenceABC[int]], str] | None = None,
        max_running_tokens: int = 0,
        max_sequence_tokens: int = 0,
        share_prefixes: bool = True,
        adapter_scale: float = 1.0,
        min_saved: int = MIN_SAVED,
    ) -> None:
        use_exact_attention(model)
        self._model = model.eval()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decode = decode
        self._min_saved = min_saved
        self._pass = ForwardPass(model)
        self._weights = ModelWeights(model, adapter_scale)
        text = model.config.get_text_config()
        positions = int(getattr(text, "max_position_embeddings", 0))
        positions = longest_exact(text) or stretched(positions, getattr(text, "rope_parameters", None))
        longest = min(max_sequence_tokens or positions, positions or max_sequence_tokens)
        sees_all = sees_all_before(text, longest or 1 << 62)
        self._share = share_prefixes and sees_all and self._pass.takes_positions
        queue = RequestQueue(
            max_sequence_tokens=longest,
            max_running_tokens=max_running_tokens,
            stops_at_texts=decode is not None,
        )
        super().__init__(queue, max_running_tokens)
        # Whether no waiting answer fits until a running one ends.
        self._full = False
        # The shapes of weights whose memory was released.
        self._shapes: dict[str, torch.Size] = {}
        self._clear()

    def _clear(self) -> None:
        """Drop all rows with their keys and values."""
        self._rows = Rows(self._model.device, self._stop_token_ids, self._decode)
        self._prefix = Prefix()
        # The batches, by the key of their rows.
        self._batches: dict[tuple[int, int], KvBatch] = {}
        # The places of the engine's rows in the concatenated batches; None: in the same order.
        self._order: Tensor | None = None

    # Requests

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._full = False

    @property
    def _in_flight(self) -> int:
        return self._rows.running

    @property
    def _reserved(self) -> int:
        return self._reservation().tokens

    def _reservation(self) -> Reservation:
        """Return the cache tokens that running answers may need."""
        alive = set(self._rows.alive())
        return Reservation(
            [
                row
                for batch in self._batches.values()
                for row, number in zip(batch.rows, integers(batch.numbers), strict=True)
                if number in alive
            ]
        )

    def _cached_bytes(self) -> int:
        every = [*self._prefix.tensors, *(part for batch in self._batches.values() for part in batch.tensors)]
        # A batch may share the memory of the common prefix, so each address counts once.
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in every}.values())

    def unfinished_answers(self) -> list[Sequence]:
        return self._rows.unfinished() + self._queue.waiting()

    # Steps

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """See `Engine`: start the answers that fit, then draw one token for every running answer."""
        if self._paused:
            return []
        self._check_awake()
        ended = self._begin()
        return ended + self._go_on()

    def _begin(self) -> list[Sequence]:
        """Prefill the prompts that fit, and sample their first tokens."""
        taken = self._admitted()
        if not taken:
            return []
        self._leave_out_ended()
        common = self._common([answer.request.prompt for answer, _ in taken])
        taken = self._sharing(taken, common)
        if common and common != self._prefix.tokens:
            self._prefix = self._pass.prefix(common)
            self._prefilled += len(common)
        prefix = self._prefix if common else Prefix()
        ended: list[Sequence] = []
        for wave in self._waves(taken, len(common)):
            ended += self._prefill(wave, prefix)
        return ended

    def _admitted(self) -> list[_Entry]:
        """Return answers that may start now; wait until they are many, as every start copies all running answers."""
        if self._full or not self._queue:
            return []
        running = self._rows.running
        limit = self._limit or self._room()
        reservation = self._reservation()
        stored = {tokens for batch in self._batches.values() for tokens in batch.stems()}
        taken: list[_Entry] = []
        while self._queue:
            row = self._row(self._queue.first(), stored)
            reservation.add(row)
            if limit and (running or taken) and reservation.tokens > limit:
                break
            stored.add(row.shared)
            taken.append((self._queue.pop(), row))
        if self._queue and len(taken) * _ENDED_SHARE < running:
            for answer, _ in taken:
                self._queue.put_back(answer)
            self._full = True
            return []
        return taken

    def _row(self, answer: Answer, stored: Container[Tokens]) -> NewRow:
        """Return the row of an answer, whose prompt is its own or stored once."""
        request = answer.request
        prompt = request.prompt
        saved = (self._queue.waiting_for(prompt) - 1) * len(prompt)
        is_shared = self._share and not request.begun.tokens and (saved >= self._min_saved or prompt in stored)
        shared = prompt if is_shared else ()
        return NewRow(shared, len(request.context), answer.most_tokens)

    def _sharing(self, taken: list[_Entry], common: Tokens) -> list[_Entry]:
        """Return admitted answers, with their common prefix stored once if that saves enough."""
        alone = sum(not row.shared for _, row in taken)
        if (alone - 1) * len(common) < max(1, self._min_saved):
            return taken
        return [(answer, row if row.shared else replace(row, shared=common)) for answer, row in taken]

    def _room(self) -> int:
        """Return how many tokens fit into GPU memory; 0 on a CPU: no limit."""
        device = self._model.device
        if device.type != "cuda":
            return 0
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free += self._cached_bytes() - torch.cuda.memory_allocated(device)
        return max(1, int(_CACHE_SHARE * free) // self._pass.bytes_per_token)

    def _waves(self, taken: list[_Entry], known: int) -> Iterable[list[_Entry]]:
        """Yield answers in waves of similar lengths whose distinct contexts fit into one forward pass.

        Args:
            taken: the answers.
            known: the number of initial tokens of each context that are already computed.
        """
        wave: list[_Entry] = []
        seen: set[Tokens] = set()
        for answer, row in sorted(taken, key=lambda entry: entry[1].length):
            context = answer.request.context
            if context not in seen:
                if seen and (len(seen) + 1) * (len(context) - known) > _PREFILL_TOKENS:
                    yield wave
                    wave, seen = [], set[Tokens]()
                seen.add(context)
            wave.append((answer, row))
        yield wave

    def _prefill(self, wave: list[_Entry], prefix: Prefix) -> list[Sequence]:
        answers = [answer for answer, _ in wave]
        contexts = list(dict.fromkeys(answer.request.context for answer in answers))
        prefilled = self._pass.prefilled(contexts, prefix)
        places = {context: place for place, context in enumerate(contexts)}
        which = [places[answer.request.context] for answer in answers]
        first = self._rows.count
        self._rows.add(answers)
        # Rows are added together if they have one batch and either all share the common prefix or none does.
        alike: dict[tuple[tuple[int, int], bool], list[int]] = {}
        for number, (_, row) in enumerate(wave):
            alike.setdefault((row.key, row.shared == prefix.tokens), []).append(number)
        for (key, _), numbers in alike.items():
            batch = self._batches.setdefault(key, KvBatch(len(prefilled.layers), folds=self._pass.takes_masks))
            rows, own = [wave[number][1] for number in numbers], [which[number] for number in numbers]
            batch.add(prefilled, rows, own, [first + number for number in numbers])
        self._settle_order()
        self._prefilled += sum(len(context) - len(prefix.tokens) for context in contexts)
        self._prompted += sum(len(answer.request.context) for answer in answers)
        logits = prefilled.logits.index_select(0, torch.tensor(which, device=self._model.device))
        return self._draw(logits, first)

    def _settle_order(self) -> None:
        """Update the order of the engine's rows among the batches."""
        numbers = [batch.numbers for batch in self._batches.values()]
        order = torch.cat(numbers).argsort() if numbers else torch.empty(0, dtype=torch.int64)
        is_same = len(numbers) < 2 and bool((order == torch.arange(len(order))).all())
        self._order = None if is_same else order.to(self._model.device)

    def _common(self, prompts: list[Tokens]) -> Tokens:
        """Return the prefix that these prompts share with waiting or earlier prompts; each continues after it."""
        if not self._share:
            return ()
        waiting = {answer.request.prompt for answer in self._queue}
        longest = _common_length(waiting.union(prompts))
        known = self._prefix
        if known.tokens and longest < len(known.tokens) + _MIN_COMMON and all(map(known.begins, prompts)):
            return known.tokens
        return prompts[0][:longest]

    def _logits(self) -> Tensor:
        """Return the logits of the next token of each row, float [rows, V], and keep the newest token's keys and
        values."""
        newest, parts = self._rows.newest, list[Tensor]()
        for batch in self._batches.values():
            tokens = newest if self._order is None else newest.index_select(0, batch.numbers.to(newest.device))
            parts.append(batch.logits(self._pass, tokens))
        return parts[0] if self._order is None else torch.cat(parts).index_select(0, self._order)

    def _go_on(self) -> list[Sequence]:
        """Draw one token for every running answer."""
        if not self._rows.running:
            self._leave_out_ended()
            return []
        if self._rows.ended * _ENDED_SHARE >= self._rows.count:
            self._leave_out_ended()
        return self._draw(self._logits(), first=0)

    def _draw(self, logits: Tensor, first: int) -> list[Sequence]:
        """Draw a token for each row from `first` on, and return the answers that end with it."""
        rows = self._rows
        settings = rows.settings(first)
        banned = rows.too_early(logits, first)
        tokens, logprobs = draw(logits, settings.temperature, settings.uniform, settings.top_k, settings.top_p, banned)
        before = rows.running
        ended = rows.put(tokens, logprobs, self._version, first)
        self._generated += before if not first else len(tokens)
        self._full = self._full and not ended
        return ended

    def _leave_out_ended(self) -> None:
        if self._rows.ended:
            numbers = torch.full((self._rows.count,), -1)
            kept = self._rows.leave_out_ended()
            numbers[kept] = torch.arange(len(kept))
            self._batches = {key: batch for key, batch in self._batches.items() if batch.keep(numbers)}
            self._settle_order()

    # Control

    @torch.inference_mode()
    def pause(self, mode: PauseMode) -> list[Sequence]:
        done: list[Sequence] = []
        if mode == "drain":
            while self._rows.running:
                done += self._go_on()
        elif mode == "abort":
            done = self._rows.abort()
            self._full = False
            self._leave_out_ended()
            done += self._queue.abort()
        self._paused = True
        return done

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        """See `Engine`. Keys and values of running answers stay those of the weights that computed them."""
        self._check_awake()
        self._prefix = Prefix()
        for batch in self._batches.values():
            batch.close()
        digest = self._weights.load_adapter(tensors) if adapter_only else self._weights.load_whole(tensors)
        self._version = version
        return digest

    @torch.inference_mode()
    def sleep(self, level: int = 1) -> None:
        if self._rows.running:
            raise ValueError(f"{self._rows.running} answers are in progress: pause the engine first")
        if level > 1 and self._weights.is_merged:
            raise ValueError("a LoRA adapter update replaces only the adapter: the engine can sleep at level 1")
        self._clear()
        if level > 1:
            # Buffers stay, as no trainer sends them.
            self._shapes = {name: weight.shape for name, weight in self._model.named_parameters()}
            for weight in self._model.parameters():
                weight.data = weight.new_empty(0)

    def wake(self) -> None:
        for name, shape in self._shapes.items():
            weight = self._model.get_parameter(name)
            weight.data = weight.new_empty(shape)
        self._shapes = {}

    def _check_awake(self) -> None:
        if self._shapes:
            raise ValueError("the engine has released its weights: wake it first")

    def stop(self) -> None:
        self._queue.abort()
        self._clear()


def _common_length(prompts: Iterable[Tokens]) -> int:
    """Return the length of the prompts' common prefix, 0 if not worth a pass; each prompt keeps a token after it."""
    distinct = set(prompts)
    low, high, most = min(distinct), max(distinct), min(map(len, distinct)) - 1
    common = 0
    while common < most and low[common] == high[common]:
        common += 1
    return common if len(distinct) > 1 and common >= _MIN_COMMON else 0


# Prompts of different lengths with a common prefix, two of them with two answers, cover prefill, shared prefixes,
# prompts that are stored once, and ragged decoding.
_LENGTHS, _GROUPS, _COMMON, _TOKENS = (9, 31, 20), (1, 2, 2), 8, 12


def check_engine(model: PreTrainedModel) -> Difference:
    """Compare greedy answers of the engine with forward passes of the model, sequence by sequence.

    Returns:
        The largest difference of a log-probability, in nats.

    Raises:
        ConfigError: log-probabilities differ by more than rounding, or a token is not the likeliest.
    """
    kind = type(model).__name__
    vocabulary: int = cast("Any", model.get_input_embeddings()).weight.shape[0]
    tokens = integers(torch.randint(vocabulary, (max(_LENGTHS),), generator=torch.Generator().manual_seed(0)))
    params = SamplingParams(temperature=0.0, max_new_tokens=_TOKENS)
    largest = 0.0
    with refusing(f"the engine `torch` cannot sample from `{kind}`"):
        engine = TorchEngine(model, min_saved=1)
        for length, group in zip(_LENGTHS, _GROUPS, strict=True):
            # A common prefix, then different tokens.
            prompt = (*tokens[:_COMMON], *tokens[_COMMON:length][::-1])
            engine.submit(Request(request_id=str(length), prompt=prompt, params=params, group_size=group))
        answers = list(engine.results())
        with torch.no_grad(), plain_attention(model):
            for answer in answers:
                prompt, drawn = list(answer.prompt), list(answer.tokens)
                row = torch.tensor([[*prompt, *drawn]], device=model.device)
                positions = torch.arange(row.shape[1], device=model.device)[None]
                logits = cast("Any", model)(input_ids=row, position_ids=positions, use_cache=False).logits
                logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                theirs = logprobs.gather(1, row[0, len(prompt) :, None])[:, 0]
                ours = torch.tensor(answer.logprobs, device=model.device)
                # How far a drawn token is below the likeliest.
                missed = (logprobs.max(dim=-1).values - theirs).max()
                largest = max(largest, float((ours - theirs).abs().max()), float(missed))
    drawn_tokens = sum(len(answer.tokens) for answer in answers)
    return rounding(f"the engine `torch` samples incorrectly from `{kind}`", largest, model.dtype, drawn_tokens)
