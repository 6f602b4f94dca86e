"""ms-swift's plugin on a stand-in of its trainer: as its own replay; what is refused; the file that it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers import ms_swift_stand_in as stand_in
from helpers.megatron_runs import Layout
from helpers.ms_swift_modules import ms_swift
from helpers.ms_swift_runs import EP_2, MICRO_BATCHES, STEPS, Runs, arguments, figures, sessions
from helpers.ms_swift_stand_in import import_external_file, swift
from helpers.plugin_runs import assert_close, use_routers
from helpers.rank_pool import on_ranks
from helpers.rank_tests import on_megatron_ranks
from trimtab.errors import InputError
from trimtab.integrations.ms_swift import PLUGIN_FILE, read_tokens


def compare(layout: Layout, largest: float = 1e-11, mode: str = "R3", **case: Any) -> None:
    with ms_swift():
        runs = Runs(layout, **case)
        expected = runs.expected(router_replay_mode=mode)
        with runs.balanced(router_replay_mode=mode):
            found = runs.other.steps(runs.batches)
        errors = assert_close(found, expected, largest)
        assert all(error == 0 for name, error in errors.items() if name.startswith("0 ref"))
        planned = [replicas for replicas in runs.other.planned if replicas is not None]
        assert len(planned) == (STEPS * MICRO_BATCHES if mode == "R3" else 0)
        assert mode == "R2" or sum(planned) > 0
        for step in figures(runs.other):
            assert step["moe/replicas"] > 0
            assert step["moe/unplanned_micro_steps"] == step["moe/mixed_instances"] == 0
            assert step["memory/pool_bytes"] > 0


FLOAT32 = {"largest": 1e-5, "double": False, "distributed_optimizer": True}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    # The pass of log-probabilities and training, with padding that ms-swift replays as expert 0.
    "EP": (EP_2, {}),
    # Memory is freed during generation.
    "offload": (EP_2, FLOAT32),
    # The trainer records routes, which are replayed and planned.
    "R2": (EP_2, {"mode": "R2"}),
    "TP": (Layout(2, 2, tensor=2), {}),
    "CP": (Layout(2, 2, context=2), {}),
    "pipeline": (Layout(4, 2, pipeline=2), {}),
    # Two ranks have the same experts; each updates a part of them, and gathers the other later.
    "overlap": (Layout(4, 2), FLOAT32 | {"overlap": True}),
}


@pytest.mark.longer
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_ms_swift_s_own_replay(name: str) -> None:
    layout, options = CASES[name]
    on_ranks(_compare, (layout, options), ranks=layout.ranks, patched="megatron")


def _compare(layout: Layout, options: dict[str, Any]) -> None:
    compare(layout, **options)


@on_megatron_ranks
def test_shadow_and_off_change_no_bit() -> None:
    with ms_swift():
        runs = Runs()
        expected = runs.expected()
        for mode in ("shadow", "off"):
            with runs.balanced(f"mode={mode}") as other:
                found = other.steps(runs.batches)
            assert_close(found, expected, 0)
            assert all(("moe/max_vio_before" in step) == (mode == "shadow") for step in figures(other))


@on_megatron_ranks
def test_live_mode_needs_no_recorded_routing() -> None:
    """The reference is a model of this process that is not balanced."""
    with ms_swift():
        runs = Runs()
        for each in (each for batch in runs.batches for each in batch):
            del each["routed_experts"]
        expected = runs.expected(router_replay_mode="disabled")
        with runs.balanced("mode=live", router_replay_mode="disabled") as other:
            found = other.steps(runs.batches)
            assert len(sessions(other)) == 1
        errors = assert_close(found, expected, 1e-11)
        assert all(error == 0 for name, error in errors.items() if name.startswith("0 ref"))
        assert all(step["moe/max_vio_before"] > 0 for step in figures(other))


class Supervised(stand_in.BaseMegatronTrainer):
    """A trainer without rollouts, which computes no log-probabilities beside training."""

    forward_step = stand_in.MegatronGRPOTrainer.forward_step
    loss_func = stand_in.MegatronGRPOTrainer.loss_func


@on_megatron_ranks
def test_live_mode_in_other_trainers() -> None:
    with ms_swift(), mock.patch.object(swift(stand_in.GRPO), "MegatronGRPOTrainer", Supervised):
        runs = Runs()
        options = {"router_replay_mode": "disabled", "rlhf_type": None}
        for each in runs.batches[0]:
            del each["routed_experts"]
        plain = runs.trainer(**options)
        plain.run_train_step(iter([dict(each) for each in runs.batches[0]]))
        with runs.balanced("mode=live", **options) as other:
            other.trainer.run_train_step(iter([dict(each) for each in runs.batches[0]]))
            assert other.trainer.logged[0]["loss"] == pytest.approx(plain.logged[0]["loss"], rel=1e-11)
            assert other.trainer.logged[0]["grad_norm"] == pytest.approx(plain.logged[0]["grad_norm"], rel=1e-11)
            assert other.trainer.logged[0]["moe/max_vio_before"] > 0


@on_megatron_ranks
def test_the_reference_is_not_planned_where_it_replays_too() -> None:
    """As in ms-swift's Ray workers, which set the action for every model."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    with ms_swift():
        runs = Runs()
        with runs.balanced() as other:
            trainer, batch = other.trainer, dict(runs.batches[0][0])
            use_routers(runs.reference, trainer.args.of_tests.actor)
            del batch["grpo_batch"]
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            trainer.compute_per_token_logps(trainer.ref_models[0], iter([dict(batch)]))
            RouterReplay.clear_global_router_replay_action()
            (session,) = sessions(other)
            assert session.report is None


