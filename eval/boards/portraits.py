"""The images of a report, with their acceptance maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lantern.eval.boards.rounds import pack
from lantern.eval.speed.contenders import Contender, Job
from lantern.generation.acceptance_map import AcceptanceMap, read_map


@dataclass(frozen=True)
class Portrait:
    """One shown image: number, prompt, data URI of its pixels ("" without a tokenizer), and acceptance map."""

    number: int
    prompt: str
    picture: str
    map: AcceptanceMap

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; inverse of `from_dict`."""
        return {"number": self.number, "prompt": self.prompt, "picture": self.picture, "map": self.map.as_dict()}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Portrait":
        """Read a portrait written by `as_dict`."""
        return cls(found["number"], found["prompt"], found["picture"], AcceptanceMap.from_dict(found["map"]))


def make_portraits(
    contender: Contender, jobs: Sequence[Job], known: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Decode the first image of each job with its steps, untimed; entries in `known` are reused."""
    found = [dict(one) for one in known[: len(jobs)]]
    for number in range(len(found), len(jobs)):
        made = contender.decode(jobs[number], keep_steps=True)
        accepted = read_map(made.steps, 0, made.codes.shape[1])
        found.append({"number": number, "codes": pack(made.codes[0]), "map": accepted.as_dict()})
    return found
