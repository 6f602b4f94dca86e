"""Small models of recipes for Megatron: the options that decide how their layers run are those of the recipes.

From the providers and the H100 recipes of Megatron-Bridge, 0fe9cb1dd. Norms are Megatron's own without Transformer
Engine. A hybrid model has a list of layers, each attention or an MLP or experts, in place of a spec for all layers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from helpers.megatron_specs import parts_of_spec


class Recipe(NamedTuple):
    """What of a small model is as in a recipe.

    Attributes:
        options: of the TransformerConfig.
        pattern: of a HybridModel's layers; "" for a GPTModel.
    """

    options: dict[str, Any]
    pattern: str = ""


_MTP: dict[str, Any] = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3, "qk_layernorm": True}
_SIGMOID = _MTP | {
    "moe_layer_freq": [0, 1, 1, 1], "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-2,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3,
    "moe_shared_expert_overlap": True, "bias_activation_fusion": True,
}  # fmt: skip
RECIPES = {
    "DeepSeek-V3": Recipe(
        _SIGMOID
        | {
            "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
            "moe_router_pre_softmax": True, "multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_head_dim": 2, "qk_pos_emb_head_dim": 2, "v_head_dim": 4,
        }
    ),
    "GLM-4.5": Recipe(_SIGMOID | {"num_query_groups": 2, "add_qkv_bias": True}),
    # global_aux_loss counts all micro-batches since the last step, and a comparison runs some of them twice.
    "Qwen3-Next": Recipe(
        _MTP
        | {
            "moe_layer_freq": [1, 1, 1, 1], "num_query_groups": 2, "moe_shared_expert_gate": True,
            "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2,
            "linear_conv_kernel_dim": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "deterministic_mode": True,
        }
    ),
    "hybrid": Recipe({"num_layers": 8}, pattern="*-*E*E*E"),
    "hybrid with MTP": Recipe(_MTP | {"num_layers": 8}, pattern="*-*E|*E*E/*E"),
}  # fmt: skip
"""By name; a pipeline has two stages."""


def build_recipe(recipe: Recipe, config: Any, vocabulary: int, length: int, **options: Any) -> Any:
    """One chunk of a model. `config` has the recipe's options."""
    if recipe.pattern:
        return _hybrid(recipe, config, vocabulary, length, **options)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    stage = options["vp_stage"]
    plain = (
        config if not config.experimental_attention_variant else replace(config, experimental_attention_variant=None)
    )
    spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="LayerNorm", vp_stage=stage)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
    if config.multi_latent_attention:
        _attend_with_values_as_wide_as_keys(spec)
    if config.experimental_attention_variant:
        _use_linear_attention(spec)
    return GPTModel(
        config, spec, vocab_size=vocabulary, max_sequence_length=length, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, mtp_block_spec=mtp, **options,
    )  # fmt: skip


def _attend_with_values_as_wide_as_keys(block_spec: Any) -> None:
    """Megatron's own core attention in MLA, for which it has Transformer Engine's."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if not isinstance(multi_latent_attention.TELinear, type):
        vars(multi_latent_attention)["TELinear"] = type("TELinear", (), {})

    class Attention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 4, v_channels: int = 4, **options: Any) -> None:
            assert k_channels == v_channels == options["config"].kv_channels
            super().__init__(*args, **options)

    for part in parts_of_spec(block_spec):
        if hasattr(part, "core_attention"):
            part.core_attention = Attention


def _use_linear_attention(block_spec: Any) -> None:
    """Every other layer of a block has Megatron's gated delta net, without FLA's kernels."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=dim, eps=eps)

    for name, module in list(sys.modules.items()):
        if name.startswith(gated_delta_net.__name__):
            vars(module).update(HAVE_FLA=True, l2norm=l2norm)
    net = ModuleSpec(
        gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    block_spec.layer_specs = [
        replace(layer, submodules=replace(layer.submodules, self_attention=net)) if number % 2 == 0 else layer
        for number, layer in enumerate(block_spec.layer_specs)
    ]


def _hybrid(recipe: Recipe, config: Any, vocabulary: int, length: int, **options: Any) -> Any:
    """A HybridModel; before 0.18 it is a MambaModel."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def layer(experts: int | None, *names: str) -> Any:
        whole = get_gpt_layer_local_spec(num_experts=experts, normalization="LayerNorm").submodules
        parts = {name: getattr(whole, name) for name in names}
        return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))

    mlp = "pre_mlp_layernorm", "mlp", "mlp_bda"
    layers = {
        "attention_layer": layer(None, "input_layernorm", "self_attention", "self_attn_bda"),
        "mlp_layer": layer(None, *mlp), "moe_layer": layer(config.num_moe_experts, *mlp),
    }  # fmt: skip
    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Kind

        stack, submodules, pattern = block.HybridStack, block.HybridStackSubmodules, "hybrid_layer_pattern"
        layers["mtp_block_spec"] = _mtp_spec()
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Kind
        from megatron.core.ssm import mamba_block as block

        stack, submodules, pattern = block.MambaStack, block.MambaStackSubmodules, "hybrid_override_pattern"
        del options["vp_stage"]
    vars(block)["TENorm"] = WrappedTorchNorm
    return Kind(
        config, ModuleSpec(stack, submodules=submodules(**layers)), vocabulary, length,
        **{pattern: recipe.pattern if config.pipeline_model_parallel_size > 1 else recipe.pattern.replace("|", "")},
        position_embedding_type="rope", **options,
    )  # fmt: skip


def _mtp_spec() -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    layer = mtp.MultiTokenPredictionLayerSubmodules(eh_proj=ColumnParallelLinear, mtp_model_layer=None, **norms)
    spec = ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=layer)
    submodules = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[spec])
    return ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=submodules)
