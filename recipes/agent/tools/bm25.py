"""BM25 over an inverted index.

Of the packages on PyPI, rank-bm25 scores every document for every query, and bm25s brings numpy into processes that
need it for nothing else.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

_WORD: Final = re.compile(r"\w+")
# Saturation of repeated words, and weight of a document's length, as is usual.
_K1: Final = 1.5
_B: Final = 0.75


def words(text: str) -> list[str]:
    """Return the words of a text, without case."""
    return _WORD.findall(text.casefold())


class BM25:
    """An index of documents.

    Robertson and Zaragoza, "The probabilistic relevance framework: BM25 and beyond" (2009), eq. 3.15, with the inverse
    document frequency of Lucene, ln(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.

    Args:
        documents: texts.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(words(document)) for document in documents]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, words_of_document in enumerate(counts):
            for word, count in words_of_document.items():
                holders[word].append((number, count))
        # By word: documents with what the word adds to their scores.
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for word, postings in holders.items():
            rarity = math.log(1 + (len(documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            self._weights[word] = [
                (number, rarity * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * lengths[number] / mean)))
                for number, count in postings
            ]

    def search(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the best documents that share a word with a query, by number with their scores, best first."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in words(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        return heapq.nsmallest(count, scores.items(), key=lambda scored: (-scored[1], scored[0]))
