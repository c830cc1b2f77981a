"""`python -m studies.verification`: milliseconds of verifying a draft tree, by verifier, lazily and over all rows.

Backs the figures of verification in docs/engines.md. Logits and log q are random, with q near p, for one image under
guidance 7.5 and top-k 1000. A tree is scored once and verified again and again with the codes and the noise of other
places, so that its walks have different lengths; the figure of a verifier is the mean over them of the least time of
each. Passes, drafting and the copies of accepted keys and values are not included.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lantern.cli.command import DONE, Command, integer, run_command
from lantern.core.io import write_json
from lantern.core.noise import Noise, Purpose
from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Verdict, Verifier
from lantern.decoding.loop import LazyRows
from lantern.drafters.trees.static import StaticTree, named
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.verifiers.greedy import GreedyVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxed import RelaxedVerifier

STEPS = 16  # different walks
NEIGHBOURS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(COMMAND, argv, prog="python -m studies.verification")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--tree", default="naive_extend_57", help="static tree (default naive_extend_57: 58 nodes)")
    parser.add_argument("--codes", type=integer(64, 1 << 20), default=16384, help="codes of the codebook")
    parser.add_argument("--threads", type=integer(1, 1024), nargs="+", default=[1, 2], help="numbers of CPU threads")
    parser.add_argument("--rounds", type=integer(1, 10**4), default=10, help="repetitions of each walk (default 10)")
    parser.add_argument("--out", type=Path, help="JSON file of the results")


def run(args: argparse.Namespace) -> int:
    """Print the milliseconds of every verifier and write them."""
    before, rows = load_average(), []
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows += [{"threads": threads} | row for row in measure(named(args.tree), args.codes, args.rounds)]
    print(f"{'verifier':16} threads  codes a step     all rows  rows visited (ms)")
    for row in rows:
        print(f"{row['verifier']:16} {row['threads']:7} {row['codes']:13.2f} {row['all']:12.2f} {row['lazy']:13.2f}")
    found = {"tree": args.tree, "codes": args.codes, "surroundings": surroundings(torch.device("cpu"))}
    if args.out is not None:
        write_json(args.out, found | {"load_average": {"begin": before, "end": load_average()}, "rows": rows})
    return DONE


def verifiers(codes: int) -> dict[str, tuple[Verifier, DraftMode]]:
    """Return the verifiers by name, with the mode of their drafts; neighbours are random."""
    table = torch.randint(codes, (codes, NEIGHBOURS), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return {
        "gumbel": (GumbelVerifier(), "gumbel"),
        "rejection": (RejectionVerifier(), "sampled"),
        "lantern": (RejectionVerifier(Lantern(table, k=NEIGHBOURS, delta=0.1)), "sampled"),
        "lantern++": (RejectionVerifier(LanternPP(table, k=10, lambda_=2.0)), "sampled"),
        "greedy lantern": (GreedyVerifier(Lantern(table, k=NEIGHBOURS, delta=0.1)), "point"),
        "bounded": (RelaxedVerifier(Bounded(table, k=50), GumbelVerifier()), "gumbel"),
    }


@torch.no_grad()
def measure(tree: StaticTree, codes: int, rounds: int) -> list[dict[str, Any]]:
    """Return for each verifier the mean codes a step, and mean milliseconds over all rows and over those visited."""
    found = []
    for name, (verifier, mode) in verifiers(codes).items():
        sampling = Sampling(guidance=7.5, top_k=1000)
        sampling = sampling.untruncated() if verifier.reads_untruncated else sampling
        noise = Noise([(0, 0)], positions=STEPS + tree.depth + 2, vocab_size=codes)
        drafts = Drafts(tree, mode, sampling, codes, noise)
        lengths, full, lazy = [], [], []
        for place in range(STEPS):
            draft, places = drafts.at(place)
            verdict, seconds = least(lambda: drafts.walk(verifier, draft, places), rounds)  # noqa: B023
            full.append(seconds)
            other, seconds = least(lambda: drafts.descend(verifier, draft, places), rounds)  # noqa: B023
            lazy.append(seconds)
            assert torch.equal(verdict.length, other.length) and torch.equal(verdict.next_token, other.next_token)
            lengths.append(int(verdict.length) + 1)
        means = {"codes": sum(lengths) / STEPS, "all": 1e3 * sum(full) / STEPS, "lazy": 1e3 * sum(lazy) / STEPS}
        found.append({"verifier": name} | {key: round(value, 3) for key, value in means.items()})
    return found


class Drafts:
    """Drafts of one tree of random logits."""

    def __init__(self, tree: StaticTree, mode: DraftMode, sampling: Sampling, codes: int, noise: Noise) -> None:
        random = torch.Generator().manual_seed(1)
        self.tree, self.shape, self.mode, self.sampling, self.noise = tree, tree.shape(), mode, sampling, noise
        self.logits = torch.randn(1, 2, tree.max_nodes, codes, generator=random)
        near = sampling.untruncated().log_probs(self.logits, self.shape.depths[None])
        self.log_q = sampling.filtered(near + 8.0 * torch.randn(near.shape, generator=random))

    def at(self, place: int) -> tuple[DraftTree, torch.Tensor]:
        """Return the draft below a code number, and the code numbers that follow its nodes."""
        places = place + 1 + self.shape.depths[None]
        purpose = Purpose.TARGET if self.mode == "gumbel" else Purpose.DRAFT
        scores = self.log_q if self.mode == "point" else self.log_q + self.noise.gumbel(places, purpose)
        ranked = scores.topk(max(self.shape.widths)).indices
        tokens = ranked[:, self.shape.parents, self.shape.ranks]
        return DraftTree(tokens, self.shape, self.mode, self.log_q, self.tree.inner()), places

    def walk(self, verifier: Verifier, draft: DraftTree, places: torch.Tensor) -> Verdict:
        """Verify with all rows."""
        return verifier.walk(draft, self.sampling.log_probs(self.logits, places), places, self.noise)

    def descend(self, verifier: Verifier, draft: DraftTree, places: torch.Tensor) -> Verdict:
        """Verify with the rows that the walk visits."""
        return verifier.descend(draft, LazyRows(self.sampling, self.logits, places), places, self.noise)


def least(work: Callable[[], Verdict], rounds: int) -> tuple[Verdict, float]:
    """Return a result and the least seconds of several calls."""
    made, seconds = work(), float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        made = work()
        seconds = min(seconds, time.perf_counter() - begun)
    return made, seconds


COMMAND = Command("verification", "Measure the time of verifying a tree.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
