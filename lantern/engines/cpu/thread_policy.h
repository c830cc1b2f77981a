// Chooses how many threads calls of a kind use. Threads wait for each other five times a layer: where other programs
// occupy a core, one thread alone is faster. The bits of the results do not depend on the number of threads.

#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

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
