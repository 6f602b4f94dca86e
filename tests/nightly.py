"""Which tests `make test` leaves to `make nightly`: dear ones, mostly cases of a test of which it runs others.

Tests are here that take more than 10 s of processor time, all cases together, if the functions that they call are
called by other tests too, as the map of `make mutants` says. Of equal loops `make test` keeps a small and a large
layout, or a mode with planned and one with live routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

# For each test the cases that `make test` runs, in the brackets of their names; none: all of it is left.
RUN_BY_MAKE_TEST: Mapping[str, tuple[str, ...]] = {
    "benchmarks/test_bench_host.py::test_figures": (),
    "benchmarks/test_bench_papers.py::test_cases_are_drawn_from_the_whole_grid": (),
    "benchmarks/test_bench_papers.py::test_only_chooses_cases_by_name": (),
    "doctor/test_gpu_stages.py::test_stages_find_what_is_broken": (
        "rewrite_without_writing", "refresh_once", "leave_an_element_of_one_expert", "wait_in_every_layer",
        "soak_with_rows_that_stay", "soak_that_sends_old_values",
    ),
    "integrations/test_expert_parallel.py::test_random_plans_equal_all_to_all": ("case0", "case3", "case6", "case9"),
    "integrations/test_megatron_equality.py::test_balanced_models_train_as_megatron_s_own": (
        "EP 2 x expert-DP 2", "PP 2 x EP 2", "TP 2 x EP 2", "CP 2 x EP 2",
    ),
    "integrations/test_megatron_equality.py::test_balanced_models_train_as_megatron_s_own_if_the_device_is_late": (),
    "integrations/test_megatron_exporters.py::test_every_known_exporter_is_logical_or_raises": ("EP 2",),
    "integrations/test_megatron_moves.py::test_models_with_moves_train_as_models_without": (
        "EP 2-", "TP 2 x EP 2-",
    ),
    "integrations/test_megatron_recipes.py::test_recipes_train_as_megatron_s_own": (
        "DeepSeek-V3-EP 2", "Qwen3-Next-PP 2 x EP 2", "hybrid-EP 2",
    ),
    "integrations/test_megatron_recipes.py::test_experts_of_mtp_layers_stay_at_home_when_others_move": (),
    "integrations/test_megatron_static_budget.py::test_no_row_of_twenty_steps_is_dropped": ("exact",),
    "integrations/test_replay_plugins.py::test_chunks_of_an_interleaved_pipeline": (),
    "integrations/test_replay_plugins.py::test_groups_are_destroyed_and_created_again_between_steps": ("slime",),
    "integrations/test_skyrl.py::test_stages_of_a_pipeline": ("True",),
    "integrations/test_transformers.py::test_a_shared_model_equals_the_plain_one": ("qwen3_moe", "gpt_oss"),
    "integrations/test_trl.py::test_gradients_are_those_of_trl": (
        "accumulation-", "iterations, checkpointing-", "reentrant checkpointing-", "two updates to a generation-",
        "two generations to an update-", "short last update of an epoch-", "auxiliary loss-",
        "entropy, no clipping, truncated completions-", "generation, evaluation-",
    ),
    "launch/test_namespaces.py::test_only_links_between_nodes_are_limited": (),
    "rl/test_disaggregated_sampling.py::test_training_is_that_with_a_colocated_rollout": ("1-1-1-plan", "2-2-2-plan"),
    "rl/test_faults_of_modes.py::test_a_run_whose_rank_is_killed_continues_the_same": ("rehome", "t-ppo"),
    "rl/test_faults_of_modes.py::test_elapsed_time_and_the_clock_change_nothing": ("disaggregated",),
    "rl/test_faults_of_modes.py::test_runs_of_a_mode_do_what_others_do_not": ("rehome", "live"),
    "rl/test_training.py::test_a_checkpoint_can_be_trained_on_under_torchrun": (),
    "rollout/test_disaggregated_rollout.py::test_tokens_and_routing_are_those_of_the_whole_model": (
        "qwen3_moe-2-2", "gpt_oss-1-2",
    ),
    "runtime/test_groups.py::test_no_rank_s_memory_grows_with_the_number_of_groups": (),
    "runtime/test_groups.py::test_random_plans_equal_the_single_process": ("2",),
    "runtime/test_late_compute.py::test_loops_in_which_other_ranks_read_the_parameters": ("12",),
    "runtime/test_late_compute.py::test_loops_with_moves_accumulation_and_suspension": ("thread lazy peers queues-3",),
    "runtime/test_late_compute.py::test_random_plans_equal_the_single_process": ("True-lazy", "False-early"),
    "runtime/test_late_device.py::test_live_calls_equal_the_single_process": ("predict",),
    "runtime/test_late_device.py::test_random_plans_equal_the_single_process": ("2-4",),
    "runtime/test_live.py::test_live_micro_steps_equal_the_single_process": ("2-auto", "2-off", "4-feplb"),
    "runtime/test_micro_steps.py::test_rows_of_any_micro_steps_in_any_order": ("3-1-2", "4-2-2"),
    "runtime/test_rank_memory.py::test_rounds_of_sleep_plan_and_training_keep_nothing": ("compute_dtype3-parameters",),
    "runtime/test_slices.py::test_gradients_are_those_of_one_process": ("3-1-4-late", "4-2-4-in time"),
    "runtime/test_suspend.py::test_steps_after_suspension_are_right_and_keep_nothing": ("4-6", "5-6"),
    "test_examples.py::test_a_megatron_loop_learns_and_is_balanced_under_torchrun": (),
    "test_examples.py::test_a_transformers_loop_is_balanced_in_every_step": (),
    "test_examples.py::test_supervised_fine_tuning_learns_and_is_balanced_from_live_routing": (),
}  # fmt: skip


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out `nightly`."""
    for item in items:
        name, _, case = item.nodeid.removeprefix("tests/").partition("[")
        if case.removesuffix("]") not in RUN_BY_MAKE_TEST.get(name, (case.removesuffix("]"),)):
            item.add_marker("nightly")
