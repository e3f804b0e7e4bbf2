"""A program of the Tinker SDK that goes on for some steps, whatever ends at the server; writes what it saw as JSON.

python restart_program.py FOLDER STEPS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tinker
from tinker import types

ROWS = [[3 + (7 * row + place) % 12 for place in range(9)] for row in range(4)]


def data(step: int) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0 + step % 3] * 8},
        )
        for row in ROWS
    ]


def main(folder: Path, steps: int) -> None:
    training = tinker.ServiceClient().create_lora_training_client(base_model="rlinf/base", rank=4, seed=3)
    prompt, params = types.ModelInput.from_ints(ROWS[0][:4]), types.SamplingParams(max_tokens=4, stop=[], seed=5)
    seen: list[object] = []
    for step in range(steps):
        learned = training.forward_backward(data(step), "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
        row: list[object] = [learned.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]]
        if step % 10 == 9:
            sampler = training.save_weights_and_get_sampling_client()
            (answer,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
            row += [list(answer.tokens), [float(value) for value in answer.logprobs or ()]]
        seen.append(row)
        # The test looks at it to choose its moments.
        Path(folder, "progress").write_text(str(step + 1))
    final = training.forward(data(0), "cross_entropy").result().loss_fn_outputs
    seen.append([list(output["logprobs"].data) for output in final])
    Path(folder, "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
