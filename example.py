"""Plan a synthetic RL step for 16 ranks and print its balance: `python example.py`. It needs no GPU and no torch."""

import trimtab
from trimtab.trace import PRESETS, synthesize_preset


def main() -> None:
    # Expert ids of every token in every MoE layer, as a rollout records them. With routing of your own, pass its path:
    # trimtab.plan("routing/step-00000.parquet", trimtab.Run(ranks=16)).
    trace = synthesize_preset(
        PRESETS["qwen3-30b-math"],
        num_sequences=256,
        mean_length=512,
        max_length=2048,
        num_layers=4,
        num_experts=128,
        top_k=8,
    )
    print(trimtab.analyze(trace, trimtab.Run(ranks=16, token_budget=2048)), end="\n\n")

    # Which replicas of which experts every rank holds in every micro-step, and which tokens they compute.
    result = trimtab.plan(trace, trimtab.Run(ranks=16, ranks_per_node=8, token_budget=2048))
    print(result, end="\n\n")

    # An instance (one layer of one micro-step) lasts as long as its busiest rank: 1.00 is perfect balance.
    print("busiest rank over the mean rank, mean over micro-steps")
    print("layer  static  planned")
    before_MLR, after_MLR = result.loads_before_MLR, result.loads_after_MLR
    before_L = (before_MLR.max(axis=-1) / before_MLR.mean(axis=-1)).mean(axis=0)
    after_L = (after_MLR.max(axis=-1) / after_MLR.mean(axis=-1)).mean(axis=0)
    for layer, before, after in zip(trace.layer_indices, before_L, after_L, strict=True):
        print(f"{layer:5}  {before:6.2f}  {after:7.2f}")


if __name__ == "__main__":
    main()
