"""Tools that compute in the process of an agent: search over a local corpus, and a calculator."""

from __future__ import annotations

import ast
import heapq
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
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


Number = int | float

# The maximum characters of an expression, and bits of an integer; larger ones only take time.
_LONGEST: Final = 200
_MOST_BITS: Final = 1024
_BINARY: Final[Mapping[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: operator.mod,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Number], Number]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Tool):
    """Numbers, parentheses and + - * / // % **."""

    name = "calculator"
    computes = True
    description = "computes an arithmetic expression, such as (3 + 4) * 2"

    async def call(self, argument: str) -> str:
        return calculate(argument)


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text; floats with 12 digits.

    Raises:
        ToolError: the text is no arithmetic expression, or its value is undefined or too large.
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"the expression is longer than {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case _:
            raise ToolError("only numbers, parentheses and + - * / // % ** are known")


def _power(base: Number, exponent: Number) -> Number:
    # Checked before computing, as a huge integer would exhaust the machine's memory.
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent * (abs(int(base)).bit_length() - 1) > _MOST_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError("the value is not a real number")
    return _checked(value)


def _checked(value: Number) -> Number:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
        return value
    if value.bit_length() > _MOST_BITS:
        raise OverflowError
    return value
