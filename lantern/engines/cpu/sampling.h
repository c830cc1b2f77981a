// Sampling of tokens: `Sampling.scores` and the argmax of score and noise, in the same order of operations as
// lantern/core/sampling.py, so that the bits are equal.

#pragma once
#include "pass.cpp"

namespace {

constexpr int SINGLE_THREAD = 1 << 15; // with fewer scores, one thread is faster

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// Maps rows of logits to log-probabilities, up to a constant per row.
struct Distribution {
    int vocab, top_k, interval;
    float guidance, temperature; // temperature 0: the most likely token

    // Writes the sum of score and noise of every token. u is null without guidance, noise is null for none; `room` is a
    // buffer of the same size.
    void score(const float *c, const float *u, int64_t where, const float *noise, float *out, float *room) const {
        const bool is_guided = u && (interval < 0 || where <= interval + 1);
        const bool is_cooled = temperature != 0 && temperature != 1;
        const Lanes scale = all(guidance), divisor = all(temperature), none = all(-INFINITY);
        for (int v = 0; v < vocab; v += WIDTH) {
            Lanes x = load(c + v);
            if (is_guided) x = load(u + v) + (x - load(u + v)) * scale;
            if (is_cooled) x = x / divisor;
            store(out + v, x);
        }
        float least = -INFINITY;
        if (top_k > 0 && top_k < vocab) {
            least = kth_largest(out, top_k, room);
        }
        for (int v = 0; v < vocab; v += WIDTH) {
            Lanes x = load(out + v);
            x = x < least ? none : x;
            store(out + v, noise ? x + load(noise + v) : x);
        }
    }

    // Returns the k-th largest number, by a histogram of leading bits and a selection among those that share them.
    float kth_largest(const float *numbers, int k, float *room) const {
        constexpr int SHIFT = 20;
        int32_t counts[1 << (32 - SHIFT)] = {};
        for (int v = 0; v < vocab; v++) counts[order(numbers[v]) >> SHIFT]++;
        uint32_t bits = uint32_t(-1) >> SHIFT;
        while (counts[bits] < k) k -= counts[bits--];
        int found = 0;
        for (int v = 0; v < vocab; v++) { // without branches, which could not be predicted
            room[found] = numbers[v] == numbers[v] ? numbers[v] : -INFINITY;
            found += order(numbers[v]) >> SHIFT == bits;
        }
        std::nth_element(room, room + k - 1, room + found, std::greater<float>());
        return room[k - 1];
    }

    // Maps floats to integers of the same order; NaN is mapped like -inf.
    static uint32_t order(float x) {
        const float y = x == x ? x : -INFINITY;
        uint32_t bits;
        std::memcpy(&bits, &y, 4);
        return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
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
        Lanes best = all(-INFINITY);
        for (int v = 0; v < vocab; v += WIDTH) best = larger(load(numbers + v), best);
        float most = -INFINITY;
        for (int i = 0; i < WIDTH; i++) most = best[i] > most ? best[i] : most;
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
