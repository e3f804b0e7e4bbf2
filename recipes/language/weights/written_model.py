"""The comparison of a written model folder with the trained policy.

A separate process, which runs this module, loads the folder by transformers alone: it reads a request from standard
input, and writes the reply to standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch

from recipes.language.models.fingerprint import fingerprint
from recipes.language.models.packing import RowLayout
from recipes.language.models.policy import LIMITS, AnswerModel
from recipes.training.typed_tensors import integers
from rlinf_core import RLinfError
from rlinf_core.collective.memory_budget import free_bytes
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.runners.storage.first_contact import Difference

LOADED: Final = "the folder that was written, loaded by transformers in another process"
_TOKENS: Final = 64
# The number of tokens, of 64, that may differ more: their routers may be near a tie and choose other experts.
_EXCEPTIONS: Final = 7
# The memory of the other process: a multiple of the weights' bytes, and bytes besides.
_SHARE, _BESIDE = 1.25, 1 << 30
# The time limit of the other process in seconds, and the additional seconds per GiB.
_SECONDS, _SECONDS_OF_GIB = 300, 60


class ExpectedLogprobs(NamedTuple):
    """Log-probabilities of a policy.

    Attributes:
        tokens: random tokens, equal for models with equal vocabulary sizes.
        logprobs: the log-probability of each token but the first.
        dtype: the type of the written weights.
    """

    tokens: list[int]
    logprobs: list[float]
    dtype: torch.dtype


@torch.no_grad()
def expected_logprobs(policy: AnswerModel, dtype: torch.dtype) -> ExpectedLogprobs:
    """Return what a written folder must compute. Collective: all ranks that share the weights call it together."""
    config: Any = policy.causal.config.get_text_config()
    positions = int(getattr(config, "max_position_embeddings", 0) or _TOKENS + 1)
    vocabulary: int = cast("Any", policy.causal.get_input_embeddings()).weight.shape[0]
    count = min(_TOKENS + 1, positions)
    row = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    layout = RowLayout([integers(row[:-1])], masks=False)
    rows = layout.rows(layout.places(0), row[1:], next(policy.parameters()).device)
    logprobs = policy.computing(lambda: policy.answers(rows).logprobs.float())
    return ExpectedLogprobs(row.tolist(), logprobs.tolist(), dtype)


def check_written(folder: Path, fingerprints: Mapping[str, str], expected: ExpectedLogprobs) -> Difference:
    """Compare a folder with the policy whose weights were written into it.

    If the host lacks memory for another copy of the weights, nothing is compared, and the result says so.

    Args:
        folder: the folder.
        fingerprints: the checksums of the written weights, by name.
        expected: see `expected_logprobs`.

    Returns:
        The largest difference of a log-probability, in nats.

    Raises:
        RLinfError: transformers loads other weights, or computes other log-probabilities.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed, free = int(_SHARE * size) + _BESIDE, free_bytes()
    if needed > free:
        return Difference(
            note=f"not loaded: that takes {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
        )
    answer = _answer_of(folder, expected.tokens, _SECONDS + _SECONDS_OF_GIB * size / 2**30)
    if isinstance(answer, str):
        return Difference(note=f"not loaded: {answer}")
    loaded: Mapping[str, str] = answer["fingerprints"]
    others = sorted({*answer["missing"], *(name for name, text in fingerprints.items() if loaded.get(name) != text)})
    if others:
        further = f" and of {len(others) - 1} more" if len(others) > 1 else ""
        raise _refusal(folder, f"transformers loads other values of `{others[0]}`{further}")
    apart = sorted(
        (abs(mine - theirs) for mine, theirs in zip(expected.logprobs, answer["logprobs"], strict=True)), reverse=True
    )
    limit = LIMITS[expected.dtype]
    if not apart[min(_EXCEPTIONS, len(apart) - 1)] <= limit:
        raise _refusal(
            folder,
            f"its weights, among them `{min(fingerprints)}`, are those that were written, but log-probabilities differ"
            f" by up to {apart[0]:.2g}; rounding explains {limit:g}",
        )
    return Difference(apart[0], limit, f"{len(apart)} tokens, {len(fingerprints)} tensors")


def _answer_of(folder: Path, tokens: list[int], seconds: float) -> dict[str, Any] | str:
    """Return the reply of the other process, or why there is none if the folder is not at fault.

    Raises:
        RLinfError: transformers cannot load the folder.
    """
    # Leave accelerators to the trainer.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    asked = json.dumps({"folder": str(folder), "tokens": tokens})
    try:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name],
            input=asked,
            capture_output=True,
            text=True,
            env=env,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"that takes longer than {seconds:.0f} s"
    except OSError as error:
        return f"no process can be started: {error}"
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise _refusal(folder, f"transformers cannot load it: {lines[-1]}")
    return load_json_object(done.stdout, non_finite=True)


def _refusal(folder: Path, why: str) -> RLinfError:
    return RLinfError(
        "the model folder that was written is not the model that was trained; it was removed",
        where=str(folder),
        why=why,
        help="report this model family; `runner.skip_checks: true` writes the folder all the same. Checkpoints of the"
        " state are not affected",
    )


# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


@torch.no_grad()
def answer(folder: str, tokens: list[int]) -> dict[str, Any]:
    """Return weights and log-probabilities of a folder as transformers loads it.

    Args:
        folder: the folder.
        tokens: the token ids of a sequence.

    Returns:
        `missing`: names of weights without a value; `fingerprints`: checksums of all weights, by name; `logprobs`:
            log-probability of each token but the first.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # With `output_loading_info` it returns two values, which its type does not say.
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, report = load(
        folder,
        dtype="auto",
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="eager",
        output_loading_info=True,
    )
    row = torch.tensor([tokens])
    logprobs = model.eval()(input_ids=row, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    state: dict[str, torch.Tensor] = model.state_dict()
    return {
        "missing": sorted(report["missing_keys"]),
        "fingerprints": {name: fingerprint([(name, weight)]) for name, weight in state.items()},
        "logprobs": logprobs.gather(1, row[0, 1:, None])[:, 0].tolist(),
    }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    out = sys.stdout
    # Keep the output of libraries out of the reply.
    sys.stdout = sys.stderr
    print(json.dumps(answer(asked["folder"], asked["tokens"])), file=out)
