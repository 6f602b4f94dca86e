"""Record the experts that a model's routers choose while it runs.

Ids stay on their device in a narrow dtype and are copied to the host in blocks, so no layer waits for the device. The
ids of a sequence are found by the token ids that were fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from transformers import Cache

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.transformers.families import decoder_of, moe_blocks, num_experts, top_k
from trimtab.integrations.transformers.passes import Call, Pass, fetch_calls
from trimtab.trace import RoutingTrace, hash_tokens, id_dtype

# Ids kept on a device before they are copied: those of 170,000 tokens in 48 layers with top-8.
BLOCK_BYTES = 64 << 20


class RoutingRecord:
    """The experts that a model's routers chose while it ran. Made by `record_routing`.

    Until `clear` it grows by `layers * top_k` bytes per fed token, twice that from 256 experts on.
    """

    def __init__(self, model: Any) -> None:
        self._layers = list(moe_blocks(model))
        self._top_k: int = top_k(model.config)
        self._num_experts = num_experts(model.config)
        self._model: str = model.config.model_type
        self._dtype = id_dtype(self._num_experts)
        self._narrow = torch.uint8 if self._dtype.itemsize == 1 else torch.int16  # torch does little with uint16
        self._caches: WeakKeyDictionary[Cache, int] = WeakKeyDictionary()
        self._numbers = count()
        self._begun: tuple[Any, int | torch.Tensor] | None = None
        self._ids_L: list[torch.Tensor | None] = []
        self.clear()

    def clear(self) -> None:
        """Delete all that was recorded so far, such as the rollout of a finished step."""
        self._calls: list[Call] = []
        self._waiting_bytes = 0
        self._passes: list[Pass] = []
        self._pass_of_cache: dict[int, Pass] = {}

    def trace(
        self,
        tokens: Any,
        attention_mask: Any,
        *,
        prompt_lengths: Any = None,
        eos_token_id: int | Sequence[int] | None = None,
        step: int = 0,
    ) -> RoutingTrace:
        """The routing of sequences, without padding. Their last tokens have no row, fed or not.

        Sequences are found by their tokens, latest forwards first. They may therefore be reordered or selected.

        Args:
            tokens: `[S, n]` integers, as returned by `generate` or fed to a forward.
            attention_mask: `[S, P]`, of the prompts given to `generate`: left padding is removed, and all tokens from
                column P on are the response. With P = n it covers the whole sequences.
            prompt_lengths: `[S]` tokens of the prompts; by default all that the mask covers.
            eos_token_id: last token of a response, or several such tokens; padding generated after it is removed.
            step: the RL step.

        Raises:
            InputError: if a sequence was not recorded, or mask and tokens don't match.
        """
        tokens_SN = _host(tokens)
        starts_S, ends_S, covered_S = _bounds(tokens_SN, _host(attention_mask), eos_token_id)
        prompts_S = covered_S if prompt_lengths is None else _host(prompt_lengths)
        return RoutingTrace.from_sequences(
            [ids[start:] for ids, start in zip(self._find(tokens_SN, ends_S - 1), starts_S, strict=True)],
            num_experts=self._num_experts,
            shape=(len(self._layers), self._top_k),
            layer_indices=self._layers,
            prompt_lengths=np.minimum(prompts_S, ends_S - 1 - starts_S),
            steps=step,
            sequence_hashes=[
                hash_tokens(row[start:end]) for row, start, end in zip(tokens_SN, starts_S, ends_S, strict=True)
            ],
            model=self._model,
        )

    def expert_ids(self, tokens: Any) -> Array:
        """Ids `[S, n - 1, L, K]` of all tokens but the last of each row of `tokens [S, n]`, with those of padding.

        Raises:
            InputError: if a row was not recorded.
        """
        tokens_SN = _host(tokens)
        return np.stack(self._find(tokens_SN, np.full(len(tokens_SN), tokens_SN.shape[1] - 1)))

    def _find(self, tokens_SN: Array, fed_S: Array) -> list[Array]:
        """Ids `[fed, L, K]` of each row's first tokens, as views."""
        self._join()
        found = []
        for row, fed in enumerate(fed_S):
            wanted = tokens_SN[row, :fed]
            ids = next((ids for each in reversed(self._passes) if (ids := each.find(wanted, row)) is not None), None)
            if ids is None:
                problems = ", ".join(sorted({each.problem for each in self._passes} - {""}))
                raise InputError(
                    f"sequence {row} was not recorded: no forward was fed its {fed} tokens"
                    + (f"; rows of some forwards can't be identified: {problems}" if problems else "")
                    + ". Give tokens as `generate` returned them"
                )
            found.append(ids)
        return found

    def _join(self) -> None:
        """Copy waiting calls to the host, and append each to the rows of its cache."""
        fetch_calls(self._calls, self._dtype)
        for call in self._calls:
            grown = None if call.cache is None else self._pass_of_cache.get(call.cache)
            if grown is None or (call.past == 0 and not call.problem):
                grown = Pass()
                self._passes.append(grown)
                if call.cache is not None:
                    self._pass_of_cache[call.cache] = grown
            grown.feed(call)
        self._calls.clear()
        self._waiting_bytes = 0

    # Hooks.

    def begin(self, _decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook before the decoder runs. Experts that run outside of it are recomputation, which is recorded already."""
        cache = _cache_in(kwargs)
        past = 0 if cache is None else cache.get_seq_length()
        # A static cache updates its length in place, on its device.
        past = past.clone() if isinstance(past, torch.Tensor) else past
        self._begun = (kwargs.get("input_ids", args[0] if args else None), past)
        self._ids_L = [None] * len(self._layers)

    def add_ids(self, layer: int, _experts: nn.Module, args: Any) -> None:
        """Hook before a layer's experts run with `(hidden, ids [N, K], weights)`."""
        if self._begun is not None:
            self._ids_L[layer] = args[1]

    def end(self, _decoder: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Hook after the decoder has run. The output is None if it failed."""
        if self._begun is None or output is None:
            self._begun = None
            return
        (tokens, past), self._begun = self._begun, None
        cache = getattr(output, "cache", None)
        cache = _cache_in(kwargs) if cache is None else cache
        number = None
        if cache is not None:
            number = self._caches.get(cache)
            if number is None:
                number = self._caches[cache] = next(self._numbers)
        ids = [each for each in self._ids_L if each is not None]
        self._ids_L = []
        call = Call(number, past)
        if tokens is None:
            call.problem = "the model was fed embeddings instead of token ids"
        elif len(ids) < len(self._layers):
            call.problem = f"only {len(ids)} of {len(self._layers)} MoE layers ran"
        elif len(ids[0]) != tokens.numel():
            call.problem = f"experts were given {len(ids[0])} rows for {tokens.numel()} tokens"
        else:
            call.tokens_BT = tokens.to(torch.int32, copy=True)
            call.ids_LNK = torch.stack([each.to(ids[0].device) for each in ids]).to(self._narrow)
            self._waiting_bytes += call.ids_LNK.nbytes
        self._calls.append(call)
        if self._waiting_bytes >= BLOCK_BYTES:
            self._join()

    def mark_reordered(self, cache: Cache) -> None:
        """Mark a cache whose rows are being reordered."""
        number = self._caches.get(cache)
        if number is not None:
            self._calls.append(Call(number, problem="beam search reorders the rows of its cache"))


@contextmanager
def record_routing(model: Any) -> Iterator[RoutingRecord]:
    """Record the routing of a model during `generate` or forward calls, until the context ends.

    The recorded ids are those that experts receive: under `replay_routing` and in a session the replayed ids. A forward
    that gradient checkpointing repeats in backward is recorded once. Models under `torch.compile` can't be recorded.

    Raises:
        InputError: if the model's type is not supported.
    """
    record = RoutingRecord(model)
    decoder = decoder_of(model)
    reorder = Cache.reorder_cache

    def marked_reorder(cache: Cache, beam_idx: Any) -> None:
        record.mark_reordered(cache)
        reorder(cache, beam_idx)

    with ExitStack() as stack:
        stack.callback(setattr, Cache, "reorder_cache", reorder)
        Cache.reorder_cache = marked_reorder
        handles = [
            decoder.register_forward_pre_hook(record.begin, with_kwargs=True),
            decoder.register_forward_hook(record.end, with_kwargs=True, always_call=True),
            *(
                block.experts.register_forward_pre_hook(partial(record.add_ids, layer))
                for layer, block in enumerate(moe_blocks(model).values())
            ),
        ]
        for handle in handles:
            stack.callback(handle.remove)
        yield record


def _host(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _bounds(tokens_SN: Array, mask_SP: Array, eos_token_id: Any) -> tuple[Array, Array, Array]:
    """First token of each sequence, end of it, and number of tokens that the mask covers; `[S]` each."""
    mask_SP = mask_SP != 0
    if tokens_SN.ndim != 2 or mask_SP.ndim != 2 or len(mask_SP) != len(tokens_SN):
        raise InputError(
            f"tokens have shape {tokens_SN.shape} and the mask {mask_SP.shape}; they should be [sequences, tokens] and "
            "[sequences, tokens of the prompt]"
        )
    width, covered = mask_SP.shape[1], mask_SP.sum(axis=1)
    starts = mask_SP.argmax(axis=1) if width else covered
    ends = starts + covered
    places = np.arange(width)
    bad = (mask_SP != ((places >= starts[:, None]) & (places < ends[:, None]))).any(axis=1) | (covered == 0)
    if width < tokens_SN.shape[1]:
        bad |= ends != width
    if width > tokens_SN.shape[1] or bad.any():
        where = f"row {int(bad.argmax())} of the mask" if bad.any() else "the mask"
        raise InputError(
            f"{where} does not fit tokens of width {tokens_SN.shape[1]}; it should be that of left-padded prompts, or "
            "as wide as the tokens with ones where the sequence is"
        )
    if width < tokens_SN.shape[1]:
        ended = np.zeros_like(tokens_SN[:, width:], bool)
        if eos_token_id is not None:
            ended = np.isin(tokens_SN[:, width:], eos_token_id)
        ends = np.where(ended.any(axis=1), width + ended.argmax(axis=1) + 1, tokens_SN.shape[1])
    return starts, ends, covered


def _cache_in(arguments: Mapping[str, Any]) -> Any:
    """The key-value cache that a decoder is given, also by the name that transformers had for it before 5.24."""
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache
