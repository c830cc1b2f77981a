"""Check that a drafter belongs to a target: by its sizes, and by the digest of the weights it was trained for."""

from pathlib import Path

from torch import nn

from lantern.core.config import load_config
from lantern.core.io import CONFIG_NAME, weights_digest
from lantern.drafters.eagle.eagle1 import EagleConfig
from lantern.models.llamagen.config import TransformerConfig
from lantern.models.llamagen.transformer import Transformer

ADVICE = "train one for it (lantern train drafter), or decode with --method plain"


def check_sizes(drafter: EagleConfig, target: TransformerConfig, *, drafter_name: str, model_name: str) -> None:
    """Raise ValueError if the drafter has another codebook, width or grid than the target."""
    got, expected = (
        f"{sizes.vocab_size} codes of width {sizes.dim}, {sizes.block_size} per picture" for sizes in (drafter, target)
    )
    if got != expected:
        raise ValueError(
            f"{drafter_name} drafts {got}, but model {model_name} has {expected}:"
            f" it was trained for another one; {ADVICE}"
        )


def check_weights(drafter: object, target: nn.Module, *, drafter_name: str, model_name: str) -> None:
    """Raise ValueError if the drafter names other weights than the target's as those it was trained for."""
    digest = getattr(drafter, "target", None)
    if digest is not None and digest != (found := weights_digest(target.state_dict())):
        raise ValueError(
            f"{drafter_name} was trained for a target of digest {digest[:12]}, but that of model {model_name}"
            f' is {found[:12]}: {ADVICE}; to use it anyway set "target" to null in its config.json'
        )


def check_drafter(folder: Path, target: Transformer, *, model_name: str) -> None:
    """Run both checks on a drafter's folder before its weights are read; a missing folder passes."""
    if not folder.is_dir():
        return
    config = load_config(EagleConfig, folder / CONFIG_NAME)
    check_sizes(config, target.config, drafter_name=f"drafter {folder}", model_name=model_name)
    check_weights(config, target, drafter_name=f"drafter {folder}", model_name=model_name)
