"""Errors: everything manyhands raises on purpose.

    ManyhandsError
    +-- PlanError        a plan word that is unknown, impossible or without effect (also ValueError)
    +-- TaskError        the user's task cannot be trained as it stands            (also ValueError)
    +-- PeerLost         another rank died or never came; the round did not happen
    +-- ServerLost       a parameter server died, is not there or does not answer in time
    +-- StoreError       a server refused a request: wrong ids, memory limit       (also ValueError)
    |   +-- NotFinite    ... because updates in it are NaN or infinite
    +-- Deadlock         ranks wait for each other for ever, or exchange different things
    +-- Diverged         loss or parameters are NaN or infinite
    +-- CheckpointError  a checkpoint is damaged, or of another model
    +-- RunBusy          the run directory belongs to a live run
    +-- LaunchError      processes could not be started, or one of them failed

Each message says what was given, what is needed and what to do.
"""


class ManyhandsError(Exception):
    """Root of the tree."""


class PlanError(ManyhandsError, ValueError):
    """A plan that cannot be run as written."""


class TaskError(ManyhandsError, ValueError):
    """A task that cannot be trained as it stands."""


class PeerLost(ManyhandsError):
    """Another rank died or did not come in time.

    `ranks` are the guilty ones, as far as this rank can tell.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class ServerLost(ManyhandsError):
    """A parameter server died, is not there or did not answer in time.

    The message names it, the table and the operation.
    """


class StoreError(ManyhandsError, ValueError):
    """A request that a store refused; its tables are as before."""


class NotFinite(StoreError):
    """Updates that a store refused because some of them are NaN or infinite."""


class Deadlock(ManyhandsError):
    """Ranks wait for ranks that will not come, or do not exchange the same thing."""


class Diverged(ManyhandsError):
    """A loss or a parameter became NaN or infinite."""


class CheckpointError(ManyhandsError):
    """A checkpoint that cannot be used."""


class RunBusy(ManyhandsError):
    """The run directory is in use by a live run."""


class LaunchError(ManyhandsError):
    """Processes could not be started, or one of them failed.

    `exit_code` is what the command should exit with.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code
