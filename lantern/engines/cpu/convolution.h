// 3x3 convolutions of a tokenizer's decoder in fp32, with group normalisation and SiLU before, doubling of the resolution
// by the nearest neighbour, and the addition of the block's input.
//
// In vector lanes they are Winograd's F(4x4, 3x3) (arXiv:1509.09308), which multiplies a quarter as often as a sum over
// the nine weights:
//
//   tile    4 x 4 outputs, which depend on a patch of 6 x 6 inputs
//   point   one of the 36 numbers into which a patch is transformed; a point of all tiles is multiplied as a matrix
//   block   the tiles of a task of a thread; its size depends on the shapes only, and so do all bits
//
// AMX multiplies so fast that the transforms, and memory that delivers their weights, would take most of the time. With it
// a convolution is the sum over the nine weights. Pixels and weights are sums of two bf16 numbers, high and low; products
// of two low ones are left out, so that about 16 bits of each number count:
//
//   block   four rows of 16 pixels, whose sums for 16 outputs are four tiles
//   patch   the blocks of a task of a thread

#pragma once
#include "pass.cpp"

extern "C" {

struct ConvolutionArgs {
    int32_t images, inputs, outputs, height, width; // of the output
    int32_t is_doubled, groups, threads;            // groups 0: no normalisation
    float eps;
    const float *x;           // (images, height, width, inputs); half as high and wide if `is_doubled`
    const float *gamma, *beta; // (inputs): of the normalisation
    // Transformed, (outputs / 32, 36, inputs, 32) in fp32; for lantern_split_convolution in bf16, high and low ones, in
    // pairs of inputs: (outputs / 16, inputs / 32, 9, 2, 16, 16, 2).
    const void *weights;
    const float *bias;        // (outputs)
    const float *residual;    // (images, height, width, outputs), or null; may be `out`
    float *out;               // (images, height, width, outputs)
};
}

namespace {

constexpr int SPAN = 4, PATCH = 6, POINTS = PATCH * PATCH, MOST_TILES = TILE;
constexpr int64_t LONG = 1 << 28; // more products of inputs and outputs wait little for other threads

// The transforms evaluate polynomials at 0, +-sqrt(1/2), +-sqrt(2) and infinity. Rounding errors are half of those of the
// usual points 0, +-1, +-2.
constexpr float SMALL = 0.70710678f, LARGE = 1.41421356f;

// Transforms six numbers of a patch, `step` apart, to six points.
inline void to_points(const Unit *d, int step, Unit *v) {
    const Unit d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step], d5 = d[5 * step];
    const Unit both = spread<Unit>(-2.5f), half = spread<Unit>(-0.5f), two = spread<Unit>(-2.0f);
    const Unit even = fma(two, d2, d4), odd = fma(two, d1, d3), wider = fma(half, d2, d4), change = fma(half, d1, d3);
    v[0] = fma(both, d2, d0 + d4);
    v[step] = fma(spread<Unit>(SMALL), odd, even);
    v[2 * step] = fma(spread<Unit>(-SMALL), odd, even);
    v[3 * step] = fma(spread<Unit>(LARGE), change, wider);
    v[4 * step] = fma(spread<Unit>(-LARGE), change, wider);
    v[5 * step] = fma(both, d3, d1 + d5);
}

// Transforms six points, `step` apart, to four outputs.
inline void from_points(const Unit *m, int step, Unit *y) {
    const Unit m1 = m[step], m2 = m[2 * step], m3 = m[3 * step], m4 = m[4 * step];
    const Unit even = m1 + m2, odd = SMALL * (m1 - m2), wider = m3 + m4, change = LARGE * (m3 - m4);
    y[0] = m[0] + even + wider;
    y[step] = odd + change;
    y[2 * step] = fma(spread<Unit>(0.5f), even, 2.0f * wider);
    y[3 * step] = fma(spread<Unit>(0.5f), odd, fma(spread<Unit>(2.0f), change, m[5 * step]));
}

