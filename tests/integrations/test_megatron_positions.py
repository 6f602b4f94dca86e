"""Formats that store optimizer state by position know experts at home alone: others are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.megatron_moves import (
    BY_POSITION,
    Pair,
    exported_pairs,
)
from helpers.megatron_runs import Layout, MegatronCase, use_layout
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError

EP_2 = Layout(2, 2)


@runs_on_ranks(2, "megatron")
def test_what_depends_on_positions_is_refused_while_experts_are_away() -> None:
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(distributed_optimizer=True), positional="refuse")
    tokens_MBS = pair.tokens()
    pair.zero()
    pair.live_step(tokens_MBS)
    with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
        pair.move(everywhere=True)
    model, optimizer, session = pair.moving.models[0], pair.moving.optimizer, pair.session
    pair.plain.optimizer.step()
    optimizer.step()
    pair.move(everywhere=True)
    assert session.have_moved
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    refused: dict[str, Any] = {
        "state_dict of layer 1": model.state_dict,
        "layer 1 has": lambda: model.load_state_dict({}, strict=False),
        "format dp_reshardable": lambda: optimizer.sharded_state_dict({}, metadata=metadata),
        "optimizer's state_dict": optimizer.state_dict,
        "optimizer's load_state_dict": lambda: optimizer.load_state_dict({}),
        "optimizer's save_parameter_state": lambda: optimizer.save_parameter_state("never"),
        "singleton_local_shards": lambda: model.sharded_state_dict(metadata={"singleton_local_shards": True}),
        "registered already": lambda: session.register_optimizer(optimizer),
    }
    for message, call in refused.items():
        with pytest.raises(InputError, match=message):
            call()
    session.return_home()
    assert not session.have_moved
    model.state_dict()
    optimizer.state_dict()
    # Gradients that no step uses don't hold experts back, once they are zeroed.
    pair.zero()
    pair.live_step(tokens_MBS)
    pair.zero()
    pair.move(everywhere=True)
    session.remove()
    assert "step" not in vars(optimizer)
    assert "state_dict" not in vars(optimizer)
    assert "sharded_state_dict" not in vars(model.decoder.layers[1].mlp.experts)
    model.state_dict()
    pair.zero()
    pair.live_step(tokens_MBS)
    for (name, expected), (_, actual) in zip(exported_pairs(pair.plain), exported_pairs(pair.moving), strict=True):
        assert torch.allclose(expected, actual, rtol=1e-4, atol=1e-6), name


@runs_on_ranks(2, "megatron")
def test_an_optimizer_s_shards_by_position_need_those_of_a_model_at_home() -> None:
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(distributed_optimizer=True))
    pair.move(everywhere=True)
    model, optimizer = pair.moving.models[0], pair.moving.optimizer
    logical = model.sharded_state_dict(metadata={})
    metadata = {"distrib_optim_sharding_type": BY_POSITION}
    with pytest.raises(InputError, match="give the same metadata to the model's sharded_state_dict"):
        optimizer.sharded_state_dict(logical, metadata=metadata)
    assert pair.session.have_moved
    with pytest.raises(InputError, match="it should be one of return_home, refuse"):
        pair.session.register_optimizer(optimizer, positional="never")  # type: ignore[arg-type]
    model.sharded_state_dict(metadata={"singleton_local_shards": True})
    assert not pair.session.have_moved
    pair.session.remove()


def test_formats_by_position_are_refused_in_any_argument() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    from trimtab.integrations.megatron.logical_order import PositionalGuard

    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (DistributedOptimizer, ({}, False, "dp_zero_gather_scatter"), {}),
        (DistributedOptimizer, ({}, False, None, metadata), {}),
        (DistributedOptimizer, ({},), {"sharding_type": "fully_sharded_bucket_space"}),
        (FP32Optimizer, ({}, False, metadata), {}),
        (ChainedOptimizer, ({}, False), {"metadata": metadata}),
    ]
    for kind, arguments, named in calls:
        optimizer = kind.__new__(kind)
        found: list[str] = []
        PositionalGuard(optimizer, lambda: True, found.append)
        with pytest.raises(Exception):  # noqa: B017, since the optimizer is empty
            optimizer.sharded_state_dict(*arguments, **named)
        assert len(found) == 1


def test_optimizers_whose_state_cannot_move_are_named() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    def distributed(**options: Any) -> Any:
        made = DistributedOptimizer.__new__(DistributedOptimizer)
        ddp = {"use_megatron_fsdp": False, "num_distributed_optimizer_instances": 1} | options
        made.config, made.ddp_config, made.optimizer = SimpleNamespace(**options), SimpleNamespace(**ddp), None
        made.is_stub_optimizer = False
        return made

    refused = {
        "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "use_megatron_fsdp": True,
        "num_distributed_optimizer_instances": 2,
    }  # fmt: skip
    for option, value in refused.items():
        with pytest.raises(InputError, match=f"state of DistributedOptimizer: .*{option}"):
            optimizers_in(distributed(**{option: value}))
    with pytest.raises(InputError, match="LayerWiseDistributedOptimizer: use one of FP32Optimizer, "):
        optimizers_in(LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer))
    stub = FP32Optimizer.__new__(FP32Optimizer)
    stub.is_stub_optimizer = True
    chained = ChainedOptimizer.__new__(ChainedOptimizer)
    fine = distributed()
    chained.chained_optimizers = [stub, fine]
    assert optimizers_in(chained) == [fine]
