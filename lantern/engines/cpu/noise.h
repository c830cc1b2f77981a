// The noise of an image at a token number, as lantern/core/sampling.py makes it: uniforms by Philox4x32-10, Gumbel noise of them.

#pragma once
#include "mixture.h"

extern "C" {

// The key of a purpose, in two words, and the image's number.
struct Stream {
    int64_t low, high, image;
};
}

namespace {

constexpr int BLOCKS = 16; // of four tokens, whose numbers are computed side by side

// Writes the uniforms of the tokens of some blocks at a token number.
inline void uniforms_of(const Stream &of, int64_t where, const uint32_t *blocks, double *to) {
    uint32_t a[BLOCKS], b[BLOCKS], c[BLOCKS], d[BLOCKS], k0 = uint32_t(of.low), k1 = uint32_t(of.high);
    for (int j = 0; j < BLOCKS; j++) {
        a[j] = blocks[j], b[j] = uint32_t(where);
        c[j] = uint32_t(of.image), d[j] = uint32_t(of.image >> 32);
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
        for (int j = 0; j < BLOCKS; j++) {
            const uint64_t left = uint64_t(a[j]) * 0xD2511F53, right = uint64_t(c[j]) * 0xCD9E8D57;
            a[j] = uint32_t(right >> 32) ^ b[j] ^ k0;
            c[j] = uint32_t(left >> 32) ^ d[j] ^ k1;
            b[j] = uint32_t(right);
            d[j] = uint32_t(left);
        }
    for (int j = 0; j < BLOCKS; j++) {
        to[4 * j] = (a[j] + 0.5) * 0x1p-32, to[4 * j + 1] = (b[j] + 0.5) * 0x1p-32;
        to[4 * j + 2] = (c[j] + 0.5) * 0x1p-32, to[4 * j + 3] = (d[j] + 0.5) * 0x1p-32;
    }
}

inline Doubles gumbel(Doubles u) { return -exact_log(-exact_log(u)); }

// Writes the tokens of the `count` largest sums of score and Gumbel noise, in descending order, the lowest number among
// equals, and 0 in the place of tokens without probability. Noise of a uniform u is at most -log(1 - u), so that few of its
// logarithms can matter.
inline void take_with_gumbel(const Stream &of, int64_t where, int vocab, const float *scores, int count, int64_t *to) {
    constexpr double LOG_2 = 0.6932, MOST = 34 * LOG_2; // rounded up
    std::vector<float> sums(count, -INFINITY);
    std::fill(to, to + count, 0);
    float own[4 * BLOCKS] = {}, least = -INFINITY; // least: the last of `sums`, which others must exceed
    double numbers[4 * BLOCKS];
    uint32_t blocks[BLOCKS] = {};
    int queued = 0;
    const auto insert = [&](float sum, int64_t token) {
        if (!(sum > least)) return;
        int at = count - 1;
        for (; at && sums[at - 1] < sum; at--) sums[at] = sums[at - 1], to[at] = to[at - 1];
        sums[at] = sum, to[at] = token;
        least = sums[count - 1];
    };
    const auto add = [&] {
        uniforms_of(of, where, blocks, numbers);
        for (int i = 0; i < 4 * queued; i += PAIR) {
            const Doubles u = get<Doubles>(numbers + i), one = spread<Doubles>(1.0), magic = spread<Doubles>(0x1p52);
            const Longs halvings = ((Longs)one - (Longs)(one - u)) >> 52; // at most one less than -log2(1 - u)
            const Doubles bound = ((Doubles)(halvings + (Longs)magic) - magic + 1.0) * LOG_2;
            const Longs is_less = widened(own + i) + bound < spread<Doubles>(double(least));
            int64_t all = -1;
            for (int lane = 0; lane < PAIR; lane++) all &= is_less[lane];
            if (all) continue;
            put(numbers + i, gumbel(u));
            for (int j = i; j < std::min(i + PAIR, 4 * queued); j++)
                insert(own[j] + float(numbers[j]), 4 * int64_t(blocks[j / 4]) + j % 4);
        }
        queued = 0;
    };
    for (int v = 0; v < vocab; v += 4) {
        const float most = std::max(std::max(scores[v], scores[v + 1]), std::max(scores[v + 2], scores[v + 3]));
        if (most + MOST < least) continue;
        std::copy_n(scores + v, 4, own + 4 * queued);
        blocks[queued++] = uint32_t(v / 4);
        if (queued == BLOCKS) add();
    }
    if (queued) add();
}

} // namespace
