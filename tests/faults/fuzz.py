"""Mutations of model folders and checkpoints, and what loading them does.

    python -m tests.faults.fuzz --count 2000 --seed 0

Each mutation damages one file, or one component's folder, in one way. The places are a toy model with every component
and add-on, with and without checksums, loaded as a command and as a diffusers pipeline do; a checkpoint and a released
drafter, as `lantern convert` reads them; and a drafter's folder, as training continues it. Loading must raise one
ValueError or OSError whose text is one line that names the file or its folder. Files that no checksum covers, and JSON
files, may load as well; then an image must come out or the same kinds of error. Nothing may run that a file contains,
and nothing may be written. Each mutation has 10 seconds of processor time, and 60 of waiting on a busy machine; the
process stays within 1 GiB beyond what it used after loading the undamaged model.
"""

import argparse
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lantern import LanternPipeline
from lantern.core.config import one_line
from lantern.core.io import CONFIG_NAME, WEIGHTS_NAME, write_json
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.generation.generator import generate
from lantern.generation.requests import requests
from lantern.models.folder import load_model
from lantern.models.llamagen.checkpoint import read_checkpoint
from lantern.models.llamagen.transformer import Transformer
from lantern.training.kinds import load_kind
from lantern.verifiers.relaxations.neighbours import proximity_table, save_table
from tests.tiny_folder import save_tiny_model

SECONDS, WAIT, GROWTH_KIB, HUGE = 10, 60, 1 << 20, 1 << 36
JUNK: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 10**9, 10**30, 1.5, True, [[1]], {"a": 1}, "\u0000", 1e308)
FOREIGN: tuple[Any, ...] = (["os", "system"], ["subprocess", "Popen"], ["tests.faults.hostile", "Model"], "os.system")
Mutation = Callable[[Path, random.Random, Path], None]


class TooSlowError(Exception):
    """A mutation took too long to refuse."""


class Payload:
    """Object whose unpickling creates a file, as a hostile checkpoint might."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def truncate(path: Path, lot: random.Random, marker: Path) -> None:
    """Keep a part of the file."""
    content = path.read_bytes()
    path.write_bytes(content[: lot.randrange(len(content))] if content else b"")


def flip_bits(path: Path, lot: random.Random, marker: Path) -> None:
    """Flip one to four bits."""
    content = bytearray(path.read_bytes())
    for _ in range(lot.randint(1, 4)):
        content[lot.randrange(len(content))] ^= 1 << lot.randrange(8)
    path.write_bytes(bytes(content))


def replace_with_pickle(path: Path, lot: random.Random, marker: Path) -> None:
    """Put a hostile pickle in the place of the file, bare or inside torch's archive."""
    if lot.random() < 0.5:
        path.write_bytes(pickle.dumps(Payload(marker)))
    else:
        torch.save({"model": Payload(marker)}, path)


def replace_with_junk(path: Path, lot: random.Random, marker: Path) -> None:
    """Put random bytes, JSON of another kind or deep JSON in the place of the file."""
    junk = [json.dumps(value).encode() for value in JUNK]
    path.write_bytes(lot.choice([lot.randbytes(lot.randrange(200)), b"[" * 100_000, *junk]))


def enlarge(path: Path, lot: random.Random, marker: Path) -> None:
    """Extend the file by zeros to 64 GiB, which occupy no disk."""
    os.truncate(path, HUGE)


