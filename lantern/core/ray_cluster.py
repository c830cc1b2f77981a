"""The connection to Ray, which evaluation and serving on many machines share."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lantern.core.config import install_hint


def check_ray() -> None:
    """Raise ImportError without Ray."""
    try:
        import ray  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(f"Ray is not installed; {install_hint('ray')}") from error


@contextmanager
def cluster(address: str | None = None) -> Iterator[Mapping[str, float]]:
    """Connect to Ray, or start it locally, without its output; yield the resources of the cluster.

    `address` is that of a cluster; None starts Ray on this machine and stops it at the end. A connection that exists
    already is used and stays. ImportError without Ray.
    """
    import logging

    check_ray()
    import ray  # pyright: ignore[reportMissingImports]

    began = not ray.is_initialized()
    if began:
        # actors import the package from the same path, installed or not
        found: Any = {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}}
        where: Any = {"address": address} if address else {"include_dashboard": False}
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **found, **where)
        if threading.current_thread() is threading.main_thread():  # with Ray's handler SIGTERM aborts the process
            for number, handler in kept.items():
                if handler is not None:  # one that Python did not install cannot be restored
                    signal.signal(number, handler)
    try:
        yield ray.cluster_resources()
    finally:
        if began:
            ray.shutdown()


def machines() -> int:
    """Return the number of machines of the cluster that are alive."""
    import ray  # pyright: ignore[reportMissingImports]

    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
