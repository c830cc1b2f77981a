"""`lantern serve --restarts` in processes of their own: a killed server is started again at the same address."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import httpx
import openai

from tests.tiny_folder import save_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder, url = str(save_tiny_model(tmp_path / "toy")), f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "lantern.cli.main", "serve", folder, "--port", str(port), "--restarts", "1"]
    with subprocess.Popen([*command, "--engine", "eager"], stderr=subprocess.PIPE, text=True) as server:

        def child() -> int:
            found = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text(encoding="ascii").split()
            return int(found[0]) if found else 0

        try:
            # connections wait in the socket while the model is loaded
            while server.poll() is None:
                try:
                    body = {"prompt": "a red apple", "seed": 1}
                    first = httpx.post(f"{url}/v1/images/generations", json=body, timeout=120).json()["data"]
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            killed = child()
            os.kill(killed, signal.SIGKILL)
            while child() in (0, killed):
                time.sleep(0.01)
            # OpenAI's client, which is in another process than the server
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
                again = client.images.generate(prompt="a red apple", extra_body={"seed": 1}).data
            assert again is not None and again[0].b64_json == first[0]["b64_json"]
        finally:
            server.send_signal(signal.SIGTERM)
            error = server.communicate(timeout=60)[1]
    assert server.returncode == 143
    assert "killed by SIGKILL: it is started again, 0 restarts left" in error
