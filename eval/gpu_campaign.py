"""`python -m lantern.eval.gpu_campaign --minutes M --out DIR`: everything that only a GPU can show, in one command.

Seven parts run in the order of their worth, each task in a process of its own with its own time limit. Every finished
or stopped task writes DIR/NAME.json with machine, versions and commit. The command stops within M minutes. Started
again with the same DIR it continues: finished tasks are skipped, and those with the fewest attempts come first.
`--device cpu --toy` rehearses all of it on a CPU with toy sizes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantern.cli.command import DONE, FAILED, Command, existing, one_of, real, run_command
from lantern.core.config import read_json_object
from lantern.core.io import embedded_model, write_json

PARTS = {
    1: "doctor and the tests marked gpu",
    2: "equality of codes in bf16",
    3: "LlamaGen's shapes: plain, drafted, T(n)",
    4: "the embedded model: engines and methods, batches",
    5: "leaderboard",
    6: "frontier of speed against quality",
    7: "throughput of training",
}
METHODS = (
    *("gumbel-jacobi", "eagle1", "eagle2"),
    *("lantern", "lantern++", "bounded-window"),
)
POINTS = ("gumbel-jacobi", "bounded-window:delta=0.1/0.2", "lantern:k=100,delta=0.2", "lantern++:lambda_=2/5")
BASELINES = ("--baseline", "eager", "graph", "graph+int8")
SEVERAL = ("--variants", *BASELINES[1:], *BASELINES)  # those without minutes of compilation
GRACE = 15.0  # seconds between SIGTERM and SIGKILL
LEAST = 20.0  # a task is not started with fewer seconds left
TAIL = 4000  # characters of a task's output that its record keeps
CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Task:
    """One process: the arguments of Python, a limit in seconds, and the files it leaves beside its record.

    `prepare` runs before it, in this process. `figures` reads what the record holds beside the command's output.
    """

    part: int
    name: str
    arguments: tuple[str, ...]
    seconds: float
    prepare: Callable[[], object] = lambda: None
    figures: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    seeds: int = 64
    prompts: int = 4
    guidance: tuple[str, ...] = ("1", "3", "7.5")
    equality: tuple[str, ...] = ("gumbel-jacobi", "eagle1")
    equality_batches: tuple[str, ...] = ("1", "8")
    shapes: tuple[str, ...] = ("XL", "3B", "B")
    shape_words: tuple[str, ...] = ("--tau", "1.5", "2.5", "3.5", "--images", "10", *SEVERAL)
    methods: tuple[str, ...] = METHODS
    batches: tuple[str, ...] = ("1", "8", "64")
    bench_words: tuple[str, ...] = ("--images", "10", "--no-memory", "--variants", "graph", *BASELINES)
    engine_words: tuple[str, ...] = ("--images", "4", "--no-memory")
    board_words: tuple[str, ...] = ("--images", "64", "16", "--baseline", "eager", "graph")
    points: tuple[str, ...] = POINTS
    frontier_words: tuple[str, ...] = ("--images", "2000", "--baseline", "graph")
    pictures: int = 4000
    training: Mapping[str, int] = field(
        default_factory=lambda: {"dim": 256, "n_layer": 12, "n_head": 4, "batch": 384, "steps": 300}
    )


EAGER = ("--variants", "eager", "--baseline", "eager")
QUICK = ("--images", "1", "--no-memory", "--nodes", "1", "2")
TOY = Sizes(
    seeds=1,
    prompts=1,
    guidance=("3",),
    equality=("gumbel-jacobi",),
    equality_batches=("1",),
    shapes=("B",),
    shape_words=("--tau", "2", "--images", "1", "--codes", "3", "--nodes", "1", "2", *EAGER),
    methods=("gumbel-jacobi",),
    batches=("1",),
    bench_words=(*QUICK, *EAGER),
    engine_words=(*QUICK, *EAGER),
    board_words=("--images", "1", "--temperatures", "1", "--methods", "gumbel-jacobi", "--baseline", "eager"),
    points=("gumbel-jacobi",),
    frontier_words=("--images", "1", "--baseline", "eager"),
    pictures=12,
    training={"dim": 64, "n_layer": 1, "n_head": 1, "batch": 2, "steps": 4},
)


@dataclass(frozen=True)
class Plan:
    """What a campaign runs: results go to `out`, models, images and checkpoints to `work`.

    `metrics` are options of the frontier and the leaderboard for quality metrics; without them only total variation is
    measured.
    """

    out: Path
    work: Path
    device: str
    is_toy: bool = False
    metrics: tuple[str, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """How much is measured."""
        return TOY if self.is_toy else Sizes()

    def tasks(self) -> list[Task]:
        """Return all tasks in the order of their worth."""
        sizes, toy = self.sizes, self._save_toy_model if self.is_toy else lambda: None
        model = ("--model", str(self.work / "toy") if self.is_toy else "lantern-emoji")
        on = ("--dtype", "bf16", "--device", self.device)

        def bench(name: str, *words: str) -> tuple[str, ...]:
            return command("bench", *words, *on, "--out", self.out / f"{name}-figures.json", "--quiet")

        def board(name: str, *words: str) -> tuple[str, ...]:
            # rounds go to `work`, where a stopped board continues
            folders = ("--run", self.work / name, "--out", self.out / name)
            return command(name, *model, *words, *on, *self.metrics, *folders, "--overwrite", "--quiet")

        found = [Task(1, "doctor", command("doctor"), 120)]
        found += [Task(1, "gpu-tests", tests(self.is_toy), 300)] if gpu_tests() else []
        equality = (
            *("-m", "lantern.eval.speed.equality", *model, "--engine", "auto", "--methods", *sizes.equality),
            *("--seeds", str(sizes.seeds), "--prompts", str(sizes.prompts), "--guidance", *sizes.guidance),
            *("--batch", *sizes.equality_batches, *on, "--out", str(self.out / "equality-cells.json")),
        )
        found.append(Task(2, "equality", equality, 480, toy))
        for shape in sizes.shapes:
            name = f"shape-{shape}"
            found.append(Task(3, name, bench(name, "--shape", shape, *sizes.shape_words), 300))
        for batch in sizes.batches:
            name, words = f"embedded-{batch}", ("--methods", *sizes.methods, *sizes.bench_words, "--batch", batch)
            found.append(Task(4, name, bench(name, *model, *words), 300, toy))
        engines = bench("embedded-engines", *model, "--methods", sizes.methods[0], *sizes.engine_words)
        pages = ("--docs", str(self.out / "leaderboard"))
        return [
            *found,
            Task(4, "embedded-engines", engines, 480, toy),
            Task(5, "leaderboard", board("leaderboard", *sizes.board_words, *pages), 540, toy),
            Task(6, "frontier", board("frontier", "--points", *sizes.points, *sizes.frontier_words), 1800, toy),
            *self._training(),
        ]

    def _training(self) -> list[Task]:
        """Return the tasks of the last part: synthetic data, and a target of the embedded model's parts."""
        sizes, pictures = self.sizes, self.work / "pictures"
        data, config, target = (self.work / name for name in ("data", "target.json", "target"))
        source = embedded_model()
        folders = {"vq": "vqvae", "text-encoder": "text_encoder", "tokenizer": "tokenizer"}
        parts = [word for name, folder in folders.items() for word in (f"--{name}", source / folder)]
        made = command("train", "data", "--config", "data-folder", "--path", pictures, "--out", data)
        trained = command("train", "target", "--config", config, "--data", data, *parts, "--out", target)

        def write_config() -> None:
            write_json(config, training_config(sizes.training, is_compiled=not self.is_toy))

        def figures() -> Mapping[str, Any]:
            return throughput(target / "log.jsonl", sizes.training["batch"])

        return [
            Task(7, "training-data", made, 120, lambda: draw_pictures(pictures, sizes.pictures)),
            Task(7, "training", trained, 300, write_config, figures),
        ]

    def _save_toy_model(self) -> None:
        from lantern.eval.toy_model import save_toy_model

        if not (self.work / "toy" / "model_index.json").is_file():
            save_toy_model(self.work / "toy")


