"""The HTTP server: OpenAI's client against a real server of a toy model."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import httpx
import numpy as np
import openai
import torch
from hypothesis import HealthCheck, given, settings
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from lantern import __version__
from lantern.core.process import Stopped, Stopping
from lantern.core.sampling import Sampling
from lantern.decoding.rounds import Joint
from lantern.generation.generator import generate
from lantern.generation.images import read_facts
from lantern.generation.init_image import KeptPart
from lantern.generation.requests import Request, requests_of_call
from lantern.generation.serving import app
from lantern.generation.serving.app import Limits
from lantern.generation.serving.worker import Job, RefusedError, Row, Worker
from lantern.models.folder import Model, load_model
from lantern.models.llamagen.text import TextEncoder
from tests.cli.calls import Capture, refused_by
from tests.engines.cuda.claimed import RehearsedEngine
from tests.generation.served import KEY, PROMPT, Served, image
from tests.refusals import refused
from tests.tiny_transformers import save

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with Served(model, Limits(prompt=50, body=4000, api_key=KEY, batch=3)) as server:
        yield server


def expected(model: Model, seed: int, number: int = 0) -> np.ndarray:
    (picture,) = generate(model, [Request(prompt=PROMPT, seed=seed, number=number)])
    return picture.pixels.numpy()


def test_pictures_are_those_of_the_generator_whatever_shares_their_batch(served: Served, model: Model) -> None:
    def made(seed: int) -> list[Any]:
        answer = served.images(n=2, extra_body={"seed": seed})
        assert answer.usage.output_tokens == 2 * model.target.config.block_size
        return [image(one) for one in answer.data]

    with ThreadPoolExecutor(4) as pool:
        for seed, pair in enumerate(pool.map(made, range(4))):
            for number, found in enumerate(pair):
                assert np.array_equal(found, expected(model, seed, number))


def test_streams_end_with_the_picture_after_partial_ones(served: Served, model: Model) -> None:
    events = list(served.images(stream=True, partial_images=2, extra_body={"seed": 5, "method": "plain"}))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert np.array_equal(image(events[2]), expected(model, 5))
    first = np.asarray(image(events[0]))
    assert (first[-1] == 128).all() and not (first[0] == 128).all()
    several = served.images(n=3, stream=True, partial_images=1, extra_body={"seed": 5})
    done = {event.image_index: image(event) for event in several if event.type.endswith("completed")}
    assert sorted(done) == [0, 1, 2]
    for number, found in done.items():
        assert np.array_equal(found, expected(model, 5, number))


def test_answers_and_streams_have_seeds_and_warnings(served: Served) -> None:
    asked: Any = {"prompt": "xqzzt", "extra_body": {"seed": 5}}
    for answer in (served.images(**asked), *served.images(**asked, stream=True)):
        found = answer.to_dict()
        (metrics,) = found["metrics"] if isinstance(found["metrics"], list) else [found["metrics"]]
        assert metrics["seed"] == 5 and "no word of the prompt 'xqzzt'" in found["warnings"][0]


def test_a_negative_prompt_takes_the_place_of_the_unconditional_caption(served: Served, model: Model) -> None:
    negative: Any = {"negative_prompt": "a blue car"}
    found = image(served.images(extra_body={"seed": 5} | negative).data[0])
    call = requests_of_call(model, model.sampling(), prompt=PROMPT, generator=5, **negative)
    (picture,) = generate(model, call)
    assert np.array_equal(found, picture.pixels.numpy()) and not np.array_equal(found, expected(model, 5))


@pytest.mark.parametrize(("form", "compression"), [("png", {}), ("jpeg", {}), ("webp", {"output_compression": 50})])
def test_images_have_format_size_and_the_metadata_of_files(served: Served, form: str, compression: Any) -> None:
    asked: Any = {"size": "auto", "output_format": form, "extra_body": {"seed": 5, "method": "plain"}} | compression
    answer = served.images(**asked)
    for one in (answer.data[0], *served.images(**asked, stream=True, partial_images=1)):
        facts = read_facts(found := image(one))
        assert found.format == form.upper() and f"{found.width}x{found.height}" == answer.size
        assert facts["Source"] == "AI generated"
        assert one.to_dict().get("partial_image_index") == 0 or (facts["seed"], facts["method"]) == ("5", "plain")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": 11}, "n", "less than or equal to 10"),
        ({"n": True}, "n", "integer"),
        ({"size": "7x7"}, "size", "wanted auto or one of"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "x" * 51}, "prompt", "more than 50 characters"),
        ({"temprature": 1}, "temprature", "not permitted"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"guidance": 1e9}, "guidance", "less than or equal to 1000"),
        ({"method": "eagel1"}, "method", "did you mean 'eagle1'"),
        ({"method": "eagle1:tree=chain_4"}, "method", "wanted the name of a method without options"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"prompt": "  "}, "prompt", "the prompt is empty"),
        ({"negative_prompt": "a car", "guidance": 1}, "negative_prompt", "no effect without guidance"),
        ({"negative_prompt": "..."}, "negative_prompt", "is empty after cleaning"),
        ({"method": ""}, "method", "at least 1 character"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"method": "lantern"}, "method", "k is 100, wanted from 1 to 23"),
        ({"guidance": 2, "guidance_scale": 3}, "guidance", "are one setting"),
        ({"background": "transparent"}, "background", "'auto' or 'opaque'"),
        ({"output_compression": 50}, "output_compression", "for jpeg and webp"),
        ({"partial_images": 2}, "partial_images", "give stream true"),
    ],
    ids=str,
)
def test_bad_requests_name_their_field(served: Served, body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        served.images(extra_body=body)
    assert found.value.param == param and message in found.value.response.json()["error"]["message"]


def test_other_refusals(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(served.images, model="other", error=openai.NotFoundError, match="is not served here")
    refused(served.client.models.retrieve, "other", error=openai.NotFoundError, match="is not served here")
    assert served.post({"prompt": PROMPT}).status_code == 401
    for key in ({}, {"Authorization": KEY}):
        assert httpx.get(f"{served.url}/v1/models", headers=key).status_code == 401
    assert served.post(content=b"x" * 5000, headers=HEADERS).status_code == 413
    for length in ({}, {"Content-Length": "5"}):
        chunked = HEADERS | length | {"Transfer-Encoding": "chunked"}
        assert served.post(content=iter([b"{}"]), headers=chunked).status_code == 411
    # the key is asked for whatever host is named: the URL that Starlette 1.0 makes of this host
    monkeypatch.setattr(HTTPConnection, "url", URL("http://x/y/v1/images/generations"))
    assert served.post({"prompt": PROMPT}, headers={"Host": "x/y"}).status_code == 401


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"", "application/json", 400, "the body is empty"),
        (b"nonsense", "application/json", 400, "the body is no JSON: Expecting value at character 0"),
        (b'{"prompt": "a', "application/json", 400, "Unterminated string starting at at character 11"),
        (b"[1]", "application/json", 400, "the body is no JSON object"),
        (b'{"prompt": "\xff"}', "application/json", 400, "the body"),
        (b"[" * 3000, "application/json", 400, "body"),
        (b'{"prompt": "a"}', "text/plain", 415, "the Content-Type is text/plain, wanted application/json"),
        (b"prompt=a", "application/x-www-form-urlencoded", 415, "wanted application/json"),
    ],
    ids=str,
)
def test_bodies_of_no_request_are_refused(served: Served, content: bytes, kind: str, status: int, message: str) -> None:
    answer = served.post(content=content, headers=HEADERS | {"Content-Type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, "invalid_request_error", None)
    assert message in error["message"]


def test_a_method_without_its_part_is_a_fault_of_the_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service, "model", replace(served.service.model, add_ons={}))
    for stream in (False, True):  # before the stream begins
        answer = served.post({"prompt": PROMPT, "method": "vadusa", "stream": stream}, headers=HEADERS)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "method") and "that this model lacks" in error["message"]


def test_a_prompt_that_the_processor_refuses_is_a_fault_of_the_request(tmp_path: Path) -> None:
    with Served(load_model(save("janus", tmp_path / "janus"), device="cpu"), Limits()) as server:
        answer = server.post({"prompt": "an <image>"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt") and "Found 1 <image> tokens" in error["message"]


@pytest.mark.parametrize(
    ("content", "message"), [("", "no key"), (" \n", "no key"), ("two\nkeys", "a key that no"), ("é", "a key that no")]
)
def test_an_api_key_that_no_client_can_send_is_refused(
    content: str, message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(content)
    words = ["serve", "lantern-emoji", "--api-key-file"]
    assert f"holds {message}" in refused_by(capsys, *words, str(tmp_path / "key"))
    assert "none cannot be read" in refused_by(capsys, *words, str(tmp_path / "none"))
    monkeypatch.setenv("LANTERN_API_KEY", content)
    assert f"LANTERN_API_KEY holds {message}" in refused_by(capsys, *words[:2])


def test_the_model_thread_runs_on_the_gpu_of_the_model(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[torch.device]()
    guard = "lantern.generation.serving.worker.on_device"
    monkeypatch.setattr(guard, lambda device: nullcontext(taken.append(device)))
    worker = Worker(model, batch=1, waiting=1)
    worker.start()
    assert worker.stop(10) and taken == [model.device]


def test_wrong_routes_and_verbs_say_what_is_right(served: Served) -> None:
    assert httpx.get(f"{served.url}/docs").status_code == 404  # its page would load scripts from other hosts
    for path in ("/nowhere", "/v1/images/variations", "/v1/images/generations/"):
        answer = httpx.post(served.url + path, json={}, headers=HEADERS)
        assert answer.status_code == 404 and "POST /v1/images/generations" in answer.json()["error"]["message"]
    answer = httpx.get(f"{served.url}/v1/images/generations", headers=HEADERS)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"] == "GET is not accepted here, wanted POST"
    assert httpx.post(f"{served.url}/health", json={}).json()["error"]["message"].endswith("wanted GET")
    for path in ("/health", "/version", "/metrics", "/v1/models"):
        answer = httpx.head(served.url + path, headers=HEADERS)
        assert answer.status_code == 200 and not answer.content


def test_service_routes(served: Served, model: Model) -> None:
    served.service.warm_up()
    served.images()
    (picture,) = generate(model, [PROMPT], method="zipar", settings={"measured": False})
    served.service.metrics.made(picture.statistics)
    assert [one.id for one in served.client.models.list()] == [model.name]
    assert served.client.models.retrieve(model.name).id == model.name
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/ready").status_code == 200
    assert httpx.get(f"{served.url}/version").json() == {"version": __version__}
    text = httpx.get(f"{served.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines[f'lantern:generation_tokens_total{{model_name="{model.name}"}}']) > 0
    assert f'lantern:num_requests_waiting{{model_name="{model.name}"}}' in lines
    assert float(lines[f'lantern:total_variation_sum_total{{model_name="{model.name}"}}']) >= 0


class Hearing(Worker):
    """A worker that keeps the kinds of a picture's events and the value of the last one, by its seed."""

    def __init__(self, model: Model, *, batch: int) -> None:
        super().__init__(model, batch=batch)
        self.heard, self.made = dict[int, list[str]](), dict[int, Any]()

    def ask(self, *seeds: int, prompt: str = PROMPT, **fields: Any) -> list[Job]:
        how = {"method": "plain", "sampling": Sampling()} | fields
        jobs = [Job(Request(prompt=prompt, seed=seed), send=partial(self.hear, seed), **how) for seed in seeds]
        self.submit(jobs)
        return jobs

    def hear(self, seed: int, kind: str, value: Any, index: int | None) -> None:
        self.heard.setdefault(seed, []).append(kind)
        self.made[seed] = value

    def finish(self) -> None:
        while self.queued or self.running:
            self.step()


