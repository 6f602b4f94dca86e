"""Small runs of the recipe `recipes.rl`: a tiny model that they start fast with, their command, their processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from recipes.rl.checkpoint import Checkpoint, last_checkpoint
from recipes.rl.task import build_tokenizer, save_model


def save_tiny_model(directory: Path) -> None:
    """A random Qwen3-MoE of 2 layers with 8 experts."""
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(config, model.state_dict(), tokenizer, directory)


def train_command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "recipes.rl.train", "--output", str(out), *more]


def settings(steps: int) -> list[str]:
    """Of a run with a checkpoint after each step."""
    words = ["--warm-start-steps", "40", "--held-out", "8", "--problems", "8", "--samples", "16"]
    return [*words, "--token-budget", "256", "--compare-pairs", "0", "--save-every", "1", "--steps", str(steps)]


# Of runs in which other things can go wrong, in `TrainConfig`.
MODES: dict[str, dict[str, Any]] = {
    "plan": {},
    # Other policies depend on measured times, or on loads before the run was stopped.
    "live": {"mode": "live", "policy": "quota"},
    # Windows of responses that stay open from step to step, and a value model with experts.
    "t-ppo": {"algorithm": "t-ppo", "value_model": "trunk", "window": 3},
}


def of_mode(mode: str) -> dict[str, Any]:
    """Settings of a small run in a mode of `MODES`, with a checkpoint after each step."""
    given = {"warm_start_steps": 40, "held_out": 8, "problems": 8, "samples": 16, "token_budget": 256}
    return {**given, "compare_pairs": 0, "save_every": 1, **MODES[mode]}


def words_of_mode(mode: str) -> list[str]:
    """The options for what `MODES` has."""
    return [word for name, value in MODES[mode].items() for word in (f"--{name.replace('_', '-')}", str(value))]


def open_responses(checkpoint: Checkpoint) -> int:
    """Responses that a later step continues."""
    return sum(map(len, checkpoint.algorithm.get("windows", ())))


def straight_run(folder: Path, steps: int, mode: str = "plan") -> Path:
    """The output of an uninterrupted run of the model that is written to `folder / "model"`."""
    save_tiny_model(folder / "model")
    run(train_command(folder / "out", "--model", str(folder / "model"), *settings(steps), *words_of_mode(mode)))
    assert sum(m["trained_sequences"] for m in metrics_of(folder / "out")[2:]) > 0
    return folder / "out"


def run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def stopped_after(straight: Path, step: int, out: Path) -> Path:
    """A copy of a complete run, cut back to a run that was killed while writing the checkpoint after `step`."""
    shutil.copytree(straight, out)
    for path in (out / "checkpoints").glob("step-*"):
        if int(path.name[-5:]) > step:
            shutil.rmtree(path)
    shutil.copytree(out / "checkpoints" / f"step-{step:05d}", out / "checkpoints" / f".step-{step + 1:05d}.partial")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward": 0.0')
    return out


def assert_same_run(out: Path, straight: Path, steps: int) -> None:
    for step, (found, expected) in enumerate(zip(metrics_of(out), metrics_of(straight), strict=True)):
        other = found.items() ^ expected.items()
        assert not other, f"step {step}: {sorted(other)}"
    checkpoint, same = last_checkpoint(out), last_checkpoint(straight)
    assert checkpoint is not None
    assert same is not None
    assert checkpoint.step == same.step == steps
    assert_equal(vars(checkpoint) | {"folder": None}, vars(same) | {"folder": None})
    weights, expected = (load_file(each.folder / "model.safetensors") for each in (checkpoint, same))
    assert_equal(weights, expected)
    for folder in ("checkpoints", "routing"):
        assert sorted(p.name for p in (out / folder).iterdir()) == sorted(p.name for p in (straight / folder).iterdir())
    for file in ("summary.json", "settings.json"):
        ignored = {"out": None}
        assert json.loads((out / file).read_text()) | ignored == json.loads((straight / file).read_text()) | ignored


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Assert that nested dictionaries and lists of tensors are equal bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{where}/{number}")
    else:
        assert found == expected, where


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """A run's metrics, step by step, but for times and what the machine had left."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if not name.endswith(("_s", "free_bytes"))} for line in lines]


def processes_under(leader: int) -> list[int]:
    """Living processes of the session that `leader` leads, without itself."""
    return [process for process, fields in _living() if int(fields[3]) == leader != process]


def ranks_under(leader: int) -> list[int]:
    """Ranks of a launcher: the processes that it has started."""
    return [p for p, fields in _living() if int(fields[1]) == leader and "resource_tracker" not in command_line(p)]


def _living() -> list[tuple[int, list[str]]]:
    """Processes that run, with their state, parent, group and session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if fields[0] != "Z":
                found.append((int(stat.parent.name), fields))
    return sorted(found)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def count_steps(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_text().count("\n")
    except OSError:
        return 0
