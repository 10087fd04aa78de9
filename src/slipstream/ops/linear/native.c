// Skinny GEMM: float32 or bfloat16 weights times float32 activations of a few tokens. bfloat16 weights are extended to
// float32, so a result has the bits that float32 weights of the same values give. With up to three tokens memory bandwidth is the limit, and one
// weight row is read from end to end (two rows at a time reach two thirds of the bandwidth). With more tokens
// arithmetic is the limit: the register tile is 3 weight rows x 4 tokens. The order of each sum does not depend on the
// number of tokens.
#include <stdint.h>

#include "../native_math.h"
#include "../native_parts.h"
#include "../native_vector.h"

#define WIDTH SLIP_WIDTH
#define PIECE 24   // weight rows per work item of a thread
#define TOKENS 32  // tokens per pass over a piece: both stay in the L2 cache
#define LANES 2  // independent accumulators per sum, to hide the latency of an FMA

typedef SlipVector Vector;

SLIP_INLINE Vector load_weights(int layout, const void *weight, int64_t at) {
    return layout == SLIP_BFLOAT16 ? slip_load_bfloat16((const uint16_t *)weight + at) : slip_load((const float *)weight + at);
}

SLIP_INLINE float load_weight(int layout, const void *weight, int64_t at) {
    if (layout != SLIP_BFLOAT16) return ((const float *)weight)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)weight)[at] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// One register tile, from weight row `row` on. Callers pass constants for `layout`, `rows` and `tokens`, so that the
// loops unroll.
SLIP_INLINE void multiply_tile(int layout, int rows, int tokens, const void *weight, int64_t row, const float *x,
                               int64_t size, float *out, int64_t out_stride) {
    int64_t first = row * size;
    Vector total[3][4][LANES] = {0};
    int64_t i = 0;
    for (; i + WIDTH * LANES <= size; i += WIDTH * LANES)
        for (int l = 0; l < LANES; l++) {
            Vector w[3];
            for (int r = 0; r < rows; r++) w[r] = load_weights(layout, weight, first + r * size + i + l * WIDTH);
            for (int t = 0; t < tokens; t++) {
                Vector a = slip_load(x + t * size + i + l * WIDTH);
                for (int r = 0; r < rows; r++) total[r][t][l] = slip_fma_vector(w[r], a, total[r][t][l]);
            }
        }
    float sums[3][4];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) sums[r][t] = slip_sum_lanes(total[r][t][0] + total[r][t][1]);
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++) {
            for (int64_t j = i; j < size; j++)
                sums[r][t] = slip_fma(load_weight(layout, weight, first + r * size + j), x[t * size + j], sums[r][t]);
            out[t * out_stride + r] = sums[r][t];
        }
}

SLIP_INLINE void multiply_rows(int layout, const float *x, const void *weight, float *out, int64_t num_tokens,
                               int64_t size, int64_t out_stride, int64_t first, int64_t last) {
    int64_t n = first, fours = num_tokens / 4 * 4;
    for (; fours && n + 3 <= last; n += 3) {
        for (int64_t t = 0; t < fours; t += 4)
            multiply_tile(layout, 3, 4, weight, n, x + t * size, size, out + t * out_stride + n, out_stride);
        for (int64_t t = fours; t < num_tokens; t++)
            multiply_tile(layout, 3, 1, weight, n, x + t * size, size, out + t * out_stride + n, out_stride);
    }
    for (; n < last; n++)
        for (int64_t t = 0; t < num_tokens; t += 4) {
            const float *a = x + t * size;
            float *o = out + t * out_stride + n;
            switch (num_tokens - t) {
                case 1: multiply_tile(layout, 1, 1, weight, n, a, size, o, out_stride); break;
                case 2: multiply_tile(layout, 1, 2, weight, n, a, size, o, out_stride); break;
                case 3: multiply_tile(layout, 1, 3, weight, n, a, size, o, out_stride); break;
                default: multiply_tile(layout, 1, 4, weight, n, a, size, o, out_stride);
            }
        }
}

void slip_plain_rows(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens, int64_t size,
                     int64_t out_stride, int64_t first, int64_t last) {
    if (layout == SLIP_BFLOAT16)
        multiply_rows(SLIP_BFLOAT16, x, weight, out, num_tokens, size, out_stride, first, last);
    else
        multiply_rows(SLIP_FLOAT32, x, weight, out, num_tokens, size, out_stride, first, last);
}

// out [tokens, rows] = x [tokens, size] times the transpose of weight [rows, size]
void slip_skinny_gemm(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens,
                      int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 16384)
    for (int64_t n = 0; n < num_rows; n += PIECE)
        for (int64_t t = 0; t < num_tokens; t += TOKENS)
            slip_plain_rows(x + t * size, weight, out + t * num_rows, layout,
                            num_tokens - t < TOKENS ? num_tokens - t : TOKENS, size, num_rows, n,
                            n + PIECE < num_rows ? n + PIECE : num_rows);
}
