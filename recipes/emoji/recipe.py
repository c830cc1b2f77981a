"""The recipe of the embedded model: its stages and configs; see assets/lantern-emoji/README.md for the commands."""

from pathlib import Path

from lantern.training.stages import Option, Recipe, Stage

RECIPE = Recipe(
    name="emoji",
    stages={
        "data": Stage(
            "recipes.emoji.dataset",
            "prepare",
            "EmojiConfig",
            summary="draw emoji and their captions into prepared data",
            required=("packages",),
            reports_progress=True,
        ),
        "text": Stage(
            "recipes.emoji.text_encoder",
            "train",
            "TextConfig",
            summary="train a text encoder by a teacher's sentence embeddings",
            required=("packages", "teacher"),
            optional=("steps", "decay", "minutes"),
        ),
        "words": Stage(
            "recipes.emoji.words",
            "train",
            "WordsConfig",
            summary="give the text encoder the words of a lexicon",
            required=("text_encoder", "packages", "teacher"),
            optional=("tokenizer",),
        ),
    },
    options={"teacher": Option("folder of a BERT sentence encoder")},
    configs=Path(__file__).parent / "configs",
)
