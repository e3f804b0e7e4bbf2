"""Search over a local corpus."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from recipes.agent.tools.tool import Tool, ToolError
from rlinf_core import ConfigError
from rlinf_core.foreign.files import BadFileError, read_bounded
from rlinf_core.foreign.strict_json import wide_encoding

NOTHING_FOUND: Final = "nothing found"


class Search(Tool):
    """Search for the best documents of a corpus by BM25.

    Args:
        documents: the documents of the corpus.
        results: the number of documents shown.
    """

    name = "search"
    description = "shows the documents that fit some words best"
    computes = True

    def __init__(self, documents: Sequence[str], results: int = 1) -> None:
        self._documents = documents
        self._results = results
        self._index = BM25(documents)

    async def call(self, argument: str) -> str:
        return self.find(argument)

    def find(self, query: str) -> str:
        """Return the best documents, one per line.

        Raises:
            ToolError: no document has any of the words.
        """
        hits = self._index.search(query, self._results)
        if not hits:
            raise ToolError(NOTHING_FOUND)
        return "\n".join(self._documents[number] for number, _ in hits)


def read_corpus(path: str) -> list[str]:
    """Return the documents of a text file: its non-empty lines.

    Raises:
        ConfigError: the file cannot be read, or has no documents.
    """
    try:
        content = read_bounded(path, 1 << 32)
        if (other := wide_encoding(content)) is not None:
            raise BadFileError(path, f"is {other} text, not UTF-8")
        # Not `splitlines`: a page break or U+2028 is a part of a document.
        lines = re.split("\r\n?|\n", content.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the corpus `{path}` cannot be read", why=why) from None
    documents = [line.strip() for line in lines if line.strip()]
    if not documents:
        raise ConfigError(f"the corpus `{path}` has no documents", help="write one document per line")
    return documents


_WORD: Final = re.compile(r"\w+")
# The usual saturation of repeated words and weight of a document's length.
_K1: Final = 1.5
_B: Final = 0.75


def words(text: str) -> list[str]:
    """Return the case-folded words of a text."""
    return _WORD.findall(text.casefold())


class BM25:
    """An index of documents.

    Robertson and Zaragoza, "The probabilistic relevance framework: BM25 and beyond" (2009), eq. 3.15, with the inverse
    document frequency of Lucene, ln(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.

    Args:
        documents: the texts to index.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(words(document)) for document in documents]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, words_of_document in enumerate(counts):
            for word, count in words_of_document.items():
                holders[word].append((number, count))
        # The documents of each word, with its contribution to their scores.
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for word, postings in holders.items():
            rarity = math.log(1 + (len(documents) - len(postings) + 0.5) / (len(postings) + 0.5))
            self._weights[word] = [
                (number, rarity * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * lengths[number] / mean)))
                for number, count in postings
            ]

    def search(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the numbers and scores of the best documents that share a word with a query, best first."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in words(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        return heapq.nsmallest(count, scores.items(), key=lambda scored: (-scored[1], scored[0]))
