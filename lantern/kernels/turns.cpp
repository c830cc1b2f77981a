// Whole turns of plain decoding, or of a Jacobi window under fixed noise, in one call: what a pass takes in, the pass,
// the draws, the match, and what is kept of it. Plain decoding is a window of one code.
//
// Draws are those of `draws.h`. In a relaxed window (`relax.h`) every law is moved toward the one that its draft was drawn
// from, and the next window's drafts are drawn from what comes of it.

#include "relax.h"

extern "C" {

struct Turns {
    int32_t images, nodes, codes, prefix, conditioning, top_k, interval, is_random, is_half;
    float guidance, temperature; // temperature 0: the most likely code
    const void *embeddings;      // (vocab, dim), in bf16 where `is_half`, else in fp32
    const float *noise;          // (images, codes, vocab); null: none
    const int64_t *random;       // (images, codes): initial codes, where `is_random`
    int64_t *known;              // (images): codes decided, of which the last is not in the cache
    int64_t *window;             // (images, nodes): the last code and drafts of those that follow it
    int64_t *grid;               // (images, codes)
    int64_t *begun, *counts;     // (images): the first new code of the last turn, and how many there were
    int64_t *drawn;              // (images, nodes): the code that follows each node
    int64_t *passes;             // (images)
    int64_t *accepted, *reached; // (images, nodes - 1)
    uint8_t *finite;             // (images)
    const Relaxing *relaxing;    // null: nothing is relaxed, and what follows is not there
    float *laws;                 // (images, nodes - 1, vocab): what the child of each node was drawn from
    float *moved;                // (images, nodes, vocab): what the code that follows each node is drawn from
    float *spent, *travelled;    // (images, nodes): total variation and latent distance between that and p
    float *owed;                 // (images, nodes - 1): the share of the child's probability that p would not give
    double *price;               // (images, 4): sums of codes' owed, spent, and travelled, and the largest spent
    double seconds;              // in passes
};
}

namespace {

constexpr int RELAXED = 16; // so many times the work of a law that is only drawn from

struct Turner {
    const Model &model;
    const Pass &pass;
    Turns &turns;
    const int rows = pass.rows / turns.images; // of an image
    std::vector<std::vector<float>> laws, sorted; // one a thread
    std::vector<Flow> flows;

    Turner(const Model &model, const Pass &pass, Turns &turns)
        : model(model), pass(pass), turns(turns), laws(pass.threads, std::vector<float>(model.vocab)), sorted(laws) {
        if (turns.relaxing) flows.assign(pass.threads, Flow(*turns.relaxing, model.vocab));
    }

    int64_t place(int image, int node) const {
        return std::min<int64_t>(turns.known[image] + node, turns.codes - 1);
    }

    // What the pass reads: embeddings, positions, and which committed codes are seen.
    void fill() const {
        float *inputs = const_cast<float *>(pass.inputs), *mask = const_cast<float *>(pass.mask);
        for (int m = 0; m < pass.rows; m++) {
            const int image = m / rows;
            const int64_t known = turns.known[image];
            for (int i = 0; i < turns.nodes; i++) {
                const size_t at = size_t(m) * turns.nodes + i;
                embed(turns.window[image * turns.nodes + i], inputs + at * model.dim);
                const int64_t where = std::min<int64_t>(known - 1 + i, turns.codes - 1);
                const_cast<int64_t *>(pass.positions)[at] = where + turns.conditioning;
                float *seen = mask + m * pass.mask_row + i * pass.mask_node + turns.prefix;
                std::fill(seen, seen + known - (turns.nodes > 1), 0.0f);
            }
        }
        // A window stands in the stage; a single code goes where it stays.
        if (turns.nodes == 1) const_cast<int64_t *>(pass.places)[0] = turns.prefix + turns.known[0] - 1;
    }

    void embed(int64_t code, float *to) const {
        const size_t from = size_t(code) * model.dim;
        for (int c = 0; c < model.dim; c++)
            to[c] = turns.is_half ? wide(((const uint16_t *)turns.embeddings)[from + c])
                                  : ((const float *)turns.embeddings)[from + c];
    }

    const float *logits(int image, int row, int node) const {
        return pass.logits + ((size_t(image) * rows + row) * turns.nodes + node) * model.vocab;
    }

