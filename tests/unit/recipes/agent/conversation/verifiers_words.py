"""A taskset of verifiers as people write them: words to spell backwards, with a tool that does it where asked for.

Imported by the interpreter that has verifiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Words"]
WORDS = ("river", "stone", "cloud", "apple")


class WordData(vf.TaskData):
    """A word."""

    word: str


class Reversing(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """The tool."""

    TOOL_PREFIX = ""

    @vf.tool
    def backwards(self, word: str) -> str:
        """Spell a word backwards."""
        return word[::-1]


class WordsConfig(vf.TasksetConfig):
    """What may be asked for."""

    with_tool: bool = False


class Word(vf.Task[WordData, vf.State, vf.TaskConfig]):
    """A task."""

    @vf.reward(weight=2.0)
    async def spelled(self, trace: Any) -> float:
        """Return whether the last thing said is the word backwards."""
        return float((trace.last_reply or "").strip() == self.data.word[::-1])


class WordWithTool(Word):
    """A task with the tool."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Reversing(vf.ToolsetConfig())]


class Words(vf.Taskset[Word, WordsConfig]):
    """The words."""

    def load(self) -> Iterator[Word]:
        for word in WORDS:
            data = WordData(prompt=f"Spell {word} backwards.", system_prompt="Answer by one word.", word=word)
            yield (WordWithTool if self.config.with_tool else Word)(data, self.config.task)


if __name__ == "__main__":
    # Its tools are served by a process of their own.
    Reversing.run()
