// Whole steps of plain decoding, of a Jacobi window under fixed noise, or of a drafter's static trees, in one call: the
// inputs of the pass, the pass, the samples (`sampling.h`), the match or the tests (`rejection.h`), the commit, and the next
// draft (`draft.h`). Plain decoding is a window of one token.

#include "convolution.h"
#include "draft.h"

extern "C" {

struct StepArgs {
    // With `is_staged`, keys and values are written to the stage first; else, of chains, to the slots of their tokens.
    int32_t images, nodes, tokens, prefix, conditioning, is_staged, is_half;
    const void *embeddings; // (vocab, dim), in bf16 if `is_half`, else in fp32
    const ImageArgs *of;    // (images)
    const DraftArgs *drafts; // of each generation with a drafter
    int64_t drafters;
    double seconds, drafting; // spent in passes, and in drafting
};
}

namespace {

struct Stepper {
    const Model &model;
    const PassArgs &pass;
    StepArgs &state;
    const int rows = pass.rows / state.images; // guidance rows of an image
    std::vector<std::vector<float>> scores, room; // one per thread
    std::vector<Mixture> mixtures;                // one per thread
    std::vector<Rejection> tests;                 // one per thread
    std::vector<float> kept;                      // (images, nodes, vocab): scores of images with a relaxation
    std::vector<Drafts> drafts;

    Stepper(const Model &model, const PassArgs &pass, StepArgs &state)
        : model(model), pass(pass), state(state), scores(pass.threads, std::vector<float>(model.vocab)), room(scores) {
        for (int64_t i = 0; i < state.drafters; i++) drafts.emplace_back(model, state.drafts[i], state.of);
        const auto is_tested = [](const ImageArgs &of) { return of.test != nullptr; };
        if (std::any_of(state.of, state.of + state.images, is_tested)) tests.resize(pass.threads, Rejection(model.vocab));
        const auto is_relaxed = [](const ImageArgs &of) { return of.log_q != nullptr; };
        if (std::none_of(state.of, state.of + state.images, is_relaxed)) return;
        mixtures = std::vector<Mixture>(pass.threads, Mixture(model.vocab));
        kept.resize(size_t(state.images) * state.nodes * model.vocab);
    }

    // Number of the token that follows a node.
    int64_t place(const ImageArgs &of, int node) const {
        return std::min<int64_t>(*of.known + of.depths[node], state.tokens - 1);
    }

    // Writes the inputs of the pass: embeddings, positions, and the mask of committed tokens.
    void fill() const {
        float *inputs = const_cast<float *>(pass.inputs), *mask = const_cast<float *>(pass.mask);
        for (int m = 0; m < pass.rows; m++) {
            const ImageArgs &of = state.of[m / rows];
            const int64_t known = *of.known;
            for (int i = 0; i < state.nodes; i++) {
                const size_t at = size_t(m) * state.nodes + i;
                embed(state.embeddings, state.is_half, of.tree[i], model.dim, inputs + at * model.dim);
                const int64_t where = std::min<int64_t>(known - 1 + of.depths[i], state.tokens - 1);
                const_cast<int64_t *>(pass.positions)[at] = where + state.conditioning;
                if (!state.is_staged) const_cast<int64_t *>(pass.places)[at] = where + state.prefix;
                float *seen = mask + m * pass.mask_row + i * pass.mask_node + state.prefix;
                std::fill(seen, seen + (state.is_staged ? known - 1 : where + 1), 0.0f);
            }
        }
    }

    const float *logits(int image, int row, int node) const {
        return pass.logits + ((size_t(image) * rows + row) * state.nodes + node) * model.vocab;
    }

    float *row(int image, int node) { return kept.data() + (size_t(image) * state.nodes + node) * model.vocab; }

    // Writes the scores of the token that follows a node, and noise if there is any.
    void score(int image, int node, const float *noise, float *out, int thread) {
        const ImageArgs &of = state.of[image];
        const float *u = rows == 2 ? logits(image, 1, node) : nullptr;
        const Distribution distribution = {model.vocab, of.top_k, of.interval, of.guidance, of.temperature};
        distribution.score(logits(image, 0, node), u, place(of, node), noise, out, room[thread].data());
    }