def test_a_full_queue_answers_429(model: Model) -> None:
    with Served(model, Limits(batch=1, waiting=1)) as server, ThreadPoolExecutor(6) as pool:
        never = server.post({"prompt": PROMPT, "n": 2})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")

        def status(_: int) -> int:
            answer = server.post({"prompt": PROMPT, "n": 1})
            if answer.status_code == 429:
                assert answer.headers["Retry-After"] and answer.json()["error"]["code"] == "queue_full"
            return answer.status_code

        found = list(pool.map(status, range(6)))
    assert set(found) == {200, 429}


@pytest.mark.parametrize("methods", [("plain", "gumbel-jacobi", "eagle1", "sjd"), ("zipar",) * 4, ("pjd",) * 4])
def test_a_picture_that_joins_others_is_the_picture_alone(model: Model, methods: tuple[str, ...]) -> None:
    """Jobs come one by one, each after some steps of those under way."""
    worker, most = Hearing(model, batch=3), 0
    how: list[Any] = [{"method": name, "sampling": Sampling(guidance=1 + i)} for i, name in enumerate(methods)]
    left = [*enumerate(how)]
    while len(worker.made) < 4:
        for seed, options in left[:1]:
            worker.ask(seed, **options)
        del left[:1]
        worker.step()
        most = max(most, worker.running)
    assert most > 1
    for seed, found in worker.made.items():
        alone: Any = next(generate(model, [Request(prompt=PROMPT, seed=seed)], **how[seed]))
        assert torch.equal(found.tokens, alone.tokens) and torch.equal(found.pixels, alone.pixels)


