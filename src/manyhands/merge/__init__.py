"""How replicas agree. One algorithm, one file; its name here is its name in a plan: `merge=all_reduce`."""

from manyhands.merge.all_reduce import AllReduce

STRATEGIES = {
    "all_reduce": AllReduce,
}
