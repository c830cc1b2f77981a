"""`lantern serve`: an HTTP server with OpenAI's image API for one model."""

import importlib.util
import os
import time
from functools import partial
from pathlib import Path

from lantern.cli.command import arg, command, opt, say
from lantern.cli.options import MODEL, MODEL_HELP, Placement
from lantern.core.config import install_hint, one_line, resolve_model

KEY = "LANTERN_API_KEY"
KEY_HELP = f"file of the key that clients send (default: ${KEY}, else none)"
LOCAL = ("127.0.0.1", "localhost", "::1")
RAY_HELP = "replicas on a Ray cluster, or here (extra: ray)"
ORIGIN_HELP = "origin of web pages that may send requests, such as https://example.org; * for all; may be repeated"


def serve(
    model: str = arg(MODEL_HELP, default=MODEL),
    host: str = opt("127.0.0.1", "address to listen on (default 127.0.0.1: this machine only)"),
    port: int = opt(8000, "port; 0 is a free one", 0, 65535),
    api_key_file: Path | None = opt(None, KEY_HELP, metavar="FILE"),
    allow_origin: list[str] = opt([], ORIGIN_HELP, metavar="ORIGIN", action="append"),
    ray: str | None = opt(None, RAY_HELP, metavar="ADDRESS", nargs="?", const=""),
    replicas: int | None = opt(None, "--ray: default one per GPU", 1, 10_000),
    batch: int = opt(4, "images at once", 1, 4096),
    queue: int = opt(64, "images that may wait", 1, 10**6),
    timeout: float = opt(600, "seconds a request may take", 1, 10**6),
    max_prompt: int = opt(2000, "most characters of a prompt", 1, 2000),
    drain: float = opt(60, "seconds to finish images after SIGTERM", 0, 10**6),
    *,
    where: Placement,
) -> int:
    """Answer requests over HTTP in the form of OpenAI's image API."""
    for package in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        if importlib.util.find_spec(package) is None:
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
        from lantern.generation.serving.server import bind
        from lantern.generation.serving.server import serve as serve_here

        with bind(host, port) as bound:
            return serve_here(started, bound, drain)
    resolve_model(model)  # Ray does not report why a replica did not start
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"--ray needs Ray, which is not installed; {install_hint('ray')}")
    from lantern.core.process import cluster
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


COMMAND = command(serve)
