// Products with low-bit weights, for ARM processors with 8-bit dot products.
//
// Activations become 8-bit numbers, 32 of a row sharing a scale. Weights come four rows interleaved, 4 columns at a
// time, so that a lane of the vectors is a row and nothing is summed across. Up to eight tokens share an unpacked
// block, and all sums stay in registers. A token's result does not depend on its neighbours.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../native_parts.h"

#define BLOCK SLIP_BLOCK
#define TOKENS 8

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

void slip_quantize(const float *x, int8_t *numbers, float *scales, float *sums, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) {
        const float *a = x + g * BLOCK;
        float32x4_t v[8], most = vdupq_n_f32(0);
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(a + 4 * i);
            most = vmaxq_f32(most, vabsq_f32(v[i]));
        }
        float scale = vmaxvq_f32(most) / 127.0f;
        float inverse = scale > 0 ? 1.0f / scale : 0;
        int32x4_t total = vdupq_n_s32(0);
        for (int i = 0; i < 8; i += 4) {
            int32x4_t q[4];
            for (int j = 0; j < 4; j++) {
                q[j] = vcvtnq_s32_f32(vmulq_n_f32(v[i + j], inverse));
                total = vaddq_s32(total, q[j]);
            }
            int16x8_t low = vcombine_s16(vmovn_s32(q[0]), vmovn_s32(q[1]));
            int16x8_t high = vcombine_s16(vmovn_s32(q[2]), vmovn_s32(q[3]));
            vst1q_s8(numbers + g * BLOCK + 4 * i, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
        scales[g] = scale;
        sums[g] = scale * (float)vaddvq_s32(total);
    }
}

// One block of four rows with each token of a tile; `bits` and `tokens` are constants where this is used.
static inline __attribute__((always_inline)) void tile(int bits, int tokens, const uint8_t *weights,
                                                       const float16_t *weight_scales, const float16_t *offsets,
                                                       const int8_t *numbers, const float *scales, const float *sums,
                                                       int64_t groups, float32x4_t *total) {
    for (int t = 0; t < tokens; t++) total[t] = vdupq_n_f32(0);
    for (int64_t g = 0; g < groups; g++) {
        int8x16_t w[8];  // 4 columns of 4 rows each
        if (bits == 8) {
            for (int c = 0; c < 8; c++) w[c] = vreinterpretq_s8_u8(vld1q_u8(weights + g * 128 + c * 16));
        } else {
            for (int c = 0; c < 4; c++) {
                uint8x16_t pairs = vld1q_u8(weights + g * 64 + c * 16);
                w[c] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
                w[c + 4] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
            }
        }
        float32x4_t scale = vcvt_f32_f16(vld1_f16(weight_scales + g * 4));
        float32x4_t offset = bits == 8 ? scale : vcvt_f32_f16(vld1_f16(offsets + g * 4));
        for (int t = 0; t < tokens; t++) {
            const int8_t *x = numbers + (t * groups + g) * BLOCK;
            int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + 16);
            int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
            a = vdotq_laneq_s32(a, w[0], low, 0);
            b = vdotq_laneq_s32(b, w[4], high, 0);
            a = vdotq_laneq_s32(a, w[1], low, 1);
            b = vdotq_laneq_s32(b, w[5], high, 1);
            a = vdotq_laneq_s32(a, w[2], low, 2);
            b = vdotq_laneq_s32(b, w[6], high, 2);
            a = vdotq_laneq_s32(a, w[3], low, 3);
            b = vdotq_laneq_s32(b, w[7], high, 3);
            float32x4_t product = vcvtq_f32_s32(vaddq_s32(a, b));
            total[t] = vfmaq_f32(total[t], product, vmulq_n_f32(scale, scales[t * groups + g]));
            if (bits == 4) total[t] = vfmaq_n_f32(total[t], offset, sums[t * groups + g]);
        }
    }
}

#define TILE(bits, tokens)                                                                                       \
    case bits * 16 + tokens:                                                                                     \
        tile(bits, tokens, w, s, o, numbers + t * groups * BLOCK, scales + t * groups, sums + t * groups, groups, \
             total);                                                                                             \
        break;