def remove(path: Path, lot: random.Random, marker: Path) -> None:
    """Remove a file or folder, or put a folder, a link to nothing, to itself or to a device, or a pipe in its place."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    put: list[Callable[[], object]] = [
        lambda: None,
        path.mkdir,
        path.touch,
        lambda: path.symlink_to(path.with_name("missing")),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.mkfifo(path),
    ]
    lot.choice(put)()


def change_json(path: Path, lot: random.Random, marker: Path) -> None:
    """Change, add or remove a value of a JSON file; of weights, change the header."""
    if path.suffix != ".json":
        return change_header(path, lot, marker)
    values = json.loads(path.read_text(encoding="utf-8"))
    place = values
    while (
        isinstance(place, dict)
        and lot.random() < 0.4
        and (inner := [v for v in place.values() if v and isinstance(v, dict)])
    ):
        place = lot.choice(inner)
    kind, names = lot.randrange(4), sorted(place)
    if kind == 0 and names:
        del place[lot.choice(names)]
    elif kind == 1:
        place[lot.choice(["vocab_sise", "", "auto_map", "model_type", "kind", "vqvae"])] = lot.choice(
            (*JUNK, *FOREIGN, "bert", {"AutoConfig": "hostile.Config", "AutoTokenizer": ["hostile.T", None]})
        )
    elif names:
        place[lot.choice(names)] = lot.choice((*JUNK, *FOREIGN))
    path.write_text(json.dumps(values), encoding="utf-8")
    return None


def change_header(path: Path, lot: random.Random, marker: Path) -> None:
    """Change name, dtype, shape or place of a tensor in a safetensors file, or the header's length; else flip bits."""
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        return flip_bits(path, lot, marker)
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = lot.choice(sorted(set(header) - {"__metadata__"}))
    kind = lot.randrange(5)
    if kind == 0:
        header[lot.choice(["x", ""])] = header.pop(name)
    elif kind == 1:
        header[name]["dtype"] = lot.choice(["F64", "BF16", "I8", "U8", "C64", "BOOL", "F8_E4M3", "x"])
    elif kind == 2:
        header[name]["shape"] = lot.choice([[], [-1], [0], [1 << 40], [1 << 62, 4], header[name]["shape"][::-1], "x"])
    elif kind == 3:
        header[name]["data_offsets"] = lot.choice([[0, 0], [0, 1 << 62], [-8, 8], [8, 0], [0, len(data)]])
    text = json.dumps(header).encode()
    size = lot.choice([0, 1 << 63, len(text) * 2, len(text) - 1]) if kind == 4 else len(text)
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return None


MUTATIONS: tuple[Mutation, ...] = (
    *(truncate, flip_bits, replace_with_pickle, replace_with_junk, enlarge, remove, remove),
    *(change_json,) * 4,
)


@dataclass(frozen=True)
class Place:
    """A folder of files to damage, how it is loaded, and whether each of its weight files has a checksum."""

    name: str
    folder: Path
    load: Callable[[Path], object]
    weight: int
    has_checksums: bool = False

    def targets(self) -> list[Path]:
        """Return the files and folders to damage, relative to the folder.

        pipeline.py is for diffusers' trust_remote_code alone: lantern neither reads nor runs it.
        """
        return sorted(p.relative_to(self.folder) for p in self.folder.rglob("*") if p.suffix != ".py")


def load_all(folder: Path) -> None:
    """Load a model folder with all of its components and add-ons, and make an image."""
    model = load_model(folder, device="cpu")
    for name in model.add_ons:
        assert model.add_ons[name] is not None
    made = list(generate(model, requests(prompts=["a red apple"]), method="eagle1" if model.drafter else "plain"))
    assert len(made) == 1


def load_pipeline(folder: Path) -> None:
    """Load a model folder as a diffusers pipeline and make an image."""
    pipe = LanternPipeline.from_pretrained(folder)
    for name in pipe.model.add_ons:
        assert pipe.model.add_ons[name] is not None
    pipe.set_progress_bar_config(disable=True)
    pipe("a red apple", method="plain", generator=0)