// The inputs of a convolution.
struct Inputs {
    const ConvolutionArgs &of;
    const int deep = of.is_doubled ? of.height / 2 : of.height, broad = of.is_doubled ? of.width / 2 : of.width;
    // Sums and sums of squares per image, row and input; then factors and offsets of the normalisation.
    std::vector<float> sums = std::vector<float>(of.groups ? size_t(of.images) * deep * 2 * of.inputs : 0);
    std::vector<float> factors = std::vector<float>(size_t(of.images) * 2 * of.inputs);

    explicit Inputs(const ConvolutionArgs &args) : of(args) {}

    // Adds up a row of pixels.
    void add_up(int row) {
        const float *x = of.x + size_t(row) * broad * of.inputs;
        float *to = &sums[size_t(row) * 2 * of.inputs];
        for (int i = 0; i < broad; i++, x += of.inputs)
            for (int c = 0; c < of.inputs; c += UNIT) {
                const Unit value = get<Unit>(x + c);
                put(to + c, get<Unit>(to + c) + value);
                put(to + of.inputs + c, fma(value, value, get<Unit>(to + of.inputs + c)));
            }
    }

    // Normalises group `group` of an image: y = factor x + offset.
    void normalise(int image, int group) {
        const int size = of.inputs / of.groups;
        const size_t n = of.inputs;
        double sum = 0, squares = 0;
        for (int row = 0; row < deep; row++)
            for (int c = group * size; c < (group + 1) * size; c++) {
                sum += sums[(size_t(image) * deep + row) * 2 * n + c];
                squares += sums[(size_t(image) * deep + row) * 2 * n + n + c];
            }
        const double count = double(deep) * broad * size, mean = sum / count;
        const double inverse = 1 / std::sqrt(std::max(squares / count - mean * mean, 0.0) + of.eps);
        float *to = &factors[image * 2 * n];
        for (int c = group * size; c < (group + 1) * size; c++) {
            to[c] = float(of.gamma[c] * inverse);
            to[n + c] = float(of.beta[c] - mean * of.gamma[c] * inverse);
        }
    }

    // Returns a unit of inputs of a pixel inside of the image, normalised.
    Unit value(int image, const float *row, int x, int c) const {
        Unit value = get<Unit>(row + size_t(x >> of.is_doubled) * of.inputs + c);
        if (!of.groups) return value;
        const float *factor = &factors[size_t(image) * 2 * of.inputs + c];
        value = fma(value, get<Unit>(factor), get<Unit>(factor + of.inputs));
        return value / (exp(-value) + 1.0f);
    }

    const float *row(int image, int y) const {
        return of.x + (size_t(image) * deep + (y >> of.is_doubled)) * broad * of.inputs;
    }

    // Computes the factors of the normalisation; called by all threads of a parallel region.
    void prepare() {
        if (!of.groups) return;
#pragma omp for
        for (int row = 0; row < of.images * deep; row++) add_up(row);
#pragma omp for
        for (int i = 0; i < of.images * of.groups; i++) normalise(i / of.groups, i % of.groups);
    }

    // Calls run(threads) with a number of threads that suits the load.
    template <class Run> void with_load(Run run) const {
        const int64_t work = int64_t(of.images) * of.height * of.width * of.inputs * of.outputs;
        if (work >= LONG) return run(of.threads);
        with_threads({of.inputs, of.outputs, of.images * of.height, of.width}, of.threads, run);
    }
};

struct Winograd : Inputs {
    const int tiles_across = (of.width + SPAN - 1) / SPAN;
    const int tiles = tiles_across * ((of.height + SPAN - 1) / SPAN);
    const int blocks = std::max((tiles + MOST_TILES - 1) / MOST_TILES, std::min(tiles, 2));

    using Inputs::Inputs;

    // Buffers of a thread.
    struct Room {
        Lined<float> pixels, points, products;
        explicit Room(const ConvolutionArgs &of)
            : pixels(PATCH * (SPAN * MOST_TILES + 2) * WIDTH), points(size_t(POINTS) * MOST_TILES * of.inputs),
              products(POINTS * MOST_TILES * PANEL) {}
    };

