// The bounded relaxation of a row, with the bits of lantern/verifiers/relaxations/bounded.py: masses are whole units in
// fp64, whose sums do not depend on an order, and exponentials and logarithms are computed in fp64 and rounded.

#pragma once
#include "sampling.h"

extern "C" {

// `Bounded` of bounded.py.
struct RelaxArgs {
    int32_t k, columns, apart, rounds, width; // columns: of the table, apart: of the distances
    double delta, cap;
    const int32_t *table;   // (vocab, columns)
    const float *distances; // (vocab, apart); null: none
};
}

namespace {

constexpr double UNITS = 0x1p48, COARSE = 0x1p36; // as in lantern/core/sampling.py

template <class Vector, class Number> inline Vector get_any(const Number *at) {
    Vector x;
    std::memcpy(&x, at, sizeof(x));
    return x;
}
template <class Number, class Vector> inline void put_any(Number *at, Vector x) { std::memcpy(at, &x, sizeof(x)); }

#if LANTERN_HALVES
typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));
typedef float Singles __attribute__((vector_size(16)));
#else
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef float Singles __attribute__((vector_size(32)));
#endif
constexpr int PAIR = sizeof(Doubles) / sizeof(double);

inline Doubles widened(const float *at) { return __builtin_convertvector(get_any<Singles>(at), Doubles); }
inline Doubles rounded(Doubles x) { return __builtin_convertvector(__builtin_convertvector(x, Singles), Doubles); }
inline Doubles both(double x) { return x - Doubles{}; }
inline Doubles smaller(Doubles a, Doubles b) { return a < b ? a : b; }
inline Doubles not_less(Doubles a, double least) { return a > both(least) ? a : both(least); }

inline Doubles fma(Doubles a, Doubles b, Doubles c) {
#if LANTERN_HALVES
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__AVX512F__)
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    for (int i = 0; i < PAIR; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

// Whole part of numbers from 0 up to 2^51.
inline Doubles whole(Doubles x) {
    const Doubles magic = both(0x1p52), near = (x + magic) - magic;
    return near > x ? near - 1.0 : near;
}

// e^x for x up to 0, rounded to fp32; 0 where that is less than a unit.
inline Doubles exp(Doubles x) {
    const Doubles y = not_less(x, -60.0), magic = both(0x1.8p52), shifted = y * 1.4426950408889634 + magic;
    const Doubles steps = shifted - magic, r = (y - steps * 0x1.62e42fee00000p-1) - steps * 0x1.a39ef35793c76p-33;
    Doubles p = both(1.0 / 6227020800);
    for (double c : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                     1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5})
        p = fma(p, r, both(c));
    const Doubles power = (Doubles)(((Longs)shifted - (Longs)magic + 1023) << 52);
    return rounded((1.0 + (r + r * r * p)) * power);
}

// log x of positive normal numbers, rounded to fp32.
inline Doubles log(Doubles x) {
    const Longs bits = (Longs)x, exponent = (bits - 0x3fe6a09e667f3bcdLL) >> 52; // mantissa from sqrt(1/2) to sqrt(2)
    const Doubles m = (Doubles)(bits - (exponent << 52)), s = (m - 1.0) / (m + 1.0), z = s * s;
    Doubles p = both(2.0 / 25);
    for (double c : {2.0 / 23, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11, 2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3})
        p = fma(p, z, both(c));
    const Doubles steps = __builtin_convertvector(exponent, Doubles);
    return rounded(steps * 0x1.62e42fee00000p-1 + (2.0 * s + (s * z * p + steps * 0x1.a39ef35793c76p-33)));
}

// Buffers and methods for one row at a time.
struct Relaxer {
    RelaxArgs of = {}; // the rule of the last row
    int vocab;
    std::vector<float> p;
    std::vector<double> deficit, left, first, demand, offers, change;
    std::vector<int32_t> tokens;
    std::vector<double> lacks, asked, inflow;
    double spent = 0, distance = 0; // of the last row: total variation, and mass times distance

    explicit Relaxer(int vocab)
        : vocab(vocab), p(vocab), deficit(vocab), left(vocab), first(vocab), demand(vocab), offers(vocab),
          change(vocab) {
        for (auto *part : {&lacks, &asked, &inflow}) part->resize(vocab);
        tokens.reserve(vocab);
    }

    // Scores to log-probabilities, in place: `rounded_log_softmax`.
    void normalize(float *scores) const {
        Lanes best = all(-INFINITY);
        for (int v = 0; v < vocab; v += WIDTH) best = larger(load(scores + v), best);
        float most = -INFINITY;
        for (int i = 0; i < WIDTH; i++) most = best[i] > most ? best[i] : most;
        Doubles sums = {};
        for (int v = 0; v < vocab; v += WIDTH) {
            store(scores + v, load(scores + v) - most);
            for (int i = 0; i < WIDTH; i += PAIR) sums += whole(exp(widened(scores + v + i)) * COARSE);
        }
        double total = 0;
        for (int i = 0; i < PAIR; i++) total += sums[i];
        const float log_total = float(std::log(double(float(total / COARSE))));
        for (int v = 0; v < vocab; v += WIDTH) store(scores + v, load(scores + v) - log_total);
    }

