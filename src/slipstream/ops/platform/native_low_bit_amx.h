// Low-bit GEMM for x86 with AMX, for whole tiles of 8 tokens; native_low_bit_x86.h computes the others. The integer
// sums of a group are those of that kernel, and the arithmetic after them is the same, so a token has the same bits in
// both.
//
// A tile instruction multiplies 8 tokens by 16 weight rows, 32 columns at a time. Weights are unpacked once for all
// tokens.
#include "native_amx.h"

#ifdef SLIP_AMX_EMULATED

static __thread struct {
    uint8_t weights[8][64], high[8][32], low[8][32];
    int32_t sums[2][8][16];
} emulated;

SLIP_INLINE void open_tiles(void) {}
SLIP_INLINE void close_tiles(void) {}
SLIP_INLINE void load_weight_tile(const uint8_t *from) { memcpy(emulated.weights, from, sizeof emulated.weights); }

SLIP_INLINE void multiply_tokens(int is_signed, const SlipActivations *x, int32_t (*sums)[8][16]) {
    for (int t = 0; t < 8; t++)
        for (int r = 0; r < 16; r++) {
            sums[0][t][r] = sums[1][t][r] = 0;
            for (int c = 0; c < BLOCK; c++) {
                uint8_t w = emulated.weights[c / 4][r * 4 + c % 4];
                int32_t weight = is_signed ? (int8_t)w : w;
                sums[0][t][r] += weight * x[t].high[c];
                sums[1][t][r] += weight * x[t].low[c];
            }
        }
}

#else

// Tile registers. The intrinsics take the text of a number: constants of an enum would not do.
#define WEIGHTS 0
#define HIGH 1
#define LOW 2
#define HIGH_SUMS 3
#define LOW_SUMS 4