    // Copies 16 inputs of the patches of `count` tiles side by side to `to`, normalised, zero outside of the image.
    void stage(int image, int down, int across, int count, int c, float *to) const {
        const int first = SPAN * across - 1, pitch = SPAN * count + 2;
        for (int i = 0; i < PATCH; i++) {
            const int y = SPAN * down - 1 + i;
            if (y < 0 || y >= of.height) {
                std::fill(to, to + pitch * WIDTH, 0.0f);
                to += pitch * WIDTH;
                continue;
            }
            const float *from = row(image, y);
            for (int x = first; x < first + pitch; x++, to += WIDTH)
                for (int lane = 0; lane < WIDTH; lane += UNIT)
                    put(to + lane, x >= 0 && x < of.width ? value(image, from, x, c + lane) : Unit{});
        }
    }

    // Transforms the inputs of a unit of a patch; its points are `apart` numbers apart.
    static void transform(const float *pixels, int pitch, float *points, size_t apart) {
        Unit patch[POINTS], turned[POINTS];
#pragma GCC unroll 6
        for (int i = 0; i < PATCH; i++)
#pragma GCC unroll 6
            for (int j = 0; j < PATCH; j++) patch[i * PATCH + j] = get<Unit>(pixels + (i * pitch + j) * WIDTH);
#pragma GCC unroll 6
        for (int j = 0; j < PATCH; j++) to_points(patch + j, PATCH, turned + j);
#pragma GCC unroll 6
        for (int i = 0; i < PATCH; i++) {
            to_points(turned + i * PATCH, 1, patch + i * PATCH);
#pragma GCC unroll 6
            for (int j = 0; j < PATCH; j++) put(points + (i * PATCH + j) * apart, patch[i * PATCH + j]);
        }
    }

    // Transforms the points of a tile to 4 x 4 of the outputs of a unit, adds bias and residual, and writes those in the image.
    void finish(int image, int tile, int o, const float *products, size_t apart) const {
        Unit points[POINTS], turned[POINTS], results[SPAN];
#pragma GCC unroll 36
        for (int i = 0; i < POINTS; i++) points[i] = get<Unit>(products + i * apart);
#pragma GCC unroll 6
        for (int j = 0; j < PATCH; j++) from_points(points + j, PATCH, turned + j);
        const int top = tile / tiles_across * SPAN, left = tile % tiles_across * SPAN;
        const Unit bias = get<Unit>(of.bias + o);
#pragma GCC unroll 4
        for (int i = 0; i < SPAN; i++) {
            from_points(turned + i * PATCH, 1, results);
            if (top + i >= of.height) break;
            const size_t row = (size_t(image) * of.height + top + i) * of.width;
#pragma GCC unroll 4
            for (int j = 0; j < SPAN; j++) {
                if (left + j >= of.width) break;
                const size_t at = (row + left + j) * of.outputs + o;
                const Unit sum = results[j] + bias;
                put(of.out + at, of.residual ? sum + get<Unit>(of.residual + at) : sum);
            }
        }
    }

    void run(int image, int block, Room &room) const {
        const int begin = int(int64_t(tiles) * block / blocks), end = int(int64_t(tiles) * (block + 1) / blocks);
        const int count = end - begin, inputs = of.inputs;
        for (int tile = begin; tile < end;) {
            const int across = tile % tiles_across, some = std::min(end - tile, tiles_across - across);
            for (int c = 0; c < inputs; c += WIDTH) {
                stage(image, tile / tiles_across, across, some, c, room.pixels.data());
                for (int t = 0; t < some; t++)
                    for (int lane = 0; lane < WIDTH; lane += UNIT)
                        transform(&room.pixels[t * SPAN * WIDTH + lane], SPAN * some + 2,
                                  &room.points[size_t(tile - begin + t) * inputs + c + lane], size_t(count) * inputs);
            }
            tile += some;
        }
        Plain<Full> operand(count, inputs);
        for (int p = 0; p < of.outputs / PANEL; p++) {
            for (int point = 0; point < POINTS; point++) {
                float *to = &room.products[size_t(point) * count * PANEL];
                operand.take(&room.points[size_t(point) * count * inputs], count, inputs);
                multiply(operand, (const float *)of.weights, p * POINTS + point, [&](int m, Lanes left, Lanes right) {
                    put(to + m * PANEL, left);
                    put(to + m * PANEL + WIDTH, right);
                });
            }
            for (int t = 0; t < count; t++)
                for (int o = 0; o < PANEL; o += UNIT)
                    finish(image, begin + t, p * PANEL + o, &room.products[t * PANEL + o], size_t(count) * PANEL);
        }
    }

