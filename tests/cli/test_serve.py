"""`lantern serve` in a process of its own: its log, its end, and what it refuses."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import httpx
from safetensors.torch import load_file, save_file

from lantern.cli.main import main
from tests.cli.calls import Capture
from tests.tiny_folder import save_tiny_model

COMMAND = [sys.executable, "-m", "lantern.cli.main", "serve", "--port", "0", "--engine", "eager"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM")
def test_a_server_says_where_it_is_and_ends_without_an_error(tmp_path: Path) -> None:
    folder, printed = str(save_tiny_model(tmp_path / "toy")), list[str]()
    with subprocess.Popen([*COMMAND, folder], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                printed.append(line)
                if found := re.search(r"toy is served at (http://127.0.0.1:\d+)", line):
                    break
            else:
                raise AssertionError("".join(printed))
            reader = threading.Thread(target=lambda: printed.extend(server.stderr or []))
            reader.start()
            answer = httpx.post(f"{found[1]}/v1/images/generations", json={"prompt": "a red apple"}, timeout=120)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            reader.join()
    assert answer.status_code == 200 and server.returncode == 143
    log = "".join(printed)
    assert answer.headers["x-request-id"] in log and "error" not in log.lower()


@pytest.mark.slow
def test_a_model_that_makes_no_image_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "toy")
    shutil.rmtree(folder / "drafter")  # it is of a target with other weights
    (folder / "transformer" / "SHA256SUMS").unlink()
    path = folder / "transformer" / "model.safetensors"
    save_file({name: value * 1e30 for name, value in load_file(path).items()}, path)
    ended = subprocess.run([*COMMAND, str(folder)], capture_output=True, text=True, timeout=300)
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
