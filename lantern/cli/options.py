"""Options that several commands have, and those of `lantern reproduce`, which its row keeps (`eval.protocols`)."""

from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

from lantern.cli.command import Group, OneOf, existing, opt
from lantern.engines.engine import ENGINES, KV_CACHES, WEIGHTS, Engine, engine
from lantern.methods import METHODS

MODEL = opt("lantern-emoji", "name, folder or hub id")
MODEL_PLACE = replace(MODEL, is_positional=True)
MAX_SEED = 2**63 - 1
DTYPES = ("fp32", "bf16", "fp16")


class MethodName(OneOf):
    """A type for the name of a method, whose settings are options of the command."""

    def __call__(self, text: str) -> str:
        """Return the name; ArgumentTypeError for another one, and for one with settings."""
        name, _, settings = text.partition(":")
        if name in self.names and settings:
            raise ArgumentTypeError(f"{text!r:.40}, wanted {name}: its settings are options, such as --{settings}")
        return super().__call__(text)


METHOD = MethodName(METHODS, "a method that `lantern methods` lists")
ENGINE_HELP = (
    "how steps are run: eager (by torch), wide (attention in fp64: rounds the same in any tree), graph (one CUDA "
    "graph per step), cpu (C++, built by pip install or at first use by g++: several times as fast as eager, and "
    "exact methods give plain decoding's tokens in bf16 too); auto: the fastest of them that is ready"
)
WEIGHTS_HELP = (
    "weights of the target: full (the model's own, default), bf16, int8 (layers, head and the cpu engine's drafters), "
    "int4 (layers); exact methods are exact with respect to the quantized target"
)
KV_CACHE_HELP = (
    "keys and values: full, or fp8 (engines graph and eager), for batches of 16 and more on a GPU; exact methods are "
    "exact with respect to the target with this cache"
)
METHOD_HELP = 'such as eagle1 or "lantern++:k=5,lambda_=1.5"; default: the model\'s'
RAY_HELP = "as a Ray job, on a cluster or here (extra: ray)"
OF_MODEL = "(default: the model's)"


class Filters(Group):
    """The distribution that tokens are sampled from."""

    guidance: float | None = opt(None, f"classifier-free guidance; 1 or less is none {OF_MODEL}", 0, 1000)
    guidance_interval: int | None = opt(None, f"guide only tokens 0 to N + 1; -1 guides all {OF_MODEL}", -1, 10**6)
    top_k: int | None = opt(None, f"tokens to choose from; 0 is all {OF_MODEL}", 0, 10**6)
    top_p: float | None = opt(None, f"probability to choose from; 1 is all {OF_MODEL}", 0, 1)

    def given(self) -> dict[str, Any]:
        """Return the fields of the sampling that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Distribution(Filters):
    """The distribution that tokens are sampled from."""

    temperature: float | None = opt(None, f"0 is greedy {OF_MODEL}", 0, 100)


class Runs(Group):
    """How steps are run."""

    engine: str = opt("auto", ENGINE_HELP, type=OneOf(ENGINES))
    target_weights: str | None = opt(None, WEIGHTS_HELP, type=OneOf(["full", "bf16", *WEIGHTS[1:]]))
    kv_cache: str = opt("full", KV_CACHE_HELP, type=OneOf(KV_CACHES))

    def chosen(self) -> Engine:
        """Return the engine that the options describe."""
        weights = self.target_weights if self.target_weights in WEIGHTS else "full"
        return engine(self.engine, weights=weights, kv_cache=self.kv_cache)


class Apart(Runs):
    """Where and how the model runs."""

    device: str = opt("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = opt(
        "auto", "auto (bf16; fp32 on a CPU without C++ engine), fp32, bf16 or fp16", type=OneOf(["auto", *DTYPES])
    )

    def options(self) -> dict[str, Any]:
        """Return device, dtype and engine as `load_model` takes them; ValueError if they contradict each other."""
        dtype = self.dtype
        if self.target_weights == "bf16":
            if dtype not in ("auto", "bf16"):
                raise ValueError(f"--weights bf16 contradicts --dtype {dtype}: give one of them")
            dtype = "bf16"
        return {"device": self.device, "dtype": dtype, "engine": self.chosen()}


class Placement(Apart):
    """Where and how the model runs."""

    target_weights: str | None = replace(Apart.OPTIONS["target_weights"], flag="--weights")  # type: ignore[assignment]


class Machine(Group):
    """The machine."""

    threads: int | None = opt(None, "CPU threads to compute on", 1, 1024)
    device: str = opt("auto", "auto, cpu, cuda or cuda:N")
    quiet: bool = opt(False, "print no progress")

    def set_threads(self) -> None:
        """Let torch compute on --threads CPU threads, if they were given."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)


class Choices(Group):
    """What is made and measured."""

    method: str | None = opt(None, METHOD_HELP, metavar="METHOD")
    model: str | None = opt(None, "name, folder or hub id (default lantern-emoji)")
    limit: int = opt(0, "only the first N images of the protocol", 1, 10**7)
    metrics: list[str] | None = opt(None, "default: the protocol's; without a name, none", nargs="*")
    batch: int = opt(0, "images at a time (default 1)", 1, 4096)
    threads: int | None = opt(None, "CPU threads to compute on", 1, 1024)
    prompts: Path | None = opt(None, "folder of the protocol's prompt file", type=existing, metavar="FOLDER")
    reference: Path | None = opt(None, "real images or their statistics", type=existing)
    ray: str | None = opt(None, RAY_HELP, metavar="ADDRESS", nargs="?", const="")
    actors: int | None = opt(None, "--ray: number of models; default one per GPU", 1, 10_000)
