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
SLIP_INLINE void dot_four(int32x4_t *sums, const int8x16_t *w, const int8x16_t *x) {
#define DOTS(w, i) DOT(a, w, xa, i) DOT(b, w, xb, i) DOT(c, w, xc, i) DOT(d, w, xd, i)
    asm(DOTS(w0, 0) DOTS(w1, 1) DOTS(w2, 2) DOTS(w3, 3)
        : [a] "+w"(sums[0]), [b] "+w"(sums[1]), [c] "+w"(sums[2]), [d] "+w"(sums[3])
        : WEIGHTS, [xa] "w"(x[0]), [xb] "w"(x[1]), [xc] "w"(x[2]), [xd] "w"(x[3]));
#undef DOTS
}

SLIP_INLINE void dot_two(int32x4_t *sums, const int8x16_t *w, const int8x16_t *x) {
#define DOTS(w, i) DOT(a, w, xa, i) DOT(b, w, xb, i)
    asm(DOTS(w0, 0) DOTS(w1, 1) DOTS(w2, 2) DOTS(w3, 3)
        : [a] "+w"(sums[0]), [b] "+w"(sums[1])
        : WEIGHTS, [xa] "w"(x[0]), [xb] "w"(x[1]));
#undef DOTS
}

SLIP_INLINE float32x4_t from_half(const uint16_t *halves) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
}

// the float16 scales of a superblock: d and dmin
SLIP_INLINE float32x4x2_t load_heads(int layout, const uint8_t *scales, int64_t g) {
    const uint16_t *halves = (const uint16_t *)(scales + g * slip_scale_bytes(layout));
    return (float32x4x2_t){{from_half(halves), from_half(layout == SLIP_Q6_K ? halves : halves + 4)}};
}

// Scale and offset of block g, a lane per row. Q6_K: scales of the first and of the last 16 columns.
SLIP_INLINE float32x4x2_t load_scales(int layout, float32x4x2_t heads, const uint8_t *scales, const uint16_t *offsets,
                                      int64_t g) {
    float32x4x2_t found;
    if (layout == SLIP_Q4_K || layout == SLIP_Q5_K) {
        const SlipScalesQ45 *s = (const SlipScalesQ45 *)scales + (g >> 3);
        uint16x8_t both = vmovl_u8(vld1_u8((const uint8_t *)&s->blocks[g & 7]));
        found.val[0] = vmulq_f32(heads.val[0], vcvtq_f32_u32(vmovl_u16(vget_low_u16(both))));
        found.val[1] = vmulq_f32(heads.val[1], vcvtq_f32_u32(vmovl_u16(vget_high_u16(both))));
    } else if (layout == SLIP_Q6_K) {
        const SlipScalesQ6 *s = (const SlipScalesQ6 *)scales + (g >> 3);
        int16x8_t both = vmovl_s8(vld1_s8((const int8_t *)&s->blocks[g & 7]));
        found.val[0] = vmulq_f32(heads.val[0], vcvtq_f32_s32(vmovl_s16(vget_low_s16(both))));
        found.val[1] = vmulq_f32(heads.val[1], vcvtq_f32_s32(vmovl_s16(vget_high_s16(both))));
    } else {
        found.val[0] = found.val[1] = from_half((const uint16_t *)scales + g * 4);
        if (layout == SLIP_FOUR_BITS) found.val[1] = from_half(offsets + g * 4);
        if (layout == SLIP_Q4_0) found.val[1] = vmulq_n_f32(found.val[0], -8);
    }
    return found;
}

SLIP_INLINE float32x4_t add_sum(float32x4_t total, int32x4_t sum, float32x4_t scale, float x_scale) {
    return vfmaq_f32(total, vcvtq_f32_s32(sum), vmulq_n_f32(scale, x_scale));
}

SLIP_INLINE float32x4_t add_block(int layout, float32x4_t total, int32x4_t sum, float32x4x2_t scales,
                                  const SlipActivations *x) {
    total = add_sum(total, sum, scales.val[0], x->scale);
    return slip_has_offset(layout) ? vfmaq_n_f32(total, scales.val[1], x->sum) : total;
}

// 16 columns of four weight rows times those of four tokens: the high digits, then the low digits
SLIP_INLINE void dot_high(int32x4_t *sums, const int8x16_t *w, const SlipActivations *x, int half) {
    int8x16_t high[4];
    for (int i = 0; i < 4; i++) high[i] = vld1q_s8(x[i].high + 16 * half);
    dot_four(sums, w + 4 * half, high);
}

