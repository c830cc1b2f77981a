"""Number of threads of a pass by measured seconds; their barrier; and running out of memory in C++."""

import ctypes
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from lantern.core.config import is_out_of_memory
from lantern.engines.cpu import build as building
from lantern.engines.cpu.structures import cpp
from lantern.engines.pass_times import WARM_PASSES

# `play` sends calls through a policy: it returns the threads of each, if one thread takes `alone` and two `together`.
# `count_early` lets threads meet: how often one went on before another had arrived, -1 for other threads.
PROGRAM = """
#include "thread_policy.h"
#include <omp.h>
extern "C" void play(int calls, const double *alone, const double *together, int32_t *threads) {
    ThreadPolicy policy;
    for (int i = 0; i < calls; i++) {
        threads[i] = policy.threads(2);
        policy.record(threads[i], threads[i] == 1 ? alone[i] : together[i]);
    }
}
extern "C" int32_t count_early(int threads, int waits) {
    Barrier barrier(threads);
    std::vector<std::atomic<int32_t>> arrived(threads);
    std::atomic<int32_t> early{0}, team{0};
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num();
        team = omp_get_num_threads();
        uint32_t count = 0;
        for (int i = 1; i <= waits; i++) {
            arrived[me].store(i, std::memory_order_relaxed);
            barrier.wait(me, threads, count);
            for (auto &other : arrived) early += other.load(std::memory_order_relaxed) < i;
        }
    }
    return team == threads ? early.load() : -1;
}
"""
TRIED = WARM_PASSES  # calls with one thread at the beginning


@pytest.fixture(scope="module")
def player(compiled: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return compiled(PROGRAM)


def play(player: ctypes.CDLL, alone: list[float], together: list[float]) -> list[int]:
    seconds = ctypes.c_double * len(alone)
    threads = (ctypes.c_int32 * len(alone))()
    player.play(len(alone), seconds(*alone), seconds(*together), threads)
    return list(threads)


def test_threads_are_used_where_they_help_and_again_when_cores_are_free(player: ctypes.CDLL) -> None:
    assert play(player, [1.0] * 100, [0.6] * 100) == [1] * TRIED + [2] * 97
    threads = play(player, [1.0] * 1000, [50.0] * 100 + [0.6] * 900)
    assert threads[:100].count(2) == 4
    back = threads.index(2, 100)
    assert back < 230 and threads[back:] == [2] * (1000 - back)


def test_busy_cores_lead_to_rarer_trials_and_an_interruption_to_none(player: ctypes.CDLL) -> None:
    threads = play(player, [1.0] * 2000, [50.0] * 2000)
    tries = [i for i, count in enumerate(threads) if count == 2]
    assert tries[0] == TRIED
    alone = [after - before - 1 for before, after in pairwise(tries)]
    assert alone == [8, 16, 32, 64, 128, 256, 512, 512]
    # after it, two threads that take 3 are still slower than one
    threads = play(player, [1.0, 1.0, 40.0] + [1.0] * 97, [3.0] * 100)
    assert [i for i, count in enumerate(threads) if count == 2] == [3, 12, 29, 62]


def test_no_thread_passes_a_barrier_before_all_have_arrived(player: ctypes.CDLL) -> None:
    assert [player.count_early(threads, 100) for threads in (1, 2, 3, 5, 8)] == [0] * 5


def test_out_of_memory_in_a_call_raises_memory_error() -> None:
    outputs = torch.empty(1)
    huge = {"rows": 1 << 30, "inputs": 1 << 20, "outputs": 32}  # 4 PiB of inputs, allocated before they are read
    with pytest.raises(MemoryError, match="the C\\+\\+ engine ran out of memory") as caught:
        building.library().lantern_linear(
            ctypes.byref(cpp.LinearArgs(**huge, threads=1, a=outputs, panels=outputs, bias=outputs, out=outputs))
        )
    assert is_out_of_memory(caught.value)
