"""The recipe of the embedded model: its stages and configs; see assets/lantern-emoji/README.md for the commands."""

from pathlib import Path

from lantern.training.stages import Option, Recipe, Stage

RECIPE = Recipe(
    name="emoji",
    stages={
        "data": Stage("recipes.emoji.dataset", "prepare", "EmojiConfig", required=("packages",), reports_progress=True),
        "text": Stage(
            "recipes.emoji.text_encoder",
            "train",
            "TextConfig",
            required=("packages", "teacher"),
            optional=("steps", "decay", "minutes"),
        ),
        "words": Stage(
            "recipes.emoji.words",
            "train",
            "WordsConfig",
            required=("text_encoder", "packages", "teacher"),
            optional=("tokenizer",),
        ),
    },
    options={"teacher": Option("folder of a BERT sentence encoder")},
    configs=Path(__file__).parent / "configs",
)
