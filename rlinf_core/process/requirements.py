"""Packages that an interpreter lacks or has in an unsupported version, and the commands that install them."""

from __future__ import annotations

import re
import shlex
import string
import sys
from collections.abc import Iterable
from typing import Final

from rlinf_core.errors import ConfigError

# By import name: the requirement for pip, as in the extras of `pyproject.toml`.
_REQUIREMENTS: Final = {
    "PIL": "pillow>=10",
    "av": "av>=14,<19",
    "cv2": "opencv-python-headless>=4.10,<6",
    "franka": "franka-rs>=0.4,<0.5",
    "gymnasium": "gymnasium>=1.0,<2",
    "h5py": "h5py>=3.11,<4",
    "hydra": "hydra-core>=1.3,<1.4",
    "httpx": "httpx>=0.28,<1",
    "jinja2": "jinja2>=3.1",
    "math_verify": "math-verify>=0.8,<1",
    "mcp": "mcp>=2,<3",
    "mlflow": "mlflow-skinny>=3,<4",
    "mujoco": "mujoco>=3.3,<5",
    "numpy": "numpy>=1.26",
    "envpool": "envpool>=1.2.5,<2",
    "panda_gym": "panda-gym>=3.0.7,<4",
    "onnx": "onnx>=1.17,<2",
    "onnxruntime": "onnxruntime>=1.20,<2",
    "onnxscript": "onnxscript>=0.3,<1",
    "peft": "peft>=0.17,<1",
    "google.protobuf": "protobuf>=5.29,<8",
    "prometheus_client": "prometheus-client>=0.20,<1",
    "pyrealsense2": "pyrealsense2>=2.55,<3",
    "py_spy": "py-spy>=0.4,<1",
    "pyarrow": "pyarrow>=17",
    "ray": "ray>=2.54,<2.61",
    "reasoning_gym": "reasoning-gym>=0.1.25,<0.2",
    "safetensors": "safetensors>=0.5",
    "starlette": "starlette>=0.46,<2",
    "swanlab": "swanlab>=0.10",
    "tensorboard": "tensorboard>=2.16",
    "torch": "torch>=2.6",
    "trackio": "trackio>=0.2",
    "transformers": "transformers>=5.3,<6",
    "uvicorn": "uvicorn>=0.34,<1",
    "verifiers": "verifiers>=0.4,<0.5",
    "vl_convert": "vl-convert-python>=1.9,<2",
    "wandb": "wandb>=0.17",
    "websockets": "websockets>=14",
}

# The characters of a distribution's name.
_NAME: Final = string.ascii_letters + string.digits + "-_"


def missing_modules(modules: Iterable[str]) -> list[str]:
    """Return those of `modules` that this interpreter cannot import, or has in a version out of rlinf's range.

    Imports none of them. `absence` tells which of the two applies.
    """
    import importlib.util

    def is_missing(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            return True  # its parent package is missing

    return [name for name in modules if is_missing(name) or _unfit_version(name) is not None]


def absence(module: str) -> str:
    """Return what is wrong with one of `missing_modules`, as text that follows the module's name in a message."""
    version = _unfit_version(module)
    if version is None:
        return "not installed in this Python"
    return f"of which this Python has {version}, out of the range {_REQUIREMENTS[module].lstrip(_NAME)}"


def require_version(module: str) -> None:
    """Check that the installed version of a module is in the range that rlinf supports, if there is one.

    Raises:
        ConfigError: it is out of range; the error names version, range, and the command that installs another.
    """
    if _unfit_version(module) is not None:
        raise ConfigError(
            f"this needs the package `{module}`, {absence(module)}",
            where=sys.executable,
            help=f"run `{install_command(module)}`",
        )


def _unfit_version(module: str) -> str | None:
    """Return the installed version of a module if it is out of range; None if it is in range or unknown."""
    from importlib.metadata import PackageNotFoundError, version

    requirement = _REQUIREMENTS.get(module, "")
    try:
        installed = version(requirement[: len(requirement) - len(requirement.lstrip(_NAME))])
    except (PackageNotFoundError, ValueError):
        return None  # built by the user, or installed from a distribution of another name
    release = _release(installed)
    for relation, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        if release and (release >= _release(bound)) != (relation == ">="):
            return installed
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without trailing zeros: 5.0 becomes 5."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def install_command(*modules: str, python: str | None = None) -> str:
    """Return the command that installs the packages of `modules` (import names) for `python`, by default this one."""
    wanted = (_REQUIREMENTS.get(name, name) for name in modules)
    return shlex.join((python or sys.executable or "python", "-m", "pip", "install", *wanted))
