"""`python -m studies.serving_load`: `lantern serve` under many clients, with its server process killed half-way.

Backs the figures of the load test in docs/serving.md. Each client sends one request after the other and changes the
method each time. Every tenth request is abandoned by its client after half a second. After the load, the rows and the
queue of the server must become empty. Memory is the resident memory of the process that serves.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch

from lantern.cli.command import DONE, FAILED, Command, integer, real, run_command
from lantern.core.io import write_json
from lantern.eval.speed.surroundings import load_average, surroundings

METHODS = ("plain", "gumbel-jacobi", "eagle1", "bounded-window")
ABANDONED = 10  # every so many requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="lantern-emoji", help="name, folder or hub id")
    parser.add_argument("--clients", type=integer(1, 4096), default=64, metavar="N", help="clients (default 64)")
    parser.add_argument("--seconds", type=real(10, 10**6), default=300, metavar="S", help="seconds of load (300)")
    parser.add_argument("--batch", type=integer(1, 4096), default=4, metavar="N", help="pictures at once (default 4)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file")


class Load:
    """Clients of a server, and what they were answered."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.end = url, time.monotonic() + seconds
        self.answers, self.waits = Counter[str](), list[float]()
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        """Send requests until the time is up."""
        seed = number
        while time.monotonic() < self.end:
            seed += 1
            body = {"prompt": "a red apple", "seed": seed, "method": METHODS[seed % len(METHODS)]}
            begun, is_abandoned = time.monotonic(), seed % ABANDONED == 0
            try:
                timeout = 0.5 if is_abandoned else 600
                answer = httpx.post(f"{self.url}/v1/images/generations", json=body, timeout=timeout)
                kind = str(answer.status_code)
            except httpx.TimeoutException:
                kind = "abandoned"
            except httpx.TransportError:
                kind = "connection lost"
            with self._lock:
                self.answers[kind] += 1
                if kind == "200":
                    self.waits.append(time.monotonic() - begun)
            if kind in ("429", "connection lost"):
                time.sleep(2)  # the time that Retry-After names


def run(args: argparse.Namespace) -> int:
    """Serve, load, kill, and write the result."""
    before = load_average()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [sys.executable, "-m", "lantern.cli.main", "serve", args.model]
    options = ["--port", str(port), "--batch", str(args.batch), "--restarts", "3"]
    with subprocess.Popen([*command, *options]) as server:
        try:
            started = wait_until_ready(url)
            memory = {"ready": resident(child_of(server.pid))}
            load, begun = Load(url, args.seconds), time.monotonic()
            clients = [threading.Thread(target=load.client, args=(i,)) for i in range(args.clients)]
            for client in clients:
                client.start()
            time.sleep(args.seconds / 2)
            memory["before the kill"] = resident(child_of(server.pid))
            os.kill(child_of(server.pid), signal.SIGKILL)
            restarted = wait_until_ready(url)
            memory["restarted"] = resident(child_of(server.pid))
            for client in clients:
                client.join()
            lasted = time.monotonic() - begun
            left = wait_until_idle(url)
            memory["after the load"] = resident(child_of(server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait()
    waits = sorted(load.waits)
    result: dict[str, Any] = {
        "what": "serving_load",
        "model": args.model,
        "clients": args.clients,
        "seconds": args.seconds,
        "batch": args.batch,
        "methods": METHODS,
        "answers": dict(load.answers),
        "pictures_per_second": load.answers["200"] / lasted,
        "wait_seconds": {"median": waits[len(waits) // 2], "largest": waits[-1]} if waits else None,
        "start_seconds": started,
        "restart_seconds": restarted,
        "resident_mib": memory,
        "rows_and_queue_after": left,
        "exit_code": code,
        "surroundings": surroundings(torch.device("cpu")),
        "load_average": {"before": before, "after": load_average()},
    }
    write_json(args.out, result)
    print(result)
    is_clean = left == 0 and not any(kind.startswith("5") for kind in load.answers)
    return DONE if is_clean else FAILED


def wait_until_ready(url: str) -> float:
    """Return the seconds until a first image has been made."""
    begun = time.monotonic()
    while True:
        try:
            if httpx.get(f"{url}/ready", timeout=600).status_code == 200:
                return time.monotonic() - begun
        except httpx.TransportError:
            pass
        time.sleep(0.5)


def wait_until_idle(url: str, seconds: float = 120) -> float:
    """Return the images that are decoded or wait once there are none, at the latest after some seconds."""
    end, left = time.monotonic() + seconds, 1.0
    while left and time.monotonic() < end:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        left = sum(float(line.split()[-1]) for line in lines if line.startswith("lantern:num_requests_"))
        time.sleep(0.5)
    return left


def child_of(pid: int) -> int:
    """Return the child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


COMMAND = Command("serving-load", "Load a server with many clients and kill its process.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.serving_load"))