def command(*words: object) -> tuple[str, ...]:
    """Return the arguments of Python for a `lantern` command."""
    return ("-m", "lantern.cli.main", *map(str, words))


def gpu_tests() -> list[Path]:
    """Return the test files with tests marked gpu; none in a wheel."""
    every = sorted((CHECKOUT / "tests").rglob("test_*.py"))
    return [path for path in every if "mark.gpu" in path.read_text(encoding="utf-8")]


def tests(is_toy: bool) -> tuple[str, ...]:
    """Return the arguments of Python for the tests marked gpu; of one file in a rehearsal."""
    files = [str(path) for path in gpu_tests()]
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *(files[:1] if is_toy else files))


def draw_pictures(folder: Path, count: int) -> None:
    """Write images of coloured rectangles on white, each with its caption, as `lantern train data` reads them."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    for number in range(count):
        image, colour = Image.new("RGB", (64, 64), "white"), source.choice(("red", "blue", "green", "yellow"))
        corner = source.randrange(32), source.randrange(32)
        ImageDraw.Draw(image).rectangle((*corner, corner[0] + 24, corner[1] + 24), fill=colour)
        image.save(folder / f"{number:05}.png")
        (folder / f"{number:05}.txt").write_text(f"a {colour} square\n", encoding="utf-8")


def training_config(sizes: Mapping[str, int], *, is_compiled: bool) -> dict[str, Any]:
    """Return the config of a target over the embedded model's codes."""
    own = read_json_object(embedded_model() / "transformer" / "config.json")
    kept = {name: own[name] for name in ("model_type", "vocab_size", "block_size", "cls_token_num", "caption_dim")}
    model = kept | {name: sizes[name] for name in ("dim", "n_layer", "n_head")}
    loop = {"steps": sizes["steps"], "warmup": 1, "decay": 1, "evaluate_every": 10**6, "log_every": 2}
    return {
        "model": model,
        "loop": loop,
        "batch": sizes["batch"],
        "slots": own["cls_token_num"],
        "compile": is_compiled,
    }


