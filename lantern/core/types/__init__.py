"""Data types of speculative decoding and the protocols of its parts.

Every tensor has a leading image axis b. With guidance one image has r = 2 rows, first conditional, then unconditional;
only the target and drafters that read guidance rows see this inner axis. p is the target's distribution and q the
draft's, both after guidance and filters. Row i of either is the distribution of what FOLLOWS node i, so siblings share
a row.

Imported by all of `lantern`. Imports the noise only.
"""

from lantern.core.types.drafter import Drafter, SampleWindow
from lantern.core.types.prompt import Condition, Prompt
from lantern.core.types.step import Callback, Generation, Step
from lantern.core.types.target import Ranker, Raster, Sampler, Scores, Target
from lantern.core.types.tree import DraftMode, DraftTree, Traits, TreeShape
from lantern.core.types.verifier import Cost, Rows, Verdict, Verifier

__all__ = [
    "Callback",
    "Condition",
    "Cost",
    "DraftMode",
    "DraftTree",
    "Drafter",
    "Generation",
    "Prompt",
    "Ranker",
    "Raster",
    "Rows",
    "SampleWindow",
    "Sampler",
    "Scores",
    "Step",
    "Target",
    "Traits",
    "TreeShape",
    "Verdict",
    "Verifier",
]
