"""Which tests `make test` leaves to `make nightly`: dear ones, mostly cases of a test of which it runs others.

The functions of src that they call are called by other tests, too, as the map of `make mutants` says. Of equal loops
`make test` keeps a small and a large layout, or a mode with planned and one with live routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

# For each test the cases that `make test` runs, in the brackets of their names; none: all of it is left.
RUN_BY_MAKE_TEST: Mapping[str, tuple[str, ...]] = {
    "benchmarks/test_bench_advice.py::test_a_small_run": (),
    "benchmarks/test_bench_host.py::test_figures": (),
    "benchmarks/test_bench_live.py::test_a_small_run_times_all_policies": (),
    "benchmarks/test_bench_megatron.py::test_a_small_run_plans_every_seed_and_computes_the_same_gradients": (),
    "benchmarks/test_bench_papers.py::test_cases_are_drawn_from_the_whole_grid": (),
    "benchmarks/test_bench_papers.py::test_only_chooses_cases_by_name": (),
    "benchmarks/test_bench_papers.py::test_the_command_writes_figures_of_the_simulated_steps": (),
    "benchmarks/test_bench_tppo.py::test_a_small_run_writes_figures_and_picture": (),
    "benchmarks/test_commands.py::test_transfer": (),
    "benchmarks/test_runtime_summary.py::test_a_small_run_has_every_seed_and_explains_its_figures": (),
    "doctor/test_doctor.py::test_the_micro_step_detects_a_broken_path": (),
    "doctor/test_gpu_stages.py::test_stages_find_what_is_broken": (
        "rewrite_without_writing", "leave_an_element_of_one_expert", "wait_in_every_layer",
        "soak_with_rows_that_stay", "soak_that_sends_old_values",
    ),
    "doctor/test_megatron_run.py::test_mistakes_are_found": ("exports", "checkpoint", "steps"),
    "experiments/test_planning_times.py::test_a_tiny_run_writes_times_of_every_size": (),
    "experiments/test_simulated.py::test_a_small_run_gives_every_figure": (),
    "experiments/test_presets_published.py::test_a_preset_has_the_skew_it_is_named_after": (
        "deepseek-moe-16b-text", "glm-4.7-flash-math", "gpt-oss-20b-reasoning", "nemotron-3-nano-text",
    ),
    "integrations/test_expert_parallel.py::test_random_plans_equal_all_to_all": ("case3", "case9"),
    "integrations/test_live_transformers.py::test_live_micro_steps_of_every_family_train_as_unbalanced_ones": (),
    "integrations/test_megatron_equality.py::test_balanced_models_train_as_megatron_s_own": (
        "EP 2 x expert-DP 2", "PP 2 x EP 2", "TP 2 x EP 2", "CP 2 x EP 2",
    ),
    "integrations/test_megatron_equality.py::test_balanced_models_train_as_megatron_s_own_if_the_device_is_late": (),
    "integrations/test_megatron_exporters.py::test_every_known_exporter_is_logical_or_raises": ("EP 2",),
    "integrations/test_megatron_moves.py::test_checkpoints_are_those_of_models_without_moves": ("EP 2, Adam",),
    "integrations/test_megatron_moves.py::test_checkpoints_that_assume_a_constant_structure_have_moved_experts": (
        "False-EP 2 x expert-DP 2",
    ),
    "integrations/test_megatron_moves.py::test_models_with_moves_train_as_models_without": (
        "EP 2-", "TP 2 x EP 2-",
    ),
    "integrations/test_megatron_recipes.py::test_experts_of_mtp_layers_stay_at_home_when_others_move": (),
    "integrations/test_megatron_recipes.py::test_recipes_train_as_megatron_s_own": (
        "DeepSeek-V3-EP 2", "Qwen3-Next-PP 2 x EP 2", "hybrid-EP 2",
    ),
    "integrations/test_megatron_static_budget.py::test_no_row_of_twenty_steps_is_dropped": ("exact",),
    "integrations/test_nemo_rl.py::test_steps_are_those_of_nemo_rl_s_own_replay": ("packed, CP", "packed, TP"),
    "integrations/test_replay_plugins.py::test_a_rollout_is_that_of_the_framework_s_own_replay": ("miles",),
    "integrations/test_replay_plugins.py::test_chunks_of_an_interleaved_pipeline": (),
    "integrations/test_replay_plugins.py::test_critics_run_as_without_the_plugin": ("slime",),
    "integrations/test_replay_plugins.py::test_groups_are_destroyed_and_created_again_between_steps": ("slime",),
    "integrations/test_replay_plugins.py::test_shadow_and_off_change_no_bit": ("miles",),
    "integrations/test_skyrl.py::test_stages_of_a_pipeline": ("True",),
    "integrations/test_skyrl.py::test_steps_are_those_of_skyrl_s_own_replay": ("", "TP"),
    "integrations/test_transformers.py::test_a_shared_model_equals_the_plain_one": ("qwen3_moe", "gpt_oss"),
    "integrations/test_trl.py::test_gradients_are_those_of_trl": (
        "accumulation-", "reentrant checkpointing-", "two updates to a generation-",
        "short last update of an epoch-", "auxiliary loss-",
        "entropy, no clipping, truncated completions-", "generation, evaluation-",
    ),
    "integrations/test_trl.py::test_gradients_of_every_loss_and_family_are_those_of_trl": (),
    "launch/test_namespaces.py::test_only_links_between_nodes_are_limited": (),
    "planner/test_replicas.py::test_replicas_are_hardly_more_than_the_fewest": ("nodes-1-0.02", "equal experts-0-0.0"),
    "report/test_accessibility.py::test_no_violations": (
        "advice-dark-390", "analysis-light-390", "simulation-light-1280",
    ),
    "rl/test_disaggregated_sampling.py::test_training_is_that_with_a_colocated_rollout": ("1-1-1-plan",),
    "rl/test_faults_of_modes.py::test_a_run_whose_rank_is_killed_continues_the_same": ("t-ppo",),
    "rl/test_faults_of_modes.py::test_elapsed_time_and_the_clock_change_nothing": ("disaggregated",),
    "rl/test_faults_of_modes.py::test_runs_of_a_mode_do_what_others_do_not": ("live",),
    "rl/test_tppo.py::test_a_run_resumes_in_the_middle_of_responses_bit_for_bit": ("trunk",),
    "rl/test_training.py::test_a_checkpoint_can_be_trained_on_under_torchrun": (),
    "rl/test_value_trunk.py::test_balanced_and_unbalanced_runs_have_the_same_losses": ("ppo-head", "t-ppo-trunk"),
    "rollout/test_disaggregated_rollout.py::test_tokens_and_routing_are_those_of_the_whole_model": ("gpt_oss-1-2",),
    "runtime/test_equality.py::test_random_plans_equal_the_single_process": (
        "2-1-dtype4-2-16-options4",
        "2-1-dtype8-2-16-options8", "3-1-dtype1-2-32-options1", "3-1-dtype6-2-24-options6",
        "4-2-dtype3-2-40-options3", "4-1-dtype2-2-40-options2",
    ),
    "runtime/test_groups.py::test_no_rank_s_memory_grows_with_the_number_of_groups": (),
    "runtime/test_groups.py::test_random_plans_equal_the_single_process": ("2",),
    "runtime/test_late_compute.py::test_loops_in_which_other_ranks_read_the_parameters": ("12",),
    "runtime/test_late_compute.py::test_loops_with_moves_accumulation_and_suspension": ("thread lazy peers queues-3",),
    "runtime/test_late_compute.py::test_random_plans_equal_the_single_process": ("True-lazy", "False-early"),
    "runtime/test_late_device.py::test_live_calls_equal_the_single_process": ("predict",),
    "runtime/test_late_device.py::test_random_plans_equal_the_single_process": ("2-4",),
    "runtime/test_live.py::test_any_choice_equals_the_single_process": ("quota",),
    "runtime/test_live.py::test_live_micro_steps_equal_the_single_process": ("2-auto", "4-feplb"),
    "runtime/test_micro_steps.py::test_rows_of_any_micro_steps_in_any_order": ("4-2-2",),
    "runtime/test_rank_memory.py::test_rounds_of_sleep_plan_and_training_keep_nothing": ("compute_dtype3-parameters",),
    "runtime/test_slices.py::test_gradients_are_those_of_one_process": ("3-1-4-late", "4-2-4-in time"),
    "runtime/test_suspend.py::test_steps_after_suspension_are_right_and_keep_nothing": ("5-6",),
    "runtime/test_users_state.py::test_averages_by_name_move_with_the_experts": ("stacks", "lists"),
    "runtime/test_transfers.py::test_planned_schedules_train_as_the_plain_model": ("4-2",),
    "test_examples.py::test_a_megatron_loop_learns_and_is_balanced_under_torchrun": (),
    "test_examples.py::test_a_transformers_loop_is_balanced_in_every_step": (),
    "test_examples.py::test_a_trl_script_learns_and_is_balanced_under_torchrun": (),
    "test_examples.py::test_supervised_fine_tuning_learns_and_is_balanced_from_live_routing": (),
}  # fmt: skip


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out `nightly`."""
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker("nightly")


def is_left_out(test: str) -> bool:
    """Whether `make test` leaves out a test."""
    name, _, case = test.removeprefix("tests/").partition("[")
    return case.removesuffix("]") not in RUN_BY_MAKE_TEST.get(name, (case.removesuffix("]"),))
