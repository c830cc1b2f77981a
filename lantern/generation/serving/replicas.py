"""The server as an application of Ray Serve: replicas of a model on the machines of a cluster.

Ray's proxies pass each request to the replica with the fewest. A killed replica is started again; the requests that it
had are answered with 500, and may be sent again: an image depends on its seed, not on the replica.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve  # pyright: ignore[reportMissingImports]

from lantern.core.config import one_line
from lantern.core.process import machines
from lantern.generation.serving.app import Limits, Service, build_app

NAME = "lantern"
HEALTH_SECONDS = 5.0
ERROR = re.compile(r"[\w.]*(Error|Exception): ")  # the last line of a traceback


class Replica:
    """One model with the routes of the server; it is ready once it has made an image."""

    def __init__(self, start: Callable[[], Service]) -> None:
        self._service = start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._service)

    def check_health(self) -> None:
        """Raise RuntimeError once the model thread has ended or hangs; Ray then starts another replica."""
        if not self._service.worker.is_well(self._service.limits.seconds):
            raise RuntimeError("the model thread has ended or hangs")


@contextmanager
def serving(
    start: Callable[[], Service],
    limits: Limits,
    address: tuple[str, int],
    resources: Mapping[str, float],
    *,
    replicas: int | None,
    drain: float,
) -> Iterator[int]:
    """Serve with replicas of what `start` returns while the context lasts; yield their number when all are ready.

    Every proxy listens at `address`, host and port. `resources` are those of the cluster; `replicas` is by default one
    per GPU, or one per machine without GPUs. At the end images under way have `drain` seconds. RuntimeError if the
    replicas do not start.
    """
    count = replicas or int(resources.get("GPU", 0)) or machines()
    gpus = min(1.0, resources.get("GPU", 0.0) / count)
    made: Any = serve.deployment(serve.ingress()(Replica))
    deployment = made.options(
        num_replicas=count,
        ray_actor_options={"num_gpus": gpus, "num_cpus": min(1.0, resources.get("CPU", 1.0) / count)},
        max_ongoing_requests=limits.batch + limits.waiting,
        max_queued_requests=limits.waiting,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=drain,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="EveryNode", http_options={"host": address[0], "port": address[1]})
    try:
        try:
            serve.run(deployment.bind(start), name=NAME, route_prefix="/")
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"the replicas did not start: {cause() or one_line(error)}") from error
        yield count
    finally:
        serve.shutdown()


def cause() -> str | None:
    """Return the error of a replica that did not start, from the report that Ray Serve keeps; None without one."""
    application = serve.status().applications.get(NAME)
    reports = [] if application is None else [one.message for one in application.deployments.values()]
    errors = [line for report in reports for line in report.splitlines() if ERROR.match(line)]
    return one_line(errors[-1]) if errors else None