    void run(int threads) {
        std::vector<Room> rooms(threads, Room(of)); // no exception may leave a parallel region
#pragma omp parallel num_threads(threads)
        {
            prepare();
#pragma omp for schedule(dynamic)
            for (int i = 0; i < of.images * blocks; i++) run(i / blocks, i % blocks, rooms[omp_get_thread_num()]);
        }
    }
};

#if LANTERN_TILES
// Adds the products of a block's pixels and of the weights in a tile to the block's sums.
#define LANTERN_ADD(PIXELS, WEIGHTS)                                                                                   \
    _tile_loadd(6, PIXELS, Tiles::LINE);                                                                               \
    _tile_dpbf16ps(0, 6, WEIGHTS);                                                                                     \
    _tile_loadd(7, PIXELS + line, Tiles::LINE);                                                                        \
    _tile_dpbf16ps(1, 7, WEIGHTS);                                                                                     \
    _tile_loadd(6, PIXELS + 2 * line, Tiles::LINE);                                                                    \
    _tile_dpbf16ps(2, 6, WEIGHTS);                                                                                     \
    _tile_loadd(7, PIXELS + 3 * line, Tiles::LINE);                                                                    \
    _tile_dpbf16ps(3, 7, WEIGHTS);

struct Direct : Inputs {
    static constexpr int OUTPUTS = 16, DEEP = Tiles::INPUTS;
    static constexpr int ACROSS = Tiles::ROWS, DOWN = 4; // pixels of a block
    static constexpr int WIDE = 32, HIGH = 8;            // pixels of a patch
    // Pixels of a patch and their neighbours: (2 parts, inputs / 32 slices, HIGH + 2 lines, WIDE + 2 pixels, 32).
    static constexpr size_t line = (WIDE + 2) * DEEP, slice = (HIGH + 2) * line;
    const size_t part = slice * (of.inputs / DEEP);
    const int patches_across = (of.width + WIDE - 1) / WIDE;
    const int patches = patches_across * ((of.height + HIGH - 1) / HIGH);

    using Inputs::Inputs;

    // Buffers of a thread.
    struct Room {
        Lined<uint16_t> pixels;
        Lined<float> sums;
        explicit Room(size_t part) : pixels(2 * part), sums(DOWN * ACROSS * OUTPUTS) {}
    };

    static Lanes widened(const uint16_t *at) {
        typedef uint16_t Halves __attribute__((vector_size(32)));
        return (Lanes)(__builtin_convertvector(get<Halves>(at), Whole) << 16);
    }

    // Copies the pixels of a patch and their neighbours, normalised, zero outside of the image.
    void stage(int image, int top, int left, uint16_t *to) const {
        for (int i = 0; i < HIGH + 2; i++) {
            const int y = top - 1 + i;
            const float *from = y >= 0 && y < of.height ? row(image, y) : nullptr;
            for (int j = 0; j < WIDE + 2; j++) {
                const int x = left - 1 + j;
                const bool is_inside = from && x >= 0 && x < of.width;
                for (int c = 0; c < of.inputs; c += WIDTH) {
                    const Lanes whole = is_inside ? value(image, from, x, c) : Lanes{};
                    uint16_t *high = to + c / DEEP * slice + i * line + j * DEEP + c % DEEP;
                    Half::narrow(high, whole);
                    Half::narrow(high + part, whole - widened(high));
                }
            }
        }
    }

