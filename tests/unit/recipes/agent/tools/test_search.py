from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from recipes.agent.tools.search import BM25, Search, read_corpus, words
from recipes.agent.tools.tool import ToolError
from rlinf_core import ConfigError

DOCUMENTS = ["home kobu tarn", "home mila tarn", "river tarn oder", "a long text of many words about the home of kobu"]


def test_words_are_found_whatever_their_case_and_script() -> None:
    assert words("Straße, ÉTÉ-42!") == ["strasse", "été", "42"]


def test_scores_are_those_of_the_formula() -> None:
    index = BM25(["a b b", "a c"])

    ((number, score),) = index.search("b", 5)

    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert number == 0
    assert score == pytest.approx(rarity * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 3 / 2.5)))


def test_rare_words_and_short_documents_come_first() -> None:
    results = [number for number, _ in BM25(DOCUMENTS).search("home kobu", 3)]
    assert results == [0, 3, 1]


def test_no_documents_are_an_index_that_finds_nothing() -> None:
    assert BM25([]).search("home", 3) == []


def test_the_tool_shows_the_best_documents() -> None:
    assert asyncio.run(Search(DOCUMENTS, 2).call("river tarn")) == "river tarn oder\nhome kobu tarn"
    with pytest.raises(ToolError, match="nothing found"):
        Search(DOCUMENTS).find("zzz ?")


def test_a_corpus_is_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_corpus(str(file)) == ["one", "two"]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no documents"):
        read_corpus(str(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_corpus(str(file))
    file.write_text("one", "utf-16-le")
    with pytest.raises(ConfigError, match="is UTF-16 text, not UTF-8"):
        read_corpus(str(file))
    file.write_text("one", "utf-8-sig")
    assert read_corpus(str(file)) == ["one"]
    with pytest.raises(ConfigError, match="No such file"):
        read_corpus(str(tmp_path / "none"))
