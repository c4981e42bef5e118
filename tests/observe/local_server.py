"""What stand-ins of this folder have in common: a server on 127.0.0.1."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer(ABC):
    """Serves from the start until `close`; subclasses say in `_handler` by what, after their own fields are set."""

    def __init__(self):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @abstractmethod
    def _handler(self) -> type[BaseHTTPRequestHandler]:
        """What answers a request."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