    // Samples the token that follows a node.
    int64_t sample(int image, int node, int thread) {
        const ImageArgs &of = state.of[image];
        const float *noise = of.noise ? of.noise + size_t(place(of, node)) * model.vocab : nullptr;
        float *out = of.log_q ? row(image, node) : scores[thread].data();
        score(image, node, of.log_q ? nullptr : noise, out, thread);
        return of.log_q ? best(out, noise, thread) : Distribution{model.vocab}.largest(out);
    }

    // Returns the token with the largest sum of score and noise.
    int64_t best(const float *row, const float *noise, int thread) {
        float *sums = scores[thread].data();
        for (int v = 0; v < model.vocab; v += UNIT) {
            const Unit x = get<Unit>(row + v);
            put(sums + v, noise ? x + get<Unit>(noise + v) : x);
        }
        return Distribution{model.vocab}.largest(sums);
    }

    // Samples the token that follows a node again, from the distribution moved toward that of the draft behind the node.
    void relax(int image, int node, int thread) {
        const ImageArgs &of = state.of[image];
        Mixture &mixture = mixtures[thread];
        float *own = row(image, node);
        Cost &cost = of.costs[node] = {};
        mixture.normalize(own);
        if (node + 1 < state.nodes) {
            const int64_t draft = of.tree[node + 1];
            const float before = own[draft];
            cost.spent = mixture.relax(of.delta, of.cap, own, of.log_q + size_t(node) * model.vocab);
            const float ratio = before - own[draft];
            cost.relaxed = ratio < 0 ? float(-std::expm1(double(ratio))) : 0.0f;
        }
        of.sampled[node] = best(own, of.noise ? of.noise + size_t(place(of, node)) * model.vocab : nullptr, thread);
    }

    // Returns the child of a node that is the token sampled after it, 0 for none. Nodes of trees are sampled here, those
    // of windows before; only the rows of nodes that are asked for are relaxed.
    int follow(int image, int node, int length) {
        const ImageArgs &of = state.of[image];
        if (of.pairs) of.sampled[node] = sample(image, node, omp_get_thread_num());
        if (of.log_q && *of.known + node < state.tokens) relax(image, node, omp_get_thread_num());
        if (of.lengths) return scripted(of, node, length);
        for (int i = node + 1; i < state.nodes; i++)
            if (of.parents[i] == node && of.tree[i] == of.sampled[node]) return i;
        return 0;
    }

    // Tests the nodes of a tree from the root down, and samples what follows the last that is taken; returns how many were.
    int walk(int image) {
        const ImageArgs &of = state.of[image];
        const int thread = omp_get_thread_num();
        Rejection &test = tests[thread];
        std::fill(of.costs, of.costs + of.depths[state.nodes - 1] + 1, Cost{});
        int length = 0, node = 0;
        while (true) {
            score(image, node, nullptr, test.left.data(), thread);
            softmax(test.left.data(), model.vocab);
            Cost &cost = of.costs[length];
            const int child = test.test(of, node, state.nodes, of.test->uniforms + place(of, node) * of.test->lanes, cost);
            if (!child) break;
            of.sampled[node] = of.tree[child];
            of.path[length++] = node = child;
        }
        const int64_t last = test.draw(of.test->samples, place(of, node));
        if (of.lengths) {
            std::fill(of.path, of.path + length, 0);
            for (length = node = 0; const int child = scripted(of, node, length); node = child) {
                of.sampled[node] = of.tree[child];
                of.path[length++] = child;
            }
        }
        of.sampled[node] = last;
        return length;
    }

    // Returns the child of a node that a benchmark accepts, 0 for none.
    int scripted(const ImageArgs &of, int node, int length) const {
        for (int i = node + 1; length < of.lengths[place(of, 0)] && i < state.nodes; i++)
            if (of.parents[i] == node && is_above_last(of, i)) return i;
        return 0;
    }

    // Returns whether a node is the last one of the first of the deepest, or an ancestor of it.
    bool is_above_last(const ImageArgs &of, int node) const {
        int deepest = state.nodes - 1;
        while (of.depths[deepest - 1] == of.depths[deepest]) deepest--;
        while (deepest > node) deepest = int(of.parents[deepest]);
        return deepest == node;
    }

    bool is_finite(int image, int node) const {
        Unit off = {};
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < model.vocab; v += UNIT) {
                const Unit x = get<Unit>(logits(image, row, node) + v);
                off += x - x;
            }
        for (int i = 0; i < UNIT; i++)
            if (!(off[i] == 0)) return false;
        return true;
    }

