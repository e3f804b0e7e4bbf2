"""Interpreters of their own path, made offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_venv(folder: Path, *, ray: bool = True, first_line: str = "") -> Path:
    """Return an interpreter of its own path, made offline; returns the path.

    Args:
        folder: where.
        ray: whether it has all that the interpreter of this process has.
        first_line: Python, run before anything else that it runs.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "stack_of_its_own.py").write_text('"""What the interpreter of the tests does not have."""\n')
    # Such files are read twice at the start of an interpreter of this kind.
    once = "exec('' if hasattr(sys, 'begun') else {}); sys.begun = True"
    lines = [f"import sys; {once.format(repr(first_line))}"] if first_line else []
    if ray:
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        checkout = str(Path(__file__).parents[2])
        lines += [f"import site; site.addsitedir({ours!r})", checkout]
    (packages / "a_first.pth").write_text("\n".join([*lines, ""]))
    return folder / "bin" / "python"
