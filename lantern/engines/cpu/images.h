// An image whose steps are taken here, and the embeddings of tokens.

#pragma once
#include "noise.h"

extern "C" {

// What a relaxation cost at a node: the probability that the draft behind it was accepted because of the relaxation, the
// total variation, and the sum of mass times distance.
struct Cost {
    float relaxed, spent, moved;
};

// How sampled drafts are tested (rejection.h). A draft claims up to `constant` + `factor` p of its `near` nearest tokens.
struct TestArgs {
    int32_t near, columns, far_columns, lanes, residual, is_shared;
    float constant, factor, bound; // bound: of the total variation, that beyond is summed up
    Stream drafts, samples;        // noise of drafts, and of samples after the tests
    const double *uniforms;        // (tokens, lanes)
    const int32_t *table;          // (vocab, columns): the nearest tokens; null without claims
    const float *distances;        // (vocab, far_columns), or null
    const int64_t *rows;           // (nodes): of each node that has children, its row of q
    float *q;                      // (rows, vocab): the distributions that the children were sampled from
    double *distance, *excess;     // sums over tokens
};

// An image, in memory of its own: images with other settings and other numbers of known tokens share a step.
struct ImageArgs {
    int32_t top_k, interval;
    float guidance, temperature; // temperature 0: the most likely token
    const float *noise;          // (tokens, vocab); null: none
    const int64_t *random;       // (tokens): initial tokens of a window; null: repeat the last one
    int64_t *known;              // known tokens; the last of them is not in the cache
    int64_t *tree;               // (nodes): the last known token, and the drafts of those that follow it
    const int64_t *parents, *depths; // (nodes): parents precede children, and the last node is one of the deepest
    int64_t *grid;               // (tokens)
    int64_t *start, *counts;     // number of the first new token of the last step, and how many were new
    int64_t *sampled;            // (nodes): the token sampled after each node that was read
    int64_t *path;               // (nodes): those accepted in the last step, then 0
    int64_t *passes;
    int64_t *accepted, *reached; // (depth)
    float *total;                // NaN once logits that a token was sampled from were not finite
    // With a relaxation: the distributions of the window's drafts (nodes, vocab), row i that of draft i + 1, null: none;
    // and the settings of `Mixture`. With any relaxation sums over tokens, and what the last step cost along the path
    // (depth + 1).
    float *log_q;
    double *relaxed, *variation;
    float *largest;
    Cost *costs;
    float *pairs;           // (depth + 1, dim): the guided features that predicted the new tokens, null for windows
    const int64_t *lengths; // (tokens): drafts that a benchmark accepts there, along the first of the deepest paths; null: none
    double delta, cap;
    const TestArgs *test; // how drafts are tested by rejection, then without `noise`; null: they are matched
};
}

namespace {

inline float wide(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    return get<float>(&bits);
}

// Rounds to bf16 if `is_half`.
inline float narrowed(float x, bool is_half) {
    const uint32_t bits = get<uint32_t>(&x);
    if (!is_half || x != x) return x;
    return wide(uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

// Embeddings (vocab, dim), in bf16 if `is_half`, else in fp32.
inline void embed(const void *embeddings, bool is_half, int64_t token, int dim, float *to) {
    const size_t from = size_t(token) * dim;
    for (int c = 0; c < dim; c++)
        to[c] = is_half ? wide(((const uint16_t *)embeddings)[from + c]) : ((const float *)embeddings)[from + c];
}

inline bool is_guided(const ImageArgs &of, int64_t where) { return of.interval < 0 || where <= of.interval + 1; }

} // namespace
