"""Tests of functions, with the tests and the judged program in separate processes.

The modules of this folder are sent into the sandbox. They import only those parts of the standard library that are
written in C, as every answer pays for every import: `json`, `ctypes` and `collections` take longer than most tests.

The program's process is forked before the tests are read, and only a pipe of JSON connects the two. An object that is
no plain value stays in its process: the other process holds a `Remote`, which equals no plain value. So a program can
reach neither the tests, nor the expected values, nor the mark that reports success.
"""

from __future__ import annotations

import marshal
from functools import cache
from pathlib import Path
from typing import Final

# In the order of their imports.
_MODULES: Final = ("remote", "pipe", "judging")


@cache
def function_tests() -> str:
    """Return the program that runs the tests of functions given on its standard input.

    It contains the modules compiled, as the sandbox has the same interpreter.
    """
    files = [(f"{__name__}.{name}", Path(__file__).with_name(f"{name}.py")) for name in _MODULES]
    codes = [
        (name, compile(file.read_text(encoding="utf-8"), "<tests>", "exec", dont_inherit=True, optimize=2))
        for name, file in files
    ]
    return f"""\
import marshal, sys
for name, code in marshal.loads(bytes.fromhex('{marshal.dumps(codes).hex()}')):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""
