"""Every exporter of Megatron models that a framework uses yields logical names while experts are away, or raises.

The suite has stand-ins for the frameworks' code (`helpers.megatron_exporters`), which read the model as it does. Own
source runs with `make test-exporters`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from helpers.exporter_sources import (
    BRIDGE_PACKAGES,
    AnyKeys,
    defined_in,
    real_bridge,
    roll_reader,
    slime_reader,
    sources,
)
from helpers.megatron_exporters import saved_weight_gradients, slime_names, stand_ins, verl_pairs
from helpers.megatron_moves import Pair
from helpers.megatron_runs import Layout, MegatronCase, Model, use_layout
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError

SOURCES = os.environ.get("SOURCES", "")
EP_2, PIPELINE = Layout(2, 2), Layout(4, 2, pipeline=2)
Modules = dict[str, Any]


class Known(NamedTuple):
    """An exporter.

    Attributes:
        name: framework, and its functions that read the model in this way.
        read: what it exports of a model. It gets the modules of `stand_ins`, and what `keep` has returned.
        error: what it raises; "" if its names are logical.
        keep: called while experts are at home.
        pipeline: whether the stand-in is for pipelines too.
    """

    name: str
    read: Callable[[Modules, Model, Any], Any]
    error: str = ""
    keep: Callable[[Modules, Model], Any] = lambda modules, model: None
    pipeline: bool = True


def bridge(modules: Modules, **options: Any) -> Any:
    return modules["megatron.bridge.models.conversion.model_bridge"].MegatronModelBridge(**options)


def tasks(modules: Modules, model: Model) -> Any:
    return bridge(modules).build_conversion_tasks(model.models)


def in_buckets(modules: Modules, model: Model, kept: Any) -> Iterator[Any]:
    names = sorted(kept)
    for start in range(0, len(names), 5):
        bucket = {name: kept[name] for name in names[start : start + 5]}
        yield from bridge(modules).stream_weights_megatron_to_hf(model.chunks, bucket)


def quantized(modules: Modules, model: Model, kept: Any) -> Any:
    module = modules["megatron.bridge.models.conversion.quant_bridge"]
    return module.MegatronQuantizationBridge().stream_weights_megatron_to_hf_quant(model.models, conversion_tasks=kept)


def swift(modules: Modules, model: Model, kept: Any) -> Any:
    return modules["mcore_bridge.bridge.gpt_bridge"].GPTBridge().export_weights(model.models)


def verl_shards(modules: Modules, model: Model, kept: Any) -> Any:
    engine = modules["verl.workers.engine.megatron.transformer_impl"].MegatronEngine(kept)
    return engine.get_per_tensor_param_shard()[0]


def nemo_rl_refit(modules: Modules, model: Model, kept: Any) -> Any:
    module = modules["nemo_rl.models.policy.workers.megatron_policy_worker"]
    return module.MegatronPolicyWorkerImpl(kept).nccl_reshard_refit(kv_scales=None)


def reshard(modules: Modules, model: Model, kept: Any) -> Any:
    return modules["megatron.core.resharding.refit"].execute_reshard_plan(kept)


def reshard_in_0_16(modules: Modules, model: Model, kept: Any) -> Any:
    """Megatron's own code."""
    from megatron.core.resharding.execution import execute_reshard_plan

    return execute_reshard_plan(None, model.models[0], model.models[0], None)


