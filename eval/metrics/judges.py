"""The networks of metrics by name, and their features of images.

Each network is loaded once and shared by all metrics that use it, each image is read once for all networks, and
features are written to disk in a stream.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from tqdm import tqdm

from lantern.core.config import one_line
from lantern.eval.metrics import clip_score, inception
from lantern.eval.metrics.pictures import Batch, Change, raw, stream
from lantern.eval.metrics.weights import Found, find_weights

# both have `prepare`, from an image (uint8, h w 3) to input, in reader threads, and `embed`, to features on the CPU
Judge = clip_score.Clip | inception.Inception
Pair = Callable[[UInt8[Tensor, "b 3 h w"], UInt8[Tensor, "b 3 h w"]], Float[Tensor, " b"]]
RAW = "raw"
CLEAN = "Pillow bicubic in floats, not rounded (clean-fid, mode clean)"
LEGACY = "TensorFlow 1's bilinear, not antialiased (clean-fid, mode legacy_tensorflow)", ("torch-fidelity",)
# by network: how it resizes images, and the packages that its figures depend on
NETWORKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "inception:clean": (CLEAN, ("torch-fidelity", "clean-fid")),
    **dict.fromkeys(("inception:legacy", "logits:legacy"), LEGACY),
    **dict.fromkeys(("clip", "hps", "pickscore"), (clip_score.RESIZE, ("transformers", "open_clip_torch"))),
    "lpips": ("none", ("torchmetrics", "torchvision")),
    "psnr": ("none", ("torchmetrics",)),
}


def weights_of(judge: str, given: Mapping[str, Path]) -> str:
    """Return the name of the weights of a network, "" for a measure without weights; `given` are the user's files."""
    kind = judge.partition(":")[0]
    if kind == "logits" or (kind == "inception" and "inception" not in given and "inception-logits" in given):
        return "inception-logits"
    return "" if kind == "psnr" else kind


def load_judges(
    names: Iterable[str], given: Mapping[str, Path], *, cache: Path | None, device: torch.device
) -> dict[str, Judge]:
    """Return networks by name, each file loaded once; `given` are files of users. FileNotFoundError without weights."""
    files, judges = dict[str, Judge](), dict[str, Judge]()
    for name in names:
        stored, (kind, _, resize) = weights_of(name, given), name.partition(":")
        if stored not in files:
            clip = clip_score.load_clip if kind == "clip" else clip_score.load_preference
            load: Any = inception.load_inception if stored.startswith("inception") else clip
            files[stored] = load(find_weights(stored, given, cache=cache), device=device)
        one = judges[name] = files[stored]
        if isinstance(one, inception.Inception):
            judges[name] = dataclasses.replace(one, resize=resize, gives_logits=kind == "logits")
    return judges


def load_pairs(
    names: Iterable[str], given: Mapping[str, Path], *, cache: Path | None, device: torch.device
) -> dict[str, tuple[Pair, Found | None]]:
    """Return measures of pairs, psnr or lpips, and their weights, as `load_judges`."""
    found = {name: find_weights(name, given, cache=cache) if weights_of(name, given) else None for name in names}
    return {name: (load_lpips(one, device=device) if one else psnr, one) for name, one in found.items()}


