// AMX products in bf16 and int8: blocks of up to 16 rows times a panel, 32 inputs per instruction.
//
// The bits of a row depend on that row only: whatever the number of rows of a block, an instruction adds the products of
// even inputs one after the other, then those of odd inputs, then both to the sum.

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

// Configures this thread's tiles for a number of rows during its lifetime, then restores the former configuration.
struct Tiles {
    static constexpr int ROWS = 16, INPUTS = 32, LINE = 64; // of a tile; bytes of a tile row
    static constexpr int GROUP = 64;   // 8-bit inputs per instruction
    static constexpr int AHEAD = 4096; // prefetch distance of weights in bytes
    static constexpr bool BUILT = LANTERN_TILES;

    // Returns the rows of a block, at least one. All blocks have the same size: if it does not divide `rows`, blocks
    // overlap.
    static int block(int rows) {
        rows = std::max(rows, 1);
        const int blocks = (rows + ROWS - 1) / ROWS;
        return (rows + blocks - 1) / blocks;
    }

#if LANTERN_TILES
    // Linux grants AMX on request; if it does not, products use vector lanes.
    static bool granted() {
        constexpr int REQUEST = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        static const bool yes = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
        return yes;
    }

    explicit Tiles(int rows) {
        if (!granted()) return;
        struct alignas(LINE) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE};
            uint8_t rows[16] = {};
        } config;
        std::fill(config.rows, config.rows + 6, uint8_t(block(rows))); // sums and inputs
        std::fill(config.rows + 6, config.rows + 8, uint8_t(ROWS));   // weights: pairs of inputs
        _tile_storeconfig(before);
        asm volatile("" ::"r"(&config) : "memory"); // the next intrinsic declares only eight of its bytes as read
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (!granted()) return;
        asm volatile("" ::"r"(before) : "memory");
        _tile_loadconfig(before);
    }
    Tiles(const Tiles &) = delete;

    // As `multiply` of pass.cpp, for `inputs` that are a multiple of 32; calls finish(m, left, right) with the sums of row m.
    template <class Finish>
    static void multiply(const uint16_t *a, int rows, int inputs, const uint16_t *panel, Finish finish) {
        const int high = block(rows);
        const long wide = 2 * long(inputs);
        alignas(LINE) float sums[2][2][ROWS][ROWS]; // two blocks: left and right sums
        asm volatile("" ::: "memory");              // the inputs are written before the intrinsics read them
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

    // As `multiply`, for unsigned 8-bit integers and signed 8-bit weights; calls finish(m, left, right) with the sums of row m.
    template <class Finish>
    static void multiply(const uint8_t *a, int rows, int inputs, const int8_t *panel, Finish finish) {
        const int most = block(rows);
        alignas(LINE) int32_t sums[2][ROWS][ROWS]; // left and right
        asm volatile("" ::: "memory");
        for (int m = 0; m < rows; m += most) {
            const int first = std::min(m, rows - most);
            const uint8_t *from = a + size_t(first) * inputs;
            _tile_zero(0);
            _tile_zero(1);
            for (int k = 0; k < inputs; k += GROUP) {
                const int8_t *weights = panel + size_t(k) * 32;
                for (int byte = 0; byte < 32 * GROUP; byte += LINE) __builtin_prefetch(weights + AHEAD + byte);
                _tile_loadd(6, weights, 2 * LINE);
                _tile_loadd(7, weights + LINE, 2 * LINE);
                _tile_loadd(4, from + k, inputs);
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
            }
            _tile_stored(0, sums[0], LINE);
            _tile_stored(1, sums[1], LINE);
            for (int i = m; i < std::min(m + most, rows); i++) finish(i, sums[0][i - first], sums[1][i - first]);
        }
    }

  private:
    alignas(LINE) uint8_t before[LINE];
#else
    static bool granted() { return false; }
    explicit Tiles(int) {}
    template <class Finish> static void multiply(const uint16_t *, int, int, const uint16_t *, Finish) {}
    template <class Finish> static void multiply(const uint8_t *, int, int, const int8_t *, Finish) {}
#endif
};