BY_NAME = "reads named_parameters.*within logical_names.*or call return_home"
BY_POSITION = "experts by position, and they have moved; call return_home"
KNOWN = [
    Known(
        "Megatron-Bridge: export_hf_weights, save_hf_weights, save_hf_pretrained; verl's checkpoint manager and miles' "
        "hf_export with it; SkyRL; ms-swift with bridge_backend=megatron-bridge",
        lambda modules, model, kept: bridge(modules).stream_weights_megatron_to_hf(model.chunks),
    ),
    Known(
        "Megatron-Bridge, the experts of a layer in one tensor",
        lambda modules, model, kept: bridge(modules, grouped=True).stream_weights_megatron_to_hf(
            megatron_model=model.models
        ),
    ),
    Known(
        "Megatron-Bridge with kept conversion_tasks: NeMo-RL over IPC, HTTP, NCCL and sparse; miles; ModelOpt",
        lambda modules, model, kept: bridge(modules).stream_weights_megatron_to_hf(model.chunks, kept),
        keep=tasks,
    ),
    Known("Megatron-Bridge with a bucket of kept tasks after the other: SkyRL", in_buckets, keep=tasks, pipeline=False),
    Known("Megatron-Bridge: export_hf_weights_quant", quantized, keep=tasks),
    Known(
        "Megatron-Bridge: get_conversion_tasks, load_hf_weights",
        lambda modules, model, kept: bridge(modules).build_conversion_tasks(model.models),
        BY_NAME,
    ),
    Known("mcore-bridge, ms-swift: export_weights, save_weights", swift, pipeline=False),
    Known(
        "mcore-bridge, ms-swift: load_weights",
        lambda modules, model, kept: modules["mcore_bridge.bridge.gpt_bridge"].GPTBridge().load_weights([], "never"),
        BY_POSITION,
    ),
    Known(
        "mbridge: export_weights, and save_weights in verl's checkpoints",
        lambda _, model, __: verl_pairs(model),
        BY_NAME,
    ),
    Known("verl: get_per_tensor_param_shard (delta_sharded)", verl_shards, BY_POSITION, tasks),
    Known(
        "slime: hf_checkpoint_saver, hf_weight_iterator_direct, update_weight_from_disk and _disk_delta, "
        "UpdateWeightFromTensor, UpdateWeightFromDistributed; miles: p2p, delta, broadcast, tensor, hf_export",
        lambda _, model, __: slime_names(model).items(),
        BY_NAME,
    ),
    Known("NeMo-RL: nccl_reshard_refit", nemo_rl_refit, BY_POSITION, tasks),
    Known(
        "ROLL: model_update and save_checkpoint; megatron.core.export",
        lambda _, model, __: model.models[0].state_dict_for_save_checkpoint().items(),
        "state_dict of layer .* has experts by position",
    ),
    Known("Megatron main: resharding.refit", reshard, BY_POSITION, tasks),
    Known("Megatron 0.16.1: resharding.execution", reshard_in_0_16, BY_NAME),
    Known("Megatron: --save-wgrads-interval", lambda _, model, __: saved_weight_gradients(model).items(), BY_NAME),
]


@pytest.mark.parametrize(
    "layout", [EP_2, pytest.param(PIPELINE, marks=pytest.mark.nightly)], ids=["EP 2", "PP 2 x EP 2"]
)
def test_every_known_exporter_is_logical_or_raises(layout: Layout) -> None:
    on_ranks(check_exporters, (layout,), ranks=layout.ranks, patched="megatron")


def check_exporters(layout: Layout) -> None:
    # Before a stand-in is in the place of one of its modules.
    import_module("megatron.core.resharding")
    use_layout(layout)
    for known in KNOWN:
        if layout.pipeline == 1 or known.pipeline:
            # Frameworks are imported when they please.
            pair = Pair(layout, MegatronCase(grouped=True))
            with stand_ins() as modules:
                check_exporter(known, modules, pair)


def check_exporter(known: Known, modules: Modules, pair: Pair) -> None:
    kept = {id(model): known.keep(modules, model) for model in (pair.plain, pair.moving)}

    def read(model: Model) -> dict[str, torch.Tensor]:
        return dict(known.read(modules, model, kept[id(model)]) or ())

    def check(found: dict[str, torch.Tensor]) -> None:
        assert found.keys() == expected.keys(), known.name
        assert all(torch.equal(found[name], value) for name, value in expected.items()), known.name

    session = pair.session
    pair.move(everywhere=True)
    if known.error:
        if session.have_moved:
            with pytest.raises(InputError, match=known.error):
                read(pair.moving)
        session.remove()
        return
    # Models that are not the session's keep their names.
    expected = read(pair.plain)
    check(read(pair.moving))
    if known.name.startswith("Megatron-Bridge"):
        assert all(hasattr(named, "param_name") for named in known.read(modules, pair.moving, kept[id(pair.moving)]))
    # Within logical_names the names are put right once.
    check(dict(session.logical_names(known.read(modules, pair.moving, kept[id(pair.moving)]))))
    session.remove()
    check(read(pair.moving))
    assert not hasattr(bridge(modules).stream_weights_megatron_to_hf, "__wrapped__")


