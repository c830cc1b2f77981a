"""ComfyUI finds the nodes of this folder here."""

from .nodes import LanternExtension


async def comfy_entrypoint() -> LanternExtension:
    """Return the extension."""
    return LanternExtension()
