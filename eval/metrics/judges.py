"""The networks of metrics by name, and their features of images.

Each network is loaded once and shared by all metrics that use it, each image is read once for all networks, and
features are written to disk in a stream.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lantern.core.config import one_line
from lantern.eval.metrics import clip_score, inception
from lantern.eval.metrics.pictures import Batch, Stream, raw
from lantern.eval.metrics.weights import Found, find_weights

# both have `prepare`, from an image (uint8, h w 3) to input, in reader threads, and `embed`, to features on the CPU
Judge = clip_score.Clip | inception.Inception
Pair = Callable[[UInt8[Tensor, "b 3 h w"], UInt8[Tensor, "b 3 h w"]], Float[Tensor, " b"]]
RAW = "raw"


def weights_of(judge: str, given: Mapping[str, Path]) -> str:
    """Return the name of the weights of a network, "" for a measure without weights; `given` are the user's files."""
    kind = judge.partition(":")[0]
    if kind == "logits" or (kind == "inception" and "inception" not in given and "inception-logits" in given):
        return "inception-logits"
    return "" if kind == "psnr" else kind


@dataclass
class Judges:
    """Loads networks by name. weights: files given by the user. cache: folder of the others."""

    weights: Mapping[str, Path]
    cache: Path | None
    device: torch.device
    _inceptions: dict[str, inception.Inception] = field(default_factory=dict)

    def load(self, name: str) -> Judge:
        """Return a network; FileNotFoundError for missing weights."""
        kind, _, resize = name.partition(":")
        if kind not in ("inception", "logits"):
            load = clip_score.load_clip if name == "clip" else clip_score.load_preference
            return load(find_weights(name, self.weights, cache=self.cache), device=self.device)
        stored = weights_of(name, self.weights)
        if stored not in self._inceptions:
            found = find_weights(stored, self.weights, cache=self.cache)
            self._inceptions[stored] = inception.load_inception(found, resize=resize, device=self.device)
        return dataclasses.replace(self._inceptions[stored], resize=resize, gives_logits=kind == "logits")

    def pair(self, name: str) -> tuple[Pair, Found | None]:
        """Return a measure of pairs and its weights."""
        if name == "psnr":
            return psnr, None
        found = find_weights(name, self.weights, cache=self.cache)
        return load_lpips(found, device=self.device), found


def psnr(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Return torchmetrics' peak signal-to-noise ratio of each pair in dB; infinite for equal images."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    pairs = zip(a.double(), b.double(), strict=True)
    return torch.stack([peak_signal_noise_ratio(one, other, data_range=255.0) for one, other in pairs])


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
        if a.shape != b.shape:
            raise ValueError(f"pictures of {list(a.shape)} and {list(b.shape)}, expected pairs of one size")
        return network(*(one.to(device).float() / 127.5 - 1 for one in (a, b))).flatten().cpu()

    return lpips


@dataclass
class Seen:
    """The features of a set of `count` images, by network; the tensors are files in `folder`, mapped to memory."""

    count: int
    folder: Path
    features: dict[str, Float[Tensor, "n c"]] = field(default_factory=dict)
    prompts: list[str | None] = field(default_factory=list)
    sha256: str = ""

    def enter(self, batch: Batch, judges: Mapping[str, Judge]) -> None:
        """Write the features of a batch."""
        self.prompts += batch.prompts
        for name, judge in judges.items():
            features = judge.embed(batch.inputs[name])
            if name not in self.features:
                path, shape = self.folder / f"{name.replace(':', '-')}.npy", (self.count, features.shape[1])
                self.folder.mkdir(exist_ok=True)
                self.features[name] = torch.from_numpy(np.lib.format.open_memmap(path, "w+", np.float32, shape))
            self.features[name][batch.first : batch.first + len(features)] = features


@dataclass(frozen=True)
class Extracted:
    """The features of both sets, and the measures of pairs."""

    ours: Seen
    theirs: Seen
    pairs: Mapping[str, Float[Tensor, " n"]]


def extract(
    folder: Path,
    sets: Sequence[tuple[Sequence[Path], Mapping[str, Judge]]],
    pairs: Mapping[str, Pair],
    *,
    batch: int = 32,
    before: Callable[[np.ndarray], np.ndarray] | None = None,
    reads_prompts: bool = False,
    is_quiet: bool = False,
) -> Extracted:
    """Extract features of two sets, images and reference with their networks, and measures of pairs by position.

    folder: where features are written. batch: images at a time. before: a function applied to every image first.
    reads_prompts: each image must contain its prompt. ValueError for sets that do not pair up.
    """
    from tqdm import tqdm

    if pairs:
        names, (ours, theirs) = ", ".join(pairs), (paths for paths, _ in sets)
        if len(ours) != len(theirs):
            got = f"{len(ours)} images and {len(theirs)} reference images"
            raise ValueError(f"{names}: got {got}, expected equal numbers")
        for one, other in zip(ours, theirs, strict=True):
            if one.stem != other.stem:
                raise ValueError(f"{names}: {one.name} is paired with {other.name}, expected pairs of the same name")
    seen, streams = [], []
    for place, (paths, judges) in enumerate(sets):
        seen.append(Seen(len(paths), folder / str(place)))
        prepare = {name: judge.prepare for name, judge in judges.items()} | ({RAW: raw} if pairs else {})
        streams.append(Stream(paths, prepare, batch, before))
    values: dict[str, list[Tensor]] = {name: [] for name in pairs}
    total = sum(one.count for one in seen)
    with tqdm(total=total, unit=" images", disable=True if is_quiet else None, leave=False) as bar:
        for batches in zip_longest(*streams):
            first = batches[0]
            if reads_prompts and first is not None and None in first.prompts:
                name = first.names[first.prompts.index(None)]
                raise ValueError(f"{name} has no prompt in its file: give one per image with --prompts")
            for one, some, (_, judges) in zip(seen, batches, sets, strict=True):
                if some is not None:
                    one.enter(some, judges)
                    bar.update(len(some.names))
            for name, measure in pairs.items():
                values[name].append(measure(*(some.inputs[RAW] for some in batches)))
    for one, stream in zip(seen, streams, strict=True):
        one.sha256 = stream.sha256
    return Extracted(*seen, pairs={name: torch.cat(found) for name, found in values.items()})
