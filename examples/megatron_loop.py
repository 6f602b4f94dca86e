"""RL training steps of a Megatron-core model, with its experts balanced by Trimtab.

`python examples/megatron_loop.py` starts two local ranks; under torchrun the process is one rank. It runs on GPUs if
there is one for each rank, else on the CPU. Responses are random tokens, and the reward is the fraction of even ones.
Lines that a script needs for Trimtab are marked; all others are Megatron's.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import use_cpu

from trimtab.integrations.megatron import balance  # Trimtab
from trimtab.launch import launch

LAYERS, EXPERTS, TOP_K, VOCABULARY = 2, 16, 2, 64
MICRO_BATCHES, LENGTH = 4, 256  # of a rank in a step, each of one sequence; tokens of a sequence
DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "2")) else "cpu"


def build_model() -> tuple[Any, Any]:
    """A GPTModel in DDP, and its optimizer."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=128, num_attention_heads=4, ffn_hidden_size=512, moe_ffn_hidden_size=512,
        num_moe_experts=EXPERTS, moe_router_topk=TOP_K, expert_model_parallel_size=dist.get_world_size(),
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_enable_routing_replay=True,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, use_cpu_initialization=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.1,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(EXPERTS, normalization="LayerNorm")
    model = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope").to(DEVICE)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    config.no_sync_func, config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    return ddp, get_megatron_optimizer(OptimizerConfig(lr=1e-4, use_distributed_optimizer=True), [ddp])


def log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """`[1, LENGTH]`, the log-probability of the token after each one."""
    position = torch.arange(LENGTH, device=tokens.device)[None]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    return -model(tokens[None], position, mask, labels=tokens[None].roll(-1, 1))


def record(data: Any, model: Any) -> Any:
    """Forward step without gradients: log-probabilities, and the experts `[tokens, layers, top_k]` of every token."""
    output = log_probs(model, next(data))
    ids = torch.stack(RouterReplay.get_recorded_data(), dim=1).cpu()
    return output, lambda output: (output.sum(), (output, ids))


def update(data: Any, model: Any) -> Any:
    """Forward step with gradients."""
    tokens, advantage, old = next(data)
    return log_probs(model, tokens), partial(grpo_loss, advantage, old)


def grpo_loss(advantage: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Any:
    """GRPO's clipped loss: a sum over tokens divided by a constant. Megatron divides it by the micro-batches."""
    ratio = (new - old).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / LENGTH
    return loss, {"loss": loss.detach()}


def train(steps: int = 2) -> None:
    """Train on every rank."""
    if DEVICE == "cpu":
        use_cpu()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    model, optimizer = build_model()
    session = balance(model)  # Trimtab: once, when the model is built and loaded
    run = get_forward_backward_func()
    sizes = {"model": model, "num_microbatches": MICRO_BATCHES, "seq_length": LENGTH, "micro_batch_size": 1}
    popularity = (1 / torch.arange(1, VOCABULARY + 1).double() ** 1.5).repeat(MICRO_BATCHES, 1)  # skews the routing
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        # Rollout: responses and their advantages.
        tokens_MT = torch.multinomial(popularity, LENGTH, replacement=True, generator=generator).to(DEVICE)
        rewards = (tokens_MT % 2 == 0).float().mean(dim=1)
        advantages = (rewards - rewards.mean()) / rewards.std()
        # Log-probabilities and routing before the update. An inference engine may give both.
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        with torch.no_grad():
            recorded = run(forward_step_func=record, data_iterator=iter(tokens_MT), forward_only=True, **sizes)
        RouterReplay.clear_global_router_replay_action()
        old, routing = zip(*recorded, strict=True)
        for _ in range(2):  # updates on the same responses
            start = time.perf_counter()
            model.zero_grad_buffer()
            data = zip(tokens_MT, advantages, old, strict=True)
            planned = session.planned(run, routing)  # Trimtab: in every step
            losses = planned(forward_step_func=update, data_iterator=data, forward_only=False, **sizes)
            optimizer.step()
            loss, report = sum(float(each["loss"]) for each in losses) / MICRO_BATCHES, session.report
            if dist.get_rank() == 0 and report is not None:
                figures = f"{time.perf_counter() - start:.2f} s, loss {loss:.5f}, {report.replicas} replicas"
                max_vio = f"max_vio {report.max_vio_before:.3f} before, {report.max_vio_after:.3f} planned"
                print(f"step {step}: {figures}, {max_vio}", flush=True)


if __name__ == "__main__":
    launch(train, (), ranks=2)