    // The code that follows a node.
    int64_t draw(int image, int node, int thread) {
        const Law law = {model.vocab, turns.top_k, turns.interval, turns.guidance, turns.temperature};
        const int64_t where = place(image, node);
        const float *noise = turns.noise ? turns.noise + (size_t(image) * turns.codes + where) * model.vocab : nullptr;
        const float *u = rows == 2 ? logits(image, 1, node) : nullptr;
        float *numbers = laws[thread].data();
        law.score(logits(image, 0, node), u, where, turns.relaxing ? nullptr : noise, numbers, sorted[thread].data());
        if (turns.relaxing) relax(law, image, node, noise, numbers, flows[thread]);
        return law.largest(numbers);
    }

    // Moves the law of what follows a node, and makes of it numbers of which the largest is the draw.
    void relax(const Law &law, int image, int node, const float *noise, float *numbers, Flow &flow) const {
        const size_t at = size_t(image) * turns.nodes + node, child = at - image;
        float *moved = turns.moved + at * model.vocab;
        law.normalise(numbers);
        std::memcpy(moved, numbers, sizeof(float) * model.vocab);
        if (node + 1 < turns.nodes) {
            const int64_t draft = turns.window[at + 1];
            flow.relax(moved, turns.laws + child * model.vocab);
            turns.spent[at] = flow.spent;
            turns.travelled[at] = flow.travelled;
            turns.owed[child] = moved[draft] > 0 ? std::max(1 - numbers[draft] / moved[draft], 0.0f) : 0;
        }
        for (int v = 0; v < model.vocab; v += WIDTH) store(numbers + v, load(moved + v) * exp(load(noise + v)));
    }

    bool is_finite(int image, int node) const {
        Lanes off = {};
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < model.vocab; v += WIDTH) {
                const Lanes x = load(logits(image, row, node) + v);
                off += x - x;
            }
        for (int i = 0; i < WIDTH; i++)
            if (!(off[i] == 0)) return false;
        return true;
    }

    void draw_all() {
        const int tasks = turns.images * turns.nodes;
        const int work = tasks * model.vocab * (turns.relaxing ? RELAXED : 1);
        const int threads = work < ALONE ? 1 : std::min(tasks, pass.threads);
#pragma omp parallel for num_threads(threads)
        for (int task = 0; task < tasks; task++) {
            turns.drawn[task] = draw(task / turns.nodes, task % turns.nodes, omp_get_thread_num());
        }
    }

    // Keeps the drafts that are the target's own draws, and the draw that follows them.
    void settle(int image) const {
        const int64_t known = turns.known[image], *drawn = turns.drawn + image * turns.nodes;
        const int64_t *window = turns.window + image * turns.nodes;
        turns.begun[image] = known;
        turns.counts[image] = 0;
        if (known >= turns.codes) return;
        int length = 0;
        while (length + 1 < turns.nodes && window[length + 1] == drawn[length]) length++;
        const int64_t count = std::min<int64_t>(length + 1, turns.codes - known);
        for (int64_t i = 0; i < count; i++) {
            turns.grid[image * turns.codes + known + i] = drawn[i];
            if (!is_finite(image, int(i))) turns.finite[image] = 0;
        }
        if (turns.relaxing) charge(image, length, int(count));
        turns.passes[image]++;
        for (int d = 0; d + 1 < turns.nodes && known + d < turns.codes; d++) {
            turns.accepted[image * (turns.nodes - 1) + d] += d < length;
            turns.reached[image * (turns.nodes - 1) + d] += d <= length;
        }
        if (turns.nodes > 1) keep(image, length);
        turns.counts[image] = count;
        turns.known[image] = known + count;
        shift(image, int(count));
    }

    // Books what codes cost: the laws of `count` were moved, and `length` drafts taken. Moved laws are read again.
    void charge(int image, int length, int count) const {
        double *price = turns.price + 4 * image;
        const size_t at = size_t(image) * turns.nodes;
        for (int i = 0; i < count; i++) {
            if (i < length) price[0] += turns.owed[at - image + i];
            price[1] += turns.spent[at + i];
            price[2] += turns.travelled[at + i];
            price[3] = std::max(price[3], double(turns.spent[at + i]));
        }
        for (int i = count; i < turns.nodes; i++)
            if (!is_finite(image, i)) turns.finite[image] = 0;
    }

