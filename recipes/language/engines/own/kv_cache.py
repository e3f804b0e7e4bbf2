"""The key-value cache of the engine: answers in buckets of similar lengths, shared prompts stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from recipes.language.engines.own.kv_memory import CacheShape, KvPrompts, KvRows, Tokens
from recipes.training.typed_tensors import integers

# Lengths up to this share a bucket; beyond it a bucket takes lengths that differ by less than a factor of 2.
_SHORT = 256


@dataclass(frozen=True)
class NewRow:
    """An answer that enters the cache.

    Attributes:
        shared: first tokens of its context that are stored once for all rows that have them; may be none.
        length: tokens of the context.
        most: tokens that context and answer come to at most.
    """

    shared: Tokens
    length: int
    most: int

    @property
    def own(self) -> int:
        """Tokens of the context that are the row's own."""
        return self.length - len(self.shared)

    @cached_property
    def bucket(self) -> tuple[int, int]:
        """The bucket that it belongs to, by the lengths of shared and own tokens."""
        return (_size(len(self.shared)) + 1 if self.shared else 0), _size(self.own)


class KvBucket:
    """Rows of similar lengths, and the prompts that they share.

    Attributes:
        rows: own keys and values of each row.
        prompts: keys and values that rows share; no prompt where rows have theirs themselves.
        numbers: int64 [rows], of the rows in the order of the engine, on the CPU.
        owners: int64 [rows], the prompt of each row, on the CPU.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.rows = KvRows(shape)
        self.prompts = KvPrompts(shape)
        self.numbers: Tensor = torch.empty(0, dtype=torch.int64)
        self.owners: Tensor = torch.empty(0, dtype=torch.int64)

    @property
    def bases(self) -> Tensor:
        """Shared tokens of each row, int64 [rows], on the CPU."""
        return self.prompts.lengths[self.owners] if self.prompts.count else torch.zeros_like(self.owners)

    @property
    def tokens(self) -> int:
        """Tokens that there is memory for."""
        return self.rows.count * self.rows.columns + self.prompts.count * self.prompts.columns

    def renumber(self, numbers: Tensor) -> bool:
        """Keep the rows whose new number is not negative; return whether any was dropped.

        Args:
            numbers: int64 [all rows of the cache], on the CPU.
        """
        new = numbers[self.numbers]
        kept = (new >= 0).nonzero()[:, 0]
        self.numbers = new[kept]
        if len(kept) == len(new):
            return False
        self.rows.keep(kept)
        if self.prompts.count:
            owners = self.owners[kept]
            used = owners.bincount(minlength=self.prompts.count) > 0
            self.owners = used.cumsum(0)[owners] - 1
            if not bool(used.all()):
                self.prompts.keep(used.nonzero()[:, 0])
        else:
            self.owners = self.owners[kept]
        return True


class Reservation:
    """Tokens that rows of a cache may come to need: those of a bucket are as wide as its widest."""

    def __init__(self) -> None:
        # By bucket: rows and the most own tokens of one, and the prompts that rows share.
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._prompts: dict[tuple[int, int], set[Tokens]] = {}
        self._widest: dict[tuple[int, int], int] = {}

    def add(self, row: NewRow) -> None:
        """Count a row."""
        key = row.bucket
        count, widest = self._rows.get(key, (0, 0))
        self._rows[key] = count + 1, max(widest, row.most - len(row.shared))
        if row.shared:
            self._prompts.setdefault(key, set()).add(row.shared)
            self._widest[key] = max(self._widest.get(key, 0), len(row.shared))

    @property
    def tokens(self) -> int:
        """Tokens of all rows, and of all prompts that they share."""
        rows = sum(count * widest for count, widest in self._rows.values())
        return rows + sum(len(prompts) * self._widest[key] for key, prompts in self._prompts.items())


class KvCache:
    """Keys and values of running answers.

    Attributes:
        held: the rows, as they have entered it.
        buckets: where they are.
        moves: how often rows, columns or prompts have got other memory.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.held: list[NewRow] = []
        self.moves = 0
        self._buckets: dict[tuple[int, int], KvBucket] = {}

    @property
    def buckets(self) -> list[KvBucket]:
        """Buckets in a fixed order."""
        return list(self._buckets.values())

    def prompts(self) -> set[Tokens]:
        """Return the stored prompts that further rows may share."""
        return {tokens for bucket in self._buckets.values() for tokens in bucket.prompts.numbers()}

    def close_prompts(self) -> None:
        """Let no further row share the stored prompts, as new weights compute others."""
        for bucket in self._buckets.values():
            bucket.prompts.close()

    def reservation(self, rows: Sequence[int]) -> Reservation:
        """Return what some of the rows may come to need."""
        reservation = Reservation()
        for row in rows:
            reservation.add(self.held[row])
        return reservation

    @property
    def nbytes(self) -> int:
        """Memory that is taken, in bytes."""
        return sum(bucket.tokens for bucket in self._buckets.values()) * self.shape.bytes_per_token

    def add(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rows: Sequence[NewRow],
        contexts: Sequence[Tensor],
    ) -> None:
        """Append rows.

        Args:
            keys, values: the keys and values, for each layer, float [heads, T, dim] of a packed row of tokens.
            rows: what enters.
            contexts: the positions of each row's context in the packed row, int64 [its length] on the CPU.
        """
        members: dict[tuple[int, int], list[int]] = {}
        for index, row in enumerate(rows):
            members.setdefault(row.bucket, []).append(index)
        for key, indices in members.items():
            bucket = self._buckets.setdefault(key, KvBucket(self.shape))
            self._add_to(bucket, keys, values, [(rows[i], contexts[i]) for i in indices])
            bucket.numbers = torch.cat((bucket.numbers, torch.tensor(indices) + len(self.held)))
        self.held += rows
        self.moves += 1

    def _add_to(
        self,
        bucket: KvBucket,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rows: Sequence[tuple[NewRow, Tensor]],
    ) -> None:
        stored = bucket.prompts.numbers()
        missing = {row.shared: context for row, context in rows if row.shared and row.shared not in stored}
        if missing:
            sources = [context[: len(shared)] for shared, context in missing.items()]
            bucket.prompts.add(keys, values, list(missing), sources)
            stored = bucket.prompts.numbers()
        owners = torch.tensor([stored.get(row.shared, 0) for row, _ in rows])
        bucket.owners = torch.cat((bucket.owners, owners))
        width = max(row.own for row, _ in rows)
        sources = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, (row, context) in enumerate(rows):
            sources[index, width - row.own :] = context[len(row.shared) :]
        lengths = torch.tensor([row.own for row, _ in rows])
        most = torch.tensor([row.most - len(row.shared) for row, _ in rows])
        bucket.rows.add(keys, values, sources.to(self.shape.device), lengths, most)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, int64 [n] on the CPU, ascending, and free what none of them uses."""
        numbers = torch.full((len(self.held),), -1)
        numbers[rows] = torch.arange(len(rows))
        self.held = [self.held[row] for row in integers(rows)]
        for key, bucket in list(self._buckets.items()):
            if bucket.renumber(numbers):
                self.moves += 1
            if not bucket.rows.count:
                del self._buckets[key]

    def reserve(self) -> None:
        """Make room for one more token of every row."""
        for bucket in self._buckets.values():
            self.moves += bucket.rows.reserve()

    def advance(self) -> None:
        """Count the token of every row that a decoding step has kept."""
        for bucket in self._buckets.values():
            bucket.rows.end += 1


def _size(length: int) -> int:
    """Return the class of a length: 0 up to `_SHORT`, then one for each doubling."""
    return max(0, (length - 1).bit_length() - (_SHORT - 1).bit_length())
