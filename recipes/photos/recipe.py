"""The recipe `photos`: configs of the general stages for classes of photographs."""

from pathlib import Path

from lantern.training.stages import Recipe

RECIPE = Recipe(name="photos", stages={}, configs=Path(__file__).parent / "configs")
