"""Waterfill of SGLang: the shared experts of a token are computed on a rank with little load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trimtab.policies.policy import Traits
from trimtab.policies.static import Scheduled


@dataclass(frozen=True)
class Waterfill(Scheduled):
    """DeepEP Waterfill of SGLang (pull request 19290, `layers/moe/deepep_waterfill.py`). Homes are those of `static`.

    Published: every rank holds the shared expert, and every token has one more row for it. In every layer all ranks
    add up the routed rows of each rank; a rank's load is these and its own tokens. The rank of a token's shared row is
    drawn among the ranks of its routed experts and its own, in proportion to how far each one's load is below the mean
    load with shared rows; ranks other than its own count 10/11. If no load is above this mean, all ranks are
    candidates. A rank with less than 64 tokens keeps their shared rows. With loads that EPLB has recorded, all ranks
    are candidates, and counts are not added up.

    Our choices favour it where the two differ: ranks are filled to the lowest possible level of seconds
    (`fill_shared_rows`), for any number of tokens. Only ranks that a token goes to are candidates, as others need a
    transfer. Counts don't tell how many tokens a source's rows on a rank belong to, so the most possible are taken.
    Moved rows cost no transfer if the dispatcher sends tokens. Adding up counts is not charged; no time is published.

    Not specified: training, since SGLang serves. Backward takes as long as that of experts. A shared row takes as long
    as in the dense parts, and all of a rank have the fixed time and the tiles of a copy of an expert. Also not
    specified is a dispatcher that sends rows, where a moved row is one more. Feed-forward parts beside the experts that
    are not called shared experts (LongCat) are treated as such. Without shared experts it is `scheduled`.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="nothing", transfers_start="never", copies="none", moves_shared_rows=True
    )
