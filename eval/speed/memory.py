"""Peak memory of a method, measured in its own process: `python -m lantern.eval.speed.memory '{"model": ...}'`.

On a CPU the resident set is read after loading and at its peak while one image is decoded. Peak memory is the bytes
of the weights plus what decoding added, as a GPU's allocator reports it. The interpreter and its libraries (some
hundreds of MiB) are left out, since they would hide every difference.
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


def peak_of(requested: Mapping[str, Any]) -> dict[str, float]:
    """Return the MiB of decoding one image: `weights`, what decoding `added`, and their sum `peak`.

    `requested` has model, method (as for --methods), dtype, device, threads and sampling. OSError with the last line
    of the process's stderr if it fails.
    """
    command = [sys.executable, "-m", "lantern.eval.speed.memory", json.dumps(requested)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message on stderr"]
        raise OSError(f"the process that measures memory failed: {lines[-1][:200]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(requested: Mapping[str, Any]) -> dict[str, float]:
    """Load the model and decode one image, in the child process."""
    import torch

    from lantern.eval.speed.contenders import PLAIN, PROMPTS, assemble, condition_of, method_of
    from lantern.models.folder import load_model

    torch.set_num_threads(requested["threads"])
    parts = ("text",) if requested["method"] == PLAIN else ("text", "drafter", "neighbours")
    where = {"device": requested["device"], "dtype": requested["dtype"]}
    model = load_model(requested["model"], **where, parts=parts, engine="eager")
    sampling = model.sampling(**requested["sampling"])
    method = assemble(model, method_of(model, requested["method"]), sampling)
    condition = condition_of(model, PROMPTS[:1], [0])
    modules = [model.target, *([method.drafter.module] if method.drafter and method.drafter.module else [])]
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
    """Reset the peak to what is resident now, where the system supports it; elsewhere the peak includes loading."""
    if CLEAR.is_file():
        CLEAR.write_text("5", encoding="ascii")


def peak_mib() -> float:
    """Return the largest resident set since `forget_peak`, in MiB."""
    if STATUS.is_file():
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
