"""Names of weights with and without adapters."""

from __future__ import annotations

from recipes.training.reading.tied_weights import beneath_adapters, new_adapters

OWN = [
    "critic.weight",
    "vlm.base_model.model.model.layers.0.q_proj.base_layer.weight",
    "vlm.base_model.model.model.layers.0.q_proj.lora_A.default.weight",
    "expert.base_model.model.0.state_proj.weight",
]
PLAIN = {"critic.weight", "vlm.model.layers.0.q_proj.weight", "expert.state_proj.weight"}


def test_plain_weights_are_found_beneath_adapters() -> None:
    result = beneath_adapters(OWN, PLAIN)
    assert set(result.values()) == PLAIN
    assert result["expert.base_model.model.0.state_proj.weight"] == "expert.state_proj.weight"
    assert new_adapters(OWN, PLAIN) == {OWN[2]}


def test_weights_with_adapters_keep_their_names() -> None:
    assert beneath_adapters(OWN, set(OWN)) == {name: name for name in OWN}
    assert new_adapters(OWN, OWN) == set()
    # They are not taken for plain ones where one is missing.
    assert OWN[1] not in beneath_adapters(OWN, {*OWN[2:], "vlm.model.layers.0.q_proj.weight"})
