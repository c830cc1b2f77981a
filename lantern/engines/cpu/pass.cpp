// A whole pass of a LlamaGen transformer over staged nodes in one call: every layer, the final norm and the head. For
// drafters: one layer, or one linear.
//
// The bits of a row's result depend on that row only. Products are summed along k in order, with AMX in the order of its
// instructions, whatever the number of rows; with int8 weights they are summed as integers, exactly. A node's attention is
// summed over the slots that it sees, in their order, and a masked slot adds exactly zero. The logits of a token therefore
// have the same bits in plain decoding, in any window or tree and in any batch.
//
//   panel    32 outputs of a linear with all inputs: the unit of work of a thread, stored contiguously
//   tile     up to TILE rows by one panel: sums are kept in registers during the loop over inputs
//   phase    the work of all threads between two barriers; five per layer

#pragma once
#include "thread_policy.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <omp.h>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif
// Without AVX-512 a compiler keeps vectors of 64 bytes in memory and their loops in single numbers. So with AVX2 the inner
// loops are written with registers of 32 bytes. Their bits are those of the loops in vectors of 64 bytes.
#if !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
#define LANTERN_HALVES 1
#else
#define LANTERN_HALVES 0
#endif

namespace {

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Whole __attribute__((vector_size(64)));
typedef float Eight __attribute__((vector_size(32)));
// What this processor computes with at once.
#if LANTERN_HALVES
typedef Eight Unit;
#else
typedef Lanes Unit;
#endif

// A vector that begins at a cache line, since AMX reads whole lines.
template <class Number> struct LineAllocator {
    typedef Number value_type;
    static constexpr std::align_val_t LINE{64};
    LineAllocator() = default;
    template <class Other> LineAllocator(const LineAllocator<Other> &) {}
    Number *allocate(size_t count) { return static_cast<Number *>(::operator new(count * sizeof(Number), LINE)); }
    void deallocate(Number *at, size_t) { ::operator delete(at, LINE); }
    bool operator==(const LineAllocator &) const { return true; }
    bool operator!=(const LineAllocator &) const { return false; }
};
template <class Number> using Lined = std::vector<Number, LineAllocator<Number>>;

constexpr int UNIT = sizeof(Unit) / sizeof(float);
constexpr int WIDTH = 16, PANEL = 32, TILE = LANTERN_HALVES ? 6 : 12, NODES_AT_ONCE = 4, NODES_A_TASK = 16;
// Weights are prefetched so many bytes ahead into the first cache, so that memory does not wait for arithmetic.
constexpr int AHEAD = 8192;
// With AVX2 a node's sums over values are continued after so many slots, whose values stay in the first cache for all nodes.
constexpr int SLOTS_AT_ONCE = 64;

// Reads a number or a vector of them from anywhere; writes one; makes a vector of equal numbers.
template <class Value> inline Value get(const void *at) {
    Value x;
    std::memcpy(&x, at, sizeof(x));
    return x;
}
template <class Value> inline void put(void *at, Value x) { std::memcpy(at, &x, sizeof(x)); }
template <class Vector, class Number> inline Vector spread(Number x) { return x - Vector{}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < WIDTH; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

#if LANTERN_HALVES
inline Eight fma(Eight a, Eight b, Eight c) { return (Eight)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif

// Returns e^x to 2 units in the last place; exactly 0 at -inf.
template <class Vector> inline Vector exp(Vector x) {
    const Vector low = spread<Vector>(-87.0f), high = spread<Vector>(88.0f), none = spread<Vector>(-INFINITY);
    Vector y = x < low ? low : x;
    y = y > high ? high : y;
    const Vector magic = spread<Vector>(12582912.0f);
    const Vector shifted = fma(y, spread<Vector>(1.44269504088896341f), magic), whole = shifted - magic;
    Vector r = fma(whole, spread<Vector>(-0.693359375f), y);
    r = fma(whole, spread<Vector>(2.12194440e-4f), r);
    Vector p = spread<Vector>(1.9875691500e-4f);
#pragma GCC unroll 6
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, spread<Vector>(c));
    p = fma(p, r * r, r + 1.0f);
    typedef decltype(x < low) Steps;
    const Steps power = ((Steps)shifted - (Steps)magic + 127) << 23;
    return x == none ? Vector{} : p * (Vector)power;
}
#if LANTERN_HALVES
inline Lanes exp(Lanes x) {
    alignas(64) float numbers[WIDTH];
    put(numbers, x);
    for (int i = 0; i < WIDTH; i += UNIT) put(numbers + i, exp(get<Unit>(numbers + i)));
    return get<Lanes>(numbers);
}
#endif

// Adds neighbouring blocks of T lanes: those of `a` in the even blocks of the result, those of `b` in the odd ones. `own`
// are the lanes of a and b that the result keeps.
template <int T> inline Lanes join(Lanes a, Lanes b, Whole own) {
    return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, own ^ T);
}

// Lane 4 k + j of the result is the sum of lanes 4 k to 4 k + 3 of sums[j].
inline Lanes fold_lanes(const Lanes *sums) {
    const Whole one = {0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31};
    const Whole two = {0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31};
    return join<2>(join<1>(sums[0], sums[1], one), join<1>(sums[2], sums[3], one), two);
}

// Lane 4 k + j of the result is the sum of lanes j, 4 + j, 8 + j and 12 + j of fours[k].
inline Lanes fold_fours(const Lanes *fours) {
    const Whole four = {0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31};
    const Whole eight = {0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31};
    return join<8>(join<4>(fours[0], fours[1], four), join<4>(fours[2], fours[3], four), eight);
}

// Multiplies pairs of lanes, as complex numbers, by pairs (cos, sin).
inline Unit rotate(Unit y, Unit factors) {
#if LANTERN_HALVES
    const __m256 own = (__m256)y, by = (__m256)factors;
    return (Unit)_mm256_addsub_ps(_mm256_mul_ps(own, _mm256_moveldup_ps(by)),
                                  _mm256_mul_ps(_mm256_permute_ps(own, 0xb1), _mm256_movehdup_ps(by)));
#else
    const Whole even = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14}, odd = even + 1;
    const Whole swapped = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const Lanes sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    return y * __builtin_shuffle(factors, even) + __builtin_shuffle(y, swapped) * (sign * __builtin_shuffle(factors, odd));
#endif
}

// Prefetches some numbers into the second cache. While a head's keys are read its values are prefetched, and while these
// are read the keys of the next head, so that memory never waits for arithmetic.
inline void fetch_later(const float *from, int numbers) {
#pragma GCC unroll 4
    for (int d = 0; d < numbers; d += WIDTH) __builtin_prefetch(from + d, 0, 2);
}

// Rows of inputs without conversion.
template <class Kind> struct Plain {
    const typename Kind::Number *a = nullptr;
    int rows = 0, inputs = 0;
    Plain(int, int) {}
    void take(const typename Kind::Number *from, int count, int given) { a = from, rows = count, inputs = given; }
};

// Writes the sums of ROWS rows of inputs over a panel, all of it at once or by halves, as they fit the registers. 128 bytes
// hold the weights of STEP inputs, which are added in TURNS.
template <class Kind, int ROWS, class Input>
inline void tile(const Input *a, int inputs, const void *panel, void *out) {
    constexpr int PARTS = LANTERN_HALVES && ROWS > 2 ? 2 : PANEL / UNIT, BYTES = PARTS * sizeof(Unit);
    for (int first = 0; first < int(sizeof(float)) * PANEL; first += BYTES) {
        const char *at = (const char *)panel + first;
        typename Kind::Sum sums[ROWS][PARTS] = {}; // separate from `out`, so that they stay in registers
        for (int k = 0; k < inputs; k += Kind::STEP, at += sizeof(float) * PANEL) {
#pragma GCC unroll 2
            for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(at + AHEAD + byte, 0, 3);
#pragma GCC unroll 2
            for (int turn = 0; turn < Kind::TURNS; turn++) {
                decltype(Kind::weights(at, turn)) own[PARTS];
#pragma GCC unroll 4
                for (int i = 0; i < PARTS; i++) own[i] = Kind::weights(at + sizeof(Unit) * i, turn);
#pragma GCC unroll 12
                for (int m = 0; m < ROWS; m++) {
                    const auto x = Kind::input(a + size_t(m) * inputs + k, turn);
#pragma GCC unroll 4
                    for (int i = 0; i < PARTS; i++) sums[m][i] = Kind::add(sums[m][i], x, own[i]);
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) std::memcpy((char *)out + sizeof(float) * PANEL * m + first, sums[m], BYTES);
    }
}

// Sums of products in fp32, and numbers of inputs.
struct Fp32Sums {
    struct Units { // none
        explicit Units(int) {}
        static constexpr bool BUILT = false;
    };
    typedef float Number;
    typedef Unit Sum;
    static Unit input(const float *a, int turn) { return spread<Unit>(a[turn]); }
    static Unit add(Unit sum, Unit x, Unit weights) { return fma(x, weights, sum); }
};

// Inputs and weights in fp32.
struct Full : Fp32Sums {
    typedef float Weight;
    typedef Plain<Full> Inputs;
    static constexpr int STEP = 1, TURNS = 1;
    static void narrow(float *at, Unit x) { put(at, x); }
    static Unit weights(const char *at, int) { return get<Unit>(at); }
};

// Inputs and weights in bf16, sums in fp32; weights are stored in pairs of inputs, of which the even one is in the lower
// half of 32 bits. With AVX-512's bf16 an instruction adds the product of the odd inputs of a pair, then that of the even
// ones. Without it inputs are kept in fp32, rounded to bf16, and added in this order, to the same bits (but where a sum
// is below 2^-126, which the instruction takes for 0).
struct Half : Fp32Sums {
    typedef uint16_t Weight;
    typedef Plain<Half> Inputs;
    static constexpr int STEP = 2;
#if defined(__AVX512BF16__)
    typedef uint16_t Number;
    static constexpr int TURNS = 1;
    static void narrow(Number *at, Lanes x) {
        _mm256_storeu_si256((__m256i *)at, (__m256i)_mm512_cvtneps_pbh((__m512)x));
    }
    static __m512bh weights(const char *at, int) { return (__m512bh)_mm512_loadu_si512(at); }
    static __m512bh input(const Number *a, int) { return (__m512bh)_mm512_set1_epi32(get<int32_t>(a)); }
    static Lanes add(Lanes sum, __m512bh x, __m512bh weights) { return (Lanes)_mm512_dpbf16_ps((__m512)sum, x, weights); }
#else
    static constexpr int TURNS = 2;
    typedef decltype(Unit{} < Unit{}) Bits;
    static Unit input(const float *a, int turn) { return spread<Unit>(a[1 - turn]); }
    static void narrow(float *at, Unit x) {
        const Bits bits = (Bits)x, even = bits + 0x7fff + (bits >> 16 & 1), none = Bits{} + 0x7fc00000;
        put(at, (Unit)((x == x ? even : none) & int32_t(0xffff0000)));
    }
    static Unit weights(const char *at, int turn) {
        const Bits pairs = get<Bits>(at);
        return (Unit)(turn ? pairs << 16 : pairs & int32_t(0xffff0000));
    }
#endif
};

// The same by AMX, which adds products in another order.
struct Tiled : Half {
    typedef Tiles Units;
    typedef Plain<Tiled> Inputs;
};

// Rows of inputs as 8-bit integers with a scale per row, for products with int8 weights.
struct Rounded {
#if LANTERN_HALVES
    typedef uint16_t Number; // of each four inputs, 0 and 2 come before 1 and 3
#else
    typedef uint8_t Number;
#endif
    int rows = 0, inputs = 0; // inputs: padded to a multiple of GROUP, where weights are 0
    Lined<Number> a;          // (rows, inputs): the integer + 128
    std::vector<float> scales;
    static constexpr int GROUP = Tiles::GROUP;

    static int padded(int inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }
    Rounded(int rows, int inputs) : a(size_t(rows) * padded(inputs)), scales(rows) {}

    void take(const float *from, int count, int given) {
        rows = count, inputs = padded(given);
        for (int m = 0; m < rows; m++, from += given) {
            Unit most = {}, off = {}; // off: 0, or NaN if an input is not finite
            for (int c = 0; c < given; c += UNIT) {
                const Unit x = get<Unit>(from + c), size = x < 0 ? -x : x;
                most = size > most ? size : most;
                off += x - x;
            }
            float largest = 1e-30f, lost = 0;
            for (int i = 0; i < UNIT; i++) largest = std::max(largest, most[i]), lost += off[i];
            scales[m] = largest / 127.0f + lost;
            const Unit inverse = spread<Unit>(127.0f / largest), magic = spread<Unit>(8388608.0f + 128.0f);
            typedef decltype(magic < magic) Integers;
            for (int c = 0; c < given; c += UNIT)
                write(&a[size_t(m) * inputs + c], (Integers)fma(get<Unit>(from + c), inverse, magic) & 255);
        }
    }

    template <class Integers> static void write(Number *to, Integers numbers) {
#if LANTERN_HALVES
        const __m256i low = (__m256i)numbers, high = _mm256_slli_epi32(_mm256_srli_si256(low, 8), 16);
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_or_si256(low, high), 0x08);
        _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(pairs));
#else
        typedef uint8_t Bytes __attribute__((vector_size(UNIT)));
        const Bytes bytes = __builtin_convertvector(numbers, Bytes);
        std::memcpy(to, &bytes, UNIT);
#endif
    }
};

