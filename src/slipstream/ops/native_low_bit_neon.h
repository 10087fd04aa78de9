// Low-bit GEMM for ARM with 8-bit dot products (sdot). A vector lane is a weight row, so no sum crosses lanes.
//
// An sdot that accumulates has a latency of one cycle, and two can start per cycle. Compilers issue all sdots of one
// sum in sequence; the assembly below alternates between the sums of several tokens.
#include <arm_neon.h>

static void quantize_block(const float *x, SlipActivations *out) {
    float32x4_t v[8], largest_lanes = vdupq_n_f32(0);
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        largest_lanes = vmaxq_f32(largest_lanes, vabsq_f32(v[i]));  // NaN propagates
    }
    float largest = vmaxvq_f32(largest_lanes);
    float inverse = largest > LEAST ? LIMIT / largest : 0;
    int32x4_t total = vdupq_n_s32(0);
    for (int i = 0; i < 8; i += 4) {
        int32x4_t q[4];
        for (int j = 0; j < 4; j++) {
            q[j] = vcvtnq_s32_f32(vmulq_n_f32(v[i + j], inverse));
            total = vaddq_s32(total, q[j]);
        }
        int8x8_t high[2], low[2];
        for (int j = 0; j < 2; j++) {
            int16x8_t number = vcombine_s16(vmovn_s32(q[2 * j]), vmovn_s32(q[2 * j + 1]));
            high[j] = vrshrn_n_s16(number, 8);
            low[j] = vmovn_s16(number);
        }
        vst1q_s8(out->high + 4 * i, vcombine_s8(high[0], high[1]));
        vst1q_s8(out->low + 4 * i, vcombine_s8(low[0], low[1]));
    }
    out->scale = largest > LEAST || !(largest == largest) ? largest / LIMIT : 0;
    out->sum = out->scale * (float)vaddvq_s32(total);
}

#define DOT(sum, w, x, i) "sdot %[" #sum "].4s, %[" #w "].16b, %[" #x "].4b[" #i "]\n"
#define WEIGHTS [w0] "w"(w[0]), [w1] "w"(w[1]), [w2] "w"(w[2]), [w3] "w"(w[3])

// 16 columns of four weight rows times those of four (or two) vectors of x
static inline __attribute__((always_inline)) void dot_four(int32x4_t *sums, const int8x16_t *w, const int8x16_t *x) {
#define DOTS(w, i) DOT(a, w, xa, i) DOT(b, w, xb, i) DOT(c, w, xc, i) DOT(d, w, xd, i)
    asm(DOTS(w0, 0) DOTS(w1, 1) DOTS(w2, 2) DOTS(w3, 3)
        : [a] "+w"(sums[0]), [b] "+w"(sums[1]), [c] "+w"(sums[2]), [d] "+w"(sums[3])
        : WEIGHTS, [xa] "w"(x[0]), [xb] "w"(x[1]), [xc] "w"(x[2]), [xd] "w"(x[3]));
#undef DOTS
}

static inline __attribute__((always_inline)) void dot_two(int32x4_t *sums, const int8x16_t *w, const int8x16_t *x) {
#define DOTS(w, i) DOT(a, w, xa, i) DOT(b, w, xb, i)
    asm(DOTS(w0, 0) DOTS(w1, 1) DOTS(w2, 2) DOTS(w3, 3)
        : [a] "+w"(sums[0]), [b] "+w"(sums[1])
        : WEIGHTS, [xa] "w"(x[0]), [xb] "w"(x[1]));
#undef DOTS
}

static inline __attribute__((always_inline)) float32x4_t add_group(int bits, float32x4_t total, int32x4_t sum,
                                                                   float32x4_t scale, float32x4_t offset,
                                                                   const SlipActivations *x) {
    total = vfmaq_f32(total, vcvtq_f32_s32(sum), vmulq_n_f32(scale, x->scale));
    return bits == 4 ? vfmaq_n_f32(total, offset, x->sum) : total;
}

// Four weight rows times each token of a tile. Callers pass constants for `bits` and `tokens`.
static inline __attribute__((always_inline)) void multiply_tile(int bits, int tokens, const uint8_t *weights,
                                                                const uint16_t *scales, const uint16_t *offsets,
                                                                const SlipActivations *x, int64_t groups,
                                                                float (*out)[4]) {
    float32x4_t total[TILE];
    for (int t = 0; t < tokens; t++) total[t] = vdupq_n_f32(0);
    for (int64_t g = 0; g < groups; g++, x += tokens) {
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
        float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales + g * 4)));
        float32x4_t offset = scale;
        if (bits == 4) offset = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(offsets + g * 4)));
        int t = 0;
#pragma GCC unroll 2
        for (; t + 4 <= tokens; t += 4) {
            int32x4_t sums[4] = {0};
            for (int half = 0; half < 2; half++) {
                int8x16_t high[4];
                for (int i = 0; i < 4; i++) high[i] = vld1q_s8(x[t + i].high + 16 * half);
                dot_four(sums, w + 4 * half, high);
            }
            for (int i = 0; i < 4; i++) sums[i] = vshlq_n_s32(sums[i], 8);
            for (int half = 0; half < 2; half++) {
                int8x16_t low[4];
                for (int i = 0; i < 4; i++) low[i] = vld1q_s8(x[t + i].low + 16 * half);
                dot_four(sums, w + 4 * half, low);
            }
            for (int i = 0; i < 4; i++) total[t + i] = add_group(bits, total[t + i], sums[i], scale, offset, x + t + i);
        }
#pragma GCC unroll 3
        for (; t < tokens; t++) {
            int32x4_t sums[2] = {0};
            for (int half = 0; half < 2; half++) {
                int8x16_t digits[2] = {vld1q_s8(x[t].high + 16 * half), vld1q_s8(x[t].low + 16 * half)};
                dot_two(sums, w + 4 * half, digits);
            }
            total[t] = add_group(bits, total[t], vaddq_s32(vshlq_n_s32(sums[0], 8), sums[1]), scale, offset, x + t);
        }
    }
    for (int t = 0; t < tokens; t++) vst1q_f32(out[t], total[t]);
}
