"""Exceptions: everything manyhands raises on purpose.

    ManyhandsError
    +-- PlanError        a plan word that is unknown, impossible or without effect (also ValueError)
    +-- TaskError        the task cannot be trained as written                     (also ValueError)
    +-- PeerLost         another rank died or did not respond in time
    +-- ServerLost       a parameter server died, or does not respond in time
    +-- StoreError       a server refused a request: wrong ids, memory limit       (also ValueError)
    |   +-- NotFinite    ... because its values are NaN or infinite
    |   +-- Evicted      ... because the worker was taken for dead, and the others went on
    +-- Deadlock         ranks wait for each other, or exchange different things
    +-- Diverged         loss or parameters are NaN or infinite
    +-- CheckpointError  a checkpoint is missing, damaged, or of another model
    +-- RunBusy          the run directory is in use by another run, or is the user's own folder;
    |                    or another process coordinates the run
    +-- MembershipError  the coordinator's state cannot be kept: no locks, no etcd, damaged
    |   +-- Fenced       ... because another process coordinates this run now
    +-- LaunchError      processes could not be started, or one of them failed

Each message says what was given, what is needed and what to do:

    rank 1 sent no heartbeat for 10 s, so the coordinator removed it (lease_s=10).
    Look at rank 1's log; if it was only paused, resume the run.
"""


class ManyhandsError(Exception):
    """Base class of all exceptions of manyhands."""


class PlanError(ManyhandsError, ValueError):
    """The plan cannot be run as written: a word is unknown, impossible or without effect."""


class TaskError(ManyhandsError, ValueError):
    """The task cannot be trained as written."""


class PeerLost(ManyhandsError):
    """Another rank died or did not respond in time; the round was not completed.

    `ranks` are the ranks that are lost, as far as this rank knows.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class ServerLost(ManyhandsError):
    """A parameter server died, cannot be reached or did not respond in time.

    The message names the server, the table and the operation.
    """


class StoreError(ManyhandsError, ValueError):
    """A parameter server refused a request; its tables are unchanged."""


class NotFinite(StoreError):
    """A parameter server refused a push because some of its values are NaN or infinite."""


class Evicted(StoreError):
    """The coordinator has taken this worker for dead; the others went on without it."""


class Deadlock(ManyhandsError):
    """Ranks wait for each other, or exchange different things in one call."""


class Diverged(ManyhandsError):
    """A loss or a parameter became NaN or infinite."""


class CheckpointError(ManyhandsError):
    """A checkpoint is missing, damaged, or of another model."""


class RunBusy(ManyhandsError):
    """Another run uses the run directory, or another process coordinates the run.

    Also raised where a directory holds files that a run would write over.
    """


class MembershipError(ManyhandsError):
    """The state of a run's coordinator cannot be claimed, read or saved."""


class Fenced(MembershipError):
    """This process no longer coordinates the run: what it was about to save or send is void."""


class LaunchError(ManyhandsError):
    """Processes could not be started, or one of them failed.

    `exit_code` is the exit code that the command should return. `kind` names the class of the
    error that a rank reported, or says how processes ended: killed (by a signal), ended (with a
    code of their own), stopped (when asked to), late (killed, as they did not stop in time); "":
    none had started. `round` is the round in which a rank failed, `directory` that of the run,
    where they are known.
    """

    def __init__(
        self,
        message: str,
        exit_code: int = 1,
        kind: str = "",
        round: int | None = None,
        directory: str = "",
    ):
        super().__init__(message)
        self.exit_code, self.kind, self.round = exit_code, kind, round
        self.directory = directory
