"""Lets diffusers load this folder: DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)."""

from lantern import LanternPipeline  # noqa: F401