// Weights in int8: a panel has 32 scales, 32 sums of an output's weights, and weights in groups of four inputs. Products
// are summed as integers, exactly, so AMX and vector lanes give the same result.
struct Byte {
    typedef float Number;
    typedef Tiles Units;
    typedef Rounded Inputs;
    static constexpr int HEAD = 8 * PANEL, STEP = 4; // HEAD: bytes of scales and sums
    static void narrow(Number *at, Unit x) { put(at, x); }
    static size_t panel(int inputs) { return HEAD + size_t(PANEL) * Rounded::padded(inputs); }

    // Results of a row of inputs with this scale: takes away what the inputs' offset of 128 added, and scales.
    static void results(const Whole *sums, const int8_t *panel, float scale, Lanes *out) {
        typedef decltype(Unit{} < Unit{}) Integers;
        const char *scales = (const char *)panel, *offsets = scales + 4 * PANEL;
        for (int c = 0; c < PANEL; c += UNIT) {
            const Integers own = get<Integers>((const char *)sums + 4 * c) - 128 * get<Integers>(offsets + 4 * c);
            put((float *)out + c, __builtin_convertvector(own, Unit) * get<Unit>(scales + 4 * c) * scale);
        }
    }

#if LANTERN_HALVES
    typedef __m256i Sum;
    static constexpr int TURNS = 2;
    // Weights as 16 bits: those of inputs 0 and 2, or of 1 and 3.
    static __m256i weights(const char *at, int odd) {
        const __m256i fours = _mm256_loadu_si256((const __m256i *)at);
        return _mm256_srai_epi16(odd ? fours : _mm256_slli_epi16(fours, 8), 8);
    }
    static __m256i input(const uint16_t *a, int odd) { return _mm256_set1_epi32(get<int32_t>(a + 2 * odd)); }
    static __m256i add(__m256i sum, __m256i x, __m256i weights) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, weights));
        asm("" : "+x"(sum)); // otherwise a compiler adds products first, and the sums do not fit the registers
        return sum;
    }
