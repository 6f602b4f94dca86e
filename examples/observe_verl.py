"""A sampler for verl 0.9 that observes the routing of every step; nothing else in the run changes.

    trainer.v1.sampler.custom_sampler.path=examples/observe_verl.py \
    trainer.v1.sampler.custom_sampler.name=ObservedReplayBuffer \
    +trainer.v1.sampler.sampler_kwargs.observe='{model: Qwen/Qwen3-30B-A3B, ranks: 16, folder: runs/routing}' \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True

`observe` holds arguments of `trimtab.observe.Observer`. For `trainer_mode` other than `sync`, take `ReplayBufferAsync`
as the base. With a sampler of its own verl does not filter groups (`algorithm.filter_groups`) or refill failed ones.
"""

from __future__ import annotations

import random
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from trimtab.observe import Observer

FIELDS = ["routed_experts", "prompts", "responses"]
# Sequences of a step that are fetched: they pass through the trainer's process, which verl's own do not.
MOST_SEQUENCES = 128


class ObservedReplayBuffer(ReplayBuffer):
    """verl's replay buffer, with an observer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._observer = Observer("verl", **dict(self.sampler_kwargs["observe"]))
        self._held: Any = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's batch, with the figures of the last step among its metrics."""
        batch, metrics = super().sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )  # fmt: skip
        if partition_id == "train":
            keys = random.Random(global_steps).sample(list(batch.keys), min(MOST_SEQUENCES, len(batch.keys)))
            # Kept until the next step, for the observer's thread.
            self._held = transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=FIELDS)
            self._observer.record(self._held, global_steps)
            metrics |= self._observer.metrics()
        return batch, metrics