def test_pictures_of_a_wave_promise_the_distribution(model: Model) -> None:
    worker = Hearing(replace(model, engine=RehearsedEngine()), batch=3)
    kept = worker.ask(0, 1, 2)[2]
    kept.kept = KeptPart(model, torch.zeros(8, 8, 3, dtype=torch.uint8), torch.eye(4, dtype=torch.bool))
    worker.finish()
    assert [worker.made[seed].statistics.promise for seed in range(3)] == ["distribution", "distribution", "tokens"]


def test_a_prompt_is_embedded_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(model.text, TextEncoder)
    encoded = list[str]()
    encode = model.text.encode
    monkeypatch.setattr(model.text, "encode", lambda prompts, **how: encoded.extend(prompts) or encode(prompts, **how))
    worker, prompts = Hearing(model, batch=2), [PROMPT, "a blue cat"]
    for seeds in ((0, 1), (2, 3)):
        for seed, prompt in zip(seeds, prompts, strict=True):
            worker.ask(seed, prompt=prompt, sampling=model.sampling())
        worker.finish()
    assert encoded == prompts
    with torch.no_grad():
        next(model.text.model.parameters()).mul_(1.0)  # a new version of the weights
    worker.ask(4, sampling=model.sampling())
    worker.finish()
    assert encoded == [*prompts, PROMPT]
    monkeypatch.undo()
    for seed, found in worker.made.items():
        picture: Any = next(generate(model, [Request(prompt=prompts[seed % 2], seed=seed)], method="plain"))
        assert torch.equal(found.pixels, picture.pixels)


