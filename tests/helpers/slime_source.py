"""slime's own functions on two CPU ranks, from its source at 624b824a8, on a small Megatron model.

Real: train_one_step, forward_only, get_batch, DataIterator, build_dp_schedule, fill_routing_replay, RoutingReplay,
TensorBackuper, ReloadableProcessGroup, and Megatron's GPTModel, DDP and distributed optimizer. Replaced: CUDA, modules
that are not there (ray, megatron.training, sglang, transformer_engine and others), slime's accelerator, its patch of
Megatron's router (docker/patch/latest/megatron.patch, made here at run time), the model provider with attention by
sequence, the loss, and the Ray actor, whose methods are called on a namespace.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partialmethod
from typing import Any, Literal
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist

from helpers.absent_modules import AbsentModules
from helpers.megatron_runs import Layout, MegatronCase, Model, use_cpu_once, use_layout
from helpers.plugin_runs import eager_plans, plans_at_random
from helpers.replay_stand_ins import Slime, patched_topk
from helpers.verl_fakes import packed_attention
from trimtab.array_type import Array

EXPERTS, TOP_K, LAYERS = 8, 2, 3
SAMPLES = 16
LAYOUT = Layout(2, 2)
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SlimeCase:
    """Options of one run.

    Attributes:
        recompute: all layers, so that slime's backward indices are used.
        pad: `--data-pad-size-multiplier`.
        balance: the text of `TRIMTAB_BALANCE`; None for slime without Trimtab.
        plans: `random` draws replicas, `eager` is Trimtab's planner with replicas that cost nothing, since it balances
            such small steps only then.
        sleeps: the process groups are destroyed and created again after each rollout, as with `--offload-train`.
    """

    rollouts: int = 2
    recompute: bool = False
    pad: int = 1
    balance: str | None = None
    plans: Literal["random", "eager"] = "eager"
    sleeps: bool = False


ABSENT = (
    "ray", "megatron.training", "megatron.bridge", "sglang", "torch_memory_saver", "mbridge", "sgl_kernel",
    "ring_flash_attn", "wandb", "transformer_engine", "sglang_router", "httpx", "aiohttp",
)  # fmt: skip


def use_slime(folder: str) -> None:
    """Make slime's modules of a folder importable on this rank, for good."""
    use_cpu_once()
    # These look for Transformer Engine; they are imported before it is replaced.
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401

    sys.meta_path.insert(0, AbsentModules(ABSENT, lambda name: MagicMock(name=name)))
    sys.path.insert(0, folder)
    os.environ["ENABLE_ROUTING_REPLAY"] = "1"
    from slime.utils import accelerator

    cpu = torch.device("cpu")
    values: dict[str, Any] = {
        "current_device": cpu, "device": cpu, "synchronize": None, "is_accelerator_backend": True,
        "mem_get_info": (1 << 40, 1 << 40), "memory_allocated": 0, "memory_reserved": 0, "empty_cache": None,
    }  # fmt: skip
    for name, value in values.items():
        setattr(accelerator, name, lambda *_args, value=value: value)
    accelerator.process_group_backend = lambda backend: backend
    _patch_megatron()
    import slime.backends.megatron_utils.actor  # noqa: F401


def _patch_megatron() -> None:
    """As slime's docker/patch/latest/megatron.patch does in moe_utils.py and router.py."""
    from megatron.core.transformer.moe import moe_utils, router

    moe_utils.topk_routing_with_score_function = router.topk_routing_with_score_function = patched_topk(Slime)
    plain = router.TopKRouter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from slime.utils.routing_replay import register_routing_replay

        plain(self, *args, **kwargs)
        register_routing_replay(self)

    router.TopKRouter.__init__ = init


def use_groups(*, reloadable: bool = False) -> None:
    """Create Megatron's groups, as slime's actor does; see `MegatronTrainRayActor.init`."""
    from slime.utils import reloadable_process_group as groups
    from slime.utils.distributed_utils import init_gloo_group

    if reloadable:
        groups.monkey_patch_torch_dist()
        # Calls that torch 2.13 makes of a group, and the torch of slime's image does not.
        for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
            setattr(groups.ReloadableProcessGroup, name, partialmethod(groups.ReloadableProcessGroup._fwd, name))
        groups.register_default_process_group(timeout=timedelta(minutes=5))
        init_gloo_group()
    use_layout(LAYOUT)


