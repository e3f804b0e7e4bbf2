"""Tests of functions: the tests and the program that they judge, each in a process of its own.

The modules of this folder travel into the sandbox: standard library only, and of that what is written in C. Each answer
pays for each import: `json`, `ctypes` and `collections` take longer than most tests.

The program's process is forked before the tests are read, and a pipe of JSON is all that joins the two. An object that
is no plain value stays in its process: the other one holds a `Remote`, which equals no plain value and stands for none.
So a program reaches neither the tests, nor what they compare with, nor the line by which they say that they passed.
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
    """Return the program that runs tests of functions: its standard input says which.

    It holds the modules, compiled here, since the interpreter of the sandbox is this one's.
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
