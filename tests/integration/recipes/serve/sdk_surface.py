"""Lists what the installed Tinker SDK sends and reads: its paths, the fields of its requests, its protobuf messages.

python sdk_surface.py > sdk_surface.json
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
import sys
from pathlib import Path

import tinker
import tinker.types
from pydantic import BaseModel


def paths() -> list[str]:
    """Return the paths in the SDK's source, with `{}` for ids."""
    names: set[str] = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if "test" not in file.name:
            names |= set(re.findall(r"""["']/api/v1/([^"'\s]*)["']""", file.read_text()))
    return sorted({re.sub(r"\{[^}]*\}", "{}", path) for path in names})


def requests() -> dict[str, list[str]]:
    """Return the fields of each type of request and of its parts."""
    fields: dict[str, list[str]] = {}
    for module in pkgutil.iter_modules(tinker.types.__path__):
        loaded = importlib.import_module(f"tinker.types.{module.name}")
        for name, kind in vars(loaded).items():
            if not isinstance(kind, type) or not is_sent(name):
                continue
            if issubclass(kind, BaseModel):
                fields[name] = sorted(kind.model_fields)
            elif dataclasses.is_dataclass(kind):
                fields[name] = sorted(field.name for field in dataclasses.fields(kind) if field.name[0] != "_")
    return dict(sorted(fields.items()))


def is_sent(name: str) -> bool:
    return name.endswith("Request") or name in ("AdamParams", "LoraConfig", "SamplingParams", "Datum", "ModelInput")


def messages() -> dict[str, dict[str, str]]:
    """Return the fields of each protobuf message: number, type in the wire format's numbers, and message."""
    from tinker.proto import tinker_public_pb2 as public

    return {
        name: {
            field.name: f"{field.number} {field.type} {field.message_type.name if field.message_type else ''}".strip()
            for field in message.fields
        }
        for name, message in sorted(public.DESCRIPTOR.message_types_by_name.items())
    }


if __name__ == "__main__":
    surface = {"version": tinker.__version__, "paths": paths(), "requests": requests(), "messages": messages()}
    json.dump(surface, sys.stdout, indent=1, sort_keys=True)
