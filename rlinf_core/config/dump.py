"""Serialization of a configuration as YAML that loads back to the same data.

Numbers keep the text they were written with. Text is quoted wherever a YAML reader, an old one (YAML 1.1) included,
could take it for something else. `${` is written `$${`, so that loading does not take it for a reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, cast

from rlinf_core.config.reader import resolve_plain
from rlinf_core.config.references import escape_references
from rlinf_core.config.tree import MappingNode, ScalarNode, SequenceNode, to_data

Plain: TypeAlias = "None | bool | int | float | str | Sequence[Plain] | Mapping[str, Plain]"
"""Plain data, or what `to_data` makes of a tree."""

_UNQUOTED: Final = re.compile(r"[A-Za-z0-9_/][\w/.@%+=:,~$()-]*( [\w/.@%+=,~$()-][\w/.@%+=:,~$()-]*)*", re.ASCII)
# What YAML 1.1 reads as a boolean, a number in base 60, 2 or with underscores, or a date.
_OLD_YAML: Final = re.compile(
    r"(?i:y|n|yes|no|on|off)|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|0b[01_]+|[0-9][0-9_.]*([eE][-+]?[0-9]+)?"
    r"|0x[0-9a-fA-F_]+|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*"
)
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_yaml(value: MappingNode | SequenceNode | ScalarNode | Plain) -> str:
    """Return the YAML text of a tree or of plain data, in block style, with a final line end."""
    if isinstance(value, MappingNode | SequenceNode | ScalarNode):
        value = to_data(value)
    return "\n".join(_block(value)) + "\n"


def inline(value: None | bool | int | float | str) -> str:
    """Return a single value as it stands behind a key."""
    raw: object = getattr(value, "raw", None)
    if isinstance(raw, str):
        return raw
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return _text(escape_references(value)) if isinstance(value, str) else repr(value)


def _block(value: Plain) -> list[str]:
    lines: list[str] = []
    if isinstance(value, Mapping) and value:
        for key, item in cast("Mapping[str, Plain]", value).items():
            inner = _block(item)
            if _is_filled(item):
                lines.append(f"{_text(key)}:")
                lines += [f"  {line}" for line in inner]
            else:
                lines.append(f"{_text(key)}: {inner[0]}")
        return lines
    if isinstance(value, Mapping):
        return ["{}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        for item in cast("Sequence[Plain]", value):
            first, *rest = _block(item)
            lines.append(f"- {first}")
            lines += [f"  {line}" for line in rest]
        return lines or ["[]"]
    return [inline(value)]


def _is_filled(value: Plain) -> bool:
    return bool(value) and isinstance(value, Mapping | Sequence) and not isinstance(value, str)


def _text(text: str) -> str:
    a_word = _UNQUOTED.fullmatch(text) and not (text.endswith(":") or ": " in text or _OLD_YAML.fullmatch(text))
    if a_word and isinstance(resolve_plain(text), str):
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