def throughput(log: Path, batch: int) -> dict[str, Any]:
    """Return steps and images per second of the later half of a training, without compilation and warm-up."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    timed = [(line["step"], line["seconds"]) for line in lines if "seconds" in line and "loss" in line]
    if len(timed) < 2:
        return {"steps_per_second": None, "pictures_per_second": None}
    (first, begin), (last, end) = timed[len(timed) // 2 - 1], timed[-1]
    rate = (last - first) / max(end - begin, 1e-9)
    return {"steps_per_second": round(rate, 3), "pictures_per_second": round(rate * batch, 1)}


def pending(tasks: Sequence[Task], out: Path) -> list[Task]:
    """Return the tasks without a finished record: those with the fewest attempts first, then in their order."""
    known = {task.name: record_of(out, task) for task in tasks}
    left = [task for task in tasks if known[task.name].get("status") != "done"]
    return sorted(left, key=lambda task: int(known[task.name].get("attempts", 0)))


def record_of(out: Path, task: Task) -> dict[str, Any]:
    """Return the record of a task; empty if there is none or if it is damaged."""
    try:
        return read_json_object(out / f"{task.name}.json")
    except ValueError:
        return {}


def run_campaign(
    plan: Plan,
    tasks: Sequence[Task],
    seconds: float,
    *,
    say: Callable[[str], object],
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the pending tasks within `seconds`; return whether all tasks of the campaign are done."""
    deadline = now() + seconds
    where = machine(plan.device)
    for task in pending(tasks, plan.out):
        left = deadline - now() - GRACE
        if left < LEAST:
            say(f"time is over before {task.name}; the same command continues")
            break
        say(f"part {task.part}, {task.name}: at most {min(task.seconds, left):.0f} s")
        found = run_task(task, min(task.seconds, left))
        attempts = int(record_of(plan.out, task).get("attempts", 0)) + 1
        write_json(
            plan.out / f"{task.name}.json", without_paths(found, plan) | {"attempts": attempts, "machine": where}
        )
        say(f"part {task.part}, {task.name}: {found['status']} after {found['seconds']:g} s")
    return not pending(tasks, plan.out)


