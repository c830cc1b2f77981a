"""`lantern serve`: its log, its end, what it refuses; and replicas on a local Ray, of which one is killed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import httpx
from safetensors.torch import load_file, save_file

from lantern.cli.main import main
from tests.cli.calls import Capture

COMMAND = [sys.executable, "-m", "lantern.cli.main", "serve", "--port", "0", "--engine", "eager"]


@contextmanager
def running(*words: str, until: str, end: int = signal.SIGTERM) -> Iterator[tuple[re.Match[str], list[str]]]:
    """A server that has printed `until`: what was found, and all lines that it prints. It ends by the signal `end`."""
    printed: list[str] = []
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as server:
        reader = threading.Thread(target=lambda: printed.extend(server.stderr or []))  # the pipe must not fill
        try:
            for line in server.stderr:
                printed.append(line)
                if found := re.search(until, line):
                    break
            else:
                raise AssertionError("".join(printed))
            reader.start()
            yield found, printed
        finally:
            server.send_signal(end)
            server.wait(120)
            if reader.ident is not None:
                reader.join()
    assert server.returncode == 128 + end, "".join(printed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_says_where_it_is_and_ends_without_an_error(model: str, end: int) -> None:
    body = {"prompt": "a red apple", "n": 10, "stream": True}
    with httpx.Client(timeout=120) as client:
        with running(model, until=r"toy is served at (http://127.0.0.1:\d+)", end=end) as (found, printed):
            request = client.build_request("POST", f"{found[1]}/v1/images/generations", json=body)
            answer = client.send(request, stream=True)
            lines = answer.iter_lines()
            heard = [next(lines)]
        heard += lines
    assert answer.status_code == 200 and heard.count("event: image_generation.completed") == 10
    log = "".join(printed)
    assert answer.headers["x-request-id"] in log and "error" not in log.lower()


@pytest.mark.slow
def test_a_model_that_makes_no_image_is_refused(copied: Path) -> None:
    shutil.rmtree(copied / "drafter")  # it is of a target with other weights
    (copied / "transformer" / "SHA256SUMS").unlink()
    path = copied / "transformer" / "model.safetensors"
    save_file({name: value * 1e30 for name, value in load_file(path).items()}, path)
    ended = subprocess.run([*COMMAND, str(copied)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    *_, line = ended.stderr.splitlines()
    assert line.startswith("lantern: error: ") and "became NaN" in line and "Traceback" not in ended.stderr


def test_a_port_in_use_is_refused_before_the_model_is_loaded(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        assert main(["serve", "/nowhere/model", "--port", str(used.getsockname()[1])]) == 1
    assert "cannot listen at 127.0.0.1:" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_server_that_is_open_to_others_without_a_key_is_warned_of(host: str, capsys: Capture) -> None:
    assert main(["serve", "/nowhere/model", "--host", host, "--port", "0"]) == 2
    assert ("without an API key" in capsys.readouterr().err) == (host == "0.0.0.0")


PICTURES, CLIENTS = 256, 64


def replicas() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:  # it has ended
            continue
        if words.startswith(b"ray::ServeReplica:lantern:Replica"):
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'")
def test_pictures_are_the_same_from_every_replica_and_after_one_is_killed(model: str) -> None:
    import openai

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(model, "--ray", "--replicas", "2", "--port", str(port), "--drain", "5", until="2 replicas serve"):
        before = replicas()
        assert len(before) == 2
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20) as client:

            def picture(number: int) -> str | None:
                made = client.images.generate(prompt="a red apple", extra_body={"seed": number % 4}, timeout=60)
                return made.data[0].b64_json

            first = [picture(number) for number in range(4)]
            with ThreadPoolExecutor(CLIENTS) as pool:
                under_way = [pool.submit(picture, number) for number in range(PICTURES)]
                os.kill(before[0], signal.SIGKILL)
                assert [one.result() for one in under_way] == first * (PICTURES // 4)
            assert len(set(first)) == 4
            deadline = time.monotonic() + 120
            while len(set(replicas()) - {before[0]}) < 2:
                assert time.monotonic() < deadline, "the killed replica was not started again"
                time.sleep(0.2)
    assert not replicas()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'")
def test_a_model_that_does_not_load_is_refused_with_the_reason(copied: Path) -> None:
    weights = copied / "transformer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    ended = subprocess.run([*COMMAND, str(copied), "--ray"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "the replicas did not start: ValueError: " in ended.stderr and str(weights) in ended.stderr
    assert "Traceback" not in ended.stderr