SLIP_INLINE void dot_low(int32x4_t *sums, const int8x16_t *w, const SlipActivations *x, int half) {
    int8x16_t low[4];
    for (int i = 0; i < 4; i++) low[i] = vld1q_s8(x[i].low + 16 * half);
    dot_four(sums, w + 4 * half, low);
}

// Four weight rows times each token of a tile. Callers pass constants for `layout` and `tokens`.
SLIP_INLINE void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales,
                               const uint16_t *offsets, const SlipActivations *x, int64_t groups, float (*out)[4]) {
    float32x4_t total[TILE];
    for (int t = 0; t < tokens; t++) total[t] = vdupq_n_f32(0);
    const int is_k = layout == SLIP_Q4_K || layout == SLIP_Q5_K || layout == SLIP_Q6_K;
    float32x4x2_t heads = {{vdupq_n_f32(0), vdupq_n_f32(0)}};
    for (int64_t g = 0; g < groups; g++, x += tokens) {
        if (is_k && (g & 7) == 0) heads = load_heads(layout, scales, g);
        int8x16_t w[8];  // 4 columns of 4 rows each
        if (slip_has_pairs(layout)) {
            for (int c = 0; c < 4; c++) {
                uint8x16_t pairs = vld1q_u8(weights + g * 64 + c * 16);
                w[c] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
                w[c + 4] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
            }
        } else {
            for (int c = 0; c < 8; c++) w[c] = vreinterpretq_s8_u8(vld1q_u8(weights + g * 128 + c * 16));
        }
        float32x4x2_t s = load_scales(layout, heads, scales, offsets, g);
        int t = 0;
        // a shift waits for the dots of its sum: those of the other four tokens come between
        if (tokens == TILE && layout != SLIP_Q6_K) {
            int32x4_t sums[TILE] = {0};
            for (int first = 0; first < TILE; first += 4)
                for (int half = 0; half < 2; half++) dot_high(sums + first, w, x + first, half);
            for (int first = 0; first < TILE; first += 4) {
                for (int i = first; i < first + 4; i++) sums[i] = vshlq_n_s32(sums[i], 8);
                for (int half = 0; half < 2; half++) dot_low(sums + first, w, x + first, half);
            }
            for (int i = 0; i < TILE; i++) total[i] = add_block(layout, total[i], sums[i], s, x + i);
            continue;
        }
#pragma GCC unroll 2
        for (; t + 4 <= tokens; t += 4) {
            int32x4_t sums[4] = {0};
            if (layout == SLIP_Q6_K) {
                for (int half = 0; half < 2; half++) {
                    for (int i = 0; i < 4; i++) sums[i] = vdupq_n_s32(0);
                    dot_high(sums, w, x + t, half);
                    for (int i = 0; i < 4; i++) sums[i] = vshlq_n_s32(sums[i], 8);
                    dot_low(sums, w, x + t, half);
                    for (int i = 0; i < 4; i++) total[t + i] = add_sum(total[t + i], sums[i], s.val[half], x[t + i].scale);
                }
                continue;
            }
            for (int half = 0; half < 2; half++) dot_high(sums, w, x + t, half);
            for (int i = 0; i < 4; i++) sums[i] = vshlq_n_s32(sums[i], 8);
            for (int half = 0; half < 2; half++) dot_low(sums, w, x + t, half);
            for (int i = 0; i < 4; i++) total[t + i] = add_block(layout, total[t + i], sums[i], s, x + t + i);
        }
#pragma GCC unroll 3
        for (; t < tokens; t++) {
            int32x4_t sums[2] = {0};
            for (int half = 0; half < 2; half++) {
                int8x16_t digits[2] = {vld1q_s8(x[t].high + 16 * half), vld1q_s8(x[t].low + 16 * half)};
                dot_two(sums, w + 4 * half, digits);
                if (layout == SLIP_Q6_K) {
                    int32x4_t sum = vaddq_s32(vshlq_n_s32(sums[0], 8), sums[1]);
                    total[t] = add_sum(total[t], sum, s.val[half], x[t].scale);
                    sums[0] = sums[1] = vdupq_n_s32(0);
                }
            }
            if (layout != SLIP_Q6_K)
                total[t] = add_block(layout, total[t], vaddq_s32(vshlq_n_s32(sums[0], 8), sums[1]), s, x + t);
        }
    }
    for (int t = 0; t < tokens; t++) vst1q_f32(out[t], total[t]);
}
