"""Names of quantised checkpoints, heads of multi-token prediction, and models of several modalities."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab import InputError
from trimtab.renumber.expert_tensors import Change, Tensor, changes_of

ORDER = np.array([2, 0, 1])


def changes(names: dict[str, tuple[int, ...]], model_type: str = "deepseek_v3") -> dict[str, Change]:
    return changes_of([Tensor(name, shape, 0, 0) for name, shape in names.items()], {5: ORDER}, model_type=model_type)


def test_blocks_and_scales_of_quantised_stacks() -> None:
    block = "model.layers.5.mlp"
    stacks = {
        f"{block}.experts.{name}": (3, 4, 2)
        for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
    }
    router: dict[str, tuple[int, ...]] = {f"{block}.router.weight": (3, 8), f"{block}.router.bias": (3,)}
    found = changes({**stacks, **router, "model.layers.5.self_attn.sinks": (3,)}, "gpt_oss")
    assert found.keys() == {**stacks, **router}.keys()
    assert all(change.order_E is not None and change.order_E.tolist() == [2, 0, 1] for change in found.values())


def test_scales_of_single_tensors_are_renamed_and_other_parts_of_the_model_stay() -> None:
    names: dict[str, tuple[int, ...]] = {"language_model.model.layers.5.mlp.gate.weight": (3, 8)}
    for expert in range(3):
        for name in ("down_proj.weight", "down_proj.weight_scale_inv"):
            names[f"language_model.model.layers.5.mlp.experts.{expert}.{name}"] = (4, 4)
    others = {
        "mtp.layers.5.mlp.experts.0.down_proj.weight": (4, 4), "mtp.layers.5.mlp.gate.weight": (3, 8),
        "language_model.model.layers.6.mlp.experts.0.down_proj.weight": (4, 4),
        "language_model.model.layers.5.mlp.shared_experts.down_proj.weight": (3, 4),
        "vision_tower.blocks.5.mlp.fc1.weight": (3, 4),
    }  # fmt: skip
    found = changes({**names, **others})
    assert found.keys() == names.keys()
    # New expert 0 is expert 2.
    part = "language_model.model.layers.5.mlp.experts.{}.down_proj.weight_scale_inv"
    assert {found[part.format(old)].name for old in (2,)} == {part.format(0)}


def test_experts_of_two_stacks_of_layers_are_refused() -> None:
    names: dict[str, tuple[int, ...]] = {}
    for stem in ("encoder", "decoder"):
        names |= {f"{stem}.layers.5.mlp.gate.weight": (3, 8), f"{stem}.layers.5.mlp.experts.down_proj": (3, 4, 4)}
    with pytest.raises(InputError, match=r"several names, 'decoder\.', 'encoder\.'"):
        changes(names)
