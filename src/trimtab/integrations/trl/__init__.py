"""TRL: its GRPO trainer with balanced experts."""

from trimtab.integrations.trl.batch_routes import rollout_routes
from trimtab.integrations.trl.grpo_trainer import TrimtabGRPOTrainer

__all__ = ["TrimtabGRPOTrainer", "rollout_routes"]
