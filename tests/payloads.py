"""Files that would run code if a reader executed what they say. The code writes a marker, and nothing else."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (code(self.marker),)


def code(marker: Path) -> str:
    """Return a line of Python that writes the marker."""
    return f"open({str(marker)!r}, 'a').write('x')\n"


def pickled(marker: Path) -> bytes:
    """Return a pickle that runs code."""
    return pickle.dumps(Payload(marker))


def archived(marker: Path) -> bytes:
    """Return a file of `torch.save` whose loading runs code."""
    stream = io.BytesIO()
    torch.save(Payload(marker), stream)
    return stream.getvalue()


def numbers(marker: Path) -> bytes:
    """Return a file of numpy whose loading with `allow_pickle` runs code."""
    stream = io.BytesIO()
    np.save(stream, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    return stream.getvalue()


def tagged(marker: Path) -> bytes:
    """Return YAML that runs code in a loader that makes objects."""
    return f"recipe: !!python/object/apply:builtins.exec [{json.dumps(code(marker))}]\n".encode()


def template(marker: Path) -> bytes:
    """Return a template of jinja that runs code outside of a sandbox."""
    reach = "cycler.__init__.__globals__.os.system"
    return f"{{{{ {reach}({json.dumps(f'touch {marker}')}) }}}}".encode()


PAYLOADS: Final[dict[str, Callable[[Path], bytes]]] = {
    "pickle": pickled,
    "archive": archived,
    "numbers": numbers,
    "yaml": tagged,
    "template": template,
    "python": lambda marker: code(marker).encode(),
}


# Modules that a reader, or Python itself, might look for beside what was received.
NEIGHBOURS: Final = (
    *("numpy.py", "torch.py", "conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "random.py"),
    *("yaml.py", "modeling_x.py", "configuration_x.py", "tokenization_x.py", "processing_x.py", "jinja2.py"),
    *("custom_generate/generate.py", "pydantic/__init__.py", "recipes/embodied/__init__.py", "vl_convert.py"),
)


def plant_neighbours(folder: Path, marker: Path) -> None:
    """Put modules that write the marker into a folder, beside what is there."""
    for name in NEIGHBOURS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code(marker))
    (folder / "x.pth").write_text(f"import os; {code(marker)}")


def plant(run: Path, name: str, content: bytes) -> None:
    """Put a payload into a file of a run, and have the manifest of its checkpoint say that it belongs there."""
    file = run / name
    file.write_bytes(content)
    for manifest in run.glob("checkpoints/*/manifest.json"):
        folder = manifest.parent
        if manifest == file or folder not in file.parents:
            continue
        fields = json.loads(manifest.read_text())
        inside = file.relative_to(folder).as_posix()
        fields["files"][inside] = len(content)
        fields["digests"][inside] = hashlib.sha256(content).hexdigest()
        manifest.write_text(json.dumps(fields))
