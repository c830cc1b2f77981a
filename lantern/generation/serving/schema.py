"""Bodies of requests, in the form of OpenAI's image API."""

from typing import Annotated, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from lantern.generation.requests import MAX_PROMPT

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
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    guidance: float | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class EditRequest(ImageRequest):
    """Fields of POST /v1/images/edits, as multipart/form-data: those of ImageRequest, and the files.

    OpenAI's clients name one image `image`, a list of them `image[]`. `input_fidelity` has no effect.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    image: UploadFile | None = None
    images: Annotated[list[UploadFile], Field(alias="image[]")] = []
    mask: UploadFile | None = None
    input_fidelity: str | None = None
