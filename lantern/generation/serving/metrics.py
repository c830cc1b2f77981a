"""Prometheus metrics under vLLM's names with the prefix `lantern:`, and what relaxation cost."""

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lantern.generation.images import Statistics
from lantern.generation.serving.worker import Worker

SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
Seconds = partial(Histogram, buckets=SECONDS)
METRICS: dict[str, tuple[Any, ...]] = {  # kind, text, labels
    "request_success": (Counter, "Finished requests.", "finished_reason"),
    "request_refused": (Counter, "Requests answered with an error.", "status"),
    "prompt_tokens": (Counter, "Words of prompts."),
    "generation_tokens": (Counter, "Generated tokens."),
    "iteration": (Counter, "Passes of the target, summed over images."),
    "spec_decode_num_accepted_tokens": (Counter, "Accepted drafted tokens."),
    "spec_decode_num_drafts": (Counter, "Steps that verified a draft."),
    "spec_decode_num_accepted_tokens_per_pos": (Counter, "Accepted drafted tokens by depth, from 0.", "position"),
    "relaxed_tokens": (Counter, "Tokens that only a relaxation accepted."),
    "total_variation_sum": (Counter, "Total variation, summed over tokens."),
    "e2e_request_latency_seconds": (Seconds, "Seconds from a request to its answer."),
    "request_queue_time_seconds": (Seconds, "Seconds that an image waited."),
    "request_decode_time_seconds": (Seconds, "Share of its batch's decoding of an image."),
    "num_requests_running": (Gauge, "Pictures that are being decoded."),
    "num_requests_waiting": (Gauge, "Pictures that wait in the queue."),
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, worker: Worker) -> None:
        self._name, self.registry = model_name, CollectorRegistry()
        self._metrics = {
            name: kind(f"lantern:{name}", text, ["model_name", *labels], registry=self.registry)
            for name, (kind, text, *labels) in METRICS.items()
        }
        self._metrics["num_requests_running"].labels(model_name).set_function(lambda: worker.running)
        self._metrics["num_requests_waiting"].labels(model_name).set_function(lambda: worker.queued)

    def waited(self, seconds: float) -> None:
        """Record how long an image waited."""
        self._see("request_queue_time_seconds", seconds)

    def made(self, statistics: Statistics) -> None:
        """Count a finished image."""
        self._add("generation_tokens", statistics.tokens)
        self._add("iteration", statistics.steps)
        self._add("spec_decode_num_accepted_tokens", sum(statistics.accepted))
        self._add("spec_decode_num_drafts", statistics.reached[0] if statistics.reached else 0)
        self._add("relaxed_tokens", statistics.relaxed * statistics.tokens)
        self._add("total_variation_sum", statistics.total_variation * statistics.tokens)
        for depth, count in enumerate(statistics.accepted):
            self._add("spec_decode_num_accepted_tokens_per_pos", count, depth)
        self._see("request_decode_time_seconds", statistics.seconds.get("decode", 0.0))

    def refused(self, status: int) -> None:
        """Count a request that was answered with an HTTP status from 400."""
        self._add("request_refused", 1, status)

    def answered(self, reason: str, seconds: float, words: int) -> None:
        """Count a finished request; `reason` is stop, abort or error."""
        self._add("request_success", 1, reason)
        self._add("prompt_tokens", words)
        self._see("e2e_request_latency_seconds", seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _add(self, name: str, amount: float, *labels: object) -> None:
        self._metrics[name].labels(self._name, *labels).inc(amount)

    def _see(self, name: str, seconds: float) -> None:
        self._metrics[name].labels(self._name).observe(seconds)
