"""Language models on a GPU: rows with masks, and answers from a cache, as each sequence by itself."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams  # noqa: E402 - after the checks
from recipes.language.engines.torch_engine import TorchEngine, check_engine  # noqa: E402
from recipes.language.models.policy import LanguagePolicy, check_policy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HEADS, GROUPS, DIM = 4, 2, 64


def model(kind: str = "Qwen2", **changed: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": HEADS * DIM, "intermediate_size": 512, "num_hidden_layers": 2, **changed}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=200,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).cuda().eval()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("Qwen2", {}), ("Mistral", {"sliding_window": 20}), ("Gemma2", {"head_dim": DIM, "sliding_window": 16})],
)
def test_trainer_and_engine_equal_single_sequences(kind: str, changed: dict[str, Any]) -> None:
    made = model(kind, **changed)
    trainer, engine = check_policy(LanguagePolicy(made)), check_engine(made)
    assert trainer is not None
    assert max(trainer.largest, engine.largest) < 1e-3


def test_weights_that_come_are_used_by_the_next_step() -> None:
    made, other = model(), model(intermediate_size=512)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    engine = TorchEngine(made)
    params = SamplingParams(max_new_tokens=40, temperature=0.0)
    for version, weights in enumerate((None, other)):
        if weights is not None:
            engine.load_weights({name: value.clone() for name, value in weights.state_dict().items()}.items(), version)
        engine.submit(Request(request_id=str(version), prompt=(3, 4, 5), params=params))
        [answer] = list(engine.results())
    single = TorchEngine(other)
    single.submit(Request(request_id="1", prompt=(3, 4, 5), params=params))
    [expected] = list(single.results())
    assert answer.tokens == expected.tokens