    // Threads that share so many tasks over the tokens' vocabulary.
    int threads_for(int tasks) const {
        return int64_t(tasks) * model.vocab < SINGLE_THREAD ? 1 : std::min(tasks, pass.threads);
    }

    void sample_all() {
        const int tasks = state.images * state.nodes;
#pragma omp parallel for num_threads(threads_for(tasks))
        for (int task = 0; task < tasks; task++) {
            const int image = task / state.nodes, node = task % state.nodes;
            if (state.of[image].pairs) continue;
            state.of[image].sampled[node] = sample(image, node, omp_get_thread_num());
        }
    }

    // Keeps the drafts that are accepted, and the sample that follows them.
    void commit(int image) {
        const ImageArgs &of = state.of[image];
        const int64_t known = *of.known;
        *of.start = known;
        *of.counts = 0;
        if (known >= state.tokens) return;
        std::fill(of.path, of.path + state.nodes, 0);
        const int depth = int(of.depths[state.nodes - 1]);
        int length = 0, node = 0;
        if (of.test) length = walk(image);
        else
            while (int next = follow(image, node, length)) of.path[length++] = node = next;
        const int64_t count = std::min<int64_t>(length + 1, state.tokens - known);
        for (int i = 0; i < count; i++) {
            node = i ? int(of.path[i - 1]) : 0;
            of.grid[known + i] = of.sampled[node];
            if (!is_finite(image, node)) *of.total = NAN;
            if (of.pairs) keep_feature(image, node, known + i, of.pairs + size_t(i) * model.dim);
        }
        if (of.log_q || (of.test && !of.lengths)) charge(image, length);
        ++*of.passes;
        for (int d = 0; d < depth && known + d < state.tokens; d++) {
            of.accepted[d] += d < length;
            of.reached[d] += d <= length && has_child(of, d ? int(of.path[d - 1]) : 0);
        }
        if (state.is_staged) keep(image, length);
        *of.counts = count;
        *of.known = known + count;
        if (of.pairs) return;
        shift(of, int(count));
        if (of.log_q) shift_rows(image, int(count));
    }

    bool has_child(const ImageArgs &of, int node) const {
        return std::find(of.parents + node + 1, of.parents + state.nodes, node) != of.parents + state.nodes;
    }

    // Writes the guided feature that predicted the token at `where`.
    void keep_feature(int image, int node, int64_t where, float *to) const {
        const ImageArgs &of = state.of[image];
        const float *c = pass.features + (size_t(image) * rows * state.nodes + node) * model.dim;
        const float *u = rows == 2 && is_guided(of, where) ? c + size_t(state.nodes) * model.dim : nullptr;
        for (int i = 0; i < model.dim; i++) {
            to[i] = narrowed(c[i], state.is_half);
            if (!u) continue;
            const float other = narrowed(u[i], state.is_half);
            to[i] = narrowed(other + (to[i] - other) * of.guidance, state.is_half);
        }
    }

    // Adds the costs of the committed tokens. The drafts behind them keep their distributions, so all rows are checked.
    void charge(int image, int length) {
        const ImageArgs &of = state.of[image];
        for (int i = 0; i < state.nodes && of.log_q; i++)
            if (!is_finite(image, i)) *of.total = NAN;
        for (int i = 0; i <= length && *of.known + i < state.tokens; i++) {
            const Cost &cost = of.costs[i];
            if (i < length) *of.relaxed += cost.relaxed;
            *of.variation += cost.spent;
            *of.largest = std::max(*of.largest, cost.spent);
            if (!of.test) continue;
            *of.test->distance += cost.moved;
            *of.test->excess += std::max(cost.spent - of.test->bound, 0.0f);
        }
    }

    // Keeps the distributions of the drafts that stay. New ones are uniform, or the token itself.
    void shift_rows(int image, int count) {
        const ImageArgs &of = state.of[image];
        for (int j = 0; j < state.nodes; j++) {
            float *to = of.log_q + size_t(j) * model.vocab;
            if (count + j < state.nodes) {
                std::memcpy(to, row(image, count + j), sizeof(float) * model.vocab);
                mixtures[omp_get_thread_num()].normalize(to);
                continue;
            }
            std::fill(to, to + model.vocab, of.random ? float(-std::log(double(model.vocab))) : -INFINITY);
            if (!of.random) to[of.sampled[state.nodes - 1]] = 0;
        }
    }