#else
    typedef Whole Sum;
    static constexpr int TURNS = 1;
    static Whole weights(const char *at, int) { return get<Whole>(at); }
    static int32_t input(const uint8_t *a, int) { return get<int32_t>(a); }
    // Adds four products of unsigned by signed bytes in each lane.
    static Whole add(Whole sum, int32_t four, Whole weights) {
#if defined(__AVX512VNNI__)
        return (Whole)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), (__m512i)weights);
#else
        for (int i = 0; i < 4; i++) sum += (weights << (24 - 8 * i) >> 24) * (four >> 8 * i & 255);
        return sum;
#endif
    }
#endif
};

template <class Kind> void narrow_all(const float *from, size_t count, typename Kind::Number *to) {
    for (size_t i = 0; i < count; i += UNIT) Kind::narrow(to + i, get<Unit>(from + i));
}

// Calls work(number of rows, first row) for tiles of nearly equal size, at most MOST rows.
template <int MOST, class Work> void in_tiles(int rows, Work work) {
    const int tiles = (rows + MOST - 1) / MOST;
    for (int t = 0, m = 0; t < tiles; t++) {
        const int count = rows / tiles + (t < rows % tiles);
        switch (count) {
#define CASE(N)                                                                                                        \
    case N:                                                                                                            \
        if constexpr (N <= MOST) work(std::integral_constant<int, N>(), m);                                            \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
        m += count;
    }
}

// Multiplies rows of inputs by panel p of the weights; calls finish(m, left, right) with the 32 results of row m.
template <class Kind, class Finish> void multiply(const Plain<Kind> &a, const void *weights, int p, Finish finish) {
    const auto *panel = (const typename Kind::Weight *)weights + size_t(p) * PANEL * a.inputs;
    if constexpr (Kind::Units::BUILT)
        if (Kind::Units::granted() && a.inputs % Kind::Units::INPUTS == 0)
            return Kind::Units::multiply(a.a, a.rows, a.inputs, panel, [&](int m, const float *left, const float *right) {
                finish(m, get<Lanes>(left), get<Lanes>(right));
            });
    in_tiles<TILE>(a.rows, [&](auto count, int m) {
        Lanes sums[count][2];
        tile<Kind, count>(a.a + size_t(m) * a.inputs, a.inputs, panel, sums);
        for (int i = 0; i < count; i++) finish(m + i, sums[i][0], sums[i][1]);
    });
}

template <class Finish> void multiply(const Rounded &a, const void *weights, int p, Finish finish) {
    const int8_t *panel = (const int8_t *)weights + p * Byte::panel(a.inputs);
    const auto finish_row = [&](int m, const Whole *sums) {
        Lanes results[2];
        Byte::results(sums, panel, a.scales[m], results);
        finish(m, results[0], results[1]);
    };
    if constexpr (Tiles::BUILT)
        if (Tiles::granted())
            return Tiles::multiply(a.a.data(), a.rows, a.inputs, panel + Byte::HEAD, [&](int m, const int32_t *left, const int32_t *right) {
                const Whole sums[] = {get<Whole>(left), get<Whole>(right)};
                finish_row(m, sums);
            });
    in_tiles<TILE>(a.rows, [&](auto count, int m) {
        Whole sums[count][2];
        tile<Byte, count>(&a.a[size_t(m) * a.inputs], a.inputs, panel + Byte::HEAD, sums);
        for (int i = 0; i < count; i++) finish_row(m + i, sums[i]);
    });
}

} // namespace

extern "C" {

struct Layer {
    const float *attention_norm, *ffn_norm; // null: no normalisation
    const void *wqkv, *wo, *w13, *w2; // panels; each of w13 holds 16 gates and their 16 ups
};

struct Model {
    int32_t dim, heads, layers, hidden, vocab, kind; // 0: all in fp32; weights in 1: bf16; 2: int8 in linears; 3: bf16, with AMX
    float eps;
    const Layer *layer;
    const float *norm; // null: features are the output of the last layer
    const void *head;  // null: no logits
    const float *rope; // (cos, sin) of half a head for each position
};

struct PassArgs {
    int32_t rows, nodes, slots, threads, taps;
    const float *inputs;      // (rows, nodes, dim)
    const int64_t *positions; // (rows, nodes): rows of the rotary table
    const int64_t *places;    // (rows, nodes): slots for keys and values
    const float *mask;        // (rows, nodes, slots) with the strides below: added to scores
    int64_t mask_row, mask_node;
    float *cache; // (2 layers, rows, heads, slots, head_dim)
    int64_t plane; // floats of the cache from a layer's keys to its values, and from these to the next layer's keys
    const int32_t *tapped; // layers whose inputs are copied to `fused`
    float *fused;          // (rows, nodes, taps, dim)
    float *features;       // (rows, nodes, dim)
    float *logits;         // (rows, nodes, vocab)
};

struct LinearArgs {
    int32_t rows, inputs, outputs, threads, kind;
    const float *a;     // (rows, inputs)
    const void *panels;
    const float *bias;  // (outputs), or null
    float *out;         // (rows, outputs)
};
}

