"""The recipe `photos`: general stages with configs for classes of photographs, and a stage that measures FID."""

from pathlib import Path

from lantern.training.stages import Recipe, Stage, StageOption

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
    options={"inception": StageOption("weights of Inception for FID: a file, or the package that holds it")},
    configs=Path(__file__).parent / "configs",
)