def test_rows_of_cancelled_pictures_are_free_at_once(model: Model) -> None:
    worker = Hearing(model, batch=2)
    jobs = worker.ask(0, 1, 2, 3, 4)
    worker.step()
    assert (worker.running, worker.queued) == (2, 3)
    jobs[0].is_cancelled = jobs[1].is_cancelled = jobs[3].is_cancelled = True
    worker.step()
    assert (worker.running, worker.queued) == (2, 0)
    worker.finish()
    assert worker.heard == {2: ["done"], 4: ["done"]}


def test_cancelled_pictures_make_room_in_the_queue(model: Model) -> None:
    worker = Hearing(model, batch=1)
    worker.waiting = 3
    worker.ask(0)
    worker.step()
    for job in worker.ask(1, 2, 3):
        job.is_cancelled = True
    worker.ask(4, 5)  # while the first is under way
    assert (worker.running, worker.queued) == (1, 2)
    worker.finish()
    assert worker.heard == {0: ["done"], 4: ["done"], 5: ["done"]}


def test_out_of_memory_what_lost_pictures_held_is_released_and_fewer_are_decoded_at_a_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, made, held = Joint.take, Row.__init__, list[str]()

    def limited(self: Joint, states: Any, *how: Any) -> Any:
        if len(states) > 2:
            held.append("by a cycle of references")
            raise MemoryError
        return take(self, states, *how)

    def begun(self: Row, *given: Any) -> None:
        if held:
            raise MemoryError
        made(self, *given)

    monkeypatch.setattr(Joint, "take", limited)
    monkeypatch.setattr(Row, "__init__", begun)
    monkeypatch.setattr("lantern.generation.serving.worker.release_memory", held.clear)
    worker = Hearing(model, batch=4)
    worker.ask(0, 1, 2, 3)
    worker.finish()
    assert worker.batch == 2 and worker.heard == {seed: ["done"] for seed in range(4)}