int64_t slip_low_bit_works(void) { return 1; }

void slip_low_bit_rows(const int8_t *numbers, const float *scales, const float *sums, const uint8_t *weights,
                       const void *weight_scales, const void *offsets, float *out, int64_t bits, int64_t num_tokens,
                       int64_t num_rows, int64_t groups, int64_t out_stride, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n += 4) {
        const uint8_t *w = weights + n / 4 * groups * BLOCK * bits / 2;
        const float16_t *s = (const float16_t *)weight_scales + n * groups;
        const float16_t *o = (const float16_t *)offsets + n * groups;
        int64_t count = num_rows - n < 4 ? num_rows - n : 4;
        for (int64_t t = 0; t < num_tokens; t += TOKENS) {
            int64_t tokens = num_tokens - t < TOKENS ? num_tokens - t : TOKENS;
            float32x4_t total[TOKENS];
            switch (bits * 16 + tokens) {
                TILE(4, 1) TILE(4, 2) TILE(4, 3) TILE(4, 4) TILE(4, 5) TILE(4, 6) TILE(4, 7) TILE(4, 8)
                TILE(8, 1) TILE(8, 2) TILE(8, 3) TILE(8, 4) TILE(8, 5) TILE(8, 6) TILE(8, 7) TILE(8, 8)
            }
            for (int64_t i = 0; i < tokens; i++)
                memcpy(out + (t + i) * out_stride + n, &total[i], count * sizeof(float));
        }
    }
}

// out [tokens, rows] = x [tokens, groups * 32] times the weights [rows / 4, groups, 4 rows * 32 columns], whose scales
// and offsets are [rows / 4, groups, 4] float16; with 8 bits there are no offsets
void slip_low_bit(const float *x, const uint8_t *weights, const void *weight_scales, const void *offsets, float *out,
                  int64_t bits, int64_t num_tokens, int64_t num_rows, int64_t groups) {
    int8_t *numbers = malloc(num_tokens * groups * BLOCK);
    float *scales = malloc(2 * num_tokens * groups * sizeof(float)), *sums = scales + num_tokens * groups;
#pragma omp parallel if (num_rows * groups > 2048)
    {
#pragma omp for
        for (int64_t t = 0; t < num_tokens; t++)
            slip_quantize(x + t * groups * BLOCK, numbers + t * groups * BLOCK, scales + t * groups, sums + t * groups,
                          groups);
#pragma omp for
        for (int64_t n = 0; n < num_rows; n += 16)
            slip_low_bit_rows(numbers, scales, sums, weights, weight_scales, offsets, out, bits, num_tokens, num_rows,
                              groups, num_rows, n, n + 16 < num_rows ? n + 16 : num_rows);
    }
    free(numbers);
    free(scales);
}

#else

void slip_quantize(const float *x, int8_t *numbers, float *scales, float *sums, int64_t groups) {
    (void)x, (void)numbers, (void)scales, (void)sums, (void)groups;
}

void slip_low_bit_rows(const int8_t *numbers, const float *scales, const float *sums, const uint8_t *weights,
                       const void *weight_scales, const void *offsets, float *out, int64_t bits, int64_t num_tokens,
                       int64_t num_rows, int64_t groups, int64_t out_stride, int64_t first, int64_t last) {
    (void)numbers, (void)scales, (void)sums, (void)weights, (void)weight_scales, (void)offsets, (void)out, (void)bits;
    (void)num_tokens, (void)num_rows, (void)groups, (void)out_stride, (void)first, (void)last;
}

int64_t slip_low_bit_works(void) { return 0; }

void slip_low_bit(const float *x, const uint8_t *weights, const void *weight_scales, const void *offsets, float *out,
                  int64_t bits, int64_t num_tokens, int64_t num_rows, int64_t groups) {
    (void)x, (void)weights, (void)weight_scales, (void)offsets, (void)out, (void)bits;
    (void)num_tokens, (void)num_rows, (void)groups;
}

#endif
