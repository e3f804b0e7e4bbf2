"""The forward pass of a decoding step, which a CUDA graph repeats on a GPU."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recipes.language.engines.own.decode_plan import DecodeLayout, DecodePlan
from recipes.language.engines.own.kv_cache import KvCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
# Steps without a graph after the cache has got other memory. Recording costs about as much as three of them.
_PLAIN_STEPS = 3


class Decoder:
    """Computes the logits of the next tokens of all rows of a cache.

    A step of a small batch takes a GPU less time than Python takes to start its kernels. On a GPU the kernels are
    therefore recorded once the cache has kept its memory for some steps, and started together from then on.

    Args:
        model: the model that `use_plans` has prepared.
        graphs: whether steps are recorded on a GPU.
    """

    def __init__(self, model: PreTrainedModel, *, graphs: bool = True) -> None:
        self._model: Any = model
        self._graphs = graphs and model.device.type == "cuda"
        self._graph: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop the recorded step: weights have moved, or the cache was replaced."""
        # The graph stays until the next is recorded, which takes over its memory.
        self._logits: Tensor | None = None
        self._steps = 0
        self._moves = -1

    def logits(self, tokens: Tensor, cache: KvCache) -> Tensor:
        """Return the logits after a token of each row, float [rows, V], and keep its keys and values.

        Args:
            tokens: int64 [rows].
            cache: the cache of the rows.
        """
        cache.reserve()
        if self._moves != cache.moves:
            self.forget()
            self._moves = cache.moves
            self._layout = DecodeLayout(cache)
        self._steps += 1
        if self._graphs and self._logits is None and self._steps > _PLAIN_STEPS:
            self._record(tokens, cache)
        if self._logits is None:
            logits = self._pass(tokens, DecodePlan(self._layout))
        else:
            self._tokens.copy_(tokens)
            self._graph.replay()
            self._ends += 1
            logits = self._logits
        cache.advance()
        return logits

    def _pass(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        logits: Tensor = self._model(
            input_ids=tokens[:, None],
            position_ids=plan.positions,
            use_cache=False,
            logits_to_keep=1,
            attention_plan=plan,
        ).logits
        return logits[:, -1]

    def _record(self, tokens: Tensor, cache: KvCache) -> None:
        """Record a step. A model that waits for its GPU within a step continues without."""
        self._tokens = tokens.clone()
        ends = [bucket.rows.end for bucket in cache.buckets]
        self._ends = torch.tensor(ends, device=tokens.device)
        here, apart = torch.cuda.current_stream(), torch.cuda.Stream()
        apart.wait_stream(here)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # Libraries take memory at their first call, which a graph must not record.
            with torch.cuda.stream(apart), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
                torch.cuda.set_sync_debug_mode("error")
                self._pass(self._tokens, DecodePlan(self._layout, self._ends))
        except RuntimeError as error:
            self._graphs = False
            reason = str(error).splitlines()[0]
            _log.warning("the model decodes without CUDA graphs, which makes small batches slower: %s", reason)
            return
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            here.wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._graph is None else self._graph.pool()):
            self._logits = self._pass(self._tokens, DecodePlan(self._layout, self._ends))
        self._graph = graph
