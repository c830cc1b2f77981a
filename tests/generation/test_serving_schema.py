"""Requests made from the server's own OpenAPI schema: none is answered with a server error."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("schemathesis", reason="the extra dev is not installed")
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok

from lantern.generation.serving.app import Limits
from lantern.models.folder import load_model
from tests.generation.served import Served
from tests.tiny_folder import save_tiny_model

CASES = int(os.environ.get("LANTERN_SCHEMA_CASES", "50"))  # of each route


@pytest.mark.slow
def test_no_request_is_a_server_error(tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path / "toy"), device="cpu", engine="eager")
    found = Counter[int]()
    with Served(model, Limits(batch=4)) as server:
        server.service.warm_up()
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations()
        routes = [one.ok() for one in schema if isinstance(one, Ok)]
        assert len(routes) == 8
        for route in routes:

            @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
            @given(route.as_strategy())
            def send(case: Any) -> None:
                answer = case.call(timeout=120)
                found[answer.status_code] += 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)

            send()
        assert server.worker.is_alive()
    assert {200, 400} <= set(found)
