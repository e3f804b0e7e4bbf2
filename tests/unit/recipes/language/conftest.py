"""What tests of language models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _written_models_loaded_here() -> Iterator[None]:
    """Save the seconds that another process takes to import transformers; `test_written_model.py` has one that does."""
    pytest.importorskip("transformers")
    from recipes.language.weights import written_model
    from recipes.language.weights.loaded_model import answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_model, "_answer_of", lambda folder, tokens, seconds: answer(str(folder), tokens))
        yield
