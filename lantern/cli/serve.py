"""`lantern serve`: an HTTP server with OpenAI's image API for one model; `lantern demo`: a page in the browser.

On the page plain decoding and a method fill their images side by side.
"""

import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lantern.cli.command import command, opt, say
from lantern.cli.options import MODEL_PLACE, Placement
from lantern.core.config import install_hint, one_line, resolve_model

if TYPE_CHECKING:
    from lantern.core.process import Stopping

KEY = "LANTERN_API_KEY"
KEY_HELP = f"file of the key that clients send (default: ${KEY}, else none)"
LOCAL = ("127.0.0.1", "localhost", "::1")
HOST_HELP = "address to listen on (default 127.0.0.1: this machine only)"
RAY_HELP = "replicas on a Ray cluster, or here (extra: ray)"
ORIGIN_HELP = "origin of web pages that may send requests, such as https://example.org; * for all; may be repeated"


@command
def serve(
    model: str = MODEL_PLACE,
    host: str = opt("127.0.0.1", HOST_HELP),
    port: int = opt(8000, "port; 0 is a free one", 0, 65535),
    api_key_file: Path | None = opt(None, KEY_HELP, metavar="FILE"),
    allow_origin: list[str] = opt([], ORIGIN_HELP, metavar="ORIGIN", action="append"),
    ray: str | None = opt(None, RAY_HELP, metavar="ADDRESS", nargs="?", const=""),
    replicas: int | None = opt(None, "--ray: default one per GPU", 1, 10_000),
    batch: int = opt(4, "images at once", 1, 4096),
    queue: int = opt(64, "images that may wait", 1, 10**6),
    timeout: float = opt(600, "seconds a request may take", 1, 10**6),
    max_prompt: int = opt(2000, "most characters of a prompt", 1, 2000),
    drain: float = opt(60, "seconds to finish images after a signal", 0, 10**6),
    *,
    where: Placement,
    stopping: "Stopping",
) -> int:
    """Answer requests over HTTP in the form of OpenAI's image API."""
    for package in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        if find_spec(package) is None:
            raise ImportError(f"lantern serve needs {package}, which is not installed; {install_hint('serve')}")
    key = _key_of(api_key_file)
    from lantern.generation.serving.app import Limits, start

    limits = Limits(max_prompt, timeout, api_key=key, origins=tuple(allow_origin), batch=batch, waiting=queue)
    started = partial(start, model, limits, **where.options())
    if key is None and host not in LOCAL:
        say(f"warning: {host} is open to other machines, without an API key")
    if ray is None:
        if replicas:
            raise ValueError("--replicas is an option of --ray, which is missing")
        from lantern.generation.serving import server

        with server.bind(host, port) as bound:
            return server.serve(started, bound, drain, stopping)
    resolve_model(model)  # Ray does not report why a replica did not start
    from lantern.core.process import check_ray, cluster

    check_ray()
    from lantern.generation.serving.replicas import serving

    with (
        cluster(ray or None) as resources,
        serving(started, limits, (host, port), resources, replicas=replicas, drain=drain) as count,
    ):
        say(f"{count} replicas serve at http://{host}:{port}")
        while True:
            time.sleep(1)  # until a signal raises


def _key_of(file: Path | None) -> str | None:
    """Return the API key of a file, else of the environment; ValueError for one that no client can send."""
    if file is None:
        key, source = os.environ.get(KEY), f"the environment variable {KEY}"
    else:
        source = f"--api-key-file {file}"
        try:
            key = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read: {one_line(error)}") from error
    if key is None:
        return None
    if not (key := key.strip()):
        raise ValueError(f"{source} holds no key: give one, or leave it out for a server without authentication")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{source} holds a key that no client can send, wanted printable ASCII without spaces")
    return key


@command
def demo(
    model: str = MODEL_PLACE,
    host: str = opt("127.0.0.1", HOST_HELP),
    port: int = opt(7860, "port", 1, 65535),
    open: bool = opt(False, "open the page in the browser"),
    *,
    where: Placement,
    stopping: "Stopping",
) -> None:
    """Show plain decoding and a method side by side in the browser."""
    if find_spec("gradio") is None:
        raise ImportError(f"lantern demo needs gradio, which is not installed; {install_hint('demo')}")
    from lantern.generation.demo import SideBySide, build_page, launch_options
    from lantern.models.folder import load_model

    sides, private = SideBySide(load_model(model, **where.options())), TemporaryDirectory(prefix="lantern-")
    os.environ.setdefault("GRADIO_TEMP_DIR", private.name)  # its own is its first user's, and all can read it
    page = build_page(sides)
    how = {"server_name": host, "server_port": port, "inbrowser": open, "prevent_thread_lock": True}
    try:
        try:
            _, url, _ = page.launch(**how, **launch_options())
        except OSError as error:
            raise OSError(f"cannot listen at {host}:{port}: choose another --host or --port") from error
        print(f"lantern demo: {url}")
        page.block_thread()
        stopping.check()  # gradio swallows the exception of a signal
    finally:
        page.close(verbose=False)
        sides.close()
        private.cleanup()