@on_megatron_ranks
def test_a_loss_over_all_routes_keeps_the_padding_s_routes_to_the_router() -> None:
    with ms_swift():
        runs = Runs(balanced_routers=True)
        with runs.balanced() as other:
            found = other.steps(runs.batches)
        assert all(step["moe/mixed_instances"] > 0 for step in figures(other))
        assert all(torch.isfinite(value).all() for value in found.values())


@on_megatron_ranks
def test_routes_of_other_tokens_are_named_on_all_ranks() -> None:
    """ms-swift's Ray workers train with the routes of all layers, dense ones too."""
    with ms_swift():
        runs = Runs()
        with runs.balanced() as other:
            use_routers(runs.other.trainer.args.of_tests.actor, runs.reference)
            batches = [dict(each) for each in runs.batches[0]]
            with pytest.raises(InputError, match=r"the routes of \[16, 3\] tokens and layers, and they have \[16, 2\]"):
                other.trainer.run_train_step(iter(batches))
            if dist.get_rank():
                swift(stand_in.REPLAY).set_router_replay_data = lambda *_: None
            with pytest.raises(InputError, match=r"\[16, 3\] tokens|gave no ids to the router of MoE layer 2"):
                other.trainer.run_train_step(iter([dict(each) for each in runs.batches[0]]))


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("mode=live", "mode=live .* with recorded routing use mode=plan", {}),
    ("", "mode=plan needs recorded routing; add --router_replay_mode R3", {"router_replay_mode": "disabled"}),
    ("slots=1", "TRIMTAB_BALANCE has no option 'slots'", {}),
    ("mode=shadow", "tuner_type=lora is not supported", {"tuner_type": "lora"}),
    ("", "rlhf_type=dpo is not supported: ms-swift replays routing in GRPO alone", {"rlhf_type": "dpo"}),
    ("mode=live", "rlhf_type=kto is not supported: it runs the model twice",
     {"rlhf_type": "kto", "router_replay_mode": "disabled"}),
    ("", r"padding_free=False is not supported: .* another order; .* \(1 more\)",
     {"padding_free": False, "virtual_pipeline_model_parallel_size": 2}),
    ("", "cp_partition_mode=contiguous is not", {"cp_partition_mode": "contiguous"}),
    ("", "dsa_indexer_loss_coeff=0.1 is not", {"dsa_indexer_loss_coeff": 0.1}),
    ("", "sequence_packing_scheduler=dp_balanced is not", {"sequence_packing_scheduler": "dp_balanced"}),
    ("", "mtp_num_layers=1 is not supported: .* not recorded", {"mtp_num_layers": 1}),
    ("", "fp8=hybrid is not supported", {"fp8": "hybrid"}),
    ("", "moe_router_fusion=True is not supported", {"moe_router_fusion": True}),
    ("", "context_parallel_size=2 is not supported: ms-swift's Ray workers",
     {"use_ray": True, "context_parallel_size": 2}),
]  # fmt: skip


