"""A sizing of the rollout: sentences, tables, and settings of engines."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trimtab.figures import plural
from trimtab.report.number_text import NONE, bytes_text, seconds
from trimtab.report.tables import Row, TableData
from trimtab.sizing.deployments import Deployment

# Part of the throughput from which separate ranks are advised, as for strategies of `advise`.
LEAST_GAIN = 0.03
# Micro-batches of afd-plugin's and vLLM's dual batch overlap (its README at commit 2e4378f2).
AFD_MICRO_BATCHES = 2


def ranks_text(found: Deployment) -> str:
    """Numbers of ranks and how they work, in a few words."""
    ranks = (
        f"{plural(found.attention_ranks, 'rank')} of {found.cluster}"
        if found.colocated
        else f"{found.attention_ranks} attention ranks ({found.cluster}) and {found.expert_ranks} expert ranks "
        f"({found.expert_cluster})"
    )
    copies = f", {found.copies} copies of hot experts a rank" if found.copies else ""
    micro_batches = f"{found.micro_batches} micro-batch{'es' if found.micro_batches > 1 else ''}"
    return f"{ranks}, attention TP {found.tp}, {micro_batches}, {plural(found.batch, 'sequence')} a rank{copies}"


def rollout_answer(colocated: Deployment | None, separate: Deployment | None) -> str:
    """Whether separate ranks pay, and which side of them waits; one of the deployments exists."""
    if separate is None:
        assert colocated is not None
        return f"Colocate: attention and experts on different ranks don't fit. {ranks_text(colocated)}."
    waiting = (
        f"attention ranks wait {separate.attention_idle:.0%} of the time and expert ranks {separate.expert_idle:.0%}"
    )
    if separate.micro_batches < separate.least_micro_batches:
        waiting += f"; {separate.least_micro_batches:.1f} micro-batches would keep the busier side from waiting"
    if separate.attention_ranks == separate.expert_ranks and separate.attention_idle > separate.expert_idle:
        waiting += "; fewer attention ranks than expert ranks would wait less, but afd-plugin does not connect them"
    if colocated is None:
        return f"Disaggregate: {ranks_text(separate)}; colocated ranks don't fit; {waiting}."
    gain = separate.worth / colocated.worth
    per = "per unit of money" if separate.tokens_per_money else "per GPU"
    if gain < 1 + LEAST_GAIN:
        compared = f"the best has {gain:.2f} times the tokens {per} of colocated ranks"
        return f"Colocate: disaggregation does not pay, {compared}. {ranks_text(colocated)}. If separate, {waiting}."
    return f"Disaggregate: {ranks_text(separate)}: {gain:.2f} times the tokens {per} of colocated ranks; {waiting}."


def rollout_tables(found: Sequence[Deployment]) -> list[TableData]:
    """Sizes and figures of deployments, with and without copies."""
    names = [
        ("colocated" if each.colocated else "separate") + (", copies" if each.copies else "") for each in found
    ]  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            str(each.attention_ranks), NONE if each.colocated else str(each.expert_ranks), str(each.tp),
            str(each.micro_batches), str(each.batch), f"{each.tokens_per_s_per_gpu:,.0f}", seconds(each.token_s),
        )
        for each in found
    ]  # fmt: skip
    times: list[tuple[str, ...]] = [
        (
            seconds(each.attention_s), seconds(each.expert_s), seconds(each.exchange_s), f"{each.max_over_mean:.2f}",
            NONE if each.colocated else f"{each.least_micro_batches:.2f}",
            f"{each.attention_idle:.0%} / {each.expert_idle:.0%}",
        )
        for each in found
    ]  # fmt: skip
    memory: list[tuple[str, ...]] = [
        (
            NONE if each.tokens_per_money is None else f"{each.tokens_per_money:,.0f}",
            bytes_text(each.attention_bytes), bytes_text(each.expert_bytes),
        )
        for each in found
    ]  # fmt: skip
    return [
        TableData(title, ("", *columns), tuple(map(Row, names, cells)))
        for title, columns, cells in (
            ("Best deployments", ("attention", "experts", "TP", "micro", "batch", "tokens/s/GPU", "token"), rows),
            ("A layer's micro-batch", ("attention", "experts", "exchange", "max/mean", "needed", "wait"), times),
            ("Money and memory", ("tokens/money", "attention rank", "expert rank"), memory),
        )
    ]


def engine_settings(found: Deployment | None, model: str, ranks_per_node: int) -> list[str]:
    """Commands of vLLM's afd-plugin, and of SGLang where each side is one node; none without separate ranks."""
    if found is None:
        return []
    sides = {"attention": (found.attention_ranks, found.tp), "ffn": (found.expert_ranks, 1)}
    lines = ["# vLLM with afd-plugin (it runs DeepSeek models only), two micro-batches, one command a side:"]
    if found.micro_batches != AFD_MICRO_BATCHES:
        lines.append(f"# it runs 2, this deployment has {found.micro_batches}: --micro-batches 2 sizes for it")
    for role, (ranks, tp) in sides.items():
        config = {
            "role": role, "connector": "P2pNcclAFDConnector", "host": "FFN_HOST", "port": 6239,
            "num_attention_ranks": found.attention_ranks, "num_ffn_ranks": found.expert_ranks,
        }  # fmt: skip
        lines.append(
            f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve {model} --data-parallel-size {ranks // tp} "
            f"--tensor-parallel-size {tp} --enable-expert-parallel --enable-dbo "
            f"--max-num-seqs {found.batch * found.tp} --additional-config '{json.dumps({'afd': config})}'"
        )
    if max(found.attention_ranks, found.expert_ranks) <= ranks_per_node:
        lines.append("# SGLang (it runs Qwen3-MoE only; pull request 36258, in no release yet), one node a side:")
        for role, (ranks, tp) in (("attn", sides["attention"]), ("ffn", sides["ffn"])):
            data = f" --dp-size {ranks // tp} --enable-dp-attention" if ranks > tp and role == "attn" else ""
            lines.append(
                f"python -m sglang.launch_server --model-path {model} --tp-size {ranks}{data} --afd-role {role} "
                "--afd-transfer-backend stepmesh --afd-ffn-addr FFN_HOST:6239"
            )
    return lines
