"""Language models on a GPU: the fused attention of packed rows, and decoding from CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams  # noqa: E402 - after the checks
from recipes.language.engines.own.torch_engine import TorchEngine  # noqa: E402
from recipes.language.models.attention import PackedPlan, Segment  # noqa: E402
from recipes.language.models.attention_rule import AttentionRule  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HEADS, GROUPS, DIM = 4, 2, 64
# A prefix of all, two prompts with two answers each, and a sequence of its own.
TREE = [
    Segment(0, 140),
    Segment(140, 50, 0),
    Segment(190, 33, 1),
    Segment(223, 300, 1),
    Segment(523, 1, 0),
    Segment(524, 200, 4),
    Segment(724, 9, 4),
    Segment(733, 260),
]
LENGTH = 993


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
    "change",
    [{}, {"window": 70}, {"softcap": 3.0}, {"sinks": True}, {"window": 200, "softcap": 3.0, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("segments", [TREE, [Segment(0, LENGTH)]], ids=["tree", "whole"])
def test_one_kernel_equals_one_call_a_shape(
    change: dict[str, Any], segments: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sinks = torch.randn(HEADS, device="cuda") if change.get("sinks") else None
    rule = AttentionRule(DIM**-0.5, **{**change, "sinks": sinks})
    parts = [torch.randn(1, heads, LENGTH, DIM, device="cuda") for heads in (HEADS, GROUPS, GROUPS)]
    weights = torch.randn(1, HEADS, LENGTH, DIM, device="cuda")

    def passed() -> list[Any]:
        leaves = [part.clone().requires_grad_() for part in parts]
        result = PackedPlan(segments, "cuda").attend(0, *leaves, rule)
        (result * weights).sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    fused = passed()
    monkeypatch.setattr("recipes.language.models.tree_attention.TreeAttention.serves", lambda device: False)
    for mine, theirs in zip(fused, passed(), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


def greedy(made: Any, *, graphs: bool) -> dict[str, Any]:
    engine = TorchEngine(made, graphs=graphs)
    generator = torch.Generator().manual_seed(3)
    for number in range(24):
        prompt = tuple(torch.randint(200, (5 + number,), generator=generator).tolist())
        params = SamplingParams(max_new_tokens=8 + 9 * number, temperature=0.0)
        engine.submit(Request(request_id=str(number), prompt=prompt, params=params))
    results = {answer.request_id: answer for answer in engine.results()}
    assert (engine._decoder._graph is not None) == graphs  # pyright: ignore[reportPrivateUsage]
    return results


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("Qwen2", {}), ("Mistral", {"sliding_window": 20}), ("Gemma2", {"head_dim": DIM, "sliding_window": 16})],
)
def test_graphs_answer_as_single_kernels_do(kind: str, changed: dict[str, Any]) -> None:
    made = model(kind, **changed)
    recorded, plain = greedy(made, graphs=True), greedy(made, graphs=False)
    for name, answer in plain.items():
        assert recorded[name].tokens == answer.tokens
        assert torch.allclose(torch.tensor(recorded[name].logprobs), torch.tensor(answer.logprobs), atol=1e-4)


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
    single = TorchEngine(other, graphs=False)
    single.submit(Request(request_id="1", prompt=(3, 4, 5), params=params))
    [expected] = list(single.results())
    assert answer.tokens == expected.tokens


def test_a_model_that_waits_goes_on_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    plain = greedy(made, graphs=False)
    forward: Callable[..., Any] = made.forward

    def waiting(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        float(result.logits.sum())
        return result

    made.forward = waiting
    engine = TorchEngine(made)
    with caplog.at_level(logging.WARNING):
        engine.submit(
            Request(request_id="0", prompt=plain["0"].prompt, params=SamplingParams(max_new_tokens=8, temperature=0.0))
        )
        [answer] = list(engine.results())
    assert answer.tokens == plain["0"].tokens
    assert "without CUDA graphs" in caplog.text
    assert torch.rand(3, device="cuda").isfinite().all()
