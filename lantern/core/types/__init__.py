"""Data types of speculative decoding and the protocols of its parts.

Every tensor has a leading image axis b. With guidance one image has r = 2 rows, first conditional, then unconditional;
only the target and drafters that read guidance rows see this inner axis. p is the target's distribution and q the
draft's, both after guidance and filters. Row i of either is the distribution of what FOLLOWS node i, so siblings share
a row. A class `XDefaults` holds the defaults of the optional attributes of protocol `X`.

Imported by all of `lantern`. Imports nothing else of it.
"""

from lantern.core.types.drafter import Drafter, DrafterDefaults, Kept, Prefill, WindowFill
from lantern.core.types.prompt import Prompt
from lantern.core.types.relaxation import (
    Acceptance,
    Claim,
    Claimant,
    Relaxation,
    RelaxationDefaults,
    Relaxed,
    Ruling,
    Trial,
)
from lantern.core.types.step import Callback, Generation, Step
from lantern.core.types.target import Condition, Raster, Sampler, Scores, Target, TargetDefaults
from lantern.core.types.tree import DraftMode, DraftTree, Traits, TreeShape
from lantern.core.types.verifier import GivenRows, Leftovers, NoiseSource, Rows, Verdict, Verifier, VerifierDefaults

__all__ = [
    "Acceptance",
    "Callback",
    "Claim",
    "Claimant",
    "Condition",
    "DraftMode",
    "DraftTree",
    "Drafter",
    "DrafterDefaults",
    "Generation",
    "GivenRows",
    "Kept",
    "Leftovers",
    "NoiseSource",
    "Prefill",
    "Prompt",
    "Raster",
    "Relaxation",
    "RelaxationDefaults",
    "Relaxed",
    "Rows",
    "Ruling",
    "Sampler",
    "Scores",
    "Step",
    "Target",
    "TargetDefaults",
    "Traits",
    "TreeShape",
    "Trial",
    "Verdict",
    "Verifier",
    "VerifierDefaults",
    "WindowFill",
]
