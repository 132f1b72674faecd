"""Dense model on the parameter server: its tables as `Rows`, and a pull of the whole model."""

from manyhands.core import Replica, Rows, Store, Tensors


def rows_of(replica: Replica) -> Rows:
    """Each vector of parameters is one dense table, of which all is meant."""
    return dict.fromkeys(replica.params)


def pull_all(replica: Replica, store: Store) -> Tensors:
    """The model on the servers, with everything that this rank pushed."""
    store.flush()
    return store.pull(rows_of(replica))