namespace {

// The slots that any node of a row sees, and the mask values of each node there.
struct Seen {
    std::vector<int32_t> slots;
    std::vector<float> added; // (nodes, length), length a multiple of 16
    int length = 0;

    void look(const PassArgs &pass, int row) {
        const float *mask = pass.mask + row * pass.mask_row;
        slots.clear();
        for (int s = 0; s < pass.slots; s++)
            for (int i = 0; i < pass.nodes; i++)
                if (mask[i * pass.mask_node + s] != -INFINITY) {
                    slots.push_back(s);
                    break;
                }
        const int count = int(slots.size());
        length = (count + WIDTH - 1) / WIDTH * WIDTH;
        added.assign(size_t(pass.nodes) * length, -INFINITY);
        for (int i = 0; i < pass.nodes; i++)
            for (int j = 0; j < count; j++) added[size_t(i) * length + j] = mask[i * pass.mask_node + slots[j]];
        slots.resize(length, count ? slots[count - 1] : 0);
    }
};

#if LANTERN_HALVES
// Returns the products of a query with the keys of eight slots, summed as `fold` sums them.
inline Unit eight_products(const float *query, const float *keys, const int32_t *slots, int head_dim) {
    Unit fours[2][2]; // of four slots each: sums over lanes 0 to 7, and over 8 to 15
#pragma GCC unroll 2
    for (int four = 0; four < 2; four++) {
        const float *key[4];
        Unit sums[2][4] = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) key[i] = keys + size_t(slots[4 * four + i]) * head_dim;
#pragma GCC unroll 4
        for (int d = 0; d < head_dim; d += WIDTH)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const Unit own = get<Unit>(query + d + half * UNIT);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const Unit other = get<Unit>(key[i] + d + half * UNIT);
                    sums[half][i] = d ? fma(own, other, sums[half][i]) : own * other;
                }
            }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Unit *of = sums[half];
            fours[half][four] = (Unit)_mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
        }
    }
    Unit folded[2];
    for (int half = 0; half < 2; half++)
        folded[half] = (Unit)_mm256_permute2f128_ps(fours[half][0], fours[half][1], 0x20) +
                       (Unit)_mm256_permute2f128_ps(fours[half][0], fours[half][1], 0x31);
    return folded[0] + folded[1];
}

