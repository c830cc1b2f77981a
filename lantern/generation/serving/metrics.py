"""Prometheus metrics under vLLM's names with the prefix `lantern:`, and what relaxation cost."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lantern.generation.images import Statistics
from lantern.generation.serving.worker import Worker

SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
LABEL = ("model_name",)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, worker: Worker) -> None:
        self.registry, self._name = CollectorRegistry(), model_name
        running = self._gauge("num_requests_running", "Pictures that are being decoded.")
        running.labels(model_name).set_function(lambda: worker.running)
        waiting = self._gauge("num_requests_waiting", "Pictures that wait in the queue.")
        waiting.labels(model_name).set_function(lambda: worker.queued)
        self.success = self._counter("request_success", "Finished requests.", "finished_reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Words of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Generated codes.")
        self.passes = self._counter("iteration", "Passes of the target, summed over images.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted drafted codes.")
        self.drafts = self._counter("spec_decode_num_drafts", "Steps that verified a draft.")
        self.relaxed = self._counter("relaxed_codes", "Codes that only a relaxation accepted.")
        self.variation = self._counter("total_variation_sum", "Total variation, summed over codes.")
        by_depth = "spec_decode_num_accepted_tokens_per_pos"
        self.accepted_at = self._counter(by_depth, "Accepted drafted codes by depth, from 0.", "position")
        self.latency = self._histogram("e2e_request_latency_seconds", "Seconds from a request to its answer.")
        self.wait = self._histogram("request_queue_time_seconds", "Seconds that an image waited.")
        self.decode = self._histogram("request_decode_time_seconds", "Share of its batch's decoding of an image.")

    def waited(self, seconds: Sequence[float]) -> None:
        """Count the waits of the images of a batch."""
        for value in seconds:
            self.wait.labels(self._name).observe(value)

    def made(self, statistics: Statistics) -> None:
        """Count a finished image."""
        name = self._name
        self.generation_tokens.labels(name).inc(statistics.codes)
        self.passes.labels(name).inc(statistics.passes)
        self.accepted.labels(name).inc(sum(statistics.accepted))
        self.drafts.labels(name).inc(statistics.reached[0] if statistics.reached else 0)
        self.relaxed.labels(name).inc(statistics.relaxed * statistics.codes)
        self.variation.labels(name).inc(statistics.total_variation * statistics.codes)
        for depth, count in enumerate(statistics.accepted):
            self.accepted_at.labels(name, depth).inc(count)
        self.decode.labels(name).observe(statistics.seconds.get("decode", 0.0))

    def answered(self, reason: str, seconds: float, words: int) -> None:
        """Count a finished request; `reason` is stop, abort or error."""
        self.success.labels(self._name, reason).inc()
        self.latency.labels(self._name).observe(seconds)
        self.prompt_tokens.labels(self._name).inc(words)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"lantern:{name}", text, LABEL, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"lantern:{name}", text, (*LABEL, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"lantern:{name}", text, LABEL, buckets=SECONDS, registry=self.registry)
