"""PPO and T-PPO: advantages from a value model, and windows of responses that are generated over several steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModel

from recipes.rl.batches import Loss, MicroBatch, Outputs, TrainedTokens, is_clipped, of_tokens, policy_loss
from recipes.rl.responses import Response, gather, generate, until_end
from recipes.rl.task import Problem, draw_problem
from trimtab.integrations.transformers import distribute_experts, moe_blocks, num_experts, record_routing
from trimtab.runtime import Session
from trimtab.runtime.gradients import sum_gradients
from trimtab.trace import id_dtype

GAE_LAMBDA = 0.95
MAX_NORM = 1.0
# A value that moves further in a step than this has no gradient.
VALUE_CLIP = 0.2
HEAD_LEARNING_RATE, TRUNK_LEARNING_RATE = 1e-3, 1e-4
# Ages of tokens with metrics of their own: sampled in this step, in the step before, earlier.
AGES = ("0", "1", "2_or_more")


def generalized_advantages(
    values_BT: torch.Tensor, rewards_B: torch.Tensor, mask_BT: torch.Tensor, gae_lambda: float
) -> torch.Tensor:
    """GAE (arXiv 1506.02438) of finished responses, `[B, T]`; 0 outside of the mask.

    The state before token t of a response of l tokens is s_t. Only the last token has a reward, R, and there is no
    discount, so that

        A_t = sum over k >= t of lambda^(k - t) * delta_k
        delta_k = V(s_{k+1}) - V(s_k) for k < l - 1, and delta_{l-1} = R - V(s_{l-1}).

    With lambda 1 this is R - V(s_t).

    Args:
        values_BT: value of the state before each target.
        rewards_B: of the responses.
        mask_BT: 1 for targets that belong to the response, which are contiguous.
        gae_lambda: weight of a later difference, from 0 to 1.
    """
    advantages_BT = torch.zeros_like(values_BT)
    following_B, advantage_B = rewards_B.to(values_BT.dtype), torch.zeros_like(values_BT[:, 0])
    for at in reversed(range(values_BT.shape[1])):
        inside_B, value_B = mask_BT[:, at] > 0, values_BT[:, at]
        advantage_B = torch.where(inside_B, following_B - value_B + gae_lambda * advantage_B, 0.0)
        following_B = torch.where(inside_B, value_B, following_B)
        advantages_BT[:, at] = advantage_B
    return advantages_BT


def extended_advantages(
    values_BT: torch.Tensor, rewards_B: torch.Tensor, finished_B: torch.Tensor, mask_BT: torch.Tensor, gae_lambda: float
) -> torch.Tensor:
    """GAE of responses that may be incomplete, `[B, T]`; 0 outside of the mask. Equal to GAE on finished responses.

    The purpose is that of EGAE (arXiv 2506.15050); the derivation is ours. A response that is truncated after l tokens
    has no reward. The expected reward from there on is V(s_l) by definition, so V(s_l) takes the place of R in
    `generalized_advantages`, and no reward is invented:

        delta_k = V(s_{k+1}) - V(s_k) for all k < l.

    The last token was sampled, but not fed, so the value of s_l is not known. No reward can come between s_{l-1} and
    s_l, so the expectation of V(s_l) given s_{l-1} is V(s_{l-1}), which takes its place. Then delta_{l-1} is 0: the
    last token has no advantage yet, and the advantages of the tokens before it are

        A_t = sum over t <= k < l - 1 of lambda^(k - t) * (V(s_{k+1}) - V(s_k)).

    With lambda 1 this is V(s_{l-1}) - V(s_t).

    Args:
        finished_B: bool; the rewards of other responses are not read.
        values_BT, rewards_B, mask_BT, gae_lambda: as for `generalized_advantages`.
    """
    width = mask_BT.shape[1]
    last_B = (mask_BT * torch.arange(1, width + 1, device=mask_BT.device)).argmax(dim=1)
    at_truncation_B = values_BT.gather(1, last_B[:, None]).squeeze(1)
    final_B = torch.where(finished_B, rewards_B.to(values_BT.dtype), at_truncation_B)
    return generalized_advantages(values_BT, final_B, mask_BT, gae_lambda)


def clipped_value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """Half the squared error of every value, `[B, T]`: the larger of those of the value and of the clipped value.

    Args:
        values: `[B, T]`, now.
        old_values: `[B, T]`, before the step. The clipped value differs from it by at most `VALUE_CLIP`.
        returns: `[B, T]`, targets.
    """
    clipped = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


class ValueHead:
    """A small dense network on the policy's last hidden states, which get no gradient from it.

    Policy and value model are thus updated independently. All ranks have the same parameters; the first values are 0.

    Args:
        session: of the policy, whose experts it has none of.
    """

    def __init__(self, hidden_size: int, seed: int, session: Session, device: torch.device) -> None:
        # Ranks may have drawn different numbers before.
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.SiLU(), _zero_head(hidden_size))
        self._own(network.to(device), session, HEAD_LEARNING_RATE)

    def _own(self, network: Any, session: Session, learning_rate: float) -> None:
        self.network, self.session = network, session
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def start_from(self, policy: Mapping[str, torch.Tensor]) -> None:
        """Nothing: it begins at 0."""

    def values(self, batch: MicroBatch, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Value `[B, T]` of the state after each fed token, from the hidden states alone."""
        values: torch.Tensor = self.network(hidden.detach().float()).squeeze(-1)
        return values

    def finish_gradients(self) -> None:
        """Sum the gradients over all ranks."""
        sum_gradients(self.network.parameters())

    def clip_gradients(self) -> None:
        """Clip the gradients by their norm."""
        nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)

    def step(self) -> None:
        """Clip the gradients, run an optimizer step, and zero them."""
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def state(self) -> dict[str, Any]:
        """For checkpoints, with the experts of all ranks; on ranks other than 0 it is empty. Collective."""
        whole = self.session.whole
        optimizer = dict(whole.optimizer_state(self.network, self.optimizer))
        return {"weights": dict(whole.weights(self.network)), "optimizer": optimizer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, of a run with any number of ranks."""
        self.session.whole.load_weights(self.network, state["weights"])
        self.session.whole.load_optimizer_state(self.network, self.optimizer, state["optimizer"])

    def close(self) -> None:
        """Nothing to release."""


class ValueTrunk(ValueHead):
    """A decoder like the policy's, with a linear head, and experts of its own that are spread over all ranks.

    No rollout records its routing, so its session is in mode `live`. It begins with the policy's weights; the first
    values are 0.
    """

    def __init__(self, model_config: Any, session: Session, device: torch.device) -> None:
        trunk = AutoModel.from_config(model_config, dtype=torch.float32).to(device)
        distribute_experts(trunk, session)
        head = _zero_head(model_config.hidden_size).to(device)
        self._own(nn.ModuleDict({"trunk": trunk, "head": head}).train(), session, TRUNK_LEARNING_RATE)
        self.replicated = session.replicated_parameters(self.network)

    def start_from(self, policy: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the policy's decoder, with all experts."""
        prefix = f"{self.network['trunk'].base_model_prefix}."
        trunk = {f"trunk.{name.removeprefix(prefix)}": policy[name] for name in policy if name.startswith(prefix)}
        head = {f"head.{name}": value for name, value in self.network["head"].state_dict().items()}
        self.session.whole.load_weights(self.network, trunk | head)

    def values(self, batch: MicroBatch, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Value `[B, T]` of the state after each fed token, from the tokens alone.

        Responses without a wanted value are not fed; their values are 0. A rank that has no other feeds one token of
        padding, so that it runs every layer.
        """
        width, is_fed = batch.input_ids.shape[1], wanted.any(dim=1)
        sequence_n, column_n = batch.positions // width, batch.positions % width
        fed_n, rows = is_fed[sequence_n], is_fed.nonzero()[:, 0]
        fed_width = int(column_n[fed_n].max()) + 1 if len(rows) else 1
        rows = rows if len(rows) else rows.new_zeros(1)
        positions = ((is_fed.cumsum(0) - 1)[sequence_n] * fed_width + column_n)[fed_n]
        with self.session.live_micro_step(positions=positions):
            own = self.network["trunk"](input_ids=batch.input_ids[rows, :fed_width], use_cache=False).last_hidden_state
        values = self.network["head"](own).squeeze(-1) * is_fed[rows, None]
        places = rows[:, None], torch.arange(fed_width, device=values.device)
        return values.new_zeros(wanted.shape).index_put(places, values)

    def finish_gradients(self) -> None:
        """Complete the gradients over all ranks."""
        self.session.finish_gradients(self.replicated)

    def clip_gradients(self) -> None:
        """Clip the gradients by the norm of all ranks' parameters."""
        self.session.clip_gradients(self.replicated, MAX_NORM)

    def metrics(self) -> dict[str, float]:
        """Replicas, and loads of ranks without and with them, in recompute and update."""
        taken = self.session.take_metrics()
        return {f"value/{name}": taken[f"live/{name}"] for name in ("replicas", "max_vio_before", "max_vio_after")}

    def close(self) -> None:
        """Release threads and shared memory of its session."""
        self.session.close()


def _zero_head(hidden_size: int) -> nn.Linear:
    head = nn.Linear(hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class PPO:
    """Proximal policy optimization (arXiv 1707.06347) with a value model; `GRPO` has the same methods.

    With windows it is truncated PPO (T-PPO, arXiv 2506.15050), our reimplementation. The policy is trained on tokens of
    this step's window, apart from the last token of an incomplete response, which is trained in the next step. The
    value model is trained on finished responses, with their reward as return.
    """

    def __init__(self, value_model: ValueHead | ValueTrunk, windows: Windows | None = None) -> None:
        self.value_model, self.windows = value_model, windows
        self.title = "PPO" if windows is None else "T-PPO"

    def trained(self, responses: Sequence[Response]) -> list[Response]:
        """Responses with a token for the policy or the value model."""
        return [response for response in responses if response.policy_tokens or response.value_tokens]

    def with_targets(self, batch: MicroBatch, outputs: Outputs) -> MicroBatch:
        """The micro-batch with advantages, and with values and returns as targets of the value model.

        A return of PPO is the value plus the advantage, thus a mean of later values and the reward.
        """
        values = self.value_model.values(batch, outputs.hidden, batch.response_mask)
        advantages = extended_advantages(values, batch.rewards, batch.finished, batch.response_mask, GAE_LAMBDA)
        returns = values + advantages if self.windows is None else batch.rewards[:, None].expand_as(values)
        return replace(batch, advantages=advantages, old_values=values, returns=returns)

    def loss(self, batch: MicroBatch, outputs: Outputs, old: torch.Tensor, tokens: TrainedTokens) -> Loss:
        """The clipped losses of policy and value model, each the mean over its own tokens. No parameter is in both.

        The ratio of a token is relative to the version of the policy that sampled it: the recompute for tokens of this
        step, the recorded log-probability for older ones. Figures by age in steps say how far the policy before the
        step is from the version that sampled the tokens; an age without tokens has the figure 0.
        """
        assert batch.old_values is not None
        assert batch.returns is not None
        version_log_probs = torch.where(batch.ages == 0, old, batch.rollout_log_probs)
        policy, figures = policy_loss(outputs.log_probs - version_log_probs, batch, tokens)
        value_mask = batch.response_mask * batch.finished[:, None]
        values = self.value_model.values(batch, outputs.hidden, value_mask)
        value = clipped_value_loss(values, batch.old_values, batch.returns) * value_mask
        figures |= {"value/loss": of_tokens(value, value_mask), "value/mean": of_tokens(values, value_mask)}
        drift = (old - batch.rollout_log_probs) * batch.response_mask
        # An unbiased estimate of the divergence that is never negative.
        divergence = drift.exp() - 1 - drift
        for age, name in enumerate(AGES):
            mask = batch.response_mask * (batch.ages.clamp(max=len(AGES) - 1) == age)
            figures[f"ppo/clip_fraction_age_{name}"] = of_tokens(is_clipped(drift), mask)
            figures[f"ppo/kl_age_{name}"] = of_tokens(divergence, mask)
        return policy + value.sum() / max(1, tokens.value), figures


class Windows:
    """A batch of fixed size on one rank, whose places are taken by new prompts when responses end.

    A response stays in the batch with its tokens, log-probabilities and routing. The next step feeds all of its tokens
    again, with the weights of that step, to rebuild the cache. Its recorded rows don't change: the rows of a window are
    those of the tokens that were fed in it for the first time.

    Args:
        places: responses that are generated together.
        window: most new tokens of a response in a step.
        max_new_tokens: most tokens of a response. One that reaches them has ended.
        seed: of the run.
        operation: of the problems.
    """

    FIELDS: ClassVar = ("token_ids", "expert_ids", "log_probs", "row_versions")

    def __init__(self, places: int, *, window: int, max_new_tokens: int, seed: int, operation: str) -> None:
        self.places, self.window, self.max_new_tokens, self.seed = places, window, max_new_tokens, seed
        self.operation = operation
        self.open: list[tuple[Problem, Response]] = []

    def advance(self, model: Any, tokenizer: Any, step: int) -> list[Response]:
        """Generate a window of all responses. Returns those of all places, incomplete ones too.

        Args:
            step: index of the RL step, which is the version of the weights.
        """
        rng = random.Random(f"windows {self.seed} {step} {dist.get_rank()}")
        batch = [*self.open]
        while len(batch) < self.places:
            problem = draw_problem(rng, held_out=False, operation=self.operation)
            batch.append((problem, _unstarted(problem, model, tokenizer)))
        known = [response.token_ids.tolist() for _, response in batch]
        padded = tokenizer.pad({"input_ids": known}, padding_side="left", return_tensors="pt")
        prompts = {name: padded[name].to(model.device) for name in ("input_ids", "attention_mask")}
        width = prompts["input_ids"].shape[1]
        draws = np.random.default_rng((self.seed, step, dist.get_rank())).random((len(batch), self.window))
        with record_routing(model) as record:
            tokens, log_probs = generate(model, tokenizer, prompts, self.window, draws)
        routing = record.trace(tokens, prompts["attention_mask"], eos_token_id=tokenizer.eos_token_id)
        grown = []
        for row, (problem, before) in enumerate(batch):
            assert before.row_versions is not None
            room = min(self.window, self.max_new_tokens - before.length)
            new = until_end(tokens[row, width : width + room], tokenizer.eos_token_id)
            text, old = np.concatenate([before.token_ids, new]), len(before.expert_ids)
            rows = routing.sequence(row)[: len(text) - 1]
            is_finished = text[-1] == tokenizer.eos_token_id or len(text) - before.prompt_length == self.max_new_tokens
            response = Response(
                token_ids=text,
                prompt_length=before.prompt_length,
                expert_ids=np.concatenate([before.expert_ids, rows[old:]]),
                log_probs=np.append(before.log_probs, log_probs[row, : len(new)]),
                reward=problem.reward(tokenizer.decode(text[before.prompt_length :])) if is_finished else 0.0,
                is_finished=bool(is_finished),
                known_tokens=before.length,
                row_versions=np.append(before.row_versions, np.full(len(rows) - old, step, np.int32)),
            )
            grown.append((problem, response))
        self.open = [(problem, response) for problem, response in grown if not response.is_finished]
        return [response for _, response in grown]

    def state(self) -> list[Any]:
        """Open responses of each rank. Collective."""
        mine = [
            {"terms": problem.terms, "prompt_length": response.prompt_length}
            | {name: torch.from_numpy(np.ascontiguousarray(getattr(response, name))) for name in self.FIELDS}
            for problem, response in self.open
        ]
        return gather(mine)

    def load_state(self, of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Continue with the responses of this rank. With another number of ranks, responses are dealt out in turn."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        dealt = [response for part in of_ranks for response in part][rank::num_ranks]
        mine = of_ranks[rank] if len(of_ranks) == num_ranks else dealt
        self.open = []
        for stored in mine:
            arrays: Any = {name: stored[name].numpy() for name in self.FIELDS}
            response = Response(prompt_length=stored["prompt_length"], is_finished=False, **arrays)
            self.open.append((Problem(tuple(stored["terms"]), self.operation), response))


def _unstarted(problem: Problem, model: Any, tokenizer: Any) -> Response:
    """A prompt without a response, and without rows."""
    prompt = np.array(tokenizer(problem.prompt)["input_ids"], np.int64)
    shape = 0, len(moe_blocks(model)), model.config.num_experts_per_tok
    no_rows = np.empty(shape, id_dtype(num_experts(model.config)))
    return Response(prompt, len(prompt), no_rows, np.empty(0, np.float32), row_versions=np.empty(0, np.int32))
