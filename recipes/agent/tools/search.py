"""Search over a local corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from recipes.agent.tools.bm25 import BM25
from recipes.agent.tools.tool import Tool, ToolError
from rlinf_core import ConfigError
from rlinf_core.foreign.encodings import wide_encoding
from rlinf_core.foreign.files import BadFileError, read_bounded

NOTHING_FOUND: Final = "nothing found"


class Search(Tool):
    """The documents of a corpus that fit a query best, by BM25.

    Args:
        documents: the documents of the corpus.
        results: documents that are shown.
    """

    name = "search"
    description = "shows the documents that fit some words best"
    computes = True

    def __init__(self, documents: Sequence[str], results: int = 1) -> None:
        self._documents = documents
        self._results = results
        self._index = BM25(documents)

    async def call(self, argument: str) -> str:
        """See `Tool`."""
        return self.find(argument)

    def find(self, query: str) -> str:
        """Return the best documents, one a line.

        Raises:
            ToolError: no document has one of the words.
        """
        hits = self._index.search(query, self._results)
        if not hits:
            raise ToolError(NOTHING_FOUND)
        return "\n".join(self._documents[number] for number, _ in hits)


def read_corpus(path: str) -> list[str]:
    """Return the documents of a text file: its lines that are not empty.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    try:
        content = read_bounded(path, 1 << 32)
        if (other := wide_encoding(content)) is not None:
            raise BadFileError(path, f"is {other} text, not UTF-8")
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the corpus `{path}` cannot be read", why=why) from None
    documents = [line.strip() for line in lines if line.strip()]
    if not documents:
        raise ConfigError(f"the corpus `{path}` has no documents", help="write one document per line")
    return documents
