"""All balancers with one protocol: a `View` of the permitted data in, a `StepPlan` out."""

from trimtab.policies.balanced import Balanced
from trimtab.policies.eplb import Eplb, EplbOracle
from trimtab.policies.fastermoe import FasterMoe
from trimtab.policies.feplb import Feplb
from trimtab.policies.foremoe import ForeMoe
from trimtab.policies.laer import Laer
from trimtab.policies.llep import Llep
from trimtab.policies.lplb import Lplb
from trimtab.policies.policy import Policy, Traits, View, look
from trimtab.policies.relibra import ReLibra
from trimtab.policies.routepack import RoutePack
from trimtab.policies.static import Static
from trimtab.policies.trimtab import Trimtab
from trimtab.policies.ultraep import UltraEp

POLICIES: dict[str, Policy] = {
    "static": Static(),
    "eplb": Eplb(),
    "eplb_oracle": EplbOracle(),
    "lplb": Lplb(),
    "fastermoe": FasterMoe(),
    "llep": Llep(),
    "laer": Laer(),
    "ultraep": UltraEp(),
    "feplb": Feplb(),
    "relibra": ReLibra(),
    "foremoe": ForeMoe(),
    "routepack": RoutePack(),
    "trimtab": Trimtab(),
    "balanced": Balanced(),
}

__all__ = ["POLICIES", "Policy", "Traits", "View", "look"]
