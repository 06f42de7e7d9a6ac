/* Intel's tile unit: eight tiles of 16 rows by 64 bytes, and the product of bfloat16 tiles (TDPBF16PS). On hardware, or
 * with FASTATTN_MODEL as a C model with the same bits, so that the same kernels run and are tested on every machine.
 *
 * Tiles 0 to 3 hold float32 sums, 4 and 5 the left operands, 6 and 7 the right ones: sum[m][n] += for each of 16 k:
 * left[m][2k] * right[k][2n] + left[m][2k + 1] * right[k][2n + 1].
 */
#ifndef FASTATTN_TILE_UNIT_H
#define FASTATTN_TILE_UNIT_H

#include <stdint.h>
#include <string.h>

#define TILE_NBYTES 1024 /* of a tile; its rows are 64 bytes apart in memory, except those of sums */
#define TILE_SIDE 16     /* rows, and elements of 4 bytes in a row */

#if defined(FASTATTN_MODEL)

#include "bfloat16_model.h"

/* Not aligned to vectors: Windows aligns a thread's own memory to 16 bytes only, whatever is asked for. */
static _Thread_local char model_tiles[8][TILE_NBYTES];

/* Two chains of 16 fused multiply-adds from 0, of the even and of the odd elements; their sum is added to the tile. */
static __attribute__((noinline)) void model_product(int sum, int left, int right) {
    for (int half = 0; half < TILE_SIDE; half += MODEL_LANES) {
        model_row low[TILE_SIDE], high[TILE_SIDE];
        for (int k = 0; k < TILE_SIDE; k++) {
            const model_words b = *(const model_words *)(model_tiles[right] + k * 64 + half * 4);
            low[k] = model_low(b);
            high[k] = model_high(b);
        }
        for (int m = 0; m < TILE_SIDE; m++) {
            const uint32_t *const a = (const uint32_t *)model_tiles[left] + m * TILE_SIDE;
            model_row even = {}, odd = {};
            for (int k = 0; k < TILE_SIDE; k++) {
                const model_words word = a[k] | (model_words){};
                even = model_multiply_add(model_low(word), low[k], even);
                odd = model_multiply_add(model_high(word), high[k], odd);
            }
            model_row *const row = (model_row *)(model_tiles[sum] + m * 64 + half * 4);
            *row = model_flush(model_flush(*row) + model_flush(even + odd));
        }
    }
}

static __attribute__((noinline)) void model_load(int tile, const void *from) { memcpy(model_tiles[tile], from, TILE_NBYTES); }

static __attribute__((noinline)) void model_store(int tile, char *to, long row) {
    for (int m = 0; m < TILE_SIDE; m++) memcpy(to + m * row, model_tiles[tile] + m * 64, 64);
}

#define TILE_ZERO(tile) memset(model_tiles[tile], 0, TILE_NBYTES)
#define TILE_LOAD(tile, from) model_load(tile, from)
#define TILE_STORE(tile, to, row) model_store(tile, to, row)
#define TILE_PRODUCT(sum, left, right) model_product(sum, left, right)
#define TILE_FENCE() ((void)0)

static void tiles_begin(void) {}
static void tiles_end(void) {}

#else

#include <immintrin.h>

/* The compiler does not know that tile instructions access memory. */
#define TILE_FENCE() __asm__ volatile("" ::: "memory")
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from) _tile_loadd(tile, from, 64)
#define TILE_STORE(tile, to, row) _tile_stored(tile, to, row)
#define TILE_PRODUCT(sum, left, right) _tile_dpbf16ps(sum, left, right)

static void tiles_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_nbytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64)));
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config.row_nbytes[tile] = 64;
        config.rows[tile] = TILE_SIDE;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* or the compiler keeps but the first 8 bytes */
    _tile_loadconfig(&config);
}

/* Back to the initial state, which a context switch does not save. */
static void tiles_end(void) { _tile_release(); }

#endif

#endif
