"""Exporters of Megatron models from their frameworks' own source, on CPU, without what that source imports.

The folder has unpacked wheels, as `make test-exporters` makes it, and checkouts of frameworks without one.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from helpers.absent_modules import AbsentModules
from helpers.own_source import own_functions

ABSENT = (
    "transformer_engine", "modelopt", "omegaconf", "nvidia_resiliency_ext", "megatron.training", "megatron.energon",
    "mamba_ssm", "apex",
)  # fmt: skip
"""What is replaced if it is not installed."""


@contextmanager
def sources(folder: Path, *packages: str) -> Iterator[None]:
    """A context in which modules of packages come from a folder. The packages' own `__init__` are not run.

    Args:
        packages: all packages that are not to be run, the outer ones first.
    """
    # These look for Transformer Engine; they are imported before it is replaced.
    for name in ("models.gpt.gpt_layer_specs", "models.gpt.gpt_model", "optimizer", "utils"):
        import_module(f"megatron.core.{name}")
    before = set(sys.modules)
    finder = AbsentModules(ABSENT)
    sys.meta_path.append(finder)
    try:
        for name in packages:
            package = types.ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = package
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            del sys.modules[name]


BRIDGE = "megatron.bridge"
BRIDGE_PACKAGES = (
    BRIDGE, *(f"{BRIDGE}.{name}" for name in ("models", "utils", "peft", "training")),
    *(f"{BRIDGE}.models.{name}" for name in ("conversion", "hf_pretrained")), f"{BRIDGE}.training.utils",
)  # fmt: skip


def real_bridge() -> Any:
    """A `MegatronModelBridge` of Megatron-Bridge 0.3.1, with names of Qwen3-MoE for experts. Within `sources`."""
    base: Any = import_module(f"{BRIDGE}.models.conversion.model_bridge").MegatronModelBridge
    mapping = import_module(f"{BRIDGE}.models.conversion.param_mapping")
    registry = import_module(f"{BRIDGE}.models.conversion.mapping_registry")
    of_layer, experts = "decoder.layers.*", "model.layers.*.mlp.experts.*"
    same = (
        "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias", *(f"{of_layer}.{name}" for name in (
            "input_layernorm.weight", "input_layernorm.bias", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias",
            "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight", "mlp.router.weight",
            "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc1.weight",
            "mlp.shared_experts.linear_fc2.weight",
        )),
    )  # fmt: skip

    class Bridge(base):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> Any:
            raise NotImplementedError

        def mapping_registry(self) -> Any:
            gated = mapping.GatedMLPMapping(
                megatron_param=f"{of_layer}.mlp.experts.linear_fc1.weight*", gate=f"{experts}.gate_proj.weight",
                up=f"{experts}.up_proj.weight",
            )  # fmt: skip
            one_to_one = {name: f"hf.{name}" for name in same}
            one_to_one[f"{of_layer}.mlp.experts.linear_fc2.weight*"] = f"{experts}.down_proj.weight"
            return registry.MegatronMappingRegistry(
                gated, *(mapping.ReplicatedMapping(*pair) for pair in one_to_one.items())
            )

    return Bridge()


class AnyKeys:
    """A checkpoint of Hugging Face that has all names."""

    def __init__(self) -> None:
        self.state = self.source = self

    def get_all_keys(self) -> AnyKeys:
        return self

    def __contains__(self, name: str) -> bool:
        return True


def slime_reader(folder: Path, package: str) -> Callable[[Sequence[Any]], Iterable[tuple[str, torch.Tensor]]]:
    """`named_params_and_buffers` of slime 624b824a8 or miles 31f1ca961, by which all of their exporters but those of
    Megatron-Bridge read the model."""
    from megatron.core import mpu
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    experts = SimpleNamespace(
        size=mpu.get_expert_model_parallel_world_size(), rank=mpu.get_expert_model_parallel_rank()
    )
    path = folder / package / "backends/megatron_utils/update_weight/common.py"
    names = ("named_params_and_buffers", "_named_params_and_buffers_global", "_named_params_and_buffers_vanilla")
    given = {
        "re": re, "inspect": inspect, "torch": torch, "mpu": mpu,
        "get_transformer_layer_offset": get_transformer_layer_offset,
        "strip_param_name_prefix": lambda name: name, "get_parallel_state": lambda: SimpleNamespace(ep=experts),
    }  # fmt: skip
    read = own_functions(path, names, given)["named_params_and_buffers"]
    return lambda chunks: read(SimpleNamespace(num_experts=chunks[0].config.num_moe_experts), chunks)


def roll_reader(folder: Path) -> Callable[[Sequence[Any]], Iterable[tuple[str, torch.Tensor]]]:
    """What ROLL 8eb27cc2 reads for its weight sync."""
    given = own_functions(
        folder / "roll/third_party/megatron/model_update.py", ["_iter_vp_stage_named_weights"],
        {"is_peft_available": lambda: False},
    )  # fmt: skip
    converter = SimpleNamespace(dist_converter=SimpleNamespace(preprocess_layer_index=lambda name, vp_stage: name))
    return lambda chunks: given["_iter_vp_stage_named_weights"](chunks, converter)


def defined_in(path: Path) -> set[str]:
    """Functions `f` and methods `Class.f` of a file."""
    tree = ast.parse(path.read_text())
    classes = {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)} | {"": tree.body}
    return {
        f"{name}.{each.name}".lstrip(".")
        for name, body in classes.items()
        for each in body
        if isinstance(each, ast.FunctionDef)
    }
