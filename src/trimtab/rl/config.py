"""`TrainConfig`: everything that a training run can be asked to do differently."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.runtime.planning import Mode


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `trimtab train`.

    Attributes:
        out: folder for everything that the run writes.
        model: a local Hugging Face checkpoint directory; a small model is built if None.
        mode: how recompute and update are balanced, see `Session`.
        slots: replicas that a rank has room for in every layer.
        steps: RL steps.
        problems, samples: problems of a step over all ranks, and responses to each.
        mini_batches: optimizer steps in an RL step.
        token_budget: most tokens of a rank in a micro-step.
        max_new_tokens: longest response.
        learning_rate: of GRPO; warmed up over the first steps.
        warm_start_steps, warm_start_batch, warm_start_learning_rate: supervised steps before RL, sequences in each over
            all ranks, and peak learning rate.
        max_norm: gradient norm to clip to.
        gradient_checkpointing: recompute activations in backward.
        held_out: problems that accuracy is measured on.
        save_every: RL steps between checkpoints; the last step is always saved.
        compare_pairs: timed pairs of static and trimtab at the end; 0 for none.
        seed: of model, problems and sampling.
    """

    out: Path
    model: Path | None = None
    mode: Mode = "plan"
    slots: int = 2
    steps: int = 30
    problems: int = 64
    samples: int = 8
    mini_batches: int = 2
    token_budget: int = 2048
    max_new_tokens: int = 20
    learning_rate: float = 2e-4
    warm_start_steps: int = 250
    warm_start_batch: int = 128
    warm_start_learning_rate: float = 2e-3
    max_norm: float = 1.0
    gradient_checkpointing: bool = False
    held_out: int = 512
    save_every: int = 10
    compare_pairs: int = 10
    seed: int = 0
