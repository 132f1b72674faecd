"""Merge strategies: how replicas agree. One algorithm a file; its name is the word in a plan.

`merge=all_reduce` is `all_reduce.py`. A strategy is a frozen dataclass: its fields are the options
(`merge.period=8`), and its `round` computes, exchanges and merges. What several of them share is in
`building_blocks/`. To add one, write its file and add a line to `STRATEGIES`.
"""

from manyhands.merge.ad_psgd import ADPSGD
from manyhands.merge.admm import ADMM
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.async_admm import AsyncADMM
from manyhands.merge.async_easgd import AsyncEASGD
from manyhands.merge.backup import Backup
from manyhands.merge.bmuf import BMUF
from manyhands.merge.d_psgd import DPSGD
from manyhands.merge.dc_asgd import DCASGD
from manyhands.merge.diloco import DiLoCo
from manyhands.merge.downpour import Downpour
from manyhands.merge.easgd import EASGD
from manyhands.merge.ensemble import Ensemble
from manyhands.merge.hogwild import Hogwild
from manyhands.merge.local_sgd import LocalSGD
from manyhands.merge.model_average import ModelAverage
from manyhands.merge.robust import Robust
from manyhands.merge.sgp import SGP
from manyhands.merge.skeleton import Skeleton
from manyhands.merge.stale_sync import StaleSync
from manyhands.merge.streaming_diloco import StreamingDiLoCo

STRATEGIES = {
    "all_reduce": AllReduce,
    "model_average": ModelAverage,
    "local_sgd": LocalSGD,
    "bmuf": BMUF,
    "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo,
    "easgd": EASGD,
    "admm": ADMM,
    "d_psgd": DPSGD,
    "ad_psgd": ADPSGD,
    "sgp": SGP,
    "ensemble": Ensemble,
    "robust": Robust,
    "skeleton": Skeleton,
    "hogwild": Hogwild,
    "stale_sync": StaleSync,
    "backup": Backup,
    "downpour": Downpour,
    "dc_asgd": DCASGD,
    "async_easgd": AsyncEASGD,
    "async_admm": AsyncADMM,
}
