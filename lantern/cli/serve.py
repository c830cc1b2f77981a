"""`lantern serve`: an HTTP server with OpenAI's image API for one model."""

import argparse
import importlib.util
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import (
    DONE,
    Command,
    add_engine,
    add_placement,
    complain,
    integer,
    placement_of,
    real,
    run_command,
)
from lantern.core.config import install_hint, one_line

if TYPE_CHECKING:
    from lantern.generation.serving.app import Setup

KEY = "LANTERN_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("model", nargs="?", default="lantern-emoji", metavar="MODEL", help="name, folder or hub id")
    where = parser.add_argument_group("address")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    where.add_argument("--port", type=integer(0, 65535), default=8000, help="port; 0 is a free one (default 8000)")
    where.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file of the key that clients send (default: ${KEY}, else none)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--batch", type=integer(1, 4096), default=4, metavar="N", help="images at once (default 4)")
    limits.add_argument(
        "--queue",
        type=integer(1, 10**6),
        default=64,
        metavar="N",
        help="images that may wait (default 64)",
    )
    limits.add_argument(
        "--timeout",
        type=real(1, 10**6),
        default=600,
        metavar="S",
        help="seconds a request may take (default 600)",
    )
    limits.add_argument(
        "--max-prompt",
        type=integer(1, 2000),
        default=2000,
        metavar="N",
        help="most characters of a prompt (default 2000)",
    )
    limits.add_argument(
        "--drain", type=real(0, 10**6), default=60, metavar="S", help="seconds to finish images after SIGTERM (60)"
    )
    model = parser.add_argument_group("model")
    add_placement(model)
    add_engine(model)
    many = parser.add_argument_group("many machines")
    many.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="replicas on a Ray cluster, or here (extra: ray)",
    )
    many.add_argument("--replicas", type=integer(1, 10_000), metavar="N", help="--ray: default one per GPU")
    parser.add_argument(
        "--restarts",
        type=integer(0, 10**6),
        default=0,
        metavar="N",
        help="serve in a child process, and start it again up to N times if a signal kills it (default 0: no child)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, in a child process with --restarts, on a Ray cluster with --ray.

    ValueError for options that cannot be combined, and for --restarts on Windows.
    """
    if args.ray is not None:
        if args.restarts:
            raise ValueError("--restarts has no use with --ray, which starts killed replicas again: omit it")
        return serve_on_ray(args)
    if args.replicas is not None:
        raise ValueError("--replicas is an option of --ray, which is missing")
    if not args.restarts:
        return serve(args)
    if sys.platform == "win32":
        raise ValueError("--restarts needs processes that fork, which Windows lacks: omit it")
    listening = listen(args.host, args.port)
    return supervise(replace(COMMAND, run=lambda own: serve(args, listening)), args.restarts)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; connections wait in it while no process serves.

    OSError if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port") from error


def supervise(command: Command, restarts: int) -> int:
    """Run a command in a child process, and again where a signal kills it, `restarts` times; return its exit code.

    A signal to this process ends the child with SIGTERM.
    """
    while True:
        child = os.fork()  # before torch is imported: it starts threads, which a fork does not copy
        if not child:
            os._exit(run_command(command, []))
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except KeyboardInterrupt:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            raise
        if code >= 0 or not restarts:
            return code if code >= 0 else 128 - code
        restarts -= 1
        name = signal.Signals(-code).name
        complain(f"the server was killed by {name}: it is started again, {restarts} restarts left")


def serve(args: argparse.Namespace, listening: socket.socket | None = None) -> int:
    """Load the model and serve at a socket, None: at the address of the options."""
    setup = setup_of(args)
    import uvicorn

    from lantern.generation.serving.app import build_app

    service = setup.start()
    config = uvicorn.Config(build_app(service), log_level="warning", timeout_graceful_shutdown=int(args.drain) or None)
    server = uvicorn.Server(config)
    try:
        server.run([listening or listen(args.host, args.port)])
    finally:
        service.worker.stop(args.drain)
    return DONE


def serve_on_ray(args: argparse.Namespace) -> int:
    """Serve with replicas of the model on a Ray cluster until SIGINT or SIGTERM. ImportError without Ray."""
    setup = setup_of(args)
    from lantern.models.folder import resolve_model

    resolve_model(args.model)  # Ray does not report why a replica did not start
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"--ray needs Ray, which is not installed; {install_hint('ray')}")
    from lantern.core.ray_cluster import cluster
    from lantern.generation.serving.replicas import serving

    with (
        cluster(args.ray or None) as resources,
        serving(setup, (args.host, args.port), resources, replicas=args.replicas, drain=args.drain) as count,
    ):
        print(f"{count} replicas serve at http://{args.host}:{args.port}", file=sys.stderr, flush=True)
        while True:
            time.sleep(1)  # until a signal raises


def _key_of(file: Path | None) -> str | None:
    """Return the API key of a file, else of the environment; ValueError for an empty one and an unreadable file."""
    if file is None:
        key, source = os.environ.get(KEY), f"the environment variable {KEY}"
    else:
        source = f"--api-key-file {file}"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read: {one_line(error)}") from error
    if key is not None and not key.strip():
        raise ValueError(f"{source} holds no key: give one, or leave it out for a server without authentication")
    return key


def setup_of(args: argparse.Namespace) -> "Setup":
    """Return what the options say about the server; ImportError names a package that is missing."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"lantern serve needs {package}, which is not installed; {install_hint('serve')}")
    key = _key_of(args.api_key_file)
    from lantern.generation.serving.app import Limits, Setup

    return Setup(
        model=args.model,
        **placement_of(args),
        batch=args.batch,
        waiting=args.queue,
        limits=Limits(args.max_prompt, args.timeout, api_key=key),
    )


COMMAND = Command("serve", "Answer requests over HTTP in the form of OpenAI's image API.", add_arguments, run)
