"""Published figures of routing skew, each with its source, and the preset that should match it."""

from __future__ import annotations

from dataclasses import dataclass

HALVES = "reported for Qwen3-30B-A3B and GLM-4.7-Flash on maths and code prompts; we know no primary text"
LAER = "LAER-MoE's published loads (PKU-DAIR/Hetu-Galvatron, branch laer-moe, scripts_ae/token_analysis_backup.csv)"
DODOCO = "DODOCO, arXiv 2605.20982"
LLEP = "LLEP, arXiv 2601.17111"
RELIBRA = "ReLibra, arXiv 2605.08639, from a summary"
ULTRAEP = "UltraEP, arXiv 2606.04101"
STABLE = "ForeMoE, arXiv 2606.11867: the load of a step is stable; no figure"
HANDBOOK = "gpu-container handbook, Routing De-risk: Qwen3-30B-A3B, texts of 1,000 and 8,000 tokens"


@dataclass(frozen=True)
class PublishedSkew:
    """One published figure.

    Attributes:
        preset: name of the preset that should match it.
        measure: key of `skew_measures.MEASURES`.
        published: the figure as published.
        low, high: the range in which the preset's figure counts as a match.
        source: where it is published.
        ranks: ranks of the expert-parallel group, for measures of rank loads.
        groups: expert-parallel groups whose ranks are compared.
        tokens_per_rank: tokens of a micro-step, for measures of rank loads.
        matches: False: the preset misses the figure, and the table says so.
    """

    preset: str
    measure: str
    published: str
    low: float
    high: float
    source: str
    ranks: int = 8
    groups: int = 1
    tokens_per_rank: int = 4096
    matches: bool = True


PUBLISHED = (
    PublishedSkew("qwen3-30b-math", "half_mean", "0.53 to 0.56", 0.53, 0.56, HALVES),
    PublishedSkew("qwen3-30b-math", "half_worst", "0.60 to 0.65", 0.60, 0.65, HALVES),
    PublishedSkew("qwen3-30b-math", "rank_mean", "above 2.0", 2.0, 2.5, RELIBRA, ranks=32),
    PublishedSkew("qwen3-30b-math", "sequence_concentration", "0.111 and 0.154", 0.111, 0.154, HANDBOOK),
    PublishedSkew("qwen3-30b-math", "sequence_hottest", "0.043 and 0.063", 0.043, 0.063, HANDBOOK, matches=False),
    PublishedSkew("qwen3-30b-math", "step_correlation", "stable", 0.9, 1.0, STABLE),
    PublishedSkew("qwen3-30b-math", "persistence", "none", 0.8, 0.97, "our assumption"),
    PublishedSkew("qwen3-30b-mixed", "gini", "between 0.150 and 0.24", 0.150, 0.24, DODOCO),
    PublishedSkew("glm-4.7-flash-math", "half_mean", "0.53 to 0.56", 0.53, 0.56, HALVES),
    PublishedSkew("glm-4.7-flash-math", "half_worst", "0.60 to 0.71", 0.60, 0.71, HALVES),
    PublishedSkew("gpt-oss-20b-reasoning", "rank_worst", "2.4 to 2.8", 2.4, 2.8, LLEP),
    PublishedSkew("qwen3.5-35b-text", "gini", "above 0.24", 0.24, 0.29, DODOCO),
    PublishedSkew("qwen3.5-35b-text", "rank_p1", "from 1.30", 1.30, 4.01, ULTRAEP, ranks=64),
    PublishedSkew("qwen3.5-35b-text", "rank_p99", "to 4.01", 1.30, 4.01, ULTRAEP, ranks=64),
    PublishedSkew("nemotron-3-nano-text", "gini", "0.150", 0.135, 0.165, DODOCO),
    PublishedSkew("deepseek-moe-16b-text", "gini", "0.105", 0.095, 0.116, DODOCO),
    PublishedSkew("mixtral-8x7b-text", "rank_mean", "1.66", 1.6, 1.73, LAER, 4, 8, 16384),
    PublishedSkew("mixtral-8x7b-text", "step_correlation", "0.56", 0.5, 0.8, LAER, 4, 8, 16384),
)
