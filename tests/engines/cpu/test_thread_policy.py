"""Number of threads of a pass by measured seconds; and running out of memory in C++."""

import ctypes
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from lantern.engines.cpu import build as building
from lantern.engines.cpu.kernels import LinearArgs
from lantern.engines.pass_times import WARM_PASSES
from lantern.generation.generator import is_out_of_memory

# Plays calls through a policy: returns the threads of each, if one thread takes `alone` and two take `together`.
PLAY = """
#include "thread_policy.h"
extern "C" void play(int calls, const double *alone, const double *together, int32_t *threads) {
    ThreadPolicy policy;
    for (int i = 0; i < calls; i++) {
        threads[i] = policy.threads(2);
        policy.record(threads[i], threads[i] == 1 ? alone[i] : together[i]);
    }
}
"""
TRIED = WARM_PASSES  # calls with one thread at the beginning


@pytest.fixture(scope="module")
def player(compiled: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return compiled(PLAY)


def play(player: ctypes.CDLL, alone: list[float], together: list[float]) -> list[int]:
    seconds = ctypes.c_double * len(alone)
    threads = (ctypes.c_int32 * len(alone))()
    player.play(len(alone), seconds(*alone), seconds(*together), threads)
    return list(threads)


def test_threads_are_used_where_they_help(player: ctypes.CDLL) -> None:
    assert play(player, [1.0] * 100, [0.6] * 100) == [1] * TRIED + [2] * 97


def test_busy_cores_lead_to_one_thread_and_rarer_trials(player: ctypes.CDLL) -> None:
    threads = play(player, [1.0] * 2000, [50.0] * 2000)
    tries = [i for i, count in enumerate(threads) if count == 2]
    assert tries[0] == TRIED
    alone = [after - before - 1 for before, after in pairwise(tries)]
    assert alone == [8, 16, 32, 64, 128, 256, 512, 512]


def test_all_threads_are_used_again_when_cores_are_free(player: ctypes.CDLL) -> None:
    threads = play(player, [1.0] * 1000, [50.0] * 100 + [0.6] * 900)
    assert threads[:100].count(2) == 4
    back = threads.index(2, 100)
    assert back < 230 and threads[back:] == [2] * (1000 - back)


def test_one_interrupted_call_does_not_count_as_slow(player: ctypes.CDLL) -> None:
    # after it, two threads that take 3 are still slower than one
    threads = play(player, [1.0, 1.0, 40.0] + [1.0] * 97, [3.0] * 100)
    assert [i for i, count in enumerate(threads) if count == 2] == [3, 12, 29, 62]


def test_out_of_memory_in_a_call_raises_memory_error() -> None:
    outputs = torch.empty(1)
    sizes = (1 << 30, 1 << 20, 32, 1, 0)  # 4 PiB of inputs, allocated before they are read
    with pytest.raises(MemoryError, match="the C\\+\\+ engine ran out of memory") as caught:
        building.library().lantern_linear(ctypes.byref(LinearArgs(*sizes, *[outputs.data_ptr()] * 4)))
    assert is_out_of_memory(caught.value)
