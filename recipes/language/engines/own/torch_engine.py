"""The engine of this project: a HuggingFace model in this process, its rows decoded together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from recipes.language.answers.sequences import Request, Sequence
from recipes.language.config.rollout_config import MIN_SAVED
from recipes.language.engines.engine import ArrivingTensors, PauseMode
from recipes.language.engines.own.decoder import Decoder
from recipes.language.engines.own.kv_cache import KvCache, NewRow
from recipes.language.engines.own.kv_memory import Tokens, cache_shape
from recipes.language.engines.own.merged_adapter import MergedAdapter
from recipes.language.engines.own.prefill import PackedContexts, PrefillPlan, SharedPrefix
from recipes.language.engines.own.rows import Rows
from recipes.language.engines.request_queue import Answer, QueuedEngine, RequestQueue
from recipes.language.engines.sampling import draw
from recipes.language.models.attention import PackedPlan, longest_exact, use_plans
from recipes.language.models.fingerprint import Fingerprint
from recipes.language.models.packing import MIN_SHARED, common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Entry = tuple[Answer, NewRow]

_PREFILL_TOKENS = 8192
# Ended rows are carried along until they are this share of the batch: leaving them out copies all others.
_ENDED_SHARE = 8
# On a GPU ended rows cost little, and after a copy the decoding step has to be recorded again.
_ENDED_SHARE_GPU = 2
# Of a GPU's free memory, for keys and values where nobody has said how many tokens may run.
_CACHE_SHARE = 0.6


class TorchEngine(QueuedEngine):
    """Decodes all running answers together; rows leave when they end, and prompts that share tokens compute them once.

    Args:
        model: a causal language model in evaluation mode; its attention is replaced.
        stop_token_ids: tokens that end every answer, such as the tokenizer's end of sequence.
        decode: text of token ids, needed for `SamplingParams.stop`.
        max_running_tokens: bound on prompt and answer tokens of the answers that run at once; 0: none.
        max_sequence_tokens: longest prompt and answer together; at most, and with 0, what the model has positions for.
        share_prefixes: whether tokens that all prompts begin with are computed once.
        adapter_scale: alpha / rank of a LoRA adapter whose weights are loaded.
        seed: added to that of every request.
        graphs: whether a GPU repeats decoding steps from a CUDA graph.
        min_saved: copies of a prompt's tokens that storing it once for several answers must save.
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
        seed: int = 0,
        graphs: bool = True,
        min_saved: int = MIN_SAVED,
    ) -> None:
        use_plans(model)
        self._model = model.eval()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decode = decode
        self._ended_share = _ENDED_SHARE_GPU if model.device.type == "cuda" else _ENDED_SHARE
        self._share = share_prefixes
        self._min_saved = min_saved
        self._seed = seed
        self._cache = KvCache(cache_shape(model))
        self._decoder = Decoder(model, graphs=graphs)
        self._prefix = SharedPrefix()
        self._rows = self._no_rows()
        self._adapter = MergedAdapter(model, adapter_scale)
        text = model.config.get_text_config()
        positions = longest_exact(text) or int(getattr(text, "max_position_embeddings", 0))
        queue = RequestQueue(
            max_sequence_tokens=min(max_sequence_tokens or positions, positions or max_sequence_tokens),
            max_running_tokens=max_running_tokens,
            stops_at_texts=decode is not None,
        )
        super().__init__(queue, max_running_tokens)
        # Whether nothing that waits fits before an answer ends.
        self._full = False
        # Of weights whose memory was given up.
        self._shapes: dict[str, torch.Size] = {}

    def _no_rows(self) -> Rows:
        return Rows(self._cache.shape.device, self._stop_token_ids, self._decode)

    # Requests

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._full = False

    @property
    def _in_flight(self) -> int:
        return self._rows.running

    @property
    def _reserved(self) -> int:
        return self._cache.reservation(self._rows.alive()).tokens

    def _cached_bytes(self) -> int:
        return self._cache.nbytes + len(self._prefix.tokens) * self._cache.shape.bytes_per_token

    def unfinished_answers(self) -> list[Sequence]:
        return self._rows.unfinished() + self._queue.waiting()

    # Steps

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """See `Engine`: begin the answers that fit, then draw one token for every running answer."""
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
        common = self._common([answer.request.context for answer, _ in taken])
        taken = self._sharing(taken, common)
        ended: list[Sequence] = []
        for wave in self._waves(taken, common):
            ended += self._prefill(wave, common)
        return ended

    def _admitted(self) -> list[_Entry]:
        """Return answers that may start now, in batches: every start copies all running answers."""
        if self._full or not self._queue:
            return []
        running = self._rows.alive()
        limit = self._limit or self._room()
        reservation = self._cache.reservation(running)
        stored = self._cache.prompts()
        taken: list[_Entry] = []
        while self._queue:
            row = self._row(self._queue.first(), stored)
            reservation.add(row)
            if limit and (running or taken) and reservation.tokens > limit:
                break
            stored.add(row.shared)
            taken.append((self._queue.pop(), row))
        if self._queue and len(taken) * self._ended_share < len(running):
            for answer, _ in taken:
                self._queue.put_back(answer)
            self._full = True
            return []
        return taken

    def _row(self, answer: Answer, stored: Container[Tokens]) -> NewRow:
        """Return how an answer enters the cache: with its own prompt, or one that is stored once."""
        request = answer.request
        prompt = request.prompt
        saved = (self._queue.waiting_for(prompt) - 1) * len(prompt)
        shared = prompt if self._share and (saved >= self._min_saved or prompt in stored) else ()
        return NewRow(shared, len(request.context), answer.most_tokens)

    def _sharing(self, taken: list[_Entry], common: Tokens) -> list[_Entry]:
        """Return what is taken, with what all contexts begin with stored once where that saves enough."""
        alone = sum(not row.shared for _, row in taken)
        if (alone - 1) * len(common) < max(1, self._min_saved):
            return taken
        return [(answer, row if row.shared else replace(row, shared=common)) for answer, row in taken]

    def _room(self) -> int:
        """Return how many tokens a GPU has memory for; 0 on a CPU: any number."""
        device = self._model.device
        if device.type != "cuda":
            return 0
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free += self._cache.nbytes - torch.cuda.memory_allocated(device)
        return max(1, int(_CACHE_SHARE * free) // self._cache.shape.bytes_per_token)

    def _waves(self, taken: list[_Entry], common: Tokens) -> Iterable[list[_Entry]]:
        """Yield answers in parts whose distinct contexts fit into one forward pass."""
        wave: list[_Entry] = []
        seen: set[Tokens] = set()
        tokens = 0
        for answer, row in taken:
            context = answer.request.context
            if context not in seen:
                own = len(context) - len(common)
                if tokens and tokens + own > _PREFILL_TOKENS:
                    yield wave
                    wave, seen, tokens = [], set[Tokens](), 0
                seen.add(context)
                tokens += own
            wave.append((answer, row))
        yield wave

    def _prefill(self, wave: list[_Entry], common: Tokens) -> list[Sequence]:
        device = self._model.device
        answers = [answer for answer, _ in wave]
        contexts = [answer.request.context for answer in answers]
        packed = PackedContexts.of(contexts, len(common))
        is_known = bool(common) and common == self._prefix.tokens
        known = len(common) if is_known else 0
        plan = PrefillPlan(
            PackedPlan(packed.segments, device), self._cache.shape.layers, self._prefix if is_known else None
        )
        logits = self._model(
            input_ids=torch.tensor([packed.tokens[known:]], device=device),
            position_ids=plan.positions,
            use_cache=False,
            logits_to_keep=torch.tensor(packed.last(), device=device) - known,
            attention_plan=plan,
        ).logits[0]
        if common and not is_known:
            self._prefix = plan.prefix(common)
        which = [packed.numbers[context] for context in contexts]
        positions = packed.positions()
        self._rows.add(answers, self._seed)
        self._cache.add(plan.keys, plan.values, [row for _, row in wave], [positions[number] for number in which])
        self._prefilled += len(packed.tokens) - known
        self._prompted += sum(map(len, contexts))
        return self._draw(logits[torch.tensor(which, device=device)], first=self._rows.count - len(wave))

    def _common(self, contexts: list[Tokens]) -> Tokens:
        """Return the tokens that these contexts share with waiting or earlier ones, and continue after."""
        if not self._share:
            return ()
        waiting = {answer.request.context for answer in self._queue}
        longest = common_prefix(list(waiting.union(contexts)))
        known = self._prefix
        if known.tokens and longest < len(known.tokens) + MIN_SHARED and all(map(known.begins, contexts)):
            return known.tokens
        return contexts[0][:longest]

    def _go_on(self) -> list[Sequence]:
        """Draw one token for every running answer."""
        if not self._rows.running:
            self._leave_out_ended()
            return []
        if self._rows.ended * self._ended_share >= self._rows.count:
            self._leave_out_ended()
        logits = self._decoder.logits(self._rows.newest, self._cache)
        return self._draw(logits, first=0)

    def _draw(self, logits: Tensor, first: int) -> list[Sequence]:
        """Draw a token for each row from `first` on, and return the answers that it ends."""
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
            kept = self._rows.leave_out_ended()
            self._cache.keep(kept)

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
        self._prefix = SharedPrefix()
        self._cache.close_prompts()
        self._decoder.forget()
        if adapter_only:
            digest = self._adapter.load(tensors)
        else:
            digest = self._load_whole(tensors)
        self._version = version
        return digest

    def _load_whole(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        own: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        if not isinstance(tensors, ArrivingTensors):
            weights = dict(tensors)
            tensors = ArrivingTensors(
                {name: tuple(tensor.shape) for name, tensor in weights.items()}, iter(weights.items())
            )
        # All is looked at before anything is changed.
        self._check_shapes(tensors.shapes, own)
        digest = Fingerprint()
        places = Counter(weight.data_ptr() for weight in {id(weight): weight for weight in own.values()}.values())
        for name, value in tensors:
            weight = own[name]
            # Weights that share memory without being one parameter would part.
            alone = places[weight.data_ptr()] < 2
            if tensors.may_keep and alone and (weight.dtype, weight.device) == (value.dtype, value.device):
                weight.data = value
            else:
                weight.copy_(value)
            # Of the engine's own memory, in the precision of the trainer, while it is in the processor's cache.
            digest.add(name, weight.to(value.dtype))
        self._adapter.forget()
        return digest.text()

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are the weights of the model."""
        for name, shape in shapes.items():
            target = own.get(name)
            if target is None:
                raise ValueError(f"the engine's model has no weight `{name}`")
            if tuple(target.shape) != shape:
                raise ValueError(f"weight `{name}` is {list(shape)}, the engine's model has {list(target.shape)}")
        there = {own[name].data_ptr() for name in shapes}
        missing = [name for name, weight in self._model.named_parameters() if weight.data_ptr() not in there]
        if missing:
            raise ValueError(f"weight `{missing[0]}` of the engine's model has no value")

    @torch.inference_mode()
    def sleep(self, level: int = 1) -> None:
        if self._rows.running:
            raise ValueError(f"{self._rows.running} answers are in progress: pause the engine first")
        if level > 1 and self._adapter.is_merged:
            raise ValueError("a LoRA adapter update replaces only the adapter: the engine can sleep at level 1")
        self._leave_out_ended()
        self._cache = KvCache(self._cache.shape)
        self._decoder.forget()
        self._prefix = SharedPrefix()
        if level > 1:
            # Buffers, which no trainer sends, stay.
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
        self._rows = self._no_rows()
        self._cache = KvCache(self._cache.shape)
        self._decoder.forget()
        self._prefix = SharedPrefix()
