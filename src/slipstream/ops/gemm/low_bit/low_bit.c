// GEMM with low-bit weights.
//
// Activations are quantized to 16-bit integers, one scale per 32 of a row; 8 bits would lose too much precision. Each
// integer is stored as two signed 8-bit digits where dot products of 8-bit integers are the fastest. Integer sums over 32
// columns are exact. Weights are interleaved: four rows, 4 columns at a time. Up to eight tokens share an unpacked block,
// and all sums stay in registers. A token's result does not depend on the other tokens.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native_low_bit_layout.h"
#include "native_parts.h"
#include "native_team.h"

#define BLOCK SLIP_BLOCK
#define TILE SLIP_TILE
#define LIMIT 32512.0f  // the largest integer, 127 * 256: rounding cannot overflow the high digit
#define LEAST 1e-30f    // if all 32 activations are smaller, they count as 0: the scale would be subnormal
#define AT_ONCE 256     // tokens quantized at a time, to limit memory

#if defined(SLIP_PLAIN)
#include "native_low_bit_plain.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "native_low_bit_neon.h"
#elif defined(SLIP_AVX512)
#include "native_low_bit_x86.h"
#if defined(__AVX512VNNI__) && (defined(__AMX_INT8__) || defined(SLIP_AMX_EMULATED))
#define USES_TILES
#include "native_low_bit_amx.h"
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "native_low_bit_x86.h"
#else
#include "native_low_bit_plain.h"
#endif

void slip_quantize(const float *x, SlipActivations *out, int64_t stride, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) quantize_block(x + g * BLOCK, out + g * stride);
}

#ifdef TILE_ROWS  // the kernel multiplies several blocks of four rows at a time
#define MULTIPLY(layout, tokens) multiply_tile(layout, tokens, w, s, o, a, groups, (count + 3) / 4, total)
#else
#define TILE_ROWS 4
#define MULTIPLY(layout, tokens) multiply_tile(layout, tokens, w, s, o, a, groups, total)
#endif

#define CASE(layout, tokens)      \
    case layout * 16 + tokens:    \
        MULTIPLY(layout, tokens); \
        break;
#define CASES(layout)                                                           \
    CASE(layout, 1) CASE(layout, 2) CASE(layout, 3) CASE(layout, 4)             \
    CASE(layout, 5) CASE(layout, 6) CASE(layout, 7) CASE(layout, 8)

void slip_low_bit_rows(const SlipActivations *x, const uint8_t *weights, const void *scales, const uint16_t *offsets,
                       float *out, int64_t layout, int64_t num_tokens, int64_t groups, int64_t out_stride,
                       int64_t first, int64_t last) {
    int64_t first_token = 0;
#ifdef USES_TILES
    first_token = multiply_rows_by_tiles(x, weights, scales, offsets, out, layout, num_tokens, groups, out_stride, first,
                                         last);
#endif
    for (int64_t t = first_token; t < num_tokens; t += TILE) {
        int64_t tokens = num_tokens - t < TILE ? num_tokens - t : TILE;
        const SlipActivations *a = x + t * groups;
        for (int64_t n = first; n < last; n += TILE_ROWS) {
            const uint8_t *w = weights + n / 4 * groups * slip_weight_bytes(layout);
            const uint8_t *s = (const uint8_t *)scales + n / 4 * groups * slip_scale_bytes(layout);
            const uint16_t *o = offsets + n * groups;
            int64_t count = last - n < TILE_ROWS ? last - n : TILE_ROWS;
            float total[TILE][TILE_ROWS];
            switch (layout * 16 + tokens) {
                CASES(SLIP_FOUR_BITS)
                CASES(SLIP_Q4_0)
                CASES(SLIP_EIGHT_BITS)
                CASES(SLIP_Q4_K)
                CASES(SLIP_Q5_K)
                CASES(SLIP_Q6_K)
            }
            for (int64_t i = 0; i < tokens; i++)
                memcpy(out + (t + i) * out_stride + n, total[i], count * sizeof(float));
        }
    }
}