def psnr(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Return torchmetrics' peak signal-to-noise ratio of each pair in dB; infinite for equal images."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    return peak_signal_noise_ratio(a.double(), b.double(), data_range=255.0, reduction="none", dim=(1, 2, 3))


def load_lpips(found: Found, *, device: torch.device | str = "cpu") -> Pair:
    """Return the LPIPS (arXiv:1801.03924) of pairs of images by torchvision's AlexNet in a file.

    The heads come with torchmetrics, whose class downloads AlexNet. ValueError for weights of another network.
    """
    from torchmetrics.functional.image.lpips import _LPIPS

    state = inception.read_tensors(found.path)
    network = _LPIPS(pretrained=True, net="alex", pnet_rand=True)
    try:
        # torchmetrics splits the layers into slices that keep torchvision's numbers
        for name, tensor in network.net.state_dict().items():
            tensor.copy_(state[f"features.{name.partition('.')[2]}"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{found.path} is not torchvision's AlexNet: {one_line(error)}") from error
    network.eval().to(device)

    @torch.inference_mode()
    def lpips(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
        return network(*(one.to(device).float() / 127.5 - 1 for one in (a, b))).flatten().cpu()

    return lpips


@dataclass
class Seen:
    """The features of a set of `count` images, by network; the tensors are files in `folder`, mapped to memory."""

    count: int
    folder: Path
    features: dict[str, Float[Tensor, "n c"]] = field(default_factory=dict)
    prompts: list[str | None] = field(default_factory=list)
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256, repr=False)

    @property
    def sha256(self) -> str:
        """Digest of the digests of all files, in order."""
        return self._digest.hexdigest()

    def enter(self, batch: Batch, judges: Mapping[str, Judge]) -> None:
        """Write the features of a batch."""
        self.prompts += batch.prompts
        self._digest.update(b"".join(batch.digests))
        for name, judge in judges.items():
            features = judge.embed(batch.inputs[name])
            if name not in self.features:
                path, shape = self.folder / f"{name.replace(':', '-')}.npy", (self.count, features.shape[1])
                self.folder.mkdir(exist_ok=True)
                self.features[name] = torch.from_numpy(np.lib.format.open_memmap(path, "w+", np.float32, shape))
            self.features[name][batch.first : batch.first + len(features)] = features


def check_pairs(metrics: Iterable[str], ours: Sequence[Path], theirs: Sequence[Path]) -> None:
    """Raise ValueError for images and reference images that do not pair up, by number or by name."""
    names, got = ", ".join(metrics), f"{len(ours)} images and {len(theirs)} reference images"
    if len(ours) != len(theirs):
        raise ValueError(f"{names}: got {got}, wanted equal numbers")
    for one, other in zip(ours, theirs, strict=True):
        if one.stem != other.stem:
            raise ValueError(f"{names}: {one.name} is paired with {other.name}, wanted pairs of the same name")


def extract(
    folder: Path,
    sets: Sequence[tuple[Sequence[Path], Mapping[str, Judge]]],
    pairs: Mapping[str, Pair],
    *,
    batch: int = 32,
    before: Change | None = None,
    prompts: Sequence[str] | None = (),
    is_quiet: bool = False,
) -> tuple[list[Seen], dict[str, Float[Tensor, " n"]]]:
    """Return the features of two sets, images and reference with their networks, and measures of pairs by position.

    folder: where features are written. batch: images at a time. before: a function applied to every image first.
    prompts: those given, in order; None: each image must contain its own. ValueError for what does not pair up.
    """
    if pairs:
        check_pairs(pairs, *(paths for paths, _ in sets))
    seen = [Seen(len(paths), folder / str(place)) for place, (paths, _) in enumerate(sets)]
    own = [{name: judge.prepare for name, judge in judges.items()} for _, judges in sets]
    prepare = [one | ({RAW: raw} if pairs else {}) for one in own]
    streams = [stream(paths, one, batch=batch, before=before) for (paths, _), one in zip(sets, prepare, strict=True)]
    values, given = {name: list[Tensor]() for name in pairs}, prompts or ()
    with tqdm(total=sum(one.count for one in seen), unit=" images", disable=is_quiet or None, leave=False) as bar:
        for batches in zip_longest(*streams):
            if (first := batches[0]) is not None:
                if prompts is None and None in first.prompts:
                    name = first.names[first.prompts.index(None)]
                    raise ValueError(f"{name} has no prompt in its file: give one per image with --prompts")
                for wanted, name, text in zip(given[first.first :], first.names, first.prompts, strict=False):
                    if text and text != wanted and text in given:
                        why = f"is of {text[:40]!r}, not {wanted[:40]!r}: order --prompts by file names"
                        raise ValueError(f"{name} {why}")
            for one, some, (_, judges) in zip(seen, batches, sets, strict=True):
                if some is not None:
                    one.enter(some, judges)
                    bar.update(len(some.names))
            if pairs:
                ours, theirs = (some.inputs[RAW] for some in batches)
                if ours.shape != theirs.shape:  # of the first pair too, since each set has one size
                    one, other = (paths[0] for paths, _ in sets)
                    got = f"{one} is {list(ours.shape[1:])}, its reference {other} is {list(theirs.shape[1:])}"
                    raise ValueError(f"{got}: wanted pairs of the same size")
                for name, measure in pairs.items():
                    values[name].append(measure(ours, theirs))
    return seen, {name: torch.cat(found) for name, found in values.items()}
