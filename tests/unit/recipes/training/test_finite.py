"""Detection of values that are not finite."""

from __future__ import annotations

import pickle

import numpy as np

from recipes.training.arrays import NonFiniteError, nonfinite_rows


def test_rows_with_a_nan_or_an_infinity_are_found() -> None:
    values = np.zeros((4, 2, 3), np.float32)
    values[1, 0, 2], values[3, 1, 1] = np.nan, -np.inf
    assert nonfinite_rows(values).tolist() == [False, True, False, True]
    assert nonfinite_rows(np.zeros((2, 3), np.float32)).tolist() == [False, False]


def test_integers_and_texts_are_finite() -> None:
    assert not nonfinite_rows(np.zeros((2, 4), np.uint8)).any()
    assert not nonfinite_rows(np.array(["push", "pull"])).any()


def test_error_names_tensor_value_and_place_across_processes() -> None:
    error = NonFiniteError("reward", float("nan"), "step 3, environment 5", help="look for a division by zero")
    assert str(error) == (
        "step 3, environment 5: `reward` is nan, not a finite number\n  help: look for a division by zero"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.tensor) == (str(error), "reward")
