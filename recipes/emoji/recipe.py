"""The recipe of the embedded model: its stages and configs; see assets/lantern-emoji/README.md for the commands."""

from pathlib import Path

from lantern.cli.command import Group, existing, opt
from lantern.training.stages import Recipe, Stage

HOME = "recipes.emoji"
DATA = "draw emoji and their captions into prepared data"
TEXT = "train a text encoder by a teacher's sentence embeddings"
WORDS = "give the text encoder the words of a lexicon"


class OfText(Group):
    """Options of the recipe's stages."""

    teacher: Path | None = opt(None, "folder of a BERT sentence encoder", type=existing)


RECIPE = Recipe(
    name="emoji",
    stages={
        "data": Stage(f"{HOME}.dataset:prepare", DATA, "packages", is_training=False),
        "text": Stage(f"{HOME}.text_encoder:train", TEXT, "packages teacher"),
        "words": Stage(f"{HOME}.text_encoder:train_words", WORDS, "text_encoder packages teacher", "tokenizer"),
    },
    options=OfText,
    configs=Path(__file__).parent / "configs",
)
