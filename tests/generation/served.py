"""A real server of a toy model on a free port, with OpenAI's client of it."""

import base64
import io
import threading
import time
from typing import Any

import httpx
import openai
from PIL import Image

from lantern.core.process import Stopping
from lantern.generation.serving.app import Limits, Service
from lantern.generation.serving.server import Server, bind
from lantern.models.folder import Model

KEY = "secret"
PROMPT = "a red apple"


def image(answer: Any) -> Any:
    """Return the image of an answer's entry or event."""
    return Image.open(io.BytesIO(base64.b64decode(answer.b64_json)))


class Served:
    def __init__(self, model: Model, limits: Limits) -> None:
        self.service = Service(model, limits)
        self.worker = self.service.worker
        self.server, bound = Server(self.service, 10, Stopping()), bind("127.0.0.1", 0)
        self.url = "http://{}:{}".format(*bound.getsockname())
        self.thread = threading.Thread(target=self.server.run, args=([bound],), daemon=True)

    def __enter__(self) -> "Served":
        self.worker.start()
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)
        return self

    def images(self, **fields: Any) -> Any:
        """Return the answer to OpenAI's client, which puts the fields that it does not know into `extra_body`."""
        generate: Any = self.client.images.generate
        return generate(**({"prompt": PROMPT, "size": "8x8"} | fields))

    def post(self, body: Any = None, **how: Any) -> httpx.Response:
        """Return the answer to a request for images with this JSON body; `how` are arguments of httpx."""
        how = {"json": body, "timeout": 30} | how if body is not None else how
        return httpx.post(f"{self.url}/v1/images/generations", **how)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(10)
        assert self.worker.stop(10)
