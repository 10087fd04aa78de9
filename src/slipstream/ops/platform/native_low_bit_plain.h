// Low-bit GEMM in plain C, for processors without the instructions of the other headers.
#include <math.h>

#include "native_low_bit_layout.h"
#include "native_math.h"

static void quantize_block(const float *x, SlipActivations *out) {
    float largest = 0, not_finite = 0;
#pragma omp simd reduction(max : largest) reduction(+ : not_finite)
    for (int i = 0; i < BLOCK; i++) {
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        not_finite += x[i] - x[i];  // NaN if x is infinite or NaN
    }
    float inverse = largest > LEAST ? LIMIT / largest : 0;
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < BLOCK; i++) {
        int32_t number = (int32_t)rintf(x[i] * inverse);
        total += number;
        out->low[i] = (int8_t)number;
        out->high[i] = (int8_t)((number + 128) >> 8);
    }
    out->scale = (largest > LEAST ? largest / LIMIT : 0) + not_finite;
    out->sum = out->scale * (float)total;
}

// One token times four weight rows.
static SLIP_PART void multiply_one(int layout, const uint8_t *weights, const uint8_t *scales, const uint16_t *offsets,
                         const SlipActivations *x, int64_t stride, int64_t groups, float *total) {
    for (int r = 0; r < 4; r++) total[r] = 0;
    for (int64_t g = 0; g < groups; g++, x += stride) {
        int32_t high[2][4] = {0}, low[2][4] = {0};  // of the first and the last 16 columns
        for (int c = 0; c < 8; c++)
            for (int r = 0; r < 4; r++)
                for (int i = 0; i < 4; i++) {
                    int at = c * 16 + r * 4 + i;
                    int weight = slip_has_pairs(layout) ? weights[g * 64 + at % 64] >> (c < 4 ? 0 : 4) & 15
                                                        : (int8_t)weights[g * 128 + at];
                    high[c / 4][r] += weight * x->high[c * 4 + i];
                    low[c / 4][r] += weight * x->low[c * 4 + i];
                }
        for (int r = 0; r < 4; r++) {
            int32_t first = high[0][r] * 256 + low[0][r], last = high[1][r] * 256 + low[1][r];
            float s[2];
            slip_load_scales(layout, scales, offsets, g, r, s);
            if (layout == SLIP_Q6_K) {
                total[r] = slip_fma((float)first, s[0] * x->scale, total[r]);
                total[r] = slip_fma((float)last, s[1] * x->scale, total[r]);
                continue;
            }
            total[r] = slip_fma((float)(first + last), s[0] * x->scale, total[r]);
            if (slip_has_offset(layout)) total[r] = slip_fma(s[1], x->sum, total[r]);
        }
    }
}

static void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales, const uint16_t *offsets,
                          const SlipActivations *x, int64_t groups, float (*total)[4]) {
    for (int t = 0; t < tokens; t++)
        multiply_one(layout, weights, scales, offsets, x + t, tokens, groups, total[t]);
}