    // Copies keys and values of the first nodes from the stage to the places of their codes.
    void keep(int image, int length) const {
        const int head_dim = model.dim / model.heads;
        for (int64_t plane = 0; plane < 2 * int64_t(model.layers) * pass.rows; plane++) {
            if (plane % pass.rows / rows != image) continue;
            for (int head = 0; head < model.heads; head++) {
                float *slots = pass.cache + (plane * model.heads + head) * pass.slots * head_dim;
                for (int i = 0; i <= length; i++) {
                    const int64_t where = turns.known[image] - 1 + i;
                    if (where < turns.codes)
                        std::memcpy(slots + (turns.prefix + where) * head_dim, slots + pass.places[i] * head_dim,
                                    sizeof(float) * head_dim);
                }
            }
        }
    }

    // The next window: the last new code, what was drawn behind it, and initial codes at its end.
    void shift(int image, int count) const {
        const int64_t *drawn = turns.drawn + image * turns.nodes;
        int64_t *window = turns.window + image * turns.nodes;
        window[0] = drawn[count - 1];
        for (int j = 0; j + 1 < turns.nodes; j++) {
            const int from = count + j;
            window[j + 1] = from < turns.nodes       ? drawn[from]
                            : turns.is_random        ? turns.random[image * turns.codes + place(image, j)]
                                                     : drawn[turns.nodes - 1];
            if (turns.relaxing) remember(image, j, from, window[j + 1]);
        }
    }

    // The law from which draft j of the next window was drawn: that behind node `from`, or what initial codes have.
    void remember(int image, int j, int from, int64_t code) const {
        float *law = turns.laws + (size_t(image) * (turns.nodes - 1) + j) * model.vocab;
        if (from < turns.nodes)
            std::memcpy(law, turns.moved + (size_t(image) * turns.nodes + from) * model.vocab, sizeof(float) * model.vocab);
        else
            std::fill(law, law + model.vocab, turns.is_random ? 1.0f / float(model.vocab) : 0.0f);
        if (from >= turns.nodes && !turns.is_random) law[code] = 1;
    }

    int64_t turn() {
        fill();
        const double start = omp_get_wtime();
        run(model, pass);
        turns.seconds += omp_get_wtime() - start;
        draw_all();
        for (int image = 0; image < turns.images; image++) settle(image);
        return *std::min_element(turns.known, turns.known + turns.images);
    }
};

} // namespace

// Takes turns until all pictures are done or `patience` seconds have passed, one at least; the codes that the slowest
// picture has.
extern "C" int64_t lantern_turns(const Model *model, const Pass *pass, Turns *turns, double patience) {
    return guarded([&] {
        Turner turner(*model, *pass, *turns);
        const double start = omp_get_wtime();
        int64_t known;
        do known = turner.turn();
        while (known < turns->codes && omp_get_wtime() - start < patience);
        return known;
    });
}

// Philox4x32-10 as in lantern/noise.py: the uniforms of `count` codes at each code number of each picture.
extern "C" void lantern_uniforms(int32_t pictures, int32_t positions, int32_t count, int32_t threads, const int64_t *low,
                                 const int64_t *high, const int64_t *picture, const int64_t *position, double *out) {
#pragma omp parallel for num_threads(threads)
    for (int row = 0; row < pictures * positions; row++) {
        const int of = row / positions;
        double *to = out + int64_t(row) * count;
        for (int block = 0; block * 4 < count; block++) {
            uint32_t c[4] = {uint32_t(block), uint32_t(position[row % positions]), uint32_t(picture[of]),
                             uint32_t(picture[of] >> 32)};
            uint32_t k0 = uint32_t(low[of]), k1 = uint32_t(high[of]);
            for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
                const uint64_t left = uint64_t(c[0]) * 0xD2511F53, right = uint64_t(c[2]) * 0xCD9E8D57;
                c[0] = uint32_t(right >> 32) ^ c[1] ^ k0;
                c[2] = uint32_t(left >> 32) ^ c[3] ^ k1;
                c[1] = uint32_t(right);
                c[3] = uint32_t(left);
            }
            for (int i = 0; i < std::min(4, count - 4 * block); i++) to[4 * block + i] = (c[i] + 0.5) * 0x1p-32;
        }
    }
}
