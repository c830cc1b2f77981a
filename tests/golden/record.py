"""The golden records of each kind of machine; `python -m tests.golden.record [PART ...]` writes those of this one.

With arguments, only cases whose names contain one of them are recorded, such as `toy-eager` or `-lantern++`. Other
records are kept.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.golden import adapter

FILE = Path(__file__).with_name("records.json")
COMMAND = "python -m tests.golden.record"
# methods of the embedded model by fused passes
FUSED = ("plain", "eagle1", "gumbel-jacobi", "bounded-window")
# Besides eager passes of the toy model, these run by default: fused steps, drafters and relaxations.
QUICK = ("lantern-emoji-fused-gumbel-jacobi", "toy-fused-plain", "toy-fused-gumbel-jacobi", "toy-fused-bounded-window")
QUICK += ("toy-fused-eagle1", "toy-fused-bounded", "toy-fused-sjd")
# methods that are not recorded by fused passes of the toy model: there are their likes
REPEATED = ("eagle2-rejection", "ddd", "svip", "c2t", "radar", "adt-tree", "grouped", "tolerance", "vadusa")
REPEATED += tuple(name for name in adapter.methods() if name.endswith("-paper"))


class Case(NamedTuple):
    model: str
    engine: str
    method: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def is_slow(self) -> bool:
        """Whether the default run leaves it out."""
        is_setting = self.method.endswith("-released")
        return is_setting or ((self.model, self.engine) != (adapter.TOY, "eager") and str(self) not in QUICK)


def cases() -> list[Case]:
    toy = [Case(adapter.TOY, "eager", name) for name in adapter.methods()]
    toy += [Case(adapter.TOY, "fused", name) for name in adapter.methods() if name not in REPEATED]
    fused = [Case(adapter.EMBEDDED, "fused", name) for name in FUSED]
    eager = [Case(adapter.EMBEDDED, "eager", name) for name in adapter.embedded_methods()]
    return toy + fused + eager


SAME_BITS = {"2.14": "2.13"}  # versions of torch that give the records of another one


def key() -> str:
    """Returns what bits depend on: the kind of processor and the version of torch."""
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{torch.backends.cpu.get_cpu_capability()} torch {SAME_BITS.get(version, version)}"


def read() -> dict[str, dict[str, list[dict[str, Any]]]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def write(records: dict[str, Any]) -> None:
    """Writes the records, one image a line."""
    parts = []
    for name, entries in sorted(records.items()):
        lines = [
            f"  {json.dumps(case)}: [\n   " + ",\n   ".join(json.dumps(one) for one in pictures) + "\n  ]"
            for case, pictures in sorted(entries.items())
        ]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main(wanted: list[str]) -> None:
    known = {str(case) for case in cases()}
    records = read()
    mine = {name: entry for name, entry in records.get(key(), {}).items() if name in known}
    for case in cases():
        if wanted and not any(part in str(case) for part in wanted):
            continue
        begun = time.perf_counter()
        mine[str(case)] = adapter.decode(*case)
        write(records | {key(): mine})
        print(f"{case}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
