"""`TrimtabGRPOTrainer`: TRL's GRPO trainer of a model that transformers sharded, with balanced experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trimtab.errors import InputError
from trimtab.integrations.expert_parallel import register, session_of
from trimtab.integrations.trl.batch_routes import check_routes, mask_of, positions_of, recorded_routes
from trimtab.integrations.trl.refused_options import (
    check_arguments,
    check_model,
    check_session_options,
    check_supported,
)
from trimtab.runtime import PlanReport, Session

# So that models can be loaded for it.
register()
# In a checkpoint's folder: weights and optimizer state as every rank holds them.
SHARDS, SCHEDULER = "sharded_state", "scheduler.pt"


class TrimtabGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` of a model in FSDP2 and expert parallelism, with every optimizer step planned.

    The model is loaded with `DistributedConfig(fsdp_size=N, ep_size=E, ep_implementation="trimtab")` as its
    `distributed_config`, by the caller or by `model_init_kwargs`. FSDP2 owns weights, gradients, clipping, optimizer
    and saved models; losses and gradients are those of `GRPOTrainer` with the same model under `"all_to_all"`. Replicas
    and splits of rows are planned, from the routing that is already known:

    * a `rollout_func` may return `routed_experts`, for every completion the ids `[n, L, K]` of its n tokens, prompt
      included, with or without the last one, in the model's L MoE layers. Negative ids are unknown. All forwards of
      these completions in training replay them. `rollout_routes` makes them of what vLLM returns.
    * else the routing of the forward that TRL makes for the log-probabilities of the old policy, while weights are
      those of that forward;
    * else that of a forward without gradients before the optimizer step.

    Checkpoints can be resumed, unlike those of `GRPOTrainer` with such a model: they hold the shards of all ranks, for
    any number of ranks.

    Args:
        session_options: options of `Session` other than `num_experts`, for example `{"mode": "shadow"}`.
        arguments: those of `GRPOTrainer`.

    Attributes:
        session: the experts' session.
        report: the last plan; None before the first.

    Raises:
        InputError: naming what is not supported: PEFT, DeepSpeed and others; see `refused_options.py`.
    """

    def __init__(self, *arguments: Any, session_options: Mapping[str, Any] | None = None, **named: Any) -> None:
        options = dict(session_options or {})
        check_session_options(options)
        self.report: PlanReport | None = None
        self._given: Sequence[Any] | None = None  # routes of the last rollout
        self._recorded: torch.Tensor | None = None  # routes of the last forward for log-probabilities
        self._recorded_at = -1  # optimizer steps before that forward
        self._accumulated = 0  # micro-steps since the last optimizer step
        self._plan_start = self._plan_end = 0  # micro-steps of the plan, as TRL's `_step` counts them
        given = inspect.signature(GRPOTrainer).bind(*arguments, **named).arguments
        check_arguments(given)
        only_model = getattr(given.get("args"), "save_only_model", None)
        if only_model is False:
            # The trainer of transformers refuses checkpoints of sharded models that can be resumed.
            given["args"].save_only_model = True
        try:
            super().__init__(*arguments, **named)
        finally:
            if only_model is False:
                given["args"].save_only_model = False
        check_model(self.model, disables_dropout=self.args.disable_dropout)
        autocast = torch.bfloat16 if self.args.bf16 and self.model.dtype is torch.float32 else None
        self.session: Session = session_of(self.model, compute_dtype=autocast, **options)
        if self.use_vllm:
            self.vllm_generation._iter_named_params = self._iter_whole_parameters

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        check_supported(self)

    # Routes.

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        prompt_ids, completion_ids, extra_fields = generated[0], generated[1], generated[5]
        given = extra_fields.pop("routed_experts", None)
        if self.model.training:
            self._recorded, self._given = None, given
            if given is not None:
                lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
                check_routes(given, lengths)
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        # TRL shuffles and splits them with the other tensors.
        if self.model.training and self._given is not None:
            batch["routed_experts"] = self._lay_out(mask_of(batch))
        elif self.model.training and self._recorded is not None:
            batch["recorded_experts"] = self._recorded
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **named: Any
    ) -> Any:
        if model is not self.model or torch.is_grad_enabled() or not model.training:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **named
            )
        masks = attention_mask.bool().split(batch_size or len(input_ids))
        if self._given is not None:
            given = self._lay_out(attention_mask.bool()).split(len(masks[0]))
            self._plan([ids[self._fed(mask).cpu()] for ids, mask in zip(given, masks, strict=True)])
        parts, routes = [], []
        for index, (ids, mask) in enumerate(zip(input_ids.split(len(masks[0])), masks, strict=True)):
            positions = positions_of(self._fed(mask))
            step = self.session.live_micro_step(positions=positions)
            if self._given is not None:
                step = self.session.micro_step(index, positions=positions)
            with step, recorded_routes(self.model, mask.shape) as found:
                parts.append(
                    super()._get_per_token_logps_and_entropies(model, ids, mask.long(), logits_to_keep, **named)
                )
            routes += found
        self._recorded, self._recorded_at = torch.cat(routes), self.state.global_step
        logps, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(logps),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )

    def _lay_out(self, mask: torch.Tensor) -> torch.Tensor:
        """The routes of the rollout as `[B, T, L, K]` int32 on the host, -1 where there is none."""
        assert self._given is not None
        given = [torch.as_tensor(ids, dtype=torch.int32) for ids in self._given]
        whole = torch.full((*mask.shape, *given[0].shape[1:]), -1, dtype=torch.int32)
        for row, ids, places in zip(whole, given, mask.cpu(), strict=True):
            places = places.nonzero()[: len(ids), 0]
            row[places] = ids[: len(places)]
        return whole

    def _fed(self, mask: torch.Tensor) -> torch.Tensor:
        """The tokens `[B, T]` bool that experts compute: without padding, and without the last token of each row, whose
        output only the routers' auxiliary loss uses.
        """
        if self.aux_loss_enabled:
            return mask
        return mask & (mask.flip(1).cumsum(1).flip(1) > 1)

    # Micro-steps.

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._step >= self._plan_end:
            self._plan_update()
        return inputs

    def _plan_update(self) -> None:
        """Plan the micro-steps that are known and precede the next optimizer step."""
        batches = self._buffered_inputs
        generation = len(batches) * self.num_iterations
        count = min(self.current_gradient_accumulation_steps - self._accumulated, generation - self._step % generation)
        rows = []
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for step in range(self._step, self._step + count):
                batch = batches[step % len(batches)]
                fed = self._fed(mask_of(batch))
                rows.append(self._routes(batch, fed)[fed.cpu()])
        self._plan(rows)
        self._plan_start, self._plan_end = self._step, self._step + count

    def _routes(self, batch: dict[str, torch.Tensor], fed: torch.Tensor) -> torch.Tensor:
        """Routes `[B, T, L, K]` of a batch, on the host: the known ones, or those of a forward."""
        if "routed_experts" in batch:
            return batch["routed_experts"]
        if "recorded_experts" in batch and self._recorded_at == self.state.global_step:
            return batch["recorded_experts"]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        step = self.session.live_micro_step(positions=positions_of(fed))
        # Of the whole model: FSDP2 has the last norm with the head.
        with self.accelerator.autocast(), step, recorded_routes(self.model, fed.shape) as found:
            self.model(input_ids=ids, attention_mask=mask_of(batch).long(), use_cache=False, logits_to_keep=1)
        return found[0]

    def _plan(self, rows: Sequence[torch.Tensor]) -> None:
        report = self.session.plan_micro_steps([ids.numpy() for ids in rows])
        self.report = report
        for name in ("max_vio_before", "max_vio_after", "replicas", "planning_s"):
            self._metrics["train"][f"trimtab/{name}"].append(float(getattr(report, name)))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        index = self._step - self._plan_start
        with self.session.micro_step(index, positions=positions_of(self._fed(mask_of(inputs)))):
            return super()._compute_loss(model, inputs)

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        self._accumulated += 1
        if self.accelerator.sync_gradients:
            self._accumulated = 0
            self.session.finish_gradients()
        return loss

    # Weights for vLLM, and checkpoints.

    def _iter_whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Replaces `VLLMGeneration._iter_named_params`. All ranks iterate."""
        for name, parameter in self.model.named_parameters():
            whole = parameter.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            yield self.vllm_generation._fix_param_name_to_vllm(name), whole

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        weights, state = get_state_dict(self.model, self.optimizer.optimizer)
        state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=Path(output_dir, SHARDS))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, SHARDS).is_dir():
            return
        weights, state = get_state_dict(self.model, self.optimizer.optimizer)
        state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=Path(checkpoint, SHARDS))
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, optim_state_dict=state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not Path(resume_from_checkpoint, SHARDS).is_dir():
            raise InputError(f"{resume_from_checkpoint}: has no {SHARDS}; save_only_model=True leaves it out")
        weights = self.model.state_dict()
        state_dict_loader.load({"model": weights}, checkpoint_id=Path(resume_from_checkpoint, SHARDS))
        set_model_state_dict(self.model, weights)
        self.session.weights_changed()

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)
