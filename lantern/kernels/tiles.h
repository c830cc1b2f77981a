// Matrix units (AMX) for products in bf16: blocks of up to 16 rows times a panel, 32 inputs an instruction.
//
// What decides the bits of a row is the row alone here too: however many rows a block has, an instruction adds the
// products of even inputs one after the other, those of odd inputs, then both to the sum.

#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define LANTERN_TILES 1
#else
#define LANTERN_TILES 0
#endif

// Sets this thread's units up for so many rows while it lives, and back to what they were set up for before.
struct Tiles {
    static constexpr int ROWS = 16, INPUTS = 32, LINE = 64; // of a unit; bytes of a row
    static constexpr int GROUP = 64;   // inputs of 8 bits that an instruction takes in
    static constexpr int AHEAD = 4096; // bytes of weights that are asked for before their turn
    static constexpr bool BUILT = LANTERN_TILES;

    // Rows of a block, one at least. All blocks have as many: where they do not go into `rows`, blocks overlap.
    static int block(int rows) {
        rows = std::max(rows, 1);
        const int blocks = (rows + ROWS - 1) / ROWS;
        return (rows + blocks - 1) / blocks;
    }

#if LANTERN_TILES
    // Linux lends the units to processes that ask; where it does not, products go by lanes.
    static bool lent() {
        constexpr int ASK = 0x1023, UNITS = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        static const bool yes = syscall(SYS_arch_prctl, ASK, UNITS) == 0;
        return yes;
    }

    explicit Tiles(int rows) {
        if (!lent()) return;
        struct alignas(LINE) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE};
            uint8_t rows[16] = {};
        } wanted;
        std::fill(wanted.rows, wanted.rows + 6, uint8_t(block(rows))); // sums and inputs
        std::fill(wanted.rows + 6, wanted.rows + 8, uint8_t(ROWS));   // weights: pairs of inputs
        _tile_storeconfig(before);
        asm volatile("" ::"r"(&wanted) : "memory"); // the next line's declaration tells of eight of its bytes
        _tile_loadconfig(&wanted);
    }
    ~Tiles() {
        if (!lent()) return;
        asm volatile("" ::"r"(before) : "memory");
        _tile_loadconfig(before);
    }
    Tiles(const Tiles &) = delete;

    // As `multiply` of pass.cpp, of `inputs` that are a multiple of 32; finish(m, sums) gets the 32 sums of row m.
    template <class Finish>
    static void multiply(const uint16_t *a, int rows, int inputs, const uint16_t *panel, Finish finish) {
        const int high = block(rows);
        const long wide = 2 * long(inputs);
        alignas(LINE) float sums[2][2][ROWS][ROWS]; // of a block: its left and its right sums
        asm volatile("" ::: "memory");              // the inputs are written before they are read below
        for (int m = 0; m < rows; m += 2 * high) {
            const int first = std::min(m, rows - high), second = std::min(m + high, rows - high);
            const bool two = m + high < rows;
            const uint16_t *above = a + size_t(first) * inputs, *below = a + size_t(second) * inputs;
            _tile_zero(0);
            _tile_zero(1);
            if (two) {
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int k = 0; k < inputs; k += INPUTS) {
                const uint16_t *weights = panel + size_t(k) * 32;
                for (int byte = 0; byte < 64 * INPUTS; byte += LINE) __builtin_prefetch((const char *)weights + AHEAD + byte);
                _tile_loadd(6, weights, 2 * LINE);
                _tile_loadd(7, weights + 32, 2 * LINE);
                _tile_loadd(4, above + k, wide);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (!two) continue;
                _tile_loadd(5, below + k, wide);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sums[0][0], LINE);
            _tile_stored(1, sums[0][1], LINE);
            for (int i = m; i < std::min(m + high, rows); i++) finish(i, sums[0][0][i - first], sums[0][1][i - first]);
            if (!two) continue;
            _tile_stored(2, sums[1][0], LINE);
            _tile_stored(3, sums[1][1], LINE);
            for (int i = m + high; i < std::min(m + 2 * high, rows); i++)
                finish(i, sums[1][0][i - second], sums[1][1][i - second]);
        }
    }

    // As `multiply`, of whole numbers of two digits, without signs, and weights of 8 bits, with signs; finish(m, high, low)
    // gets the 16 left and the 16 right sums of row m over each digit.
    template <class Finish>
    static void multiply(const uint8_t *high, const uint8_t *low, int rows, int inputs, const int8_t *panel, Finish finish) {
        const int most = block(rows);
        alignas(LINE) int32_t sums[4][ROWS][ROWS]; // left and right, of high digits and of low ones
        asm volatile("" ::: "memory");
        for (int m = 0; m < rows; m += most) {
            const int first = std::min(m, rows - most);
            const uint8_t *upper = high + size_t(first) * inputs, *lower = low + size_t(first) * inputs;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int k = 0; k < inputs; k += GROUP) {
                const int8_t *weights = panel + size_t(k) * 32;
                for (int byte = 0; byte < 32 * GROUP; byte += LINE) __builtin_prefetch(weights + AHEAD + byte);
                _tile_loadd(6, weights, 2 * LINE);
                _tile_loadd(7, weights + LINE, 2 * LINE);
                _tile_loadd(4, upper + k, inputs);
                _tile_loadd(5, lower + k, inputs);
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
            _tile_stored(0, sums[0], LINE);
            _tile_stored(1, sums[1], LINE);
            _tile_stored(2, sums[2], LINE);
            _tile_stored(3, sums[3], LINE);
            for (int i = m; i < std::min(m + most, rows); i++) {
                const int32_t *of_high[] = {sums[0][i - first], sums[1][i - first]};
                const int32_t *of_low[] = {sums[2][i - first], sums[3][i - first]};
                finish(i, of_high, of_low);
            }
        }
    }

  private:
    alignas(LINE) uint8_t before[LINE];
#else
    static bool lent() { return false; }
    explicit Tiles(int) {}
    template <class Finish> static void multiply(const uint16_t *, int, int, const uint16_t *, Finish) {}
    template <class Finish> static void multiply(const uint8_t *, const uint8_t *, int, int, const int8_t *, Finish) {}
#endif
};
