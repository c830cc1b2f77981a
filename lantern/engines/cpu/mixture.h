// The relaxation of a row, with the bits of lantern/verifiers/relaxations/distributions.py: masses are whole units in fp64,
// whose sums do not depend on an order, and exponentials and logarithms are computed in fp64 and rounded.

#pragma once
#include "sampling.h"

namespace {

constexpr double UNITS = 0x1p48, COARSE = 0x1p36; // as in lantern/core/sampling.py

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

inline Doubles widened(const float *at) { return __builtin_convertvector(get<Singles>(at), Doubles); }
inline Doubles rounded(Doubles x) { return __builtin_convertvector(__builtin_convertvector(x, Singles), Doubles); }
inline Doubles smaller(Doubles a, Doubles b) { return a < b ? a : b; }
inline Doubles not_less(Doubles a, double least) { return a > spread<Doubles>(least) ? a : spread<Doubles>(least); }

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
    const Doubles magic = spread<Doubles>(0x1p52), near = (x + magic) - magic;
    return near > x ? near - 1.0 : near;
}

// e^x for x up to 0, rounded to fp32; e^-87, which is less than a unit, where x is less.
inline Doubles exp(Doubles x) {
    const Doubles y = not_less(x, -87.0), magic = spread<Doubles>(0x1.8p52), shifted = y * 1.4426950408889634 + magic;
    const Doubles steps = shifted - magic, r = (y - steps * 0x1.62e42fee00000p-1) - steps * 0x1.a39ef35793c76p-33;
    Doubles p = spread<Doubles>(1.0 / 6227020800);
    for (double c : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                     1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5})
        p = fma(p, r, spread<Doubles>(c));
    const Doubles power = (Doubles)(((Longs)shifted - (Longs)magic + 1023) << 52);
    return rounded((1.0 + (r + r * r * p)) * power);
}

// log x of positive normal numbers.
inline Doubles exact_log(Doubles x) {
    const Longs bits = (Longs)x, exponent = (bits - 0x3fe6a09e667f3bcdLL) >> 52; // mantissa from sqrt(1/2) to sqrt(2)
    const Doubles m = (Doubles)(bits - (exponent << 52)), s = (m - 1.0) / (m + 1.0), z = s * s;
    Doubles p = spread<Doubles>(2.0 / 25);
    for (double c : {2.0 / 23, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11, 2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3})
        p = fma(p, z, spread<Doubles>(c));
    const Doubles steps = __builtin_convertvector(exponent, Doubles);
    return steps * 0x1.62e42fee00000p-1 + (2.0 * s + (s * z * p + steps * 0x1.a39ef35793c76p-33));
}

inline Doubles log(Doubles x) { return rounded(exact_log(x)); }

// `Mixture` of distributions.py, for one row at a time.
struct Mixture {
    int vocab;
    std::vector<float> p;
    std::vector<double> gained, lost;

    explicit Mixture(int vocab) : vocab(vocab), p(vocab), gained(vocab), lost(vocab) {}

    // Scores to log-probabilities, in place: `rounded_log_softmax`.
    void normalize(float *scores) const {
        const float most = largest_of(scores, vocab);
        Doubles sums = {};
        for (int v = 0; v < vocab; v += UNIT) {
            put(scores + v, get<Unit>(scores + v) - most);
            for (int i = 0; i < UNIT; i += PAIR) sums += whole(exp(widened(scores + v + i)) * COARSE);
        }
        double total = 0;
        for (int i = 0; i < PAIR; i++) total += sums[i];
        const float log_total = float(std::log(double(float(total / COARSE))));
        for (int v = 0; v < vocab; v += UNIT) put(scores + v, get<Unit>(scores + v) - log_total);
    }

    // Moves log p, in place, toward log q; returns the total variation.
    float relax(double delta, double cap, float *log_p, const float *log_q) {
        Doubles gains = {}, losses = {};
        for (int v = 0; v < vocab; v += PAIR) {
            const Doubles mass = exp(widened(log_p + v)), own = whole(mass * UNITS);
            const Doubles gap = whole(exp(widened(log_q + v)) * UNITS) - own;
            const Doubles gain = whole(not_less(smaller(gap, (cap - 1) * own), 0.0)), loss = not_less(-gap, 0.0);
            put(&p[v], __builtin_convertvector(mass, Singles));
            put(&gained[v], gain);
            put(&lost[v], loss);
            gains += gain, losses += loss;
        }
        const double total = sum(gains), scale = std::min(delta * UNITS / std::max(total, 1.0), 1.0);
        const double share = std::min(total * scale / std::max(sum(losses), 1.0), 1.0);
        for (int v = 0; v < vocab; v += PAIR) {
            const Doubles moved =
                whole(get<Doubles>(&gained[v]) * scale) - whole(get<Doubles>(&lost[v]) * share);
            const Longs is_moved = moved != spread<Doubles>(0.0);
            int64_t any = 0;
            for (int i = 0; i < PAIR; i++) any |= is_moved[i];
            if (!any) continue;
            const Doubles r = not_less(rounded(widened(&p[v]) + moved / UNITS), double(1.17549435e-38f));
            const Doubles kept = is_moved ? log(r) : widened(log_p + v);
            put(log_p + v, __builtin_convertvector(kept, Singles));
        }
        return std::min(float(std::floor(total * scale) / UNITS), float(delta));
    }

  private:
    static double sum(Doubles parts) {
        double total = 0;
        for (int i = 0; i < PAIR; i++) total += parts[i];
        return total;
    }
};

} // namespace
