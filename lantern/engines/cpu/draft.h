// Drafting of static trees by modules of EAGLE-1 in the guided form and of ParallelSpec: the passes of `EagleDrafter` and
// `ParallelDrafter`, with their bits. All images of a generation draft together:
//
//   first pass    pairs (feature, token) of the new tokens, and for ParallelSpec the masks behind the last of them
//   later passes  the inner nodes of a depth, each paired with the output of its parent
//
// Outputs that predict tokens give children by the target's head: the best by log q + g. For rejection q is kept.

#pragma once
#include "rejection.h"

extern "C" {

// A depth's inner nodes, as in `DepthPlan`; for ParallelSpec one for the outputs of the last pair and of the masks.
struct LevelArgs {
    int32_t nodes, width, first, staged;
    const int64_t *pairs, *parents; // (nodes)
    const uint8_t *ancestors;       // (nodes, staged)
};

struct DraftArgs {
    int32_t first, images; // of the step's images
    int32_t tokens, slots, depth, masks, levels, kind, is_half, threads;
    Model model;                                // the layers, without norm and head
    const void *join, *embeddings;              // panels of weights of `kind`; (vocab, dim)
    const float *bias, *guidance, *mask_inputs; // (dim), (dim), (masks, dim), or null; guidance: times log s
    float *cache;                               // (2 layers, images, heads, slots, head_dim), without a prompt
    int64_t plane;
    const LevelArgs *level;
    const int64_t *order; // (nodes): of each node, its place among the root and the best tokens of all depths
    int32_t nodes;
};
}

namespace {

struct Drafts {
    const Model &target;
    const DraftArgs &of;
    const ImageArgs *images;
    const int dim = of.model.dim;
    int most = of.depth + 1 + of.masks, total = 1; // inputs of the largest pass, and tokens of `ranked`, of an image
    std::vector<float> joined, inputs, above, outputs, mask, logits;
    std::vector<int64_t> positions, places, ranked;
    std::vector<std::vector<float>> scores, room; // one per thread

    Drafts(const Model &target, const DraftArgs &of, const ImageArgs *images)
        : target(target), of(of), images(images + of.first),
          scores(of.threads, std::vector<float>(target.vocab)), room(scores) {
        for (int d = 0; d < of.levels; d++) {
            most = std::max(most, int(of.level[d].nodes));
            total += of.level[d].nodes * of.level[d].width;
        }
        const size_t count = size_t(of.images) * most;
        joined.resize(count * 2 * dim), inputs.resize(count * dim), above.resize(count * dim), outputs.resize(count * dim);
        mask.resize(count * of.slots), logits.resize(count * target.vocab);
        positions.resize(count), places.resize(count), ranked.resize(size_t(of.images) * total);
    }

    // Makes input i of n of an image the token at `where`, with its keys in `slot`; it sees the slots before `seen`, and
    // its own. Returns its mask.
    float *put(int image, int i, int n, int64_t where, int64_t slot, int64_t seen) {
        const size_t at = size_t(image) * n + i;
        float *row = &mask[at * of.slots];
        std::fill(row, row + of.slots, -INFINITY);
        std::fill(row, row + seen, 0.0f);
        row[slot] = 0, positions[at] = where, places[at] = slot;
        return row;
    }

    void pair(int image, int i, int n, int64_t token, const float *feature) {
        float *to = &joined[(size_t(image) * n + i) * 2 * dim];
        embed(of.embeddings, of.is_half, token, dim, to);
        std::memcpy(to + dim, feature, sizeof(float) * dim);
    }

    void join(int n) {
        const int count = of.images * n;
        run_kind(of.kind, LinearArgs{count, 2 * dim, dim, of.threads, of.kind, joined.data(), of.join, of.bias, inputs.data()});
        for (int at = 0; at < count; at++) {
            float *x = &inputs[size_t(at) * dim];
            const bool has_scale = of.guidance && is_guided(images[at / n], positions[at]);
            for (int c = 0; c < dim; c++) {
                x[c] = narrowed(x[c], of.is_half);
                if (has_scale) x[c] = narrowed(x[c] + of.guidance[c], of.is_half);
            }
        }
    }

    // Runs the layers over n inputs of each image, and leaves their outputs in `inputs`.
    void pass(int n) {
        for (int i = 0; i < of.model.layers; i++) {
            Model layer = of.model;
            layer.layers = 1, layer.layer += i;
            run(layer, PassArgs{of.images, n, of.slots, of.threads, 0, inputs.data(), positions.data(), places.data(),
                                mask.data(), int64_t(n) * of.slots, of.slots, of.cache + 2 * i * of.plane, of.plane,
                                nullptr, nullptr, outputs.data(), nullptr});
            for (size_t c = 0; c < size_t(of.images) * n * dim; c++) inputs[c] = narrowed(outputs[c], of.is_half);
        }
    }

