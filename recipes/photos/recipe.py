"""The recipe `photos`: general stages with configs for classes of photographs, and a stage that measures FID."""

from pathlib import Path

from lantern.cli.command import Group, existing, opt
from lantern.training.stages import Recipe, Stage


class OfFid(Group):
    """Options of the recipe's stages."""

    inception: Path | None = opt(
        None, "weights of Inception for FID: a file, or the package that holds it", type=existing
    )


RECIPE = Recipe(
    name="photos",
    stages={
        "fid": Stage(
            "recipes.photos.fid:measure_fid",
            "measure FID of a class-conditional target",
            "data target vq",
            "inception",
            is_training=False,
        ),
    },
    options=OfFid,
    configs=Path(__file__).parent / "configs",
)