// Adds to `out` the weighted sums of 8 PARTS numbers of the values of seen slots; returns `total` plus their weights.
template <int PARTS>
inline Unit add_values(const Seen &of, int begin, int end, const float *weights, const float *values, int head_dim,
                       float *out, Unit total) {
    Unit sums[PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < PARTS; i++) sums[i] = get<Unit>(out + UNIT * i);
    for (int j = begin; j < end; j++) {
        const float *value = values + size_t(of.slots[j]) * head_dim;
        const Unit weight = spread<Unit>(weights[j]);
        total += weight;
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) sums[i] = fma(weight, get<Unit>(value + UNIT * i), sums[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < PARTS; i++) put(out + UNIT * i, sums[i]);
    return total;
}
#endif

template <class Kind> struct Worker {
    typedef typename Kind::Number Number;
    const Model &model;
    const PassArgs &pass;
    const int count, head_dim; // number of inputs; width of a head
    float *x, *q;              // shared: (count, dim)
    Number *attended, *gated;  // shared: (count, dim), (count, hidden)
    const Seen *seen;
    Barrier &barrier;
    uint32_t waits = 0;
    typename Kind::Inputs operand; // the inputs of the next product
    Lined<Number> normed;
    std::vector<size_t> cache_offset; // offset of an input's keys and values in the cache, from slot 0 of row 0
    std::vector<float> scores;

    Worker(const Model &model, const PassArgs &pass, float *x, float *q, Number *attended, Number *gated, const Seen *seen,
           Barrier &barrier)
        : model(model), pass(pass), count(pass.rows * pass.nodes), head_dim(model.dim / model.heads), x(x), q(q),
          attended(attended), gated(gated), seen(seen), barrier(barrier), operand(count, std::max(model.dim, model.hidden)),
          normed(size_t(count) * model.dim), cache_offset(count) {
        for (int m = 0; m < count; m++) {
            const size_t row = size_t(m / pass.nodes) * model.heads * pass.slots;
            cache_offset[m] = (row + pass.places[m]) * head_dim;
        }
        int longest = 0;
        for (int row = 0; row < pass.rows; row++) longest = std::max(longest, seen[row].length);
        scores.resize(size_t(NODES_A_TASK) * longest);
    }

    // Calls work(i) for this thread's share of tasks 0 to tasks - 1.
    template <class Work> void share(int tasks, Work work) {
        const int me = omp_get_thread_num(), of = omp_get_num_threads();
        for (int i = int(int64_t(tasks) * me / of); i < int(int64_t(tasks) * (me + 1) / of); i++) work(i);
    }

    // Every thread normalises all rows itself, which is cheaper than another barrier.
    void norm(const float *weight, float *out = nullptr) {
        const int dim = model.dim;
        for (int m = 0; m < count; m++) {
            const float *row = x + size_t(m) * dim;
            if (!weight) {
                narrow_all<Kind>(row, dim, &normed[size_t(m) * dim]);
                if (out) std::memcpy(out + size_t(m) * dim, row, sizeof(float) * dim);
                continue;
            }
            Unit squares[WIDTH / UNIT] = {};
            for (int c = 0; c < dim; c += WIDTH)
                for (int i = 0; i < WIDTH; i += UNIT) {
                    const Unit y = get<Unit>(row + c + i);
                    squares[i / UNIT] = fma(y, y, squares[i / UNIT]);
                }
            float sum = 0;
            for (int i = 0; i < WIDTH; i++) sum += squares[i / UNIT][i % UNIT];
            const Unit scale = spread<Unit>(1.0f / std::sqrt(sum / float(dim) + model.eps));
            for (int c = 0; c < dim; c += UNIT) {
                const Unit y = get<Unit>(row + c) * scale * get<Unit>(weight + c);
                Kind::narrow(&normed[size_t(m) * dim + c], y);
                if (out) put(out + size_t(m) * dim + c, y);
            }
        }
        operand.take(normed.data(), count, dim);
    }

    // Computes queries, keys and values; rotates queries and keys; stores keys and values in the cache.
    void project(const Layer &layer, int number) {
        const int dim = model.dim, half = head_dim / 2;
        const float scale = 1.0f / std::sqrt(float(head_dim));
        share(3 * dim / PANEL, [&](int p) {
            struct {
                int which, inner, d; // query, key or value; index of the first lane over all heads and within its head
                float *cache;        // their place in slot 0 of row 0
            } parts[2];
            for (int i = 0; i < 2; i++) {
                const int column = p * PANEL + i * WIDTH, which = column / dim, inner = column % dim;
                const int head = inner / head_dim, d = inner % head_dim;
                float *at = which ? pass.cache + pass.plane * (2 * number + which - 1) : nullptr;
                parts[i] = {which, inner, d, which ? at + size_t(head) * pass.slots * head_dim + d : nullptr};
            }
            multiply(operand, layer.wqkv, p, [&](int m, Lanes left, Lanes right) {
                for (int i = 0; i < 2; i++) {
                    const auto &part = parts[i];
                    const float *results = (const float *)(i ? &right : &left);
                    const float *factors = model.rope + size_t(pass.positions[m]) * half * 2 + part.d;
                    float *to = part.which ? part.cache + cache_offset[m] : q + size_t(m) * dim + part.inner;
                    for (int c = 0; c < WIDTH; c += UNIT) {
                        const Unit y = get<Unit>(results + c);
                        const Unit rotated = part.which < 2 ? rotate(y, get<Unit>(factors + c)) : y;
                        put(to + c, part.which ? rotated : rotated * scale);
                    }
                }
            });
        });
    }

    void attend(int number) {
        const int chunks = (pass.nodes + NODES_A_TASK - 1) / NODES_A_TASK;
        share(pass.rows * model.heads * chunks, [&](int task) {
            const int chunk = task % chunks, head = task / chunks % model.heads, row = task / chunks / model.heads;
            const size_t first = (size_t(row) * model.heads + head) * pass.slots * head_dim;
            const float *keys = pass.cache + pass.plane * (2 * number) + first, *values = keys + pass.plane;
            const int begin = chunk * NODES_A_TASK, count = std::min(NODES_A_TASK, pass.nodes - begin);
            const size_t length = seen[row].length;
            in_tiles<NODES_AT_ONCE>(count, [&](auto nodes, int i) {
                if (head_dim == 4 * WIDTH) weigh<4, nodes>(row, head, begin + i, keys, &scores[i * length]);
                else weigh<0, nodes>(row, head, begin + i, keys, &scores[i * length]);
            });
            in_tiles<NODES_AT_ONCE>(count, [&](auto nodes, int i) {
                int d = 0;
                for (; d + 4 * WIDTH <= head_dim; d += 4 * WIDTH)
                    gather<4, nodes>(row, head, begin + i, values, &scores[i * length], d);
                for (; d < head_dim; d += WIDTH) gather<1, nodes>(row, head, begin + i, values, &scores[i * length], d);
            });
        });
    }

    // Attention weights of some nodes, not yet divided by their sum. PARTS: vectors of a head if known at compile time,
    // else 0. Each key is read once for all nodes.
    template <int PARTS, int NODES> void weigh(int row, int head, int node, const float *keys, float *out) {
        const int head_dim = PARTS ? PARTS * WIDTH : this->head_dim;
        const Seen &of = seen[row];
        const float *query = q + (size_t(row) * pass.nodes + node) * model.dim + head * head_dim;
        Lanes own[NODES][PARTS ? PARTS : 1];
        Unit most[NODES];
        for (int n = 0; n < NODES; n++) {
            most[n] = spread<Unit>(-INFINITY);
            for (int part = 0; part < PARTS; part++) own[n][part] = get<Lanes>(query + size_t(n) * model.dim + part * WIDTH);
        }
        const auto query_part = [&](int n, int d) { return PARTS ? own[n][d / WIDTH] : get<Lanes>(query + size_t(n) * model.dim + d); };
#if LANTERN_HALVES
        for (int j = 0; j < of.length; j += WIDTH)
            for (int n = 0; n < NODES; n++) {
                const float *own = query + size_t(n) * model.dim;
                float *to = out + size_t(n) * of.length + j;
                for (int i = 0; i < WIDTH; i += UNIT) {
                    const Unit added = get<Unit>(&of.added[size_t(node + n) * of.length + j + i]);
                    const Unit score = eight_products(own, keys, &of.slots[j + i], head_dim) + added;
                    put(to + i, score);
                    most[n] = score > most[n] ? score : most[n];
                }
            }
#else
        for (int j = 0; j < of.length; j += WIDTH) {
            Lanes fours[NODES][4]; // products with four keys each
            for (int four = 0; four < 4; four++) {
                Lanes sums[NODES][4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const float *key = keys + size_t(of.slots[j + 4 * four + i]) * head_dim;
                    fetch_later(key + pass.plane, head_dim);
#pragma GCC unroll 4
                    for (int d = 0; d < head_dim; d += WIDTH) {
                        const Lanes part = get<Lanes>(key + d);
#pragma GCC unroll 4
                        for (int n = 0; n < NODES; n++)
                            sums[n][i] = d ? fma(query_part(n, d), part, sums[n][i]) : query_part(n, 0) * part;
                    }
                }
#pragma GCC unroll 4
                for (int n = 0; n < NODES; n++) fours[n][four] = fold_lanes(sums[n]);
            }
#pragma GCC unroll 4
            for (int n = 0; n < NODES; n++) {
                const Lanes score = fold_fours(fours[n]) + get<Lanes>(&of.added[size_t(node + n) * of.length + j]);
                put(out + size_t(n) * of.length + j, score);
                most[n] = score > most[n] ? score : most[n];
            }
        }
#endif
        for (int n = 0; n < NODES; n++) {
            float top = -INFINITY, *weights = out + size_t(n) * of.length;
            for (int i = 0; i < UNIT; i++) top = most[n][i] > top ? most[n][i] : top;
            for (int j = 0; j < of.length; j += UNIT) put(weights + j, exp(get<Unit>(weights + j) - top));
        }
    }

    // Weighted means of values of some nodes, PARTS vectors of a head at a time.
    template <int PARTS, int NODES>
    void gather(int row, int head, int node, const float *values, const float *weights, int d) {
        const Seen &of = seen[row];
        Lanes sums[NODES][PARTS] = {};
        Unit totals[NODES] = {};
#if LANTERN_HALVES
        for (int j = 0, step = NODES > 1 ? SLOTS_AT_ONCE : of.length; j < of.length; j += step) {
            const int end = std::min(j + step, of.length);
            for (int i = 0; i < NODES; i++)
                totals[i] = add_values<2 * PARTS>(of, j, end, weights + size_t(i) * of.length, values + d, head_dim,
                                                  (float *)sums[i], totals[i]);
        }
#else
        const ptrdiff_t next = ptrdiff_t(pass.slots) * head_dim - pass.plane; // from values to the keys of the next head
        for (int j = 0; j < of.length; j++) {
            const float *value = values + size_t(of.slots[j]) * head_dim + d;
            fetch_later(value + next, PARTS * WIDTH);
#pragma GCC unroll 4
            for (int i = 0; i < NODES; i++) {
                const Lanes weight = spread<Lanes>(weights[size_t(i) * of.length + j]);
                totals[i] += weight;
#pragma GCC unroll 4
                for (int c = 0; c < PARTS; c++) sums[i][c] = fma(weight, get<Lanes>(value + c * WIDTH), sums[i][c]);
            }
        }
#endif
        for (int i = 0; i < NODES; i++) {
            Number *to = attended + (size_t(row) * pass.nodes + node + i) * model.dim + head * head_dim + d;
            for (int c = 0; c < PARTS * WIDTH; c += UNIT)
                Kind::narrow(to + c, get<Unit>((const float *)sums[i] + c) / totals[i]);
        }
    }

    // Adds the product with a linear of `inputs` inputs to x.
    void add(const Number *a, int inputs, const void *weights) {
        operand.take(a, count, inputs);
        share(model.dim / PANEL, [&](int p) {
            multiply(operand, weights, p, [&](int m, Lanes left, Lanes right) {
                float *at = x + size_t(m) * model.dim + p * PANEL;
                put(at, get<Lanes>(at) + left);
                put(at + WIDTH, get<Lanes>(at + WIDTH) + right);
            });
        });
    }

    void gate(const Layer &layer) {
        share(2 * model.hidden / PANEL, [&](int p) {
            multiply(operand, layer.w13, p, [&](int m, Lanes gates, Lanes ups) {
                for (int i = 0; i < WIDTH; i += UNIT) {
                    const Unit gate = get<Unit>((const float *)&gates + i), up = get<Unit>((const float *)&ups + i);
                    Kind::narrow(gated + size_t(m) * model.hidden + p * WIDTH + i, gate / (exp(-gate) + 1.0f) * up);
                }
            });
        });
    }

    void score() {
        share(model.vocab / PANEL, [&](int p) {
            multiply(operand, model.head, p, [&](int m, Lanes left, Lanes right) {
                float *at = pass.logits + size_t(m) * model.vocab + p * PANEL;
                put(at, left);
                put(at + WIDTH, right);
            });
        });
    }

    void tap(int number) {
        for (int t = 0; t < pass.taps; t++)
            if (pass.tapped[t] == number)
                for (int m = 0; m < count; m++)
                    std::memcpy(pass.fused + (size_t(m) * pass.taps + t) * model.dim, x + size_t(m) * model.dim,
                                sizeof(float) * model.dim);
    }

    void wait() { barrier.wait(omp_get_thread_num(), omp_get_num_threads(), waits); }

    void run() {
        const typename Kind::Units units(count);
        for (int number = 0; number < model.layers; number++) {
            const Layer &layer = model.layer[number];
            if (omp_get_thread_num() == 0) tap(number);
            norm(layer.attention_norm);
            project(layer, number);
            wait();
            attend(number);
            wait();
            add(attended, model.dim, layer.wo);
            wait();
            norm(layer.ffn_norm);
            gate(layer);
            wait();
            add(gated, model.hidden, layer.w2);
            wait();
        }
        norm(model.norm, omp_get_thread_num() == 0 ? pass.features : nullptr);
        if (model.head) score();
    }
};

// Runs work(threads) with the number of threads that the policy of its kind chooses, and records the time.
template <class Work> void with_threads(const ThreadPolicy::Kind &kind, int most, Work work) {
    if (most < 2) return work(1);
    ThreadPolicy &policy = ThreadPolicy::of(kind);
    const int threads = policy.threads(most);
    const double start = omp_get_wtime();
    work(threads);
    policy.record(threads, omp_get_wtime() - start);
}

template <class Kind> void run(const Model &model, const PassArgs &pass) {
    const size_t count = size_t(pass.rows) * pass.nodes, dim = model.dim;
    std::vector<float> x(pass.inputs, pass.inputs + count * dim), q(count * dim);
    Lined<typename Kind::Number> attended(count * dim), gated(count * model.hidden);
    std::vector<Seen> seen(pass.rows);
    for (int row = 0; row < pass.rows; row++) seen[row].look(pass, row);
    with_threads({model.dim, model.layers, model.kind, int32_t(count)}, pass.threads, [&](int threads) {
        // buffers are allocated here, since no exception may leave a parallel region
        Barrier barrier(threads);
        std::vector<Worker<Kind>> workers(
            threads, {model, pass, x.data(), q.data(), attended.data(), gated.data(), seen.data(), barrier});
#pragma omp parallel num_threads(threads)
        workers[omp_get_thread_num()].run();
    });
}

template <class Kind> void run(const LinearArgs &linear) {
    typedef typename Kind::Number Number;
    Lined<Number> a(size_t(linear.rows) * linear.inputs);
    narrow_all<Kind>(linear.a, a.size(), a.data());
    with_threads({-linear.inputs, linear.outputs, linear.kind, linear.rows}, linear.threads, [&](int threads) {
        std::vector<typename Kind::Inputs> inputs(threads, {linear.rows, linear.inputs});
#pragma omp parallel num_threads(threads)
        {
            const typename Kind::Units units(linear.rows);
            auto &own = inputs[omp_get_thread_num()];
            own.take(a.data(), linear.rows, linear.inputs);
#pragma omp for
            for (int p = 0; p < linear.outputs / PANEL; p++) {
                const float *bias = linear.bias ? linear.bias + p * PANEL : nullptr;
                multiply(own, linear.panels, p, [&](int m, Lanes left, Lanes right) {
                    float *at = linear.out + size_t(m) * linear.outputs + p * PANEL;
                    put(at, bias ? left + get<Lanes>(bias) : left);
                    put(at + WIDTH, bias ? right + get<Lanes>(bias + WIDTH) : right);
                });
            }
        }
    });
}

// Runs a pass or a linear with weights of a kind.
template <class... Args> void run_kind(int kind, const Args &...args) {
    if (kind == 0) run<Full>(args...);
    else if (kind == 2) run<Byte>(args...);
    else if constexpr (Tiles::BUILT) kind == 3 ? run<Tiled>(args...) : run<Half>(args...);
    else run<Half>(args...);
}

void run(const Model &model, const PassArgs &pass) { run_kind(model.kind, model, pass); }

constexpr int64_t NO_MEMORY = -1;

// Returns work(), or NO_MEMORY if memory ran out.
template <class Work> int64_t guarded(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}

} // namespace

extern "C" int64_t lantern_linear(const LinearArgs *linear) {
    return guarded([&] { return run_kind(linear->kind, *linear), 0; });
}

extern "C" int64_t lantern_pass(const Model *model, const PassArgs *pass) {
    return guarded([&] { return run(*model, *pass), 0; });
}

extern "C" int32_t lantern_has_amx() { return Tiles::granted(); }
