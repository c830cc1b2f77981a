"""Peak memory of a method, each in a process of its own: `python -m lantern.eval.memory '{"model": ...}'`.

On a CPU the resident set is read after loading and at its peak while one picture is decoded; what decoding added is
put on top of the bytes of the weights, which is what a GPU's allocator reports by itself. The interpreter and its
libraries, some hundreds of MiB, are left out: they would hide every difference.
"""

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def peak_of(asked: Mapping[str, Any]) -> dict[str, float]:
    """MiB of one picture by a method: `weights`, what decoding `added`, and their sum `peak`.

    `asked` is model, method (as --methods takes it), dtype, device, threads and sampling. OSError with the last line
    of what it said if the process fails.
    """
    command = [sys.executable, "-m", "lantern.eval.memory", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise OSError(f"the process that measures memory failed: {said[-1][:200]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(asked: Mapping[str, Any]) -> dict[str, float]:
    """In the child: load, decode one picture, and tell."""
    import torch

    from lantern.eval.contenders import PLAIN, PROMPTS, assemble, condition_of, method_of
    from lantern.model_folder import load_model

    torch.set_num_threads(asked["threads"])
    parts = ("text",) if asked["method"] == PLAIN else ("text", "drafter", "neighbours")
    model = load_model(asked["model"], device=asked["device"], dtype=asked["dtype"], parts=parts)
    sampling = model.sampling(**asked["sampling"])
    method = assemble(model, method_of(model, asked["method"]), sampling)
    condition = condition_of(model, PROMPTS[:1], [0])
    modules = [model.target, *filter(None, [getattr(method.drafter, "module", None)])]
    weights = sum(p.nbytes for module in modules for p in (*module.parameters(), *module.buffers())) / 2**20
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated() / 2**20
        method.generate(condition, keys=[(0, 0)])
        added = torch.cuda.max_memory_allocated() / 2**20 - begin
    else:
        gc.collect()
        forget_peak()
        begin = peak_mib()
        method.generate(condition, keys=[(0, 0)])
        added = peak_mib() - begin
    return {"weights": round(weights, 2), "added": round(added, 2), "peak": round(weights + added, 2)}


def forget_peak() -> None:
    """Lets the peak begin at what is resident now, where the system can do that; elsewhere loading counts too."""
    if CLEAR.is_file():
        CLEAR.write_text("5", encoding="ascii")


def peak_mib() -> float:
    """The largest resident set since `forget_peak`, in MiB."""
    if STATUS.is_file():
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
