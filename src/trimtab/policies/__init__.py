"""All balancers with one protocol: a `View` of the permitted data in, a `StepPlan` out."""

from trimtab.policies.balanced import Balanced
from trimtab.policies.policy import Policy, Traits, View, make_view
from trimtab.policies.rivals.echo import Echo
from trimtab.policies.rivals.eplb import Eplb, EplbOracle
from trimtab.policies.rivals.fastermoe import FasterMoe
from trimtab.policies.rivals.feplb import Feplb
from trimtab.policies.rivals.foremoe import ForeMoe
from trimtab.policies.rivals.laer import Laer
from trimtab.policies.rivals.llep import Llep
from trimtab.policies.rivals.lplb import Lplb
from trimtab.policies.rivals.moonep import MoonEp
from trimtab.policies.rivals.openinstruct import OpenInstruct
from trimtab.policies.rivals.relibra import ReLibra
from trimtab.policies.rivals.routepack import RoutePack
from trimtab.policies.rivals.taot import Taot
from trimtab.policies.rivals.ultraep import UltraEp
from trimtab.policies.static import Static
from trimtab.policies.trimtab import Trimtab

POLICIES: dict[str, Policy] = {
    "static": Static(),
    "eplb": Eplb(),
    "eplb_oracle": EplbOracle(),
    "lplb": Lplb(),
    "fastermoe": FasterMoe(),
    "llep": Llep(),
    "laer": Laer(),
    "ultraep": UltraEp(),
    "moonep": MoonEp(),
    "echo": Echo(),
    "taot": Taot(),
    "feplb": Feplb(),
    "relibra": ReLibra(),
    "foremoe": ForeMoe(),
    "routepack": RoutePack(),
    "openinstruct": OpenInstruct(),
    "trimtab": Trimtab(),
    "balanced": Balanced(),
}

__all__ = ["POLICIES", "Policy", "Traits", "View", "make_view"]
