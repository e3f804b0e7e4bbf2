"""Programs of the Tinker SDK; run in an interpreter with the SDK alone, and write what they saw as JSON.

python tinker_program.py FOLDER           what the SDK can do
python tinker_program.py FOLDER STEPS     so many steps, whatever ends at the server
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

ROWS = [[3 + (7 * row + place) % 12 for place in range(9)] for row in range(7)]


def supervised(weight: float = 1.0) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [weight] * 8},
        )
        for row in ROWS
    ]


def reinforced(logprobs: list[Any]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "logprobs": old, "advantages": [1.0] * 8},
        )
        for row, old in zip(ROWS, logprobs, strict=True)
    ]


def step(client: Any, rate: float = 1e-2) -> Any:
    return client.optim_step(types.AdamParams(learning_rate=rate))


def values(output: Any) -> list[list[float]]:
    return [list(datum["logprobs"].data) for datum in output.loss_fn_outputs]


def failure(future: Any) -> str:
    try:
        future.result()
    except tinker.RequestFailedError as error:
        return str(error)
    return ""


def go_on(folder: Path, steps: int) -> list[object]:
    training = tinker.ServiceClient().create_lora_training_client(base_model="rlinf/base", rank=4, seed=3)
    prompt, params = types.ModelInput.from_ints(ROWS[0][:4]), types.SamplingParams(max_tokens=4, stop=[], seed=5)
    seen: list[object] = []
    for number in range(steps):
        learned = training.forward_backward(supervised(1.0 + number % 3), "cross_entropy")
        stepped = step(training, 3e-3)
        row: list[object] = [learned.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]]
        if number % 10 == 9:
            sampler = training.save_weights_and_get_sampling_client()
            (answer,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
            row += [list(answer.tokens), [float(value) for value in answer.logprobs or ()]]
        seen.append(row)
        # The test looks at it to choose its moments.
        Path(folder, "progress").write_text(str(number + 1))
    return [*seen, values(training.forward(supervised(), "cross_entropy").result())]


def main() -> dict[str, Any]:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model="rlinf/base", rank=8, seed=3)
    losses: list[float] = []
    for _ in range(4):
        learned, stepped = training.forward_backward(supervised(), "cross_entropy"), step(training)
        losses.append(learned.result().metrics["loss:sum"])
        norm = stepped.result().metrics["grad_norm"]
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(ROWS[0][:4])
    params = types.SamplingParams(max_tokens=5, stop=[])
    drawn = sampler.sample(prompt, num_samples=3, sampling_params=params).result()
    path = training.save_state("one").result().path
    before = values(training.forward(supervised(), "cross_entropy").result())
    resumed = service.create_training_client_from_state_with_optimizer(path)
    after = values(resumed.forward(supervised(), "cross_entropy").result())
    sums = {}
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        sums[loss] = training.forward_backward(reinforced(before), loss).result().metrics["loss:sum"]
    step(training).result()
    pairs = types.Datum(
        model_input=types.ModelInput.from_ints(ROWS[0][:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray([[token, 5] for token in ROWS[0][1:]]),
            "weights": np.full((8, 2), 0.5, np.float32),
        },
    )
    two = training.forward_backward([pairs], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape
    refused = failure(training.forward_backward(supervised(), "stable_reinforce"))
    after_refusal = failure(step(training))
    training.forward_backward(supervised(), "cross_entropy").result()
    step(training).result()
    final = training.save_weights_for_sampler("final").result().path
    named = service.create_sampling_client(model_path=final)
    scores = named.compute_logprobs(prompt).result()
    return {
        "losses": losses,
        "grad_norm": norm,
        "answers": [len(answer.tokens) for answer in drawn.sequences],
        "resumed_is_equal": before == after,
        "sums": sums,
        "two_shape": list(two),
        "refused": refused,
        "after_refusal": after_refusal,
        "final": final,
        "scores": [None if score is None else float(score) for score in scores],
    }


if __name__ == "__main__":
    place, *count = sys.argv[1:]
    result = go_on(Path(place), int(count[0])) if count else main()
    Path(place, "seen.json").write_text(json.dumps(result))