@on_megatron_ranks
def test_refuses_by_name_before_the_model_is_built() -> None:
    with ms_swift():
        trainer = swift(stand_in.GRPO).MegatronGRPOTrainer
        import_external_file(PLUGIN_FILE)
        for text, message, more in REFUSED:
            with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), pytest.raises(InputError, match=message):
                trainer(arguments(**more), None)
        del swift(stand_in.REPLAY).set_router_replay_data
        message = r"router_replay_utils has no set_router_replay_data; .* fits ms-swift 4\.6"
        sys.modules.pop(PLUGIN_FILE.stem)
        with pytest.raises(InputError, match=message):
            import_external_file(PLUGIN_FILE)


@on_megatron_ranks
def test_models_that_can_t_be_balanced_are_refused_before_the_first_step() -> None:
    with ms_swift():
        runs = Runs()
        for name, value, message in (
            ("moe_router_fusion", True, "moe_router_fusion=True is not supported"),
            ("num_moe_experts", None, "the model has no experts"),
        ):
            config = copy(runs.model.config)
            setattr(config, name, value)
            with pytest.raises(InputError, match=message):
                runs.balanced(config=config).__enter__()
        # As _check_padding_free of swift/megatron/model/utils.py:21 does.
        trainer = swift(stand_in.BASE).BaseMegatronTrainer
        prepare_model = trainer.prepare_model

        def unpacked(self: Any) -> None:
            prepare_model(self)
            self.args.padding_free = False

        with (
            mock.patch.object(trainer, "prepare_model", unpacked),
            pytest.raises(InputError, match="padding_free=False is not"),
        ):
            runs.balanced().__enter__()


def test_the_file_that_is_imported() -> None:
    """Its folder comes first in `sys.path`. Folders of Trimtab have the names of frameworks, and of Megatron."""
    command = [sys.executable, "-m", "trimtab.integrations.ms_swift"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    path = Path(printed.strip())
    assert path == PLUGIN_FILE
    assert printed.count("\n") == 1
    assert [each.name for each in path.parent.iterdir() if each.name != "__pycache__"] == ["trimtab_ms_swift.py"]


def test_processes_without_a_megatron_trainer_import_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    """As those that serve a checkpoint: ms-swift reads the argument from its args.json."""
    path = list(sys.path)
    try:
        import_external_file(PLUGIN_FILE)
    finally:
        sys.path[:] = path
        sys.modules.pop(PLUGIN_FILE.stem)
    assert "nothing is balanced" in capsys.readouterr().out


def test_tokens_that_a_loss_depends_on() -> None:
    """Two packed sequences and padding, whose positions are 0."""
    no = -100
    positions = [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
    assert read_of([no, no, 7, 8, no, no, 6, 9, no, no], positions) == [1, 1, 1, 0, 0, 1, 1, 0, 0, 0]
    # The last token of a sequence predicts the first label of the next, if that has one.
    assert read_of([no, no, 7, 8, no, 5, 6, 9, no, no], positions) == [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    # With context parallelism padding is behind each sequence, with positions that go on.
    assert read_of([no, 3, no, no, no, no], [0, 1, 2, 3, 0, 1]) == [1, 0, 0, 0, 0, 0]


def read_of(labels: list[int], positions: list[int]) -> list[int]:
    (found,) = read_tokens(torch.tensor([labels]), torch.tensor([positions])).int().tolist()
    return found  # type: ignore[no-any-return]
