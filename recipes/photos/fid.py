"""FID and KID of a class-conditional target, and of its tokenizer alone, against the training pictures."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from lantern.core.config import read_json_object
from lantern.core.io import atomic_write, load_component, write_json
from lantern.core.sampling import Sampling
from lantern.eval.metrics.quality import Options, measure
from lantern.eval.speed.surroundings import surroundings
from lantern.generation.generator import generate
from lantern.generation.requests import Request
from lantern.models.folder import Model
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.models.names import CLASSES_NAME
from lantern.training.data import Prepared, encode_png
from lantern.training.features import decode, encode, training_device
from lantern.training.loop import save_sheet

SHOWN = 8  # pictures of a class on the sheet


@dataclass(frozen=True)
class FidConfig:
    """How pictures are generated: their number, sampling and seed. Classes are as frequent as in training.

    ValueError for fewer than 2 pictures and for a batch below 1.
    """

    pictures: int = 2048
    guidance: float = 2.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pictures < 2 or self.batch < 1:
            raise ValueError(f"pictures is {self.pictures}, batch {self.batch}: wanted at least 2 and at least 1")


def measure_fid(
    config: FidConfig, *, out: Path, data: Path, target: Path, vq: Path, inception: Path | None = None
) -> str:
    """Generate pictures of all classes and compare them with the training pictures at their prepared size.

    Writes `out/generated`, `out/real`, `out/reconstructed` (PNG files), a sheet with a row per class, and fid.json.
    Weights of Inception are searched as by `lantern eval` unless given; FileNotFoundError names the missing file.
    ValueError without training images.
    """
    from tqdm import tqdm

    from lantern.eval.metrics.weights import find_weights

    weights = {} if inception is None else {"inception": inception}
    find_weights("inception", weights)  # before images are made
    prepared, device = Prepared.open(data), training_device()
    names = read_json_object(target / CLASSES_NAME)["classes"]
    pictures = load_component(VQVAE, VQConfig, vq).to(device)
    model = Model("photos", load_component(Transformer, TransformerConfig, target).to(device), pictures)
    used = [r for r in prepared.records if r.split == "train" and r.variant == "original"]
    if not used:
        raise ValueError(f"{data} holds no training image: prepare it with a smaller held_out")
    real = prepared.images()[torch.tensor([record.image for record in used])]
    save_pictures(real, out / "real")
    tokens = encode(pictures, real, batch=config.batch)
    save_pictures(decode(pictures, tokens, batch=config.batch), out / "reconstructed")
    of_used = torch.tensor([names.index(record.concepts[0]) for record in used])
    labels = of_used[torch.arange(config.pictures) % len(of_used)]
    requests = [Request(label=label, seed=config.seed, number=i) for i, label in enumerate(labels.tolist())]
    sampling = Sampling(config.guidance, config.temperature, config.top_k, config.top_p)
    images = generate(model, requests, method="plain", sampling=sampling, batch=config.batch)
    bar = tqdm(images, total=len(requests), desc="images", disable=None)
    made = torch.stack([torch.as_tensor(one.pixels).cpu() for one in bar]).permute(0, 3, 1, 2)
    save_pictures(made, out / "generated")
    rows = [(labels == number).nonzero()[:SHOWN, 0] for number in range(len(names))]
    shown = torch.cat([row[torch.arange(SHOWN) % len(row)] for row in rows if len(row)])
    save_sheet(made[shown], out / "sheet.png", columns=SHOWN)
    options = Options(device=device, batch=config.batch)
    found = {
        name: measure(sorted((out / name).glob("*.png")), out / "real", ["fid"], weights=weights, options=options)
        for name in ("generated", "reconstructed")
    }
    figures = {name: {k: asdict(v) for k, v in one.items()} for name, one in found.items()}
    write_json(out / "fid.json", {"classes": names, "figures": figures, "surroundings": surroundings(device)})
    texts = (f"{n}: " + ", ".join(f"{x.name} {x.value:.4g}" for x in one.values()) for n, one in found.items())
    return "; ".join(texts)


def save_pictures(pictures: Sequence[Tensor] | UInt8[Tensor, "n 3 h w"], folder: Path) -> None:
    """Write pictures as 000000.png, ...; others in the folder are removed."""
    for path in folder.glob("*.png"):
        path.unlink()
    for number, picture in enumerate(pictures):
        with atomic_write(folder / f"{number:06d}.png") as temporary:
            temporary.write_bytes(encode_png(picture.permute(1, 2, 0).numpy()))