// out [tokens, rows] = x [tokens, groups * 32] times the weights [rows / 4, groups, 4 rows * 32 columns]. `scales`:
// [rows / 4, groups, 4] float16, or [rows / 4, groups / 8] structures of native_low_bit_layout.h. `offsets`: float16 as
// scales, for SLIP_FOUR_BITS only. Returns 0 if out of memory.
int64_t slip_low_bit(const float *x, const uint8_t *weights, const void *scales, const uint16_t *offsets, float *out,
                     int64_t layout, int64_t num_tokens, int64_t num_rows, int64_t groups) {
    int64_t at_once = num_tokens < AT_ONCE ? num_tokens : AT_ONCE;
    SlipActivations *activations = malloc(at_once * groups * sizeof(SlipActivations));
    if (!activations) return 0;
    SlipClock clock = slip_clock();
    double end = clock.start, waited = 0;  // of this thread: when it waits for the others, and for how long it has before
    for (int64_t first = 0; first < num_tokens; first += AT_ONCE) {
        int64_t tokens = num_tokens - first < AT_ONCE ? num_tokens - first : AT_ONCE;
#pragma omp parallel if (num_rows * groups > 2048) num_threads(slip_team_size(num_tokens))
        {
#pragma omp for nowait
            for (int64_t t = 0; t < tokens; t++) {
                int64_t stride;
                SlipActivations *target = slip_activations_of(activations, t, tokens, groups, &stride);
                slip_quantize(x + (first + t) * groups * BLOCK, target, stride, groups);
            }
            double quantized = slip_now();
#pragma omp barrier
#pragma omp master
            waited += slip_now() - quantized;
#pragma omp for schedule(dynamic, 4) nowait
            for (int64_t n = 0; n < num_rows; n += SLIP_LOW_BIT_PIECE)
                slip_low_bit_rows(activations, weights, scales, offsets, out + first * num_rows, layout, tokens,
                                  groups, num_rows, n,
                                  n + SLIP_LOW_BIT_PIECE < num_rows ? n + SLIP_LOW_BIT_PIECE : num_rows);
#pragma omp master
            end = slip_now();
        }
    }
    free(activations);
    slip_team_time_gemm(num_tokens, clock, waited, end);
    return 1;
}

// Four rows from `first` on. Inlined with constant sizes of a block: the copies are then loads and stores.
static inline __attribute__((always_inline)) void interleave(const uint8_t *raw, uint8_t *data, uint8_t *scales,
                                                             uint8_t *offsets, const int64_t head, const int64_t size,
                                                             int64_t num_rows, int64_t groups, int64_t first) {
    static const uint8_t zeros[36];
    int64_t at = first / 4 * groups;
    for (int64_t g = 0; g < groups; g++, at++)
        for (int64_t r = 0; r < 4; r++) {
            const uint8_t *block = first + r < num_rows ? raw + ((first + r) * groups + g) * (head + size) : zeros;
            memcpy(scales + (at * 4 + r) * 2, block, 2);
            if (head == 4) memcpy(offsets + (at * 4 + r) * 2, block + 2, 2);
            for (int64_t c = 0; c < size; c += 4) memcpy(data + at * 4 * size + c * 4 + r * 4, block + head + c, 4);
        }
}

// Interleaves rows of a GGUF file: raw [rows, groups] blocks of `head` bytes (scale, then offset if there are 4) and
// `size` bytes of weights. data [rows / 4, groups, size / 4, 4 rows] of 4 bytes each, scales and offsets
// [rows / 4, groups, 4 rows]; rows behind the last are zeros. Small weights are packed by one thread: to wake others takes
// longer, above all where other programs hold their cores.
void slip_low_bit_pack(const uint8_t *raw, uint8_t *data, uint8_t *scales, uint8_t *offsets, int64_t head, int64_t size,
                       int64_t num_rows, int64_t groups) {
#pragma omp parallel for if (num_rows * groups > 1 << 18)
    for (int64_t first = 0; first < num_rows; first += 4)
        if (head == 4) interleave(raw, data, scales, offsets, 4, 16, num_rows, groups, first);
        else if (size == 16) interleave(raw, data, scales, offsets, 2, 16, num_rows, groups, first);
        else interleave(raw, data, scales, offsets, 2, 32, num_rows, groups, first);
}

// out [tokens, groups * 32]: the weight rows `ids` in float32, rounded as the reference rounds. Other arguments as above.
// Returns 0 if there is no such row.
int64_t slip_low_bit_lookup(const int64_t *ids, const uint8_t *weights, const void *scales, const uint16_t *offsets,
                            float *out, int64_t layout, int64_t num_tokens, int64_t num_rows, int64_t groups) {
    for (int64_t t = 0; t < num_tokens; t++) {
        if (ids[t] < 0 || ids[t] >= num_rows) return 0;
        int64_t block = ids[t] / 4;
        int row = ids[t] % 4;
        const uint8_t *w = weights + block * groups * slip_weight_bytes(layout) + row * 4;
        const uint8_t *s = (const uint8_t *)scales + block * groups * slip_scale_bytes(layout);
        for (int64_t g = 0; g < groups; g++, out += BLOCK) {
            float of_row[2];
            slip_load_scales(layout, s, offsets + block * groups * 4, g, row, of_row);
            for (int i = 0; i < BLOCK; i++) {
                if (slip_has_pairs(layout))
                    out[i] = of_row[0] * (float)(w[g * 64 + i % 16 / 4 * 16 + i % 4] >> (i < 16 ? 0 : 4) & 15);
                else
                    out[i] = of_row[layout == SLIP_Q6_K && i >= 16] * (float)(int8_t)w[g * 128 + i / 4 * 16 + i % 4];
                if (slip_has_offset(layout)) out[i] += of_row[1];
            }
        }
    }
    return 1;
}
