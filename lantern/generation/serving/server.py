"""The server as a process: a socket, uvicorn, and an end that answers every request."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lantern.core.config import one_line
from lantern.core.process import Stopped, Stopping
from lantern.generation.serving.app import Service, build_app
from lantern.generation.serving.worker import GRACE

LOG = logging.getLogger(__name__)
HEADER_SECONDS = 10.0
READING_SECONDS = 60.0  # in which a client reads something of an answer, else the connection is closed
CONNECTIONS = 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet. OSError if the address is not available."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # connections have it too
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READING_SECONDS * 1000))
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return bound


class TimedProtocol(H11Protocol):
    """A connection that is closed if the headers of a request, or what is left of an answered one, are late."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the headers of the first request."""
        super().connection_made(transport)
        self._expected = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Expect the rest of the headers of a later request, or of a body that was answered before it had arrived."""
        super().data_received(data)
        if self.conn.our_state is h11.SEND_RESPONSE:
            self._expected.cancel()
        elif self._expected.cancelled() and self.conn.their_state is not h11.DONE:  # which sends its next request early
            self._expected = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._expected.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Serves until a signal or until the worker ends; images under way then have `drain` seconds."""

    def __init__(self, service: Service, drain: float, stopping: Stopping) -> None:
        how: dict[str, Any] = {"http": TimedProtocol, "log_config": None, "log_level": "warning", "access_log": False}
        how |= {"lifespan": "off", "limit_concurrency": CONNECTIONS, "timeout_graceful_shutdown": int(drain) + GRACE}
        super().__init__(uvicorn.Config(build_app(service), **how))
        self._service, self.drain, self._stopping = service, drain, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            LOG.info("%s is served at http://%s:%d", self._service.model.name, shown, port)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end, which SIGHUP is too: uvicorn leaves it to `Stopping`, which would break requests off."""
        with self._stopping.shield(raises=False):
            await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end."""
        is_over = self._stopping.is_requested or not self._service.worker.is_alive()
        return await super().on_tick(counter) or is_over

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; after a second Ctrl-C without waiting for connections, which `wait_closed` does since Python 3.12."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self.servers = []

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the images under way; after `drain` seconds, or Ctrl-C after another signal that uvicorn handles, they
        are answered with 503, as are requests whose bodies have not arrived.
        """
        give_up = partial(self._service.worker.give_up, "the server stops")
        asyncio.get_running_loop().call_later(self.drain, give_up)
        await super().shutdown(sockets)
        if tasks := self.server_state.tasks:
            give_up()
            await asyncio.wait(tasks, timeout=GRACE)


def serve(start: Callable[[], Service], bound: socket.socket, drain: float, stopping: Stopping) -> int:
    """Serve what `start` returns at a socket until a signal; return the exit code.

    RuntimeError if the worker ends.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    service, code = start(), 0
    try:
        Server(service, drain, stopping).run([bound])
        stopping.check()
    except Stopped as stopped:
        LOG.info("%s", stopped)
        code = stopped.code
    service.worker.stop(GRACE)
    if (fault := service.worker.fault) is not None:
        raise RuntimeError(f"the model thread has ended: {one_line(fault)}") from fault
    return code
