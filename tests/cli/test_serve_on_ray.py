"""`lantern serve --ray`: replicas on a local Ray, of which one is killed, and refusals."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny_folder import save_tiny_model

PICTURES, CLIENTS = 256, 64


def replicas() -> list[int]:
    """The processes of replicas on this machine."""
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
def test_pictures_are_the_same_from_every_replica_and_after_one_is_killed(tmp_path: Path) -> None:
    import openai

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = str(save_tiny_model(tmp_path / "toy"))
    command = [sys.executable, "-m", "lantern.cli.main", "serve", folder, "--ray", "--replicas", "2"]
    command += ["--port", str(port), "--engine", "eager", "--drain", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.extend(server.stderr or []))  # the pipe must not fill
        try:
            for line in server.stderr:
                printed.append(line)
                if "2 replicas serve" in line:
                    break
            assert server.poll() is None, "".join(printed)
            reader.start()
            before = replicas()
            assert len(before) == 2
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20) as client:

                def picture(number: int) -> str | None:
                    made = client.images.generate(prompt="a red apple", extra_body={"seed": number % 4}, timeout=60)
                    assert made.data is not None
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
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
            if reader.is_alive():
                reader.join()
    assert server.returncode == 143, "".join(printed)
    assert not replicas()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'")
def test_a_model_that_does_not_load_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "toy")
    weights = folder / "transformer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    command = [sys.executable, "-m", "lantern.cli.main", "serve", str(folder), "--ray", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "the replicas did not start: ValueError: " in ended.stderr and str(weights) in ended.stderr
    assert "Traceback" not in ended.stderr