    // Copies keys and values of the first nodes from the stage to the slots of their tokens.
    void keep(int image, int length) const {
        const int head_dim = model.dim / model.heads;
        const int64_t known = *state.of[image].known, *path = state.of[image].path, *stage = pass.places + size_t(image) * rows * state.nodes;
        for (int part = 0; part < 2 * model.layers; part++)
            for (int head = 0; head < rows * model.heads; head++) {
                const int64_t line = int64_t(image) * rows * model.heads + head;
                float *slots = pass.cache + part * pass.plane + line * pass.slots * head_dim;
                for (int i = 0; i <= length && known - 1 + i < state.tokens; i++)
                    std::memcpy(slots + (state.prefix + known - 1 + i) * head_dim,
                                slots + stage[i ? path[i - 1] : 0] * head_dim, sizeof(float) * head_dim);
            }
    }

    // Makes the next window: the last new token, the samples behind it, and initial tokens at its end.
    void shift(const ImageArgs &of, int count) const {
        of.tree[0] = of.sampled[count - 1];
        for (int j = 0; j + 1 < state.nodes; j++) {
            const int from = count + j;
            of.tree[j + 1] = from < state.nodes ? of.sampled[from]
                               : of.random        ? of.random[place(of, j)]
                                                  : of.sampled[state.nodes - 1];
        }
    }

    // Drafts the next trees of generations that are not finished.
    void draft() {
        const double begun = omp_get_wtime();
        for (Drafts &one : drafts) {
            const auto is_open = [&](const ImageArgs &of) { return *of.known < state.tokens; };
            if (std::any_of(one.images, one.images + one.of.images, is_open)) one.propose();
        }
        state.drafting += omp_get_wtime() - begun;
    }

    // Takes a step; returns whether it gave an image its last token, or all images were done.
    bool step() {
        fill();
        const double begun = omp_get_wtime();
        run(model, pass);
        state.seconds += omp_get_wtime() - begun;
        sample_all();
#pragma omp parallel for num_threads(threads_for(state.images * state.nodes))
        for (int image = 0; image < state.images; image++) commit(image);
        draft();
        bool ends = true, is_new = false;
        for (int image = 0; image < state.images; image++) {
            const bool is_done = *state.of[image].known >= state.tokens;
            ends &= is_done;
            is_new |= is_done && *state.of[image].counts;
        }
        return ends || is_new;
    }
};

} // namespace

// Takes steps until an image is complete or `patience` seconds have passed, at least one; returns their number.
extern "C" int64_t lantern_steps(const Model *model, const PassArgs *pass, StepArgs *state, double patience) {
    return guarded([&] {
        Stepper stepper(*model, *pass, *state);
        const double begun = omp_get_wtime();
        int64_t taken = 1;
        for (; !stepper.step() && omp_get_wtime() - begun < patience; taken++) {}
        return taken;
    });
}

// The Gumbel noise of all tokens at some token numbers of each image, as in lantern/core/sampling.py, to their rows of
// `table` (images, tokens, vocab).
extern "C" void lantern_gumbel(int32_t images, int32_t tokens, int32_t vocab, int32_t count, int32_t threads,
                               const int64_t *low, const int64_t *high, const int64_t *image, const int64_t *position,
                               float *table) {
#pragma omp parallel for num_threads(threads)
    for (int row = 0; row < images * count; row++) {
        const int of = row / count;
        const int64_t where = position[row % count];
        float *to = table + (int64_t(of) * tokens + where) * vocab, noise[4 * BLOCKS];
        double numbers[4 * BLOCKS];
        for (int first = 0; first < vocab; first += 4 * BLOCKS) {
            uint32_t blocks[BLOCKS];
            for (int j = 0; j < BLOCKS; j++) blocks[j] = uint32_t(first / 4 + j);
            uniforms_of({low[of], high[of], image[of]}, where, blocks, numbers);
            for (int i = 0; i < 4 * BLOCKS; i += PAIR)
                put(noise + i, __builtin_convertvector(gumbel(get<Doubles>(numbers + i)), Singles));
            std::memcpy(to + first, noise, sizeof(float) * std::min(4 * BLOCKS, vocab - first));
        }
    }
}
