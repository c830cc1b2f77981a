"""A server in threads of the test's process."""

import threading
import time
from typing import Any

import openai
import uvicorn

from lantern.generation.serving.app import Limits, Service, build_app
from lantern.generation.serving.metrics import Metrics
from lantern.generation.serving.worker import Worker
from lantern.models.folder import Model

KEY = "secret"


class Served:
    """A server of a model on a free port, with OpenAI's client for it."""

    def __init__(self, model: Model, limits: Limits, **options: Any) -> None:
        self.worker = Worker(model, **options)
        self.service = Service(model, self.worker, Metrics(model.name, self.worker), limits)
        config = uvicorn.Config(build_app(self.service), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> "Served":
        self.worker.start()
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(10)
        assert self.worker.stop(10)
