"""Mutations of model folders and checkpoints, and what loading them does.

    python -m tests.faults.fuzz --count 2000 --seed 0

Each mutation damages one file of a toy model folder (or of a checkpoint for `lantern convert`) in one way. Loading must
either succeed, which only a mutated JSON file may, or raise one ValueError or OSError whose text is one line that names
the file or a folder above it. Nothing may run that a pickle contains, and nothing may be written. Each mutation has
10 seconds; the process stays within 1 GiB beyond what it used after loading the undamaged model.
"""

import argparse
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lantern.core.config import one_line
from lantern.models.folder import load_model
from lantern.models.llamagen.checkpoint import read_checkpoint
from tests.tiny_folder import save_tiny_model

SECONDS, GROWTH_KIB = 10, 1 << 20
JUNK: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 10**9, 10**30, 1.5, True, [[1]], {"a": 1}, "\u0000", 1e308)


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
    """Put random bytes, or JSON of another kind, in the place of the file."""
    path.write_bytes(lot.choice([lot.randbytes(lot.randrange(200)), *(json.dumps(junk).encode() for junk in JUNK)]))


def remove(path: Path, lot: random.Random, marker: Path) -> None:
    """Remove the file, or put a folder, a dangling link or a device in its place."""
    path.unlink()
    kind = lot.randrange(4)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path.with_name("missing"))
    elif kind == 3:
        path.symlink_to("/dev/zero")


def change_json(path: Path, lot: random.Random, marker: Path) -> None:
    """Change, add or remove a value of a JSON file; of others, flip bits."""
    if path.suffix != ".json":
        return flip_bits(path, lot, marker)
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
        place[lot.choice(["vocab_sise", "", "auto_map", "model_type", "kind"])] = lot.choice((*JUNK, "bert"))
    elif names:
        place[lot.choice(names)] = lot.choice(JUNK)
    path.write_text(json.dumps(values), encoding="utf-8")
    return None


MUTATIONS: tuple[Callable[[Path, random.Random, Path], None], ...] = (
    *(truncate, flip_bits, replace_with_pickle, replace_with_junk, remove),
    *(change_json,) * 3,
)


def run(path: Path, target: Path, load: Callable[[], object], marker: Path) -> str | None:
    """Load what a mutation left; return what is wrong with the outcome, None if nothing is."""
    before = sorted(target.rglob("*"))
    signal.alarm(SECONDS)
    try:
        load()
        outcome = None if path.suffix == ".json" else "a damaged file loaded"
    except TooSlowError:
        outcome = f"took more than {SECONDS} s"
    except (ValueError, OSError) as error:
        text = str(error)
        named = any(str(part) in text for part in (path, *path.parents[: len(path.relative_to(target).parts)]))
        outcome = None if named and "\n" not in text and len(text) < 600 else f"bad message: {text[:200]!r}"
        if "weights_only=False" in text:
            outcome = "the message advises to unpickle"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {one_line(error)}"
    finally:
        signal.alarm(0)
    if marker.exists():
        return "a pickle was executed"
    return outcome or ("files were written" if sorted(target.rglob("*")) != before else None)


def load_all(folder: Path) -> None:
    """Load a model folder with all of its components and add-ons."""
    model = load_model(folder, device="cpu")
    for name in model.add_ons:
        assert model.add_ons[name] is not None


def violations(count: int, seed: int) -> Iterator[str]:
    """Yield one line for each mutation that is not refused as it should be."""
    lot = random.Random(seed)

    def expired(*_: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, expired)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        whole, marker = save_tiny_model(root / "whole"), root / "marker"
        state = load_model(whole, parts=()).target.state_dict()
        torch.save({"model": state}, root / "x.pt")
        (root / "ckpt").mkdir()
        load_all(whole)
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # pipeline.py is for diffusers' trust_remote_code alone: lantern neither reads nor runs it
        files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.suffix != ".py")
        for number in range(count):
            mutate = lot.choice(MUTATIONS)
            if lot.random() < 0.1:
                shutil.copyfile(root / "x.pt", path := root / "ckpt" / "x.pt")
                mutate(path, lot, marker)
                found = run(path, root / "ckpt", lambda p=path: read_checkpoint(p, block_size=16), marker)
                found = None if found == "a damaged file loaded" else found  # a checkpoint holds no checksum
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            else:
                folder = root / "damaged"
                shutil.copytree(whole, folder)
                path = folder / lot.choice(files)
                mutate(path, lot, marker)
                found = run(path, folder, lambda f=folder: load_all(f), marker)
                if found == "a damaged file loaded" and path.name == "SHA256SUMS":
                    found = None  # without a list, files load unverified
                shutil.rmtree(folder)
            marker.unlink(missing_ok=True)
            if found is not None:
                yield f"{number} {mutate.__name__} {path.relative_to(root)}: {found}"
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
