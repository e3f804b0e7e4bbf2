"""Registers accelerators of the vendor STAND in every process that has this folder on its path."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_VENDORS = "rlinf_core.hardware.accelerators"


def _register(module: Any) -> None:
    from stand_in_accelerator import StandAccelerator

    module.register_accelerator(StandAccelerator())


def _answer_by_sleep(module: Any) -> None:
    from stand_in_answers import draw_by_sleep

    draw_by_sleep(module)
    module.check_engine = lambda model: None


def _learn_by_sleep(module: Any) -> None:
    from stand_in_answers import learn_by_sleep

    learn_by_sleep(module)


def _update_by_sleep(module: Any) -> None:
    from stand_in_answers import update_by_sleep

    update_by_sleep(module)


_AFTER_IMPORT = {
    _VENDORS: _register,
    "recipes.language.engines.torch_engine": _answer_by_sleep,
    "recipes.language.learning.learner": _learn_by_sleep,
    "recipes.embodied.off_policy.algorithm": _update_by_sleep,
}


class _Hooks(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        hook = _AFTER_IMPORT.get(fullname)
        if hook is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Hooks())
