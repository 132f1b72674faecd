"""Cut of all connections of a server at a signal, as a failing network does (`manyhands chaos`).

The server itself goes on and listens: workers, other servers and the coordinator connect again.
"""

from __future__ import annotations

import signal
import threading

from manyhands.server.network.held_shards import HeldShards
from manyhands.server.network.listener import ConnectionListener
from manyhands.server.network.registration import Registration

SIGNAL: int | None = getattr(signal, "SIGUSR2", None)  # None: Windows has none


def cut_at_signal(
    listener: ConnectionListener, registration: Registration | None, held: HeldShards
) -> None:
    """In a thread: a signal may come while the main thread holds a lock that this needs."""

    def cut() -> None:
        listener.drop()
        if registration is not None:
            registration.drop()
        for endpoint in list(held.endpoints.values()):
            link = endpoint.replicator.link
            if link is not None:
                link.channel.stop()

    # only the main thread may handle signals
    if SIGNAL is not None and threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, lambda *_: threading.Thread(target=cut, name="manyhands-cut").start())