def run_task(task: Task, limit: float) -> dict[str, Any]:
    """Run a task in a process group of its own and return its record; after `limit` seconds the group is stopped."""
    begun, output, status = time.monotonic(), "", "failed"
    returned: int | None = None
    try:
        task.prepare()
        process = subprocess.Popen(
            [sys.executable, *task.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT if (CHECKOUT / "pyproject.toml").is_file() else None,
            start_new_session=True,
        )
        printed, is_stopped = _wait(process, limit)
        output, returned = printed.decode("utf-8", "replace"), process.returncode
        status = "stopped" if is_stopped else "done" if returned == 0 else "failed"
    except (ImportError, OSError, ValueError) as error:  # of the preparation
        output = f"{type(error).__name__}: {error}"
    record: dict[str, Any] = {
        "part": task.part,
        "about": PARTS[task.part],
        "status": status,
        "exit_code": returned,
        "seconds": round(time.monotonic() - begun, 1),
        "command": ["python", *task.arguments],
        "output": output[-TAIL:],
    }
    return record | ({"figures": dict(task.figures())} if status == "done" else {})


def without_paths(record: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a record in which DIR, WORK and . stand for the folders of this machine."""
    text = json.dumps(record)
    for folder, name in ((plan.work, "WORK"), (plan.out, "DIR"), (CHECKOUT, ".")):
        text = text.replace(json.dumps(str(folder))[1:-1], name)
    return json.loads(text)


def _wait(process: "subprocess.Popen[bytes]", limit: float) -> tuple[bytes, bool]:
    """Return what a process printed and whether it was stopped: by SIGTERM after `limit` seconds, then by SIGKILL."""
    try:
        return process.communicate(timeout=limit)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    try:
        return process.communicate(timeout=GRACE)[0], True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], True


def machine(device: str) -> dict[str, Any]:
    """Return machine, versions and commit, found by a process of its own, so that this one holds no GPU memory.

    ValueError for a device that is missing.
    """
    code = (
        "import json; from lantern.eval.speed.surroundings import surroundings; "
        f"from lantern.models.folder import pick_device; print(json.dumps(surroundings(pick_device({device!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd())
    if done.returncode != 0:
        raise ValueError(f"--device {device}: {done.stderr.strip().splitlines()[-1][:200]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(COMMAND, argv, prog="python -m lantern.eval.gpu_campaign")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--minutes", type=real(0.1, 10**4), required=True, metavar="M", help="time for everything, in minutes")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the results; a stopped campaign continues")
    add("--work", type=Path, metavar="DIR", help="folder of models, images and checkpoints (default: work/ in --out)")
    add("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    add("--toy", action="store_true", help="rehearse with toy sizes")
    add("--parts", nargs="+", type=one_of([str(part) for part in PARTS]), metavar="N", help="run only these parts")
    add("--data", type=existing, metavar="FOLDER", help="real images, as `lantern train data` wrote, for KID")
    add("--weights", nargs="+", metavar="NAME=PATH", help="inception=FILE for KID and FID, clip=FOLDER for CLIP score")


def run(args: argparse.Namespace) -> int:
    """Run what is left of the campaign; return 1 if anything is."""
    metrics = () if args.data is None else ("--data", str(args.data.resolve()))
    metrics += () if args.weights is None else ("--weights", *args.weights)
    out = args.out.resolve()
    plan = Plan(out, (args.work or out / "work").resolve(), args.device, is_toy=args.toy, metrics=metrics)
    tasks = [task for task in plan.tasks() if args.parts is None or str(task.part) in args.parts]
    for folder in (plan.out, plan.work):
        folder.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    is_done = run_campaign(plan, tasks, 60 * args.minutes, say=say)
    for task in tasks:
        found = record_of(out, task)
        print(f"{task.part}  {task.name:<14} {found.get('status', 'not started')}")
    return DONE if is_done else FAILED


COMMAND = Command("gpu_campaign", "Measure everything that only a GPU can show, resumable.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
