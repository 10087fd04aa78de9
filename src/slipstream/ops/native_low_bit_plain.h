// Low-bit GEMM in plain C, for processors without the instructions of the other headers.
#include <math.h>

#include "native_math.h"

static inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    float value;
    memcpy(&value, &bits, 4);
    if (exponent == 0) value = (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    return value;
}

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
static SLIP_PART void multiply_one(int bits, const uint8_t *weights, const uint16_t *scales, const uint16_t *offsets,
                         const SlipActivations *x, int64_t stride, int64_t groups, float *total) {
    for (int r = 0; r < 4; r++) total[r] = 0;
    for (int64_t g = 0; g < groups; g++, x += stride) {
        int32_t high[4] = {0}, low[4] = {0};
        for (int c = 0; c < 8; c++)
            for (int r = 0; r < 4; r++)
                for (int i = 0; i < 4; i++) {
                    int at = c * 16 + r * 4 + i;
                    int weight = bits == 8 ? (int8_t)weights[g * 128 + at]
                                           : weights[g * 64 + at % 64] >> (c < 4 ? 0 : 4) & 15;
                    high[r] += weight * x->high[c * 4 + i];
                    low[r] += weight * x->low[c * 4 + i];
                }
        for (int r = 0; r < 4; r++) {
            float scale = from_half(scales[g * 4 + r]) * x->scale;
            total[r] = slip_fma((float)(high[r] * 256 + low[r]), scale, total[r]);
            if (bits == 4) total[r] = slip_fma(from_half(offsets[g * 4 + r]), x->sum, total[r]);
        }
    }
}

static void multiply_tile(int bits, int tokens, const uint8_t *weights, const uint16_t *scales, const uint16_t *offsets,
                          const SlipActivations *x, int64_t groups, float (*total)[4]) {
    for (int t = 0; t < tokens; t++)
        multiply_one(bits, weights, scales, offsets, x + t, tokens, groups, total[t]);
}