def places(root: Path) -> list[Place]:
    """Write all places below a folder."""
    whole = save_tiny_model(root / "whole")
    model: Any = load_model(whole)
    save_table(proximity_table(model.vq.quantize.tokens(), 12), whole / "vqvae" / "neighbours.safetensors")
    bare = Path(shutil.copytree(whole, root / "bare"))
    for path in bare.rglob("SHA256SUMS"):
        path.unlink()
    target: Transformer = model.target
    (root / "checkpoint").mkdir()
    torch.save({"model": target.state_dict()}, root / "checkpoint" / "x.pt")
    released = root / "released"
    released.mkdir()
    rows = Eagle(EagleConfig.for_target(target.config, form="rows"))
    torch.save(rows.state_dict(), released / "pytorch_model.bin")
    write_json(released / CONFIG_NAME, {"hidden_size": rows.config.dim, "num_attention_heads": rows.config.n_head})
    pickled = Path(shutil.copytree(bare, root / "pickled"))
    weights = pickled / "text_encoder" / WEIGHTS_NAME
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    drafter = Path(shutil.copytree(whole / "drafter", root / "drafter"))
    size, heads = target.config.block_size, {"n_head": target.config.n_head}
    return [
        Place("model", whole, load_all, 50, has_checksums=True),
        Place("model without checksums", bare, load_all, 20),
        Place("model with pickled text encoder", pickled, load_all, 4),
        Place("pipeline", whole, load_pipeline, 8, has_checksums=True),
        Place(
            "checkpoint", root / "checkpoint", lambda f: read_checkpoint(f / "x.pt", block_size=size, config=heads), 8
        ),
        Place("released drafter", released, lambda f: read_checkpoint(f, kind="drafter", block_size=size), 5),
        Place("drafter", drafter, lambda f: load_kind("eagle1", f, target), 5, has_checksums=True),
    ]


def run(place: Place, folder: Path, path: Path, marker: Path) -> str | None:
    """Load what a mutation of `path` left in a folder; return what is wrong with the outcome, None if nothing is."""
    before = sorted(folder.rglob("*"))
    may_load = path.suffix != ".safetensors" or not place.has_checksums
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAIT)
    try:
        place.load(folder)
        outcome = None if may_load else "a damaged file loaded"
    except TooSlowError:
        outcome = f"took more than {SECONDS} s, or waited for {WAIT} s"
    except FloatingPointError as error:  # of a picture: names the request
        outcome = None if may_load and "\n" not in str(error) else f"bad message: {one_line(error)}"
    except (ValueError, OSError) as error:
        text = str(error)
        named = any(str(part) in text for part in (path, *path.parents[: len(path.relative_to(folder).parts)]))
        outcome = None if named and "\n" not in text and len(text) < 600 else f"bad message: {text[:300]!r}"
        if "weights_only" in text or "trust_remote_code" in text:
            outcome = f"the message advises to run code: {text[:300]!r}"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {one_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    if marker.exists():
        return "a file's content was executed"
    return outcome or ("files were written" if sorted(folder.rglob("*")) != before else None)


def violations(count: int, seed: int) -> Iterator[str]:
    """Yield one line for each mutation that is not refused as it should be."""
    lot = random.Random(seed)

    def expired(*_: object) -> None:
        raise TooSlowError

    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, expired)
    with tempfile.TemporaryDirectory() as name:
        root, marker = Path(name), Path(name) / "marker"
        (root / "places").mkdir()
        known = places(root / "places")
        for place in known:
            place.load(place.folder)
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            [place] = lot.choices(known, [place.weight for place in known])
            folder = Path(shutil.copytree(place.folder, root / "damaged"))
            path = folder / lot.choice(place.targets())
            mutate = remove if path.is_dir() else lot.choice(MUTATIONS)
            mutate(path, lot, marker)
            found = run(place, folder, path, marker)
            shutil.rmtree(folder)
            marker.unlink(missing_ok=True)
            if found is not None:
                yield f"{number} {place.name}: {mutate.__name__} {path.relative_to(folder)}: {found}"
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
        if growth > GROWTH_KIB:
            yield f"memory grew by {growth >> 10} MiB"


def main() -> int:
    """Run the mutations and print those that are not refused; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = 0
    for line in violations(args.count, args.seed):
        found += 1
        print(line, flush=True)
    print(f"{args.count} mutations, {found} not refused as they should be")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