    // Sums up 16 outputs of a block, whose pixels and their neighbours begin at `pixels`.
    void add_up_block(const uint16_t *pixels, const uint16_t *weights, float *sums) const {
        constexpr int TILE = Tiles::ROWS * DEEP;
        asm volatile("" ::: "memory"); // the pixels are written before the intrinsics read them
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < of.inputs; c += DEEP, pixels += slice)
            for (int tap = 0; tap < 9; tap++, weights += 2 * TILE) {
                const uint16_t *high = pixels + tap / 3 * line + tap % 3 * DEEP, *low = high + part;
                for (int number = 0; number < 2 * TILE; number += Tiles::LINE / 2)
                    __builtin_prefetch(weights + Tiles::AHEAD / 2 + number);
                _tile_loadd(4, weights, Tiles::LINE);
                _tile_loadd(5, weights + TILE, Tiles::LINE);
                LANTERN_ADD(high, 4)
                LANTERN_ADD(high, 5)
                LANTERN_ADD(low, 4)
            }
        _tile_stored(0, sums, Tiles::LINE);
        _tile_stored(1, sums + ACROSS * OUTPUTS, Tiles::LINE);
        _tile_stored(2, sums + 2 * ACROSS * OUTPUTS, Tiles::LINE);
        _tile_stored(3, sums + 3 * ACROSS * OUTPUTS, Tiles::LINE);
    }

    // Adds bias and residual to the sums of a block, and writes those in the image.
    void finish(int image, int top, int left, int o, const float *sums) const {
        const Lanes bias = get<Lanes>(of.bias + o);
        for (int y = top; y < std::min(top + DOWN, of.height); y++)
            for (int x = left; x < std::min(left + ACROSS, of.width); x++) {
                const size_t at = ((size_t(image) * of.height + y) * of.width + x) * of.outputs + o;
                const Lanes sum = get<Lanes>(sums + ((y - top) * ACROSS + x - left) * OUTPUTS) + bias;
                put(of.out + at, of.residual ? sum + get<Lanes>(of.residual + at) : sum);
            }
    }

    // Computes outputs `begin` to `end` of a patch.
    void run(int image, int patch, int begin, int end, Room &room) const {
        const int top = patch / patches_across * HIGH, left = patch % patches_across * WIDE;
        stage(image, top, left, room.pixels.data());
        const Tiles tiles(Tiles::ROWS);
        for (int o = begin; o < end; o += OUTPUTS) {
            const uint16_t *weights = (const uint16_t *)of.weights + size_t(o) * 9 * 2 * of.inputs;
            for (int y = 0; y < HIGH && top + y < of.height; y += DOWN)
                for (int x = 0; x < WIDE && left + x < of.width; x += ACROSS) {
                    add_up_block(&room.pixels[y * line + x * DEEP], weights, room.sums.data());
                    finish(image, top + y, left + x, o, room.sums.data());
                }
        }
    }

    void run(int threads) {
        std::vector<Room> rooms(threads, Room(part)); // no exception may leave a parallel region
        const int groups = of.outputs / OUTPUTS, count = of.images * patches;
        const int shares = std::min(groups, std::max(1, threads / count)); // of a patch's outputs
#pragma omp parallel num_threads(threads)
        {
            prepare();
#pragma omp for schedule(dynamic)
            for (int i = 0; i < count * shares; i++) {
                const int begin = i % shares * groups / shares, end = (i % shares + 1) * groups / shares;
                const int at = i / shares;
                run(at / patches, at % patches, begin * OUTPUTS, end * OUTPUTS, rooms[omp_get_thread_num()]);
            }
        }
    }
};
#undef LANTERN_ADD
#endif

} // namespace

extern "C" int64_t lantern_convolution(const ConvolutionArgs *args) {
    return guarded([&] {
        Winograd winograd(*args);
        return winograd.with_load([&](int threads) { winograd.run(threads); }), 0;
    });
}

#if LANTERN_TILES
// Inputs are a multiple of 32, outputs of 16.
extern "C" int64_t lantern_split_convolution(const ConvolutionArgs *args) {
    return guarded([&] {
        Direct direct(*args);
        return direct.with_load([&](int threads) { direct.run(threads); }), 0;
    });
}
#endif