    // Ranks the children of the nodes of a depth, whose outputs are in `above`; their best tokens start at `begin`, and
    // their distributions at `row`.
    void rank(int depth, int begin, int row) {
        const LevelArgs &level = of.level[depth];
        const int tasks = of.images * level.nodes, vocab = target.vocab;
        run_kind(target.kind, LinearArgs{tasks, dim, vocab, of.threads, target.kind, above.data(), target.head, nullptr, logits.data()});
#pragma omp parallel for num_threads(int64_t(tasks) * vocab < SINGLE_THREAD ? 1 : std::min(tasks, of.threads))
        for (int task = 0; task < tasks; task++) {
            const int node = task % level.nodes, thread = omp_get_thread_num();
            const ImageArgs &image = images[task / level.nodes];
            const bool is_greedy = image.temperature == 0;
            const Distribution q = {vocab, is_greedy ? 0 : image.top_k, image.interval, image.guidance, image.temperature};
            const int64_t where = number(image, of.masks ? node : depth);
            int64_t *best = &ranked[size_t(task / level.nodes) * total + begin + node * level.width];
            float *sums = scores[thread].data();
            const float *noise = image.noise ? image.noise + where * vocab : nullptr;
            q.score(&logits[size_t(task) * vocab], nullptr, where, noise, sums, room[thread].data());
            if (image.test) { // without a table of noise
                float *kept = image.test->q + size_t(row + node) * vocab;
                std::copy_n(sums, vocab, kept);
                softmax(kept, vocab);
                take_with_gumbel(image.test->drafts, where, vocab, sums, level.width, best);
            } else {
                q.take(sums, level.width, best);
            }
        }
    }

    // Number of the token that is `ahead` of the next one, at most the last.
    int64_t number(const ImageArgs &image, int64_t ahead) const {
        return std::min<int64_t>(*image.known + ahead, of.tokens - 1);
    }

    // Reads the new tokens. A finished image reads its last token again; images with fewer tokens than others have padding,
    // which nothing sees.
    void read() {
        int most_new = 1;
        for (int b = 0; b < of.images; b++) most_new = std::max(most_new, int(*images[b].counts));
        const int n = most_new + of.masks;
        for (int b = 0; b < of.images; b++) {
            const ImageArgs &image = images[b];
            const int64_t known = *image.known;
            const int count = std::max(1, int(*image.counts));
            for (int i = 0; i < n; i++) {
                const int64_t where = known - count + i, mask = i - count;
                if (mask < 0) {
                    put(b, i, n, where, where, where);
                    pair(b, i, n, image.grid[where], image.pairs + size_t(i) * dim);
                } else {
                    float *row = put(b, i, n, number(image, mask), of.tokens + mask, mask < of.masks ? known : 0);
                    if (mask < of.masks) std::fill(row + of.tokens, row + of.tokens + mask, 0.0f);
                }
            }
        }
        join(n);
        for (int b = 0; b < of.images; b++) {
            const int count = std::max(1, int(*images[b].counts));
            float *last = &inputs[(size_t(b) * n + count - 1) * dim];
            for (int i = 0; i < of.masks * dim; i++)
                last[dim + i] = narrowed(last[i % dim] + of.mask_inputs[i], of.is_half);
        }
        pass(n);
        const size_t kept = size_t(1 + of.masks) * dim;
        for (int b = 0; b < of.images; b++) {
            const int count = std::max(1, int(*images[b].counts));
            std::memcpy(&above[b * kept], &inputs[(size_t(b) * n + count - 1) * dim], sizeof(float) * kept);
        }
    }

    // Runs the inner nodes of a depth, whose tokens are among the best of the depth above, from `begin` on.
    void extend(int depth, int begin) {
        const LevelArgs &level = of.level[depth];
        const int n = level.nodes, parents = of.level[depth - 1].nodes;
        for (int b = 0; b < of.images; b++)
            for (int i = 0; i < n; i++) {
                const int64_t where = number(images[b], depth - 1);
                float *row = put(b, i, n, where, of.tokens + level.first + i, *images[b].known);
                for (int k = 0; k < level.staged; k++)
                    if (level.ancestors[size_t(i) * level.staged + k]) row[of.tokens + k] = 0;
                const float *feature = &above[(size_t(b) * parents + level.parents[i]) * dim];
                pair(b, i, n, ranked[size_t(b) * total + begin + level.pairs[i]], feature);
            }
        join(n);
        pass(n);
        std::memcpy(above.data(), inputs.data(), sizeof(float) * of.images * n * dim);
    }

    // Writes the next trees.
    void propose() {
        read();
        int begin = 1, last = 0, row = 0;
        for (int depth = 0; depth < of.levels; depth++) {
            if (depth) extend(depth, last);
            rank(depth, begin, row);
            last = begin, begin += of.level[depth].nodes * of.level[depth].width, row += of.level[depth].nodes;
        }
        for (int b = 0; b < of.images; b++) {
            int64_t *tokens = &ranked[size_t(b) * total];
            tokens[0] = images[b].grid[*images[b].known - 1];
            for (int i = 0; i < of.nodes; i++) images[b].tree[i] = tokens[of.order[i]];
        }
    }
};

} // namespace
