"""A written model folder as others see it: loaded by transformers alone, in a separate process.

`written_model` starts it with a question on standard input, and reads the answer from standard output.
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
    """Return what transformers makes of a folder.

    Args:
        folder: the folder.
        tokens: a sequence.

    Returns:
        `missing`: names of weights that it has no value for; `fingerprints`: those of all weights, by name;
        `logprobs`: the log-probability of each token but the first.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # It returns two values where it is asked to report, which its type does not say.
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
    # What libraries print is no answer.
    sys.stdout = sys.stderr
    print(json.dumps(answer(asked["folder"], asked["tokens"])), file=out)