def arguments(case: SlimeCase) -> types.SimpleNamespace:
    """slime's arguments, those that the functions read."""
    return types.SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=100, micro_batch_size=1, balance_by_flops=False,
        balance_data=False, num_experts=EXPERTS, data_pad_size_multiplier=case.pad, sequence_parallel=False,
        allgather_cp=False, rollout_top_p=1.0, seq_length=512, decoder_seq_length=None,
        custom_megatron_before_train_step_hook_path=None, custom_megatron_before_log_prob_hook_path=None,
        enable_mtp_training=False, save_debug_train_data=None, check_for_nan_in_loss_and_grad=True, ci_test=False,
        calculate_per_token_loss=False, use_rollout_entropy=False, use_rollout_routing_replay=True,
        use_routing_replay=True, offload_train=case.sleeps, num_layers=LAYERS, moe_layer_freq=_PATTERN,
        expert_model_parallel_size=2, megatron_deepgemm_forward_layers=None,
    )  # fmt: skip


_PATTERN = [0] + [1] * (LAYERS - 1)


def _build(case: SlimeCase) -> tuple[list[Any], Any]:
    """A model in DDP, and its optimizer."""
    from slime.utils.routing_replay import RoutingReplay

    RoutingReplay.all_routing_replays.clear()
    options = {"core_attention": packed_attention(), "options": {"variable_seq_lengths": True}}
    recompute = "uniform" if case.recompute else "none"
    model = Model(LAYOUT, MegatronCase(recompute=recompute, distributed_optimizer=True, **options))
    model.chunks[0].role = "actor"
    return model.chunks, model.optimizer


