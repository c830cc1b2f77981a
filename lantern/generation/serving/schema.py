"""Bodies of requests, answers and errors, in the form of OpenAI's image API."""

from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

OutputFormat = Literal["png", "jpeg", "webp"]
MAX_SEED = 2**63 - 1


class ImageRequest(BaseModel):
    """Body of POST /v1/images/generations.

    The first group of fields is OpenAI's, the second this server's. `quality`, `style`, `moderation`, `user` and
    `safety_identifier` are accepted and have no effect. `seed` None is a random seed. A field that is not
    listed is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=10)] | None = 1
    size: str | None = "auto"
    quality: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: OutputFormat | None = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = None
    style: str | None = None
    stream: bool | None = False
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = 0
    user: str | None = None
    safety_identifier: str | None = None

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    method: Annotated[str, Field(min_length=1)] | None = None
    guidance: float | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class RefusedError(Exception):
    """A request that is answered with an error in OpenAI's form; `status` is the HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, wait: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.wait = status, param, code, wait

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The answer, with Retry-After where trying again can help."""
        return JSONResponse(self.body, self.status, {} if self.wait is None else {"Retry-After": str(self.wait)})


def timed_out() -> RefusedError:
    """Return the answer to a request that took too long."""
    return RefusedError(504, "the request took longer than its time limit", code="timeout")
