"""The recipe of the embedded model: its stages and configs; see assets/lantern-emoji/README.md for the commands."""

from pathlib import Path

from lantern.training.stages import Option, Recipe, Stage

RECIPE = Recipe(
    name="emoji",
    stages={
        "data": Stage(
            "recipes.emoji.dataset:prepare",
            "draw emoji and their captions into prepared data",
            "packages",
            is_training=False,
        ),
        "text": Stage(
            "recipes.emoji.text_encoder:train",
            "train a text encoder by a teacher's sentence embeddings",
            "packages teacher",
        ),
        "words": Stage(
            "recipes.emoji.words:train",
            "give the text encoder the words of a lexicon",
            "text_encoder packages teacher",
            "tokenizer",
        ),
    },
    options={"teacher": Option("folder of a BERT sentence encoder")},
    configs=Path(__file__).parent / "configs",
)
