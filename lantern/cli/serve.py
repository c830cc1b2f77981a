"""`lantern serve`: an HTTP server with OpenAI's image API for one model."""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import Command, add_engine, add_placement, integer, placement_of, real
from lantern.core.config import install_hint, one_line

if TYPE_CHECKING:
    from lantern.generation.serving.app import Setup

KEY = "LANTERN_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


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
    where.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may send requests, such as https://example.org; * for all; may be repeated",
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


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, with --ray on a Ray cluster. ValueError for options that cannot be combined."""
    setup = setup_of(args)
    if setup.limits.api_key is None and args.host not in LOCAL:
        print(f"lantern: warning: {args.host} is open to other machines, without an API key", file=sys.stderr)
    if args.ray is not None:
        return serve_on_ray(args, setup)
    if args.replicas is not None:
        raise ValueError("--replicas is an option of --ray, which is missing")
    from lantern.generation.serving.server import bind, serve

    with bind(args.host, args.port) as bound:
        return serve(setup, bound, args.drain)


def serve_on_ray(args: argparse.Namespace, setup: "Setup") -> int:
    """Serve with replicas of the model on a Ray cluster until SIGINT or SIGTERM. ImportError without Ray."""
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
        limits=Limits(args.max_prompt, args.timeout, api_key=key, origins=tuple(args.allow_origin)),
    )


COMMAND = Command("serve", "Answer requests over HTTP in the form of OpenAI's image API.", add_arguments, run)
