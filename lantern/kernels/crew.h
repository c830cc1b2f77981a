// How many threads calls of a kind are worth. Threads wait for each other five times a layer: where other programs hold
// a core, one alone is faster. Bits do not depend on it.

#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

struct Crew {
    static constexpr int TRIED = 3, SHORTEST = 8, LONGEST = 512;
    double alone = 0; // seconds by one thread
    int tried = 0, resting = 0, rest = SHORTEST;

    int threads(int most) const { return tried < TRIED || resting > 0 ? 1 : most; }

    void took(int threads, double seconds) {
        if (threads == 1) {
            alone = tried++ ? std::min(seconds, 1.1 * alone) : seconds; // once interrupted is not slow
            resting = std::max(resting - 1, 0);
        } else if (seconds > 2 * alone) {
            resting = rest;
            rest = std::min(2 * rest, LONGEST);
        } else {
            rest = std::max(rest / 2, SHORTEST);
        }
    }

    typedef std::array<int32_t, 4> Kind; // sizes by which calls are told apart

    static Crew &of(const Kind &kind) {
        static thread_local std::map<Kind, Crew> known;
        return known[kind];
    }
};
