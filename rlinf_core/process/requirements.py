"""Packages that an interpreter lacks, and the command that installs them there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from typing import Final

# What pip is asked for where the name of a module would not do: as the extras of `pyproject.toml` say.
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
    "envpool": "envpool>=1.2.5,<2",
    "panda_gym": "panda-gym>=3.0.7,<4",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http>=1.30,<2",
    "opentelemetry.sdk": "opentelemetry-sdk>=1.30,<2",
    "peft": "peft>=0.17,<1",
    "google.protobuf": "protobuf>=5.29,<8",
    "prometheus_client": "prometheus-client>=0.20,<1",
    "pyrealsense2": "pyrealsense2>=2.55,<3",
    "py_spy": "py-spy>=0.4,<1",
    "pyarrow": "pyarrow>=17",
    "ray": "ray>=2.60,<2.61",
    "reasoning_gym": "reasoning-gym>=0.1.25,<0.2",
    "starlette": "starlette>=0.46,<2",
    "transformers": "transformers>=5.20,<6",
    "uvicorn": "uvicorn>=0.34,<1",
    "verifiers": "verifiers>=0.4,<0.5",
    "vl_convert": "vl-convert-python>=1.9,<2",
    "websockets": "websockets>=14",
}


def missing_modules(modules: Iterable[str]) -> list[str]:
    """Return those of `modules` that this interpreter cannot import. Imports none of them."""
    import importlib.util

    def is_missing(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            return True  # the package that it is in

    return [name for name in modules if is_missing(name)]


def install_command(*modules: str, python: str | None = None) -> str:
    """Return the command that installs the packages of `modules` (import names) for `python`, by default this one."""
    wanted = (_REQUIREMENTS.get(name, name) for name in modules)
    return shlex.join((python or sys.executable or "python", "-m", "pip", "install", *wanted))
