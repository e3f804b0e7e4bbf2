"""Choices of experts of running answers, for `actor.router_replay`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.language.answers.sequences import ExpertRecord
from recipes.training.typed_tensors import integers


class RowChoices:
    """Choices of experts for the tokens of running answers, one row each.

    A row holds those of its context, which the answers to a prompt share, and of the tokens drawn so far but the last,
    which no layer has seen.

    Args:
        layers, chosen: see `ExpertSizes`.
        device: the device of the choices of drawn tokens; those of contexts are on the CPU.
    """

    def __init__(self, layers: int, chosen: int, device: torch.device) -> None:
        self._contexts: list[Tensor] = []
        self._drawn = torch.empty(0, 0, layers, chosen, dtype=torch.int16, device=device)

    def add(self, contexts: Sequence[Tensor], width: int) -> None:
        """Append rows.

        Args:
            contexts: int16 [tokens, layers, chosen] of each.
            width: tokens of the longest answer of all rows.
        """
        self._contexts += contexts
        old = self._drawn
        self._drawn = old.new_empty(len(self._contexts), width, *old.shape[2:])
        self._drawn[: old.shape[0], : old.shape[1]] = old

    def put(self, choices: Tensor, columns: Tensor) -> None:
        """Keep the choices for one token of each row.

        Args:
            choices: int16 [rows, layers, chosen].
            columns: int64 [rows], numbers of the tokens within their answers.
        """
        self._drawn[torch.arange(len(columns), device=columns.device), columns] = choices

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, int64 [n] on the CPU, in this order."""
        self._contexts = [self._contexts[row] for row in integers(rows)]
        self._drawn = self._drawn[rows.to(self._drawn.device)]

    def record(self, row: int, begun: int, drawn: int) -> ExpertRecord:
        """Return the choices of a row of `drawn` tokens, of which its context has the first `begun`."""
        whole = torch.cat((self._contexts[row], self._drawn[row, begun : max(begun, drawn - 1)].cpu()))
        return ExpertRecord(whole.shape[1], whole.shape[2], whole.numpy().tobytes())