    // Moves log p, in place, toward log q.
    void relax(const RelaxArgs &rule, float *log_p, const float *log_q) {
        of = rule;
        spent = distance = 0;
        for (int v = 0; v < vocab; v += PAIR) {
            const Doubles mass = exp(widened(log_p + v)), own = whole(mass * UNITS);
            const Doubles gap = whole(exp(widened(log_q + v)) * UNITS) - own;
            put_any(&p[v], __builtin_convertvector(mass, Singles));
            const Doubles lack = not_less(smaller(gap, (of.cap - 1) * own), 0.0);
            put_any(&deficit[v], whole(lack * (COARSE / UNITS)) * (UNITS / COARSE));
            put_any(&left[v], not_less(-gap, 0.0));
        }
        if (!of.k || !choose()) return;
        const double total = fill(), scale = std::min(of.delta * UNITS / std::max(total, 1.0), 1.0);
        for (int v = 0; v < vocab; v += PAIR)
            put_any(&change[v], -whole((get_any<Doubles>(&first[v]) - get_any<Doubles>(&left[v])) * scale));
        for (size_t i = 0; i < tokens.size(); i++) change[tokens[i]] += std::floor(inflow[i] * scale);
        for (int v = 0; v < vocab; v += PAIR) {
            const Doubles moved = get_any<Doubles>(&change[v]);
            const Longs is_moved = moved != both(0.0);
            int64_t any = 0;
            for (int i = 0; i < PAIR; i++) any |= is_moved[i];
            if (!any) continue;
            const Doubles r = not_less(rounded(widened(&p[v]) + moved / UNITS), double(1.17549435e-38f));
            const Doubles kept = is_moved ? log(r) : widened(log_p + v);
            put_any(log_p + v, __builtin_convertvector(kept, Singles));
        }
        spent = std::min(float(std::floor(total * scale) / UNITS), float(of.delta));
        distance = float(travelled * scale / COARSE);
    }

  private:
    double travelled = 0;

    // Chooses the tokens with the largest deficits, the lowest index first among equals; returns whether there are any.
    bool choose() {
        double least = 0x1p48; // of the tokens among which they are
        while (least > 1 && count(least) < of.width) least /= 4;
        tokens.resize(vocab);
        size_t found = 0;
        for (int v = 0; v < vocab; v++) { // without branches, which could not be predicted
            tokens[found] = v;
            found += deficit[v] >= least;
        }
        tokens.resize(found);
        if (found > size_t(of.width)) {
            const auto is_before = [&](int32_t a, int32_t b) {
                return deficit[a] > deficit[b] || (deficit[a] == deficit[b] && a < b);
            };
            std::nth_element(tokens.begin(), tokens.begin() + of.width, tokens.end(), is_before);
            tokens.resize(of.width);
        }
        for (size_t i = 0; i < tokens.size(); i++) lacks[i] = deficit[tokens[i]], inflow[i] = 0;
        return !tokens.empty();
    }

    // Returns how many deficits are not less than a number.
    int64_t count(double least) const {
        Longs counts = {};
        for (int v = 0; v < vocab; v += PAIR) counts -= get_any<Doubles>(&deficit[v]) >= both(least);
        int64_t total = 0;
        for (int i = 0; i < PAIR; i++) total += counts[i];
        return total;
    }

    // Returns the sum of terms of the nearest tokens.
    template <class Term> double sum(Term term) const {
        double sums[4] = {};
        int j = 0;
        for (; j + 4 <= of.k; j += 4)
            for (int i = 0; i < 4; i++) sums[i] += term(j + i);
        for (; j < of.k; j++) sums[0] += term(j);
        return sums[0] + sums[1] + sums[2] + sums[3];
    }

    // Runs the rounds of proportional filling; returns the mass that all tokens received.
    double fill() {
        first = left;
        travelled = 0;
        double total = 0;
        for (int round = 0; round < of.rounds; round++) {
            std::fill(demand.begin(), demand.end(), 0.0);
            for (size_t i = 0; i < tokens.size(); i++) {
                asked[i] = 0;
                if (lacks[i] == 0) continue;
                const int32_t *near = of.table + size_t(tokens[i]) * of.columns;
                const double around = sum([&](int j) { return left[near[j]]; });
                const double share = std::floor(std::min(lacks[i] / std::max(around, 1.0), 1.0) * COARSE);
                asked[i] = share / COARSE;
                for (int j = 0; j < of.k; j++) demand[near[j]] += share;
            }
            for (int v = 0; v < vocab; v += PAIR) {
                const Doubles own = get_any<Doubles>(&left[v]), wanted = get_any<Doubles>(&demand[v]) / COARSE;
                put_any(&offers[v], whole(own / not_less(wanted, 1.0)));
                put_any(&left[v], whole(own * not_less(1.0 - wanted, 0.0)));
            }
            for (size_t i = 0; i < tokens.size(); i++) {
                if (asked[i] == 0) continue;
                const int32_t *near = of.table + size_t(tokens[i]) * of.columns;
                const double offered = sum([&](int j) { return offers[near[j]]; });
                const double granted = std::min(std::floor(offered * asked[i]), lacks[i]);
                if (of.distances) {
                    const float *away = of.distances + size_t(tokens[i]) * of.apart;
                    const auto moved = [&](int j) { return std::floor(offers[near[j]] * away[j] * (COARSE / UNITS)); };
                    travelled += std::floor(sum(moved) * asked[i]);
                }
                lacks[i] -= granted, inflow[i] += granted, total += granted;
            }
        }
        return total;
    }
};

} // namespace
