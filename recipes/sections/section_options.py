"""Sections `options`: settings that only one function, engine or source reads, each kept as a mapping of those that a
file sets and validated by the pydantic model of the one that reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel

from rlinf_core import IgnoredKeys
from rlinf_core.config.model import Finding, several
from rlinf_core.scalars import problem
from rlinf_core.suggest import did_you_mean, quoted

M = TypeVar("M", bound=BaseModel)


def check_names(
    at: str, written: Iterable[str], known: Collection[str], of: str, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse options that nothing reads.

    Args:
        at: the key of the options in its section, as in `engine_options`.
        written: the names of the options that the file sets.
        known: the names of those that are read.
        of: what reads them, for the error.
        others: options of other readers, with these.

    Raises:
        ValidationError: an option is unknown; paths are relative to the section.
    """
    unknown = [name for name in written if name not in known]
    if unknown:
        raise several(_unknown(at, name, known, of, others) for name in unknown)


def _unknown(at: str, name: str, known: Collection[str], of: str, others: Mapping[str, str]) -> Finding:
    if name in others:
        help = f"it is an option of {others[name]}: remove it"
    else:
        help = did_you_mean(name, known) or f"known options: {quoted(known)}"
    return (at, name, "[key]"), problem("unknown-key", f"`{name}` is no option of {of}", help=help), None


def unread_options(
    at: str, key: str, readers: Mapping[str, type[BaseModel]], aliases: Mapping[str, str] = MappingProxyType({})
) -> tuple[IgnoredKeys, ...]:
    """Return a rule for each option that some values of a key do not read; values that are not listed may read any.

    Args:
        at: the key of the options, as in `engine_options`.
        key: the key beside it that chooses the reader.
        readers: the model of the options that each value of the key reads.
        aliases: other names of these values.
    """

    def rule(name: str) -> IgnoredKeys:
        reads = {value: name in model.model_fields for value, model in readers.items()}

        def chosen(section: Any) -> str:
            value = getattr(section, key)
            return aliases.get(value, value)

        return IgnoredKeys(
            (f"{at}.{name}",),
            lambda section, sizes: not reads.get(chosen(section), True),
            lambda section: f"`{key}: {chosen(section)}` does not read it",
            "remove it, or write " + " or ".join(f"`{key}: {value}`" for value, is_read in reads.items() if is_read),
            because=(key,),
        )

    names = dict.fromkeys(name for model in readers.values() for name in model.model_fields)
    return tuple(rule(name) for name in names if not all(name in model.model_fields for model in readers.values()))


def read_options(model: type[M], written: Mapping[str, Any]) -> M:
    """Return the options that a model has, with the defaults of those that the file does not set."""
    return model.model_validate({name: value for name, value in written.items() if name in model.model_fields})