def _rollout(number: int, args: Any) -> dict[str, Any]:
    """What slime's RolloutManager gives a training actor, in micro-batches of slime's own schedule."""
    from slime.utils.dp_schedule import build_dp_schedule

    rng = np.random.default_rng(number)
    lengths = rng.integers(12, 50, SAMPLES).tolist()
    skew = rng.gumbel(size=(LAYERS, EXPERTS))
    tokens = [torch.from_numpy(rng.integers(1, 64, length)) for length in lengths]

    def routes(length: int) -> Array:
        scores = rng.gumbel(size=(length - 1, LAYERS, EXPERTS)) + skew
        return np.argsort(-scores, -1)[..., :TOP_K].astype(np.int32)

    recorded = [torch.from_numpy(routes(length)) for length in lengths]
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, indices, counts, sizes = build_dp_schedule(
        args, parallel, lengths, global_batch_size=SAMPLES // 2, rollout_indices=list(range(SAMPLES))
    )
    mine = partitions[dist.get_rank()]
    responses = [length // 2 for length in lengths]
    advantages = rng.normal(size=SAMPLES).tolist()
    return {
        "tokens": [tokens[i] for i in mine], "total_lengths": [lengths[i] for i in mine],
        "response_lengths": [responses[i] for i in mine], "loss_masks": [torch.ones(responses[i]) for i in mine],
        "rollout_routed_experts": [recorded[i] for i in mine], "advantages": [advantages[i] for i in mine],
        "micro_batch_indices": indices[dist.get_rank()], "num_microbatches": counts, "global_batch_sizes": sizes,
    }  # fmt: skip


def _token_log_probs(logits: torch.Tensor) -> torch.Tensor:
    return (logits[0] if logits.shape[0] == 1 else logits[:, 0]).float().log_softmax(-1)


def _loss(args: Any, batch: Any, num_microbatches: int, step_global_batch_size: int, logits: torch.Tensor) -> Any:
    """Log-probabilities weighted by advantages."""
    labels = batch["tokens"][0].roll(-1)
    chosen = _token_log_probs(logits).gather(-1, labels[:, None])[:, 0]
    weights, start = torch.zeros_like(chosen), 0
    for length, advantage in zip(batch["total_lengths"], batch["advantages"], strict=True):
        weights[start : start + length] = advantage
        start += length
    loss = -(chosen * weights * batch["full_loss_masks"][0]).sum() / 100
    return loss, torch.tensor(1), {"keys": ["loss"], "values": torch.stack([torch.tensor(1.0), loss.detach()])}


def _log_probs(logits: torch.Tensor, **options: Any) -> Any:
    found, start, all_log_probs = [], 0, _token_log_probs(logits)
    for tokens, length, response in zip(
        options["unconcat_tokens"], options["total_lengths"], options["response_lengths"], strict=True
    ):
        rows = all_log_probs[start + length - response - 1 : start + length - 1]
        found.append(rows.gather(-1, tokens[length - response :, None])[:, 0].detach())
        start += length
    return torch.tensor(0.0), {"log_probs": found}


def run(case: SlimeCase) -> tuple[Results, list[dict[str, float]]]:
    """Rollouts of two optimizer steps each: reference and actor log-probabilities, gradients before each step, norms.

    Returns:
        Tensors by name, and what slime would log of each step.
    """
    import slime.backends.megatron_utils.model as slime_model

    args, logged = arguments(case), []
    found: Results = {}
    with (
        mock.patch.multiple(
            slime_model,
            get_args=lambda: args,
            loss_function=_loss,
            get_model_config=lambda model: model.config,
            _disable_tqdm_for_non_main_rank=lambda: True,
        ),
        _installed(case, args) as plugin,
    ):
        model, optimizer = _build(case)
        names: Callable[[], list[Any]] = lambda: list(model[0].named_parameters())  # noqa: E731
        with plans_at_random() if case.plans == "random" else eager_plans():
            for number, tensors, figures in _rollouts(case, args, model, optimizer, names):
                found |= {f"{number} {name}": tensor for name, tensor in tensors.items()}
                logged += figures
        if plugin is not None:
            plugin.uninstall()
    return found, logged


@contextmanager
def _installed(case: SlimeCase, args: Any) -> Iterator[Any]:
    """As slime's initialize.py calls `--custom-megatron-init-path`."""
    from trimtab.integrations.slime import install

    if case.balance is None:
        yield None
    else:
        with mock.patch.dict(os.environ, TRIMTAB_BALANCE=case.balance):
            yield install(args)


def _rollouts(
    case: SlimeCase, args: Any, model: list[Any], optimizer: Any, names: Callable[[], list[Any]]
) -> Iterator[tuple[int, Results, list[dict[str, float]]]]:
    """As `MegatronTrainRayActor.train_actor` goes through a rollout."""
    import slime.backends.megatron_utils.actor as slime_actor
    import slime.backends.megatron_utils.model as slime_model
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.utils.reloadable_process_group import reload_process_groups
    from slime.utils.routing_replay import RoutingReplay
    from slime.utils.tensor_backper import TensorBackuper

    backuper = TensorBackuper.create(names, None)
    backuper.backup("actor")
    backuper.backup("ref")
    scheduler = types.SimpleNamespace(step=lambda increment: None)
    for number in range(case.rollouts):
        found: Results = {}
        logged = []
        data = _rollout(number, args)
        iterators, counts = get_data_iterator(data), data["num_microbatches"]
        actor = types.SimpleNamespace(args=args, model=model)
        slime_actor.MegatronTrainRayActor.fill_routing_replay(actor, iterators, counts, data)

        def passes(prefix: str, iterators: Any = iterators, counts: Any = counts) -> torch.Tensor:
            results = slime_model.forward_only(_log_probs, args, model, iterators, counts, store_prefix=prefix)
            return torch.cat(results[f"{prefix}log_probs"])

        os.environ["ROUTING_REPLAY_STAGE"] = "fallthrough"
        backuper.restore("ref")
        found["ref_log_probs"] = passes("ref_")
        backuper.restore("actor")
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_forward"
        found["log_probs"] = passes("")
        RoutingReplay.clear_all_forward()
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
        for iterator in iterators:
            iterator.reset()
        for step, count in enumerate(counts):
            with _kept_gradients(optimizer, names, found, f"{step} grad"):
                losses, norm = slime_model.train_one_step(
                    args, number, step, iterators, model, optimizer, scheduler, count, data["global_batch_sizes"][step]
                )
            found[f"{step} norm"] = torch.tensor(float(norm))
            logged.append(losses)
        if case.recompute:
            RoutingReplay.assert_all_consumed()
        RoutingReplay.clear_all()
        backuper.backup("actor")
        if case.sleeps:
            slime_actor.destroy_process_groups()
            reload_process_groups()
        yield number, found, logged


@contextmanager
def _kept_gradients(optimizer: Any, names: Callable[[], list[Any]], found: Results, prefix: str) -> Iterator[None]:
    """Gradients when the optimizer steps; slime zeroes them after it."""
    plain = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        found.update({f"{prefix} {name}": parameter.main_grad.clone() for name, parameter in names()})
        return plain(*args, **kwargs)

    with mock.patch.object(optimizer, "step", step):
        yield