SLIP_INLINE void open_tiles(void) {
    TileShapes shapes = {.palette = 1,
                         .row_bytes = {[WEIGHTS] = 64, [HIGH] = 32, [LOW] = 32, [HIGH_SUMS] = 64, [LOW_SUMS] = 64},
                         .rows = {[WEIGHTS] = 8, [HIGH] = 8, [LOW] = 8, [HIGH_SUMS] = 8, [LOW_SUMS] = 8}};
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

SLIP_INLINE void close_tiles(void) { _tile_release(); }

SLIP_INLINE void load_weight_tile(const uint8_t *from) {
    STORE_ALL();
    _tile_loadd(WEIGHTS, from, 64);
}

// sums of the high and of the low digits, [8 tokens][16 weight rows]
SLIP_INLINE void multiply_tokens(int is_signed, const SlipActivations *x, int32_t (*sums)[8][16]) {
    _tile_loadd(HIGH, x->high, sizeof(SlipActivations));
    _tile_loadd(LOW, x->low, sizeof(SlipActivations));
    _tile_zero(HIGH_SUMS);
    _tile_zero(LOW_SUMS);
    if (is_signed) {
        _tile_dpbssd(HIGH_SUMS, HIGH, WEIGHTS);
        _tile_dpbssd(LOW_SUMS, LOW, WEIGHTS);
    } else {
        _tile_dpbsud(HIGH_SUMS, HIGH, WEIGHTS);
        _tile_dpbsud(LOW_SUMS, LOW, WEIGHTS);
    }
    _tile_stored(HIGH_SUMS, sums[0], 64);
    _tile_stored(LOW_SUMS, sums[1], 64);
}
#endif

#define UNPACKED_GROUPS 48  // groups of 16 weight rows unpacked at a time: 24 KiB

// 16 weight rows, in `num_blocks` blocks of four, times `num_tiles` tiles of 8 tokens. `count`: rows that are stored.
// Callers pass a constant for `layout`.
SLIP_INLINE void multiply_by_tiles(int layout, const uint8_t *weights, const uint8_t *scales, const uint16_t *offsets,
                                   const SlipActivations *x, int64_t groups, int64_t num_blocks, int64_t num_tiles,
                                   float *out, int64_t out_stride, int64_t count) {
    const TileRows rows = find_tile_rows(layout, weights, scales, offsets, groups, num_blocks);
    const int is_signed = layout == SLIP_EIGHT_BITS;
    const int64_t bytes = slip_weight_bytes(layout);
    const __mmask16 stored = (__mmask16)((1u << count) - 1);
    _Alignas(64) uint8_t unpacked[UNPACKED_GROUPS][8][64];
    _Alignas(64) float factors[UNPACKED_GROUPS][2][16];
    _Alignas(64) int32_t sums[2][2][8][16];  // of two groups in turn
    __m512 of_eight[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t first = 0; first < groups; first += UNPACKED_GROUPS) {
        int64_t last = first + UNPACKED_GROUPS < groups ? first + UNPACKED_GROUPS : groups;
        for (int64_t g = first; g < last; g++) {
            __m512i w[8];
            __m512 s[2];
            load_weights(layout, rows.weights, g, w);
            load_tile_scales(layout, rows.scales, rows.offsets, g, of_eight, s);
            for (int c = 0; c < 8; c++) _mm512_store_si512(unpacked[g - first][c], w[c]);
            for (int i = 0; i < 2; i++) _mm512_store_ps(factors[g - first][i], s[i]);
        }
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            float *o = out + tile * 8 * out_stride;
            __m512 total[8];
            for (int t = 0; t < 8; t++)
                total[t] = first ? _mm512_maskz_loadu_ps(stored, o + t * out_stride) : _mm512_setzero_ps();
            const SlipActivations *a = x + tile * 8 * groups;
            for (int64_t g = first; g <= last; g++) {
                if (g < last) {
                    load_weight_tile(unpacked[g - first][0]);
                    multiply_tokens(is_signed, a + g * 8, sums[g & 1]);
                }
                if (g < last && tile == 0)  // the next 16 rows
                    for (int i = 0; i < BLOCKS; i++)
                        for (int line = 0; line < bytes; line += 64)
                            _mm_prefetch(rows.weights[i] + (BLOCKS * groups + g) * bytes + line, _MM_HINT_T1);
                if (g == first) continue;
                // the group before: its sums are ready by now
                int64_t before = g - 1;
                __m512 scale = _mm512_load_ps(factors[before - first][0]);
                __m512 offset = _mm512_load_ps(factors[before - first][1]);
                for (int t = 0; t < 8; t++) {
                    const SlipActivations *of_token = a + before * 8 + t;
                    __m512i high = _mm512_load_si512(sums[before & 1][0][t]);
                    __m512i low = _mm512_load_si512(sums[before & 1][1][t]);
                    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
                    __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(of_token->scale));
                    total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, total[t]);
                    if (slip_has_offset(layout))
                        total[t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(of_token->sum), total[t]);
                }
            }
            for (int t = 0; t < 8; t++) _mm512_mask_storeu_ps(o + t * out_stride, stored, total[t]);
        }
    }
}

// Tokens [0, returned count) of weight rows [first, last): whole tiles of 8 tokens. 0 for kinds that are not faster so.
static int64_t multiply_rows_by_tiles(const SlipActivations *x, const uint8_t *weights, const uint8_t *scales,
                                      const uint16_t *offsets, float *out, int64_t layout, int64_t num_tokens,
                                      int64_t groups, int64_t out_stride, int64_t first, int64_t last) {
    int64_t num_tiles = num_tokens / 8;
    if (!num_tiles || layout == SLIP_Q6_K || !has_tiles()) return 0;
    open_tiles();
    for (int64_t n = first; n < last; n += TILE_ROWS) {
        const uint8_t *w = weights + n / 4 * groups * slip_weight_bytes(layout);
        const uint8_t *s = scales + n / 4 * groups * slip_scale_bytes(layout);
        const uint16_t *o = offsets + n * groups;
        int64_t count = last - n < TILE_ROWS ? last - n : TILE_ROWS;
#define TILES_OF(layout)                                                                                              \
    case layout:                                                                                                      \
        multiply_by_tiles(layout, w, s, o, x, groups, (count + 3) / 4, num_tiles, out + n, out_stride, count);        \
        break;
        switch (layout) {
            TILES_OF(SLIP_FOUR_BITS)
            TILES_OF(SLIP_Q4_0)
            TILES_OF(SLIP_EIGHT_BITS)
            TILES_OF(SLIP_Q4_K)
            TILES_OF(SLIP_Q5_K)
        }
#undef TILES_OF
    }
    close_tiles();
    return num_tiles * 8;
}
