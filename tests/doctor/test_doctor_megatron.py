"""`trimtab doctor --megatron`: what of a Megatron configuration is supported, from the files that users have."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.main import main
from trimtab.doctor import self_check
from trimtab.doctor.finding import Finding
from trimtab.doctor.megatron_check import check_megatron, read_options
from trimtab.doctor.self_check import PathCheck
from trimtab.errors import InputError

GOOD: dict[str, Any] = {
    "num_moe_experts": 128, "expert_model_parallel_size": 8, "tensor_model_parallel_size": 2,
    "sequence_parallel": True, "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": 4,
    "moe_token_dispatcher_type": "alltoall", "transformer_impl": "local", "recompute_granularity": "full",
    "recompute_method": "uniform", "use_distributed_optimizer": True,
    "moe_router_load_balancing_type": ["seq_aux_loss"],
}  # fmt: skip
SCRIPT = r"""#!/bin/bash
EP=${EP:-8}
export TP="2"
MODEL_ARGS=(
    --num-experts 128  # --mtp-num-layers 1
    --swiglu
)
PARALLEL="--tensor-model-parallel-size ${TP} --sequence-parallel --expert-model-parallel-size $EP \
 --expert-tensor-parallel-size 1 --pipeline-model-parallel-size=${PP:-4}"
MOE_ARGS=" --moe-token-dispatcher-type alltoall --transformer-impl local
 --recompute-granularity full --recompute-method uniform --moe-router-load-balancing-type seq_aux_loss"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $PARALLEL $MOE_ARGS --use-distributed-optimizer pretrain
"""


def written(path: Path, text: str | dict[str, Any]) -> Path:
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def findings_of(options: dict[str, Any], folder: Path) -> dict[str, Finding]:
    findings = check_megatron(written(folder / "config.json", options))
    return {finding.name.removeprefix("megatron "): finding for finding in findings}


def as_log(options: dict[str, Any]) -> str:
    """The arguments as Megatron prints them."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in options.items()]
    return "\n".join(["0: ------------ arguments ------------", *lines, "------ end of arguments ------"])


BLOCK = "\n".join(f"  {name}: {json.dumps(value)}" for name, value in GOOD.items() if not name.startswith("use_"))
FILES: dict[str, str | dict[str, Any]] = {
    "config.json": {name.replace("_", "-"): value for name, value in GOOD.items()},
    "config.yaml": {"a": {"megatron": GOOD}, "dtype": 1},
    "run_config.yml": f"model:  # of a run\n{BLOCK}\nddp:\n  use_distributed_optimizer: true\nparts: [{{fp8: 1}}]",
    "train.log": as_log(GOOD),
    "pretrain.sh": SCRIPT,
}


@pytest.mark.parametrize("name", FILES)
def test_all_kinds_of_files_have_the_same_options(name: str, tmp_path: Path) -> None:
    values, unknown = read_options(written(tmp_path / name, FILES[name]))
    assert {name: values.get(name) for name in GOOD} == GOOD
    assert unknown == []


def test_a_supported_configuration_has_no_problem(tmp_path: Path) -> None:
    found = findings_of(GOOD, tmp_path)
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["layout"].text == "EP 8, TP 2, PP 4, CP 1; schedule: 1F1B"
    assert found["experts"].text.startswith("16 of 128 experts a rank")
    assert found["gradients"].text.endswith("use_distributed_optimizer")
    assert "register_optimizer" in found["renumbering"].text
    assert found["recompute"].text.startswith("full uniform; ")


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"moe_router_fusion": True}, "moe_router_fusion", "problem"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl", "problem"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, "cuda_graph_impl", "warning"),
        ({"sequence_parallel": False}, "sequence_parallel", "problem"),
        ({"expert_tensor_parallel_size": ...}, "expert_tensor_parallel_size", "problem"),
        ({"expert_model_parallel_size": 1}, "experts", "problem"),
        ({"expert_model_parallel_size": 7}, "experts", "problem"),
        ({"num_moe_experts": ...}, "experts", "warning"),
        ({"moe_token_dispatcher_type": ...}, "moe_token_dispatcher_type", "warning"),
        ({"transformer_impl": ...}, "transformer_impl", "warning"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap", "warning"),
        ({"optimizer": "muon"}, "optimizer", "warning"),
        ({"optimizer_cpu_offload": True}, "renumbering", "warning"),
        ({"expert_model_parallel_size": "${EP}"}, "variables", "warning"),
    ],
)
def test_every_problem_is_named(tmp_path: Path, changes: dict[str, Any], name: str, status: str) -> None:
    found = findings_of({name: value for name, value in (GOOD | changes).items() if value is not ...}, tmp_path)
    assert found[name].status == status
    assert sum(finding.status == "problem" for finding in found.values()) == (status == "problem")


def test_an_option_that_is_on_in_any_part_counts(tmp_path: Path) -> None:
    nested = {"model": {"delay_wgrad_compute": True}, "ddp": {"delay_wgrad_compute": False, "bucket_size": None}}
    assert read_options(written(tmp_path / "a.json", nested))[0]["delay_wgrad_compute"] is True


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$N", 3), ("${EP}", 24), ("1$N", 13), ("$TWICE", 48), ("${N:-8}", 3), ("${EP:-${N:-8}}", 24), ("${X:-$N}", 3),
        ("${X:-${Y}}", None), ("${X:-${N:-8}}", 3), ("${X:-${Y:-8}}", 8), ("$LATER", None), ("$SELF", None),
        ("${SELF:-8}", None), ("$X", None),
    ],
)  # fmt: skip
def test_variables_have_the_values_that_the_script_gives_them(word: str, value: int | None, tmp_path: Path) -> None:
    """None if the file does not say."""
    assignments = "N=2\nEP=${N}4\nN=3\nTWICE=4${NOTHING:-8}\nLATER=$LAST\nLAST=1\nSELF=$SELF$SELF"
    name = "expert_model_parallel_size"
    found = read_options(written(tmp_path / "run.sh", f"{assignments}\ntrain --expert-model-parallel-size {word}"))
    assert found == (({}, [name]) if value is None else ({name: value}, []))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("b.yaml", "- 1\n", ""),
        ("a.txt", "nothing", "no options found"),
    ],
)
def test_bad_files_are_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_options(written(tmp_path / name, text))
    assert "\n" not in str(error.value)


def test_yaml_with_python_objects_is_only_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", "fp8: hybrid\nother: !!python/object/apply:os.getcwd []\n")
    assert read_options(path) == ({"fp8": "hybrid", "other": None}, [])


def test_the_command_reports_and_gets_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_check, "check_paths", lambda ranks: [PathCheck("peer", 4, 1e-16)])
    good, bad = written(tmp_path / "good.json", GOOD), written(tmp_path / "bad.json", GOOD | {"fp8": "e4m3"})
    assert main(["doctor", "--megatron", str(good), "--json", str(tmp_path / "doctor.json")]) == 0
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert "megatron layout" in {finding["name"] for finding in report["findings"]}
    capsys.readouterr()
    assert main(["doctor", "--megatron", str(bad)]) == 1
    assert "megatron fp8: fp8=e4m3 is not supported: " in capsys.readouterr().err


def test_a_missing_or_other_megatron_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "config.json", GOOD)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.20.0")
    first = check_megatron(path)[0]
    assert (first.status, first.text) == ("warning", "0.20.0; the tests run with 0.16.1, 0.18.2, 0.19.2")

    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    first = check_megatron(path)[0]
    assert first.status == "warning"
    assert first.text.startswith("not installed here")
