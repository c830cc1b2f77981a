// The bounded relaxation of `lantern/relaxations/bounded.py`, one law at a time.

#pragma once
#include "draws.h"

#include <limits>

extern "C" {

struct Relaxing {
    int32_t near, rounds, width; // near: how many codes a row of the table has, a multiple of 16
    float delta, cap;
    const int32_t *table;   // (vocab, near): the nearest codes of each, filled up with the number `vocab`
    const float *distances; // (vocab, near), filled up with zeros; null: none are told
};
}

namespace {

inline Lanes gather(const float *from, const int32_t *codes) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_i32gather_ps(_mm512_loadu_si512(codes), from, sizeof(float));
#else
    Lanes x;
    for (int i = 0; i < WIDTH; i++) x[i] = from[codes[i]];
    return x;
#endif
}

inline float sum(Lanes x) {
    const Whole own = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int apart = WIDTH / 2; apart; apart /= 2) x += __builtin_shuffle(x, own ^ apart);
    return x[0];
}

// A law that is moved, and what moving it cost.
struct Flow {
    Relaxing by;
    Law law;
    std::vector<float> wanted, room, surplus, demand, offers; // of each code, the last three also of none
    std::vector<int32_t> asking;
    std::vector<float> lacks, shares; // of those that ask
    int asked = 0;
    float spent = 0, travelled = 0;

    Flow(const Relaxing &by, int vocab)
        : by(by), law{vocab}, wanted(vocab), room(vocab), surplus(vocab + WIDTH), demand(surplus), offers(surplus),
          asking(vocab), lacks(vocab), shares(vocab) {}

    // Moves p toward q, in place.
    void relax(float *p, const float *q) {
        const Lanes none = {};
        for (int v = 0; v < law.vocab; v += WIDTH) {
            const Lanes own = load(p + v), gap = load(q + v) - own, most = own * (by.cap - 1);
            store(&surplus[v], larger(none - gap, none));
            store(&wanted[v], larger(gap < most ? gap : most, none));
        }
        ask();
        float total = travelled = 0;
        for (int round = 0; round < by.rounds; round++) grant();
        for (int i = 0; i < asked; i++) total += wanted[asking[i]] - lacks[i];
        const float scale = std::min(1.0f, by.delta / std::max(total, std::numeric_limits<float>::min()));
        for (int v = 0; v < law.vocab; v += WIDTH) {
            const Lanes had = larger(load(p + v) - load(q + v), none);
            store(p + v, larger(load(p + v) - (had - load(&surplus[v])) * scale, none));
        }
        for (int i = 0; i < asked; i++) p[asking[i]] += (wanted[asking[i]] - lacks[i]) * scale;
        spent = std::min(total * scale, by.delta);
        travelled *= scale;
    }

    // The codes that want most ask.
    void ask() {
        const float least = by.width < law.vocab ? law.kth_largest(wanted.data(), by.width, room.data()) : 0;
        const float *of = wanted.data();
        int count = 0, equal = by.width; // how many of those that want as much as the last may ask
        for (int v = 0; v < law.vocab; v++) equal -= of[v] > least;
        for (int v = 0; v < law.vocab; v++) { // without branches, which nobody could foresee
            const bool is_last = (of[v] == least) & (equal > 0);
            asking[count] = v;
            count += (of[v] > 0) & ((of[v] > least) | is_last);
            equal -= is_last;
        }
        for (int i = 0; i < count; i++) lacks[i] = of[asking[i]];
        asked = count;
    }

    // One round of proportional filling.
    void grant() {
        std::fill(demand.begin(), demand.end(), 0.0f);
        for (int i = 0; i < asked; i++) {
            const int32_t *near = by.table + size_t(asking[i]) * by.near;
            Lanes around = {};
            for (int j = 0; j < by.near; j += WIDTH) around += gather(&surplus[0], near + j);
            const float share = std::min(1.0f, lacks[i] / std::max(sum(around), std::numeric_limits<float>::min()));
            for (int j = 0; j < by.near; j++) demand[near[j]] += share;
            shares[i] = share;
        }
        for (int v = 0; v < law.vocab; v += WIDTH) store(&offers[v], load(&surplus[v]) / larger(load(&demand[v]), all(1.0f)));
        for (int i = 0; i < asked; i++) {
            const size_t row = size_t(asking[i]) * by.near;
            Lanes offered = {}, away = {};
            for (int j = 0; j < by.near; j += WIDTH) {
                const Lanes offer = gather(&offers[0], by.table + row + j);
                offered += offer;
                if (by.distances) away += offer * load(by.distances + row + j);
            }
            lacks[i] -= std::min(sum(offered) * shares[i], lacks[i]);
            travelled += sum(away) * shares[i];
        }
        for (int v = 0; v < law.vocab; v += WIDTH)
            store(&surplus[v], load(&surplus[v]) * larger(all(1.0f) - load(&demand[v]), Lanes{}));
    }
};

} // namespace

// Moves rows of p toward rows of q, in place: what a window does to its laws, alone.
extern "C" int64_t lantern_relax(const Relaxing *by, int32_t rows, int32_t vocab, float *p, const float *q, float *spent,
                                 float *travelled) {
    return guarded([&] {
        Flow flow(*by, vocab);
        for (int row = 0; row < rows; row++) {
            flow.relax(p + size_t(row) * vocab, q + size_t(row) * vocab);
            spent[row] = flow.spent;
            travelled[row] = flow.travelled;
        }
        return 0;
    });
}
