"""A program that loads a written model folder by transformers alone, in a separate process.

`written_model` starts it with a request on standard input, and reads the reply from standard output.
"""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from recipes.language.models.fingerprint import fingerprint


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
