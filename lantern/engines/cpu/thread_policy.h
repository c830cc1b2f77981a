// How many threads calls of a kind use, and how they wait for each other, which they do five times a layer. Where other
// programs occupy a core, one thread alone is faster. The bits of the results do not depend on the number of threads.

#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <sched.h>
#include <vector>

struct ThreadPolicy {
    // The first TRIALS calls use one thread. A slow call of several threads is followed by a pause of SHORTEST to
    // LONGEST calls with one thread.
    static constexpr int TRIALS = 3, SHORTEST = 8, LONGEST = 512;
    double single = 0; // seconds of a call with one thread
    int trials = 0, pause_left = 0, pause = SHORTEST;

    int threads(int most) const { return trials < TRIALS || pause_left > 0 ? 1 : most; }

    void record(int threads, double seconds) {
        if (threads == 1) {
            single = trials++ ? std::min(seconds, 1.1 * single) : seconds; // one interrupted call must not count as slow
            pause_left = std::max(pause_left - 1, 0);
        } else if (seconds > 2 * single) {
            pause_left = pause;
            pause = std::min(2 * pause, LONGEST);
        } else {
            pause = std::max(pause / 2, SHORTEST);
        }
    }

    typedef std::array<int32_t, 4> Kind; // sizes that tell calls apart

    static ThreadPolicy &of(const Kind &kind) {
        static thread_local std::map<Kind, ThreadPolicy> known;
        return known[kind];
    }
};

// A dissemination barrier: a thread tells those 1, 2, 4 ... places after it that it has arrived, and waits for those as
// far before it. A flag is written by one thread and read by one, so two threads wait for one transfer between their
// cores. OpenMP's barrier takes several; a step of the embedded model in int8 takes 7 % longer with it.
class Barrier {
    static constexpr int SPINS = 1 << 14; // then the core is offered to others
    struct alignas(64) Flag {
        std::atomic<uint32_t> arrived{0};
    };
    const int most;
    std::vector<Flag> flags; // (distances, most)

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    static size_t distances(int threads) {
        size_t count = 0;
        for (int distance = 1; distance < threads; distance *= 2) count++;
        return count;
    }

  public:
    explicit Barrier(int most) : most(most), flags(distances(most) * most) {}

    // `me` of `threads` threads waits for the others; `count` is its number of waits so far.
    void wait(int me, int threads, uint32_t &count) {
        count++;
        Flag *level = flags.data();
        for (int distance = 1; distance < threads; distance *= 2, level += most) {
            level[(me + distance) % threads].arrived.store(count, std::memory_order_release);
            // the other one may be at its next wait already
            for (int spins = 0; int32_t(level[me].arrived.load(std::memory_order_acquire) - count) < 0; spins++)
                if (spins > SPINS) sched_yield();
                else pause();
        }
    }
};
