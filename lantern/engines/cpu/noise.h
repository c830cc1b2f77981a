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

// Adds Gumbel noise to the scores of a token number; scores of -inf need none.
inline void add_gumbel(const Stream &of, int64_t where, int vocab, float *scores) {
    uint32_t blocks[BLOCKS] = {};
    double numbers[4 * BLOCKS];
    int count = 0;
    const auto add = [&] {
        uniforms_of(of, where, blocks, numbers);
        for (int i = 0; i < 4 * BLOCKS; i += PAIR)
            put(numbers + i, -exact_log(-exact_log(get<Doubles>(numbers + i))));
        for (int i = 0; i < 4 * count; i++) scores[4 * blocks[i / 4] + i % 4] += float(numbers[i]);
        count = 0;
    };
    for (int v = 0; v < vocab; v += 4) {
        if (!(std::max(std::max(scores[v], scores[v + 1]), std::max(scores[v + 2], scores[v + 3])) > -INFINITY)) continue;
        blocks[count++] = v / 4;
        if (count == BLOCKS) add();
    }
    if (count) add();
}

} // namespace
