// Multi-round rejection over a node's children, exact or by LANTERN and LANTERN++: `RejectionVerifier.test_children`. Sums
// are taken in an order that does not depend on the processor.

#pragma once
#include "images.h"

#include <utility>

namespace {

enum Residual { EXACT, PAPER, RELEASED };

// Returns the sum of the parts of a row, of which `part` gives PAIR at a time.
template <class Part> double sum_of(int vocab, Part part) {
    constexpr int COUNT = 16;
    Doubles sums[COUNT / PAIR] = {};
    for (int v = 0; v < vocab; v += COUNT)
        for (int i = 0; i < COUNT / PAIR; i++) sums[i] += part(v + i * PAIR);
    double total = 0;
    for (const Doubles &some : sums)
        for (int i = 0; i < PAIR; i++) total += some[i];
    return total;
}

// Scales a row to sum 1, in place; returns false where it has no mass.
inline bool normalize(float *row, int vocab) {
    const double total = sum_of(vocab, [&](int v) { return widened(row + v); });
    if (!(total > 0)) return false;
    for (int v = 0; v < vocab; v += PAIR) put(row + v, __builtin_convertvector(widened(row + v) / total, Singles));
    return true;
}

// Scores to probabilities, in place; 0 for less than e^-87 of the largest.
inline void softmax(float *scores, int vocab) {
    const double most = scores[Distribution{vocab}.largest(scores)];
    for (int v = 0; v < vocab; v += PAIR) {
        const Doubles x = widened(scores + v) - most;
        put(scores + v, __builtin_convertvector(x < spread<Doubles>(-87.0) ? Doubles{} : exp(x), Singles));
    }
    normalize(scores, vocab);
}

struct Rejection {
    int vocab;
    std::vector<float> left, after, exact, q; // `left`: p, then what the tests left of it

    explicit Rejection(int vocab) : vocab(vocab), left(vocab), after(vocab), exact(vocab), q(vocab) {}

    // Tests the children of a node in sampling order; returns the one that is taken, 0 for none.
    int test(const ImageArgs &of, int node, int nodes, const double *uniforms, Cost &cost) {
        const TestArgs &by = *of.test;
        int64_t before = -1;
        for (int child = node + 1; child < nodes; child++) {
            if (of.parents[child] != node) continue;
            const int64_t x = of.tree[child];
            if (before < 0) {
                std::copy_n(by.q + by.rows[node] * vocab, vocab, q.data());
            } else {
                const float removed = std::exchange(q[before], 0.0f);
                if (!normalize(q.data(), vocab)) q[before] = removed;
            }
            before = x;
            const double threshold = *uniforms++ * double(q[x]);
            if (!(q[x] > 0)) continue;
            const float own = left[x];
            const Claim claim = claim_of(by, x, cost.spent);
            const float mass = own + claim.mass;
            const bool is_accepted = threshold < mass;
            const float chance = std::min(mass / q[x], 1.0f), gain = chance - std::min(own / q[x], 1.0f);
            const bool is_other = by.residual == RELEASED || (by.residual == PAPER && claim.count);
            if (!is_accepted || (is_other && chance < 1)) refuse(by, x, claim);
            cost.spent += gain + (is_other && chance < 1 ? (1 - chance) * apart() : 0.0f);
            cost.moved += gain * claim.reach;
            if (is_accepted) {
                cost.relaxed = !(threshold < own);
                return child;
            }
            std::swap(left, after);
        }
        return 0;
    }

    // Samples the token of a number from what is left.
    int64_t draw(const Stream &noise, int64_t where) {
        for (int v = 0; v < vocab; v += PAIR) {
            const Doubles p = widened(&left[v]), score = log(not_less(p, double(1.17549435e-38f)));
            put(&after[v], __builtin_convertvector(p > spread<Doubles>(0.0) ? score : spread<Doubles>(-INFINITY), Singles));
        }
        int64_t token;
        take_with_gumbel(noise, where, vocab, after.data(), 1, &token);
        return token;
    }

  private:
    // The `count` nearest tokens within the budget, their mass, and their mean distance.
    struct Claim {
        int count;
        float mass, reach;
    };

    Claim claim_of(const TestArgs &by, int64_t x, float spent) const {
        const int32_t *near = by.table + x * by.columns;
        const float budget = std::max(by.factor * left[x] + by.constant - (by.is_shared ? spent : 0.0f), 0.0f);
        double mass = 0, travelled = 0;
        int count = 0;
        for (; count < by.near && mass + left[near[count]] <= budget; count++) {
            mass += left[near[count]];
            if (by.distances) travelled += left[near[count]] * by.distances[x * by.far_columns + count];
        }
        return {count, float(mass), mass > 0 ? float(travelled / mass) : 0.0f};
    }

    // Writes to `after` what a refusal of x leaves, and to `exact` what exact rejection would leave.
    void refuse(const TestArgs &by, int64_t x, const Claim &claim) {
        const int32_t *near = by.table + x * by.columns;
        for (int v = 0; v < vocab; v += UNIT) put(&exact[v], larger(get<Unit>(&left[v]) - get<Unit>(&q[v]), Unit{}));
        after = exact;
        if (by.residual == PAPER && claim.count) {
            for (int i = 0; i < claim.count; i++) after[near[i]] = 0;
            after[x] = std::max(left[x] + claim.mass - q[x], 0.0f);
        }
        for (int i = 0; by.residual == RELEASED && claim.count && i <= by.near; i++) after[near[i]] = left[near[i]];
        if (!normalize(after.data(), vocab)) {
            after = left;
            if (by.residual == RELEASED) std::fill(after.begin(), after.end(), 1.0f / vocab);
        }
        if (by.residual != EXACT && !normalize(exact.data(), vocab)) exact = left;
    }

    // Returns the total variation between what a refusal leaves and what exact rejection would leave.
    float apart() const {
        return float(sum_of(vocab, [&](int v) {
                         const Doubles gap = widened(&after[v]) - widened(&exact[v]);
                         return gap < spread<Doubles>(0.0) ? -gap : gap;
                     }) / 2);
    }
};

} // namespace
