"""The trained networks that methods read beside the target: one line each. Needs no torch.

A model's folder holds the drafter in drafter/, the others in parts/NAME/. A network is imported when it is opened.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

DRAFTER = "eagle1"  # the add-on in drafter/


def resolved(path: str) -> Any:
    """Return the class or function of a "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class AddOn:
    """A trained network: the "module:class" of the network and of its config.

    `training` is the stage of `lantern train` that makes it, "drafter" or "policy", else a command line. `task` is the
    "module:class" of a policy's training task, `toy` fields of the config at the size of tests. `limits_depth`: it
    drafts at most `config.depths` tokens ahead. `is_target`: it is a target itself, of the same family; the others name
    the target that they were trained for, by its digest in `config.target`.
    """

    name: str
    path: str
    config_path: str
    training: str = "drafter"
    toy: Mapping[str, Any] = field(default_factory=dict)
    limits_depth: bool = False
    is_target: bool = False
    task: str = ""

    @property
    def module(self) -> Any:
        """The class of the network."""
        return resolved(self.path)

    @property
    def config(self) -> Any:
        """The class of its config."""
        return resolved(self.config_path)

    @property
    def folder(self) -> str:
        """Where it lies in a model's folder."""
        return "drafter" if self.name == DRAFTER else f"parts/{self.name}"

    @property
    def command(self) -> str:
        """The command that trains it. MODEL is the model's folder; what comes out belongs into `folder`."""
        if self.training == "drafter":
            return (
                f"lantern train drafter --kind {self.name} --data DATA --target MODEL/transformer "
                "--text-encoder MODEL/text_encoder --tokenizer MODEL/tokenizer --out OUT"
            )
        if self.training == "policy":
            return f"lantern train policy --kind {self.name} --records RECORDS --out OUT"
        return self.training


ADD_ONS: dict[str, AddOn] = {}


def add_on(name: str, module: str, network: str, config: str, **fields: Any) -> None:
    """Declare an add-on by the module and the names of its network and config."""
    ADD_ONS[name] = AddOn(name, f"{module}:{network}", f"{module}:{config}", **fields)


HEADS = {"toy": {"depths": 12}, "limits_depth": True}
C2T = {"training": "policy", "toy": {"hidden": 8}, "task": "lantern.training.policy:C2TTask"}
RADAR = {"training": "policy", "toy": {"beam": 4, "hidden": 8}, "task": "lantern.training.policy:RadarTask"}
COUNTS = "lantern train tables --kind fr-spec --model MODEL --prompts FILE --out MODEL/parts"
TABLES = "lantern train tables --kind sam --model MODEL --prompts FILE --out MODEL/parts"
SMALL = (
    "lantern train target --config target-emoji-small --data DATA --vq MODEL/vqvae "
    "--text-encoder MODEL/text_encoder --tokenizer MODEL/tokenizer --out OUT"
)

add_on(DRAFTER, "lantern.drafters.eagle.eagle1", "Eagle", "EagleConfig")
add_on("eagle3", "lantern.drafters.eagle.eagle3", "Eagle3", "Eagle3Config", toy={"layers": 2})
POSS = {"toy": {"depths": 4, "per_layer": 2}, "limits_depth": True}
add_on("poss", "lantern.drafters.eagle.poss", "Poss", "PossConfig", **POSS)
add_on("vispec", "lantern.drafters.eagle.vispec", "ViSpec", "ViSpecConfig", toy={"summaries": 2, "recent": 1})
add_on("medusa", "lantern.drafters.heads.medusa", "Medusa", "MedusaConfig", **HEADS)
add_on("parallelspec", "lantern.drafters.heads.parallelspec", "ParallelSpec", "ParallelSpecConfig", **HEADS)
add_on("vertical", "lantern.drafters.heads.vertical", "Vertical", "VerticalConfig", **HEADS)
add_on("fr-spec", "lantern.drafters.eagle.fr_spec", "FrequencyTable", "FrequencyConfig", training=COUNTS)
add_on("sam", "lantern.drafters.lookup.tables", "SamTables", "SamConfig", training=TABLES)
LLAMA = ("lantern.models.llamagen.transformer", "Transformer", "TransformerConfig")
add_on("small", *LLAMA, training=SMALL, is_target=True)
add_on("c2t", "lantern.drafters.policies.c2t", "C2T", "C2TConfig", **C2T)
add_on("c2t-paper", "lantern.drafters.policies.c2t", "C2T", "C2TConfig", **C2T)
add_on("radar", "lantern.drafters.policies.radar", "Radar", "RadarConfig", **RADAR)
add_on("radar-paper", "lantern.drafters.policies.radar", "Radar", "RadarConfig", **RADAR)
