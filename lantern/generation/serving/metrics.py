"""Prometheus metrics under vLLM's names with the prefix `lantern:`, and what relaxation cost."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lantern.generation.images import Statistics
from lantern.generation.serving.worker import Worker

SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
COUNTERS: dict[str, tuple[str, ...]] = {  # text, labels
    "request_success": ("Finished requests.", "finished_reason"),
    "request_refused": ("Requests answered with an error.", "status"),
    "prompt_tokens": ("Words of prompts.",),
    "generation_tokens": ("Generated tokens.",),
    "iteration": ("Passes of the target, summed over images.",),
    "spec_decode_num_accepted_tokens": ("Accepted drafted tokens.",),
    "spec_decode_num_drafts": ("Steps that verified a draft.",),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted drafted tokens by depth, from 0.", "position"),
    "relaxed_tokens": ("Tokens that only a relaxation accepted.",),
    "total_variation_sum": ("Total variation, summed over tokens.",),
}
HISTOGRAMS = {
    "e2e_request_latency_seconds": "Seconds from a request to its answer.",
    "request_queue_time_seconds": "Seconds that an image waited.",
    "request_decode_time_seconds": "Share of its batch's decoding of an image.",
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, worker: Worker) -> None:
        self._name, self.registry, label = model_name, CollectorRegistry(), "model_name"
        how: dict[str, Any] = {"registry": self.registry}
        self._counters = {
            name: Counter(f"lantern:{name}", text, [label, *labels], **how)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"lantern:{name}", text, [label], buckets=SECONDS, **how)
            for name, text in HISTOGRAMS.items()
        }
        running = Gauge("lantern:num_requests_running", "Pictures that are being decoded.", [label], **how)
        running.labels(model_name).set_function(lambda: worker.running)
        waiting = Gauge("lantern:num_requests_waiting", "Pictures that wait in the queue.", [label], **how)
        waiting.labels(model_name).set_function(lambda: worker.queued)

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
        self._counters[name].labels(self._name, *labels).inc(amount)

    def _see(self, name: str, seconds: float) -> None:
        self._histograms[name].labels(self._name).observe(seconds)
