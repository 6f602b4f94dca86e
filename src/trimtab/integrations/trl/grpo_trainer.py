"""`TrimtabGRPOTrainer`: TRL's GRPO trainer, with the experts of its model shared over the ranks and balanced."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trimtab.errors import InputError
from trimtab.integrations.transformers import distribute_experts, num_experts
from trimtab.integrations.trl.batch_routes import check_routes, mask_of, positions_of, recorded_routes
from trimtab.integrations.trl.refused_options import (
    check_arguments,
    check_model,
    check_same_weights,
    check_session_options,
    check_supported,
)
from trimtab.runtime import PlanReport, Session


class TrimtabGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` under DDP, with experts shared over the ranks and every optimizer step planned.

    Losses, gradients, files and pushed weights are those of `GRPOTrainer`. Each rank keeps its rows of every batch;
    replicas and splits of rows are planned, from the routing that is already known:

    * a `rollout_func` may return `routed_experts`, for every completion the ids `[n, L, K]` of its n tokens, prompt
      included, with or without the last one, in the model's L MoE layers. Negative ids are unknown. All forwards of
      these completions in training replay them.
    * else the routing of the forward that TRL makes for the log-probabilities of the old policy, while weights are
      those of that forward;
    * else that of a forward without gradients before the optimizer step.

    Args:
        session_options: options of `Session` other than `num_experts`, for example `{"mode": "shadow"}`.
        arguments: those of `GRPOTrainer`.

    Attributes:
        session: the experts' session.
        report: the last plan; None before the first.

    Raises:
        InputError: naming what is not supported: PEFT, FSDP, DeepSpeed and others; see `refused_options.py`.
    """

    def __init__(self, *arguments: Any, session_options: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._session_options = dict(session_options or {})
        check_session_options(self._session_options)
        self.session: Session | None = None
        self.report: PlanReport | None = None
        self._given: Sequence[Any] | None = None  # routes of the last rollout
        self._recorded: torch.Tensor | None = None  # routes of the last forward for log-probabilities
        self._recorded_at = -1  # optimizer steps before that forward
        self._accumulated = 0  # micro-steps since the last optimizer step
        self._plan_start = self._plan_end = 0  # micro-steps of the plan, as TRL's `_step` counts them
        check_arguments(inspect.signature(GRPOTrainer).bind(*arguments, **named).arguments)
        super().__init__(*arguments, **named)
        if self.session is None:
            self._share(self.model)
        if self.use_vllm:
            self.vllm_generation._iter_named_params = self._iter_whole_parameters

    # Set-up.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        check_supported(self)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        # Before, so that a device only gets the experts of its rank.
        if self.session is None:
            self._share(model)
        super()._move_model_to_device(model, device)

    def _share(self, model: Any) -> None:
        check_model(model, disables_dropout=self.args.disable_dropout)
        if not dist.is_initialized():
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        options = self._session_options
        ranks = dist.get_world_size() // options.get("groups", 1)
        on_node = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        self.session = Session(num_experts=num_experts(model.config), **{"ranks_per_node": on_node, **options})
        check_same_weights(model, self.session.topology.control)
        autocast = torch.bfloat16 if self.args.bf16 and model.dtype is torch.float32 else None
        distribute_experts(model, self.session, compute_dtype=autocast)
        # Ranks whose completions have ended go on, since all ranks run the experts.
        model.generate = partial(model.generate, synced_gpus=True)
        model.save_pretrained = partial(_save_whole, model.save_pretrained)

    def train(self, *arguments: Any, **named: Any) -> Any:
        if self.model_wrapped is self.model:
            # evaluate() before train() prepares the model without DDP, and Accelerate prepares no model twice.
            self.model._is_accelerate_prepared = False
            self.accelerator._models = [model for model in self.accelerator._models if model is not self.model]
        return super().train(*arguments, **named)

    def create_optimizer(self, *arguments: Any) -> Any:
        optimizer = super().create_optimizer(*arguments)
        self._session.register_optimizers(getattr(optimizer, "optimizer", optimizer))
        return optimizer

    @property
    def _session(self) -> Session:
        assert self.session is not None
        return self.session

    def _experts(self) -> list[nn.Parameter]:
        return [parameter for layer in self._session.layers for parameter in layer.parameters]

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
            step = self._session.live_micro_step(positions=positions)
            if self._given is not None:
                step = self._session.micro_step(index, positions=positions)
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
        step = self._session.live_micro_step(positions=positions_of(fed))
        with self.accelerator.autocast(), step, recorded_routes(self.model, fed.shape) as found:
            self.model.base_model(input_ids=ids, attention_mask=mask_of(batch).long(), use_cache=False)
        return found[0]

    def _plan(self, rows: Sequence[torch.Tensor]) -> None:
        report = self._session.plan_micro_steps([ids.numpy() for ids in rows])
        self.report = report
        for name in ("max_vio_before", "max_vio_after", "replicas", "planning_s"):
            self._metrics["train"][f"trimtab/{name}"].append(float(getattr(report, name)))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        index = self._step - self._plan_start
        with self._session.micro_step(index, positions=positions_of(self._fed(mask_of(inputs)))):
            return super()._compute_loss(model, inputs)

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        self._accumulated += 1
        if self.accelerator.sync_gradients:
            self._accumulated = 0
            self._session.finish_gradients()
            for parameter in self._experts():
                if parameter.grad is not None:
                    # DDP takes the mean over ranks, too.
                    parameter.grad /= self.accelerator.num_processes
        return loss

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._clip(float("inf")) if grad_norm is None else grad_norm

    def _clip(self, max_norm: float) -> torch.Tensor:
        norm = self._session.clip_gradients(self._session.replicated_parameters(self.model), max_norm)
        return torch.tensor(norm, dtype=torch.float64)

    # Files and pushed weights, with the experts of all ranks.

    def _iter_whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Replaces `VLLMGeneration._iter_named_params`."""
        names = {name for name, _ in self.model.named_parameters()}
        for name, whole in self._session.whole.weights(self.model, everywhere=True):
            if name in names:
                yield self.vllm_generation._fix_param_name_to_vllm(name), whole

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        whole = dict(self._session.whole.weights(self.model, everywhere=self.args.save_on_each_node))
        super()._save(output_dir, state_dict=whole)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, names = self.optimizer.optimizer, self._names_of_state()
        whole = dict(self._session.whole.optimizer_state(self.model, optimizer))
        packed = optimizer.state_dict()
        packed["state"] = {number: whole[name] for number, name in enumerate(names) if name in whole}
        with self._optimizer_as(SimpleNamespace(state_dict=lambda: packed)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer, names = self.optimizer.optimizer, self._names_of_state()

        def load(packed: dict[str, Any]) -> None:
            state = {names[number]: values for number, values in packed["state"].items()}
            self._session.whole.load_optimizer_state(self.model, optimizer, state)
            for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

        with self._optimizer_as(SimpleNamespace(load_state_dict=load)):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _names_of_state(self) -> list[str]:
        """The parameter of each number in the optimizer's state."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = self.optimizer.optimizer.param_groups
        return [names[id(parameter)] for group in groups for parameter in group["params"]]

    @contextmanager
    def _optimizer_as(self, stand_in: Any) -> Iterator[None]:
        """TRL saves or loads this in place of the optimizer."""
        optimizer = self.optimizer
        self.optimizer: Any = stand_in
        try:
            yield
        finally:
            self.optimizer = optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        dtype = max((parameter.dtype for parameter in self.model.parameters()), key=lambda each: each.itemsize)
        whole: Any = type(self.model).from_pretrained(resume_from_checkpoint, dtype=dtype)
        self._session.whole.load_weights(self.model, whole.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _save_whole(save_pretrained: Any, *arguments: Any, **named: Any) -> Any:
    """Replaces the model's `save_pretrained`, which would write the experts of one rank."""
    if named.get("state_dict") is None:
        raise InputError(
            "model.save_pretrained() and model.push_to_hub() would write this rank's experts only; call "
            "trainer.save_model() or trainer.push_to_hub() on all ranks"
        )
    return save_pretrained(*arguments, **named)