@runs_on_ranks(2, "megatron")
def test_what_gives_no_names_away_runs_with_experts_away() -> None:
    from megatron.core.utils import check_param_hashes_across_dp_replicas

    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(grouped=True))
    pair.move(everywhere=True)
    chunk = pair.moving.chunks[0]
    assert len(list(chunk.parameters())) == len(pair.plain.named_parameters())
    assert len(list(chunk.modules())) == len(list(pair.plain.chunks[0].named_modules()))
    assert check_param_hashes_across_dp_replicas(pair.moving.chunks)
    with pytest.raises(InputError, match=r"exporters:test_what.* in which layer 1 has experts by position"):
        dict(chunk.named_parameters())
    pair.session.remove()


@runs_on_ranks(2, "megatron")
def test_tensors_on_one_rank_alone_are_renamed_on_all() -> None:
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(grouped=True))
    with stand_ins() as modules:
        swift_bridge = modules["mcore_bridge.bridge.gpt_bridge"].GPTBridge()
        pair.move(everywhere=True)
        whole = dict(swift_bridge.export_weights(pair.moving.models))
        partial_names = dict(swift_bridge.export_weights(pair.moving.models, only_master_rank=True))
        assert [*partial_names] == [*whole]
        assert all((value is None) == bool(dist.get_rank()) for value in partial_names.values())
        session = pair.session
        stacks: Any = [("model.layers.1.mlp.experts.gate_up_proj", None)]
        assert [*session.logical_names(stacks)] == stacks
        session.remove()


@pytest.mark.skipif(not SOURCES, reason="needs SOURCES=folder: make test-exporters")
@runs_on_ranks(2, "megatron")
def test_own_source_of_frameworks_is_logical_or_raises() -> None:
    folder = Path(SOURCES)
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(grouped=True))
    readers: dict[str, Any] = {
        "slime": lambda: slime_reader(folder, "slime"), "miles": lambda: slime_reader(folder, "miles"),
        "roll": lambda: roll_reader(folder),
    }  # fmt: skip
    present = {name: reader() for name, reader in readers.items() if (folder / name).is_dir()}
    for read in present.values():
        assert sum(".experts." in name for name, _ in read(pair.moving.models)) == 2 * 2 * 4
    with sources(folder, *BRIDGE_PACKAGES):
        bridge = real_bridge()
        kept = bridge.build_conversion_tasks(AnyKeys(), pair.moving.models)

        def read_bridge(model: Model, **options: Any) -> dict[str, torch.Tensor]:
            return dict(
                real_bridge().stream_weights_megatron_to_hf(model.models, AnyKeys(), show_progress=False, **options)
            )

        expected = read_bridge(pair.plain)
        assert sum(".experts." in name for name in expected) == 2 * 8 * 3
        pair.move(everywhere=True)
        with pair.session.weight_sync():
            by_position = read_bridge(pair.moving)
        assert not all(torch.equal(by_position[name], value) for name, value in expected.items())
        for options in ({}, {"conversion_tasks": kept}):
            found = read_bridge(pair.moving, **options)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        with pytest.raises(InputError, match=BY_NAME):
            bridge.build_conversion_tasks(AnyKeys(), pair.moving.models)
    for read in present.values():
        with pytest.raises(InputError, match="experts by position, and they have moved"):
            list(read(pair.moving.models))
    pair.session.remove()


@pytest.mark.skipif(not SOURCES, reason="needs SOURCES=folder: make test-exporters")
def test_wrapped_exporters_are_in_their_frameworks_source() -> None:
    """Those of packages in the folder. Megatron's own is in the one that is installed."""
    from trimtab.integrations.megatron.exporters import EXPORTERS

    for place in EXPORTERS:
        module, _, path = place.partition(":")
        file = Path(SOURCES, *module.split(".")).with_suffix(".py")
        if file.exists():
            assert path in defined_in(file), place
