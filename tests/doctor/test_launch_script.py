"""Launch scripts are read as their shell runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.doctor import FILE_CHECKS
from trimtab.doctor.launch_script import expanded

VALUES = ["8", '"a b"', "'c'", "$A", "${B}x", "${A:-3}", "${N:-4}", "${N:-${B:-5}}", '"$B/${C}"', "${C-6}", '"${L[@]}"']
ASSIGNED = st.tuples(st.sampled_from(["A=", "B=", "export C=", "A+=", "local_=1 B="]), st.sampled_from(VALUES[:-1]))
ARRAYS = st.tuples(
    st.sampled_from(["L=(", "L+=(", "M=(\n"]), st.lists(st.sampled_from(VALUES[:8]), max_size=3).map("\n  ".join)
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ASSIGNED | ARRAYS.map(lambda each: (each[0], f"{each[1]} )")), max_size=7), st.integers(0, 7))
def test_words_are_those_of_bash(tmp_path: Path, lines: list[tuple[str, str]], cut: int) -> None:
    """A part of the script is in a file that it sources."""
    texts = [
        f"{name}{value}  # {number}" if "\n" not in value else name + value
        for number, (name, value) in enumerate(lines)
    ]
    (tmp_path / "part.sh").write_text("\n".join(["A=1 B=2", "C=3", *texts[:cut]]) + "\n")
    words = r'--a $A --b "${B}" \
  --c=${C} --d "${N:-9}" ${L[@]} "${M[@]}"'
    script = tmp_path / "run.sh"
    script.write_text("\n".join(['source "$(dirname "$0")/part.sh"', *texts[cut:], f"echo run {words}"]))
    run = subprocess.run(["bash", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    (line,) = (line for line in expanded(script).splitlines() if line.startswith("echo run"))
    # What bash leaves empty stays as it is.
    found = [word for word in line.replace('"', "").split()[1:] if not word.startswith(("${L", "${M"))]
    assert found == run.stdout.split()


def test_what_is_not_in_the_files_stays_a_variable(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('source missing.sh\nsource "$ELSEWHERE/a.sh"\ntrain --x $X --y ${Y} --z "${Z[@]}"')
    assert expanded(tmp_path / "run.sh").split() == ["train", "--x", "$X", "--y", "${Y}", "--z", '"${Z[@]}"']


def test_scripts_that_source_themselves_end(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("source run.sh\ntrain --x 1")
    assert "train --x 1" in expanded(tmp_path / "run.sh")


@pytest.mark.parametrize("folder", ['"$(dirname "$0")"', "$(dirname ${BASH_SOURCE[0]})", '"$HERE"'])
def test_arguments_in_a_sourced_file_are_checked(folder: str, tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("MODEL_ARGS=(\n  --num-experts 64  # all\n  --moe-router-fusion\n)")
    (tmp_path / "run.sh").write_text(
        f'HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"\nsource {folder}/model.sh\n'
        "python3 train.py --custom-megatron-init-path trimtab.integrations.slime.install --use-rollout-routing-replay "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall ${MODEL_ARGS[@]}"
    )
    found = FILE_CHECKS["slime"](tmp_path / "run.sh")
    assert [finding.name for finding in found if finding.status == "problem"] == ["megatron moe_router_fusion"]
    assert "8 of 64 experts a rank" in " ".join(finding.text for finding in found)


VERL = """
mode=${MODE:-R3}
fused=${FUSED}
python3 -m verl.trainer.main_ppo model_engine=ENGINE \\
    actor_rollout_ref.model.external_lib=trimtab.integrations.verl \\
    actor_rollout_ref.model.use_fused_kernels=${fused} \\
    actor_rollout_ref.actor.megatron.router_replay.mode=${mode} \\
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=${ETP} \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
"""


def test_settings_that_the_file_does_not_say_are_warnings(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL.replace("ENGINE", "megatron"))
    found = FILE_CHECKS["verl"](tmp_path / "run.sh")
    assert not [finding for finding in found if finding.status == "problem"]
    (warning,) = (finding.text for finding in found if finding.name == "megatron variables")
    assert warning.startswith("expert_tensor_parallel_size, use_fused_kernels have values that are not in the file")


def test_the_engine_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL.replace("ENGINE", "veomni"))
    (problem,) = (found for found in FILE_CHECKS["verl"](tmp_path / "run.sh") if found.status == "problem")
    assert problem.text.startswith("the engine is veomni, which has no expert parallelism")


def test_a_plugin_that_the_file_does_not_name_is_a_warning(tmp_path: Path) -> None:
    text = VERL.replace("ENGINE", "megatron").replace("external_lib=trimtab.integrations.verl", "external_lib=${LIB}")
    (tmp_path / "run.sh").write_text(text)
    plugin, *_ = FILE_CHECKS["verl"](tmp_path / "run.sh")
    assert (plugin.name, plugin.status) == ("verl plugin", "warning")
    assert "has a value that is not in the file" in plugin.text


def test_config_files_of_the_command_are_read(tmp_path: Path) -> None:
    """What the command says itself counts; a file that is not there is the framework's own."""
    (tmp_path / "args.yaml").write_text("moe_router_fusion: true\nnum_experts: 64\nexpert_model_parallel_size: 4\n")
    (tmp_path / "run.sh").write_text(
        "CONFIG=args.yaml\npython3 train.py --custom-config-path $CONFIG --custom-megatron-init-path "
        "trimtab.integrations.slime.install --use-rollout-routing-replay --expert-model-parallel-size 8 "
        "--moe-token-dispatcher-type alltoall"
    )
    found = FILE_CHECKS["slime"](tmp_path / "run.sh")
    assert [finding.name for finding in found if finding.status == "problem"] == ["megatron moe_router_fusion"]
    assert "8 of 64 experts a rank" in " ".join(finding.text for finding in found)


@pytest.mark.parametrize("name", ["mine", "mine.yaml", "'mine'"])
def test_configs_of_hydra_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "actor_rollout_ref:\n  model:\n    external_lib: trimtab.integrations.verl\n  actor:\n    megatron:\n"
        "      expert_model_parallel_size: 4\n      router_replay: {mode: disabled}\n"
    )
    script = VERL.replace("ENGINE", f"megatron --config-path=config --config-name={name}")
    kept = [line for line in script.splitlines() if "external_lib" not in line]
    (tmp_path / "run.sh").write_text("\n".join(kept))
    found = FILE_CHECKS["verl"](tmp_path / "run.sh")
    assert not [finding for finding in found if finding.status == "problem"]
    assert "EP 8" in " ".join(finding.text for finding in found)
