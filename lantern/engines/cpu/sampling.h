// Sampling of tokens: `Sampling.scores` and the argmax of score and noise, in the same order of operations as
// lantern/core/sampling.py, so that the bits are equal.

#pragma once
#include "pass.cpp"

namespace {

constexpr int SINGLE_THREAD = 1 << 15; // with fewer scores, one thread is faster

inline Unit larger(Unit a, Unit b) { return a > b ? a : b; }

// Returns the largest of whole vectors of numbers, -inf if all are NaN.
inline float largest_of(const float *numbers, int count) {
    Unit best = spread<Unit>(-INFINITY);
    for (int v = 0; v < count; v += UNIT) best = larger(get<Unit>(numbers + v), best);
    float most = -INFINITY;
    for (int i = 0; i < UNIT; i++) most = best[i] > most ? best[i] : most;
    return most;
}

// Maps rows of logits to log-probabilities, up to a constant per row.
struct Distribution {
    int vocab, top_k, interval;
    float guidance, temperature; // temperature 0: the most likely token

    // Writes the sum of score and noise of every token. u is null without guidance, noise is null for none; `room` is a
    // buffer of the same size.
    void score(const float *c, const float *u, int64_t where, const float *noise, float *out, float *room) const {
        const bool is_guided = u && (interval < 0 || where <= interval + 1);
        const bool is_cooled = temperature != 0 && temperature != 1;
        const Unit scale = spread<Unit>(guidance), divisor = spread<Unit>(temperature), none = spread<Unit>(-INFINITY);
        for (int v = 0; v < vocab; v += UNIT) {
            Unit x = get<Unit>(c + v);
            if (is_guided) x = get<Unit>(u + v) + (x - get<Unit>(u + v)) * scale;
            if (is_cooled) x = x / divisor;
            put(out + v, x);
        }
        float least = -INFINITY;
        if (top_k > 0 && top_k < vocab) least = kth_largest(out, top_k, room);
        const Unit bound = spread<Unit>(least);
        for (int v = 0; v < vocab; v += UNIT) {
            Unit x = get<Unit>(out + v);
            x = x < bound ? none : x;
            put(out + v, noise ? x + get<Unit>(noise + v) : x);
        }
    }

    // Returns the k-th largest number, of which NaN is the least. It is at least the k-th of the largest of groups of
    // eight, so it is looked for among the few numbers that are.
    float kth_largest(const float *numbers, int k, float *room) const {
        constexpr int GROUP = 8;
        int count = vocab;
        if (vocab % (GROUP * WIDTH) == 0 && vocab / GROUP >= 2 * k) {
            for (int v = 0; v < vocab; v += GROUP * UNIT) {
                Unit most = spread<Unit>(-INFINITY);
                for (int i = 0; i < GROUP; i++) most = larger(get<Unit>(numbers + v + i * UNIT), most);
                put(room + v / GROUP, most);
            }
            count = at_least(kth_of(room, vocab / GROUP, k), numbers, room);
        } else {
            std::copy_n(numbers, vocab, room);
        }
        return kth_of(room, count, k);
    }

    // Packs the numbers that are at least `least`, and NaN up to a whole vector; returns their number, rounded up to it.
    int at_least(float least, const float *numbers, float *to) const {
        int count = 0;
        for (int v = 0; v < vocab; v += WIDTH) {
#if defined(__AVX512F__)
            const __m512 x = _mm512_loadu_ps(numbers + v);
            const __mmask16 is_kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ);
            _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(is_kept, x));
            count += __builtin_popcount(is_kept);
#else
            for (int i = 0; i < WIDTH; i++) { // without branches, which could not be predicted
                to[count] = numbers[v + i];
                count += numbers[v + i] >= least;
            }
#endif
        }
        const int whole = (count + WIDTH - 1) / WIDTH * WIDTH;
        std::fill(to + count, to + whole, NAN);
        return whole;
    }

    // Returns the k-th largest of whole vectors of numbers: the largest number that at least k of them reach, bit by bit.
    static float kth_of(const float *numbers, int count, int k) {
        uint32_t found = 0; // in the order of the floats
        for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
            const Unit least = spread<Unit>(float_of(found | bit));
            decltype(least >= least) reached = {};
            for (int v = 0; v < count; v += UNIT) reached -= get<Unit>(numbers + v) >= least;
            int total = 0;
            for (int i = 0; i < UNIT; i++) total += reached[i];
            if (total >= k) found |= bit;
        }
        const float kth = float_of(found);
        return kth == kth ? kth : -INFINITY;
    }

    // Returns the float at a place in their order: NaN below -inf and above inf.
    static float float_of(uint32_t place) {
        const uint32_t bits = place >> 31 ? place ^ 0x80000000u : ~place;
        return get<float>(&bits);
    }

    // Writes the indices of the largest numbers in descending order, the lowest index among equals; overwrites numbers.
    void take(float *numbers, int count, int64_t *to) const {
        for (int i = 0; i < count; i++) {
            to[i] = largest(numbers);
            numbers[to[i]] = NAN; // neither larger than nor equal to any number
        }
    }

    // Returns the index of the largest number, the lowest among equals.
    int64_t largest(const float *numbers) const {
        const float most = largest_of(numbers, vocab);
        for (int v = 0; v < vocab; v++)
            if (numbers[v] == most) return v;
        return 0; // all are NaN: `finite` reports it
    }
};

} // namespace

extern "C" {

struct SampleArgs {
    int32_t images, rows, nodes, vocab, tokens, top_k, interval, width, threads;
    float guidance, temperature;
    const float *logits;   // (images, rows, nodes, vocab)
    const int64_t *places; // (images, nodes): the numbers of the tokens
    const float *noise;    // (images, tokens, vocab); null: none
    int64_t *sampled;      // (images, nodes, width): the best first
};
}

extern "C" int64_t lantern_sample(const SampleArgs *args) {
    return guarded([&] {
        const SampleArgs &of = *args;
        const int tasks = of.images * of.nodes;
        const int threads = tasks * of.vocab < SINGLE_THREAD ? 1 : std::min<int>(tasks, of.threads);
        const Distribution distribution = {of.vocab, of.top_k, of.interval, of.guidance, of.temperature};
        std::vector<float> numbers(size_t(threads) * of.vocab), room(numbers);
#pragma omp parallel for num_threads(threads)
        for (int task = 0; task < tasks; task++) {
            const int image = task / of.nodes, node = task % of.nodes;
            const size_t mine = size_t(omp_get_thread_num()) * of.vocab, row = size_t(of.nodes) * of.vocab;
            const float *c = of.logits + image * of.rows * row + size_t(node) * of.vocab;
            const float *noise =
                of.noise ? of.noise + (size_t(image) * of.tokens + of.places[task]) * of.vocab : nullptr;
            distribution.score(c, of.rows == 2 ? c + row : nullptr, of.places[task], noise, &numbers[mine], &room[mine]);
            distribution.take(&numbers[mine], of.width, of.sampled + size_t(task) * of.width);
        }
        return 0;
    });
}