def test_idle_decoders_make_room_for_other_settings(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for two decoders, and each sampling needs its own."""
    made = Row.__init__

    def limited(self: Row, *given: Any) -> None:
        if len(worker._rows) + len(worker._idle) >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made(self, *given)

    monkeypatch.setattr(Row, "__init__", limited)
    worker = Hearing(model, batch=2)
    for seed in range(6):
        worker.ask(seed, sampling=Sampling(temperature=1 + seed))
        if seed % 3:
            worker.finish()
    assert worker.batch == 2 and worker.heard == {seed: ["done"] for seed in range(6)}


def test_a_fault_of_a_step_fails_its_pictures_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Hearing(model, batch=2)
    worker.ask(0, 1, 2)
    with monkeypatch.context() as broken:
        broken.setattr(Joint, "take", lambda *_: 1 / 0)
        worker.step()
    assert worker.heard == {0: ["failed"], 1: ["failed"]}
    worker.finish()
    assert worker.heard[2] == ["done"]


@pytest.mark.parametrize("method", ["plain", "zipar"])
def test_a_batch_that_is_cancelled_while_it_decodes_is_given_up(model: Model, method: str) -> None:
    worker, heard = Hearing(model, batch=1), list[str]()
    (one,) = worker.ask(0, method=method, partials=3)

    def stop(kind: str, *_: Any) -> None:
        heard.append(kind)
        one.is_cancelled = True

    one.send = stop
    worker.start()
    assert worker.stop(30) and heard == ["partial"]
    refused(worker.ask, 4, error=RefusedError, match="the server stops")


def test_a_device_error_ends_the_server_and_answers_requests(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    has_both = threading.Event()

    def broken(self: Joint, states: Any, *how: Any) -> None:
        has_both.wait(30)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Joint, "take", broken)
    with Served(model, Limits(batch=1)) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.post, {"prompt": PROMPT, "seed": seed}) for seed in range(2)]
        while server.worker.running + server.worker.queued < 2:
            time.sleep(0.01)
        has_both.set()
        for answer in (one.result() for one in asked):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "server_stopped") and answer.headers["Retry-After"]
            assert "illegal memory access" in error["message"]
        server.thread.join(10)  # what runs the server starts it again
        assert not server.thread.is_alive() and isinstance(server.worker.fault, torch.AcceleratorError)


def test_health_is_503_while_a_step_hangs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, take = threading.Event(), Joint.take
    monkeypatch.setattr(Joint, "take", lambda self, states, *how: ended.wait(30) and take(self, states, *how))
    with Served(model, Limits(seconds=0.5)) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.post({"prompt": PROMPT}).status_code == 504
        time.sleep(0.2)
        assert httpx.get(f"{server.url}/health").status_code == 503
        ended.set()


def test_a_signal_during_the_first_image_ends_the_model_thread(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[app.Service]()

    def warm_up(service: app.Service) -> None:
        made.append(service)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(app, "load_model", lambda name: model)
    monkeypatch.setattr(app.Service, "warm_up", warm_up)
    with pytest.raises(Stopped), Stopping():
        app.start("toy", Limits())
    assert len(made) == 1 and not made[0].worker.is_alive()


@pytest.mark.parametrize("drain", [0.1, 60])
def test_images_that_outlast_the_drain_or_a_second_signal_are_answered(
    model: Model, drain: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Joint, "take", lambda *_: time.sleep(0.05))
    with Served(model, Limits()) as server, ThreadPoolExecutor(1) as pool:
        server.server.drain = drain
        asked = pool.submit(server.post, {"prompt": PROMPT})
        while not server.worker.running:
            time.sleep(0.01)
        for _ in range(1 if drain < 1 else 2):
            server.server.handle_exit(signal.SIGINT, None)
        answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopped")
    assert not any(record.exc_info for record in caplog.records)


def test_a_body_that_is_late_at_the_end_is_answered(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with Served(model, Limits()) as server:
        server.server.config.timeout_graceful_shutdown = 1
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10) as client:
            client.sendall(head + b'Content-Length: 999\r\n\r\n{"pro')
            while not server.server.server_state.tasks:
                time.sleep(0.01)
            server.server.should_exit = True
            assert client.recv(4096).startswith(b"HTTP/1.1 503")
    assert not any(record.exc_info for record in caplog.records)


def test_requests_are_logged_and_counted(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lantern.generation.serving")
    with Served(model, Limits()) as server:
        refused = server.post({"prompt": ""})
        monkeypatch.setattr(Joint, "take", lambda *_: 1 / 0)
        failed = server.post({"prompt": PROMPT})
        other = httpx.request("A" * 60_000, f"{server.url}/{'a' * 1000}")
        verb = httpx.request("A" * 60_000, f"{server.url}/version")
        text = httpx.get(f"{server.url}/metrics").text
    assert (refused.status_code, failed.status_code, other.status_code, verb.status_code) == (400, 500, 404, 405)
    assert max(len(verb.content), *(len(record.getMessage()) for record in caplog.records)) < 200
    for status in (400, 500):
        assert f'lantern:request_refused_total{{model_name="{model.name}",status="{status}"}} 1.0' in text
    lines = [record.getMessage() for record in caplog.records]
    assert f"{model.name} is served at {server.url}" in lines
    for answer in (refused, failed):
        name, status = answer.headers["x-request-id"], answer.status_code
        assert sum(line.startswith(f"{name} POST '/v1/images/generations' {status} ") for line in lines) == 1
    assert not any("/metrics" in line for line in lines)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_slow_clients_do_not_keep_connections(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.generation.serving.server.HEADER_SECONDS", 0.3)
    head = b"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with Served(model, Limits(arrival=0.3)) as server:
        server.server.config.timeout_keep_alive = 1
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        cases = (
            (head + b'Content-Length: 99999\r\n\r\n{"pro', b"HTTP/1.1 413"),
            (head + b'Content-Length: 999\r\n\r\n{"pro', b"HTTP/1.1 408"),
            (b"", b""),
            (head, b""),
            (b"GET /version HTTP/1.1\r\nHost: a\r\n\r\nGET", b"HTTP/1.1 200"),
        )
        clients = [socket.create_connection(address, timeout=0.05) for _ in cases]
        for client, (sent, _) in zip(clients, cases, strict=True):
            client.sendall(sent)
        for client, (_, answered) in zip(clients, cases, strict=True):
            with client:
                heard = b""
                with suppress(ConnectionError):
                    for _ in range(100):
                        try:
                            if not (part := client.recv(4096)):
                                break
                            heard += part
                        except TimeoutError:
                            client.sendall(b"a")
                    else:
                        pytest.fail("the server does not close the connection")
                assert heard[: len(answered) or None] == answered


@pytest.mark.skipif(sys.platform != "linux", reason="the socket option is Linux's")
def test_clients_that_read_nothing_do_not_keep_connections(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.generation.serving.server.READING_SECONDS", 0.3)
    with Served(model, Limits()) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 400)  # whose answers fill all buffers
        connections, late = server.server.server_state.connections, time.monotonic() + 20
        while not connections:
            time.sleep(0.01)
        while connections and time.monotonic() < late:
            time.sleep(0.05)
        assert not connections


def test_pages_of_allowed_origins_may_send_requests(model: Model) -> None:
    page = "https://example.org"
    asking = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",  # of OpenAI's client
    }
    with Served(model, Limits(api_key=KEY, origins=(page,))) as server:
        url = f"{server.url}/v1/images/generations"
        assert httpx.options(url, headers=asking).headers["Access-Control-Allow-Origin"] == page
        answer = httpx.get(f"{server.url}/version", headers=asking)
        assert answer.headers["Access-Control-Expose-Headers"] == "x-request-id, Retry-After"
        assert httpx.options(url, headers=asking | {"Origin": "https://other.org"}).status_code == 400
        form: dict[str, Any] = {"files": {"prompt": (None, PROMPT)}}  # which pages send without asking
        for origin, status in ((page, 400), ("https://other.org", 403), ("null", 403)):
            headers = {"Origin": origin, "Authorization": f"Bearer {KEY}"}
            assert httpx.post(f"{server.url}/v1/images/edits", headers=headers, **form).status_code == status
    with Served(model, Limits(origins=("*",))) as server:
        assert server.post({"prompt": PROMPT}, headers={"Origin": page}).status_code == 200


@pytest.mark.slow
def test_no_request_of_the_schema_is_a_server_error(model: Model) -> None:
    """LANTERN_SCHEMA_CASES requests of each route, by default 50."""
    schemathesis = pytest.importorskip("schemathesis", reason="the extra dev is not installed")
    from schemathesis.core.result import Ok

    cases = int(os.environ.get("LANTERN_SCHEMA_CASES", "50"))
    found = Counter[int]()
    with Served(model, Limits(batch=4)) as server:
        server.service.warm_up()
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations()
        routes = [one.ok() for one in schema if isinstance(one, Ok)]
        assert len(routes) == 8
        for route in routes:

            @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
            @given(route.as_strategy())
            def send(case: Any) -> None:
                answer = case.call(timeout=120)
                found[answer.status_code] += 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)

            send()
        assert server.worker.is_alive()
    assert {200, 400} <= set(found)
