"""A proxy that loses an answer: the server has done what was asked, and the client cannot know."""

from __future__ import annotations

import socket
import threading


class LosesAnswers:
    """Passes bytes on to a port of this machine. After `lose_next`, the next bytes from the server
    are dropped and their connection is cut."""

    def __init__(self, port: int):
        self._target, self._lose = port, threading.Event()
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next(self) -> None:
        self._lose.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for a, b, answers in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(a, b, answers), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket, answers: bool) -> None:
        try:
            while data := a.recv(1 << 16):
                if answers and self._lose.is_set():
                    self._lose.clear()
                    self.lost += 1
                    break
                b.sendall(data)
        except OSError:
            pass
        for sock in (a, b):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
