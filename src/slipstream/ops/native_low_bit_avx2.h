// Low-bit GEMM for x86 with AVX2, FMA and F16C. A vector holds 8 columns of four weight rows: 4 columns in the lower
// half, the next 4 in the upper half; the halves are added at the end of a group. With AVX-VNNI one instruction multiplies
// 4 columns and adds them up. It takes unsigned weights: signed ones are read as q + 128, and the sum starts at -128 times
// the sum of the activations.
#include <immintrin.h>
#include <math.h>

#include "native_low_bit_x86.h"

static void quantize_block(const float *x, SlipActivations *out) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v[4], largest_lanes = _mm256_setzero_ps(), not_finite = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        largest_lanes = _mm256_max_ps(largest_lanes, _mm256_andnot_ps(sign, v[i]));
        not_finite = _mm256_add_ps(not_finite, _mm256_sub_ps(v[i], v[i]));  // NaN if x is infinite or NaN
    }
    float lanes[8], bad[8], largest = 0, nan = 0;
    _mm256_storeu_ps(lanes, largest_lanes);
    _mm256_storeu_ps(bad, not_finite);
    for (int i = 0; i < 8; i++) {
        largest = lanes[i] > largest ? lanes[i] : largest;
        nan += bad[i];
    }
    __m256 inverse = _mm256_set1_ps(largest > LEAST ? LIMIT / largest : 0);
    __m256i total = _mm256_setzero_si256(), first_half = total;
    for (int i = 0; i < 4; i++) {
        __m256i number = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        total = _mm256_add_epi32(total, number);
        if (i == 1) first_half = total;
        int32_t numbers[8];
        _mm256_storeu_si256((__m256i *)numbers, number);
        for (int j = 0; j < 8; j++) {
            out->low[8 * i + j] = (int8_t)numbers[j];
            out->high[8 * i + j] = (int8_t)((numbers[j] + 128) >> 8);
        }
    }
    int32_t sums[8], sum = 0;
    _mm256_storeu_si256((__m256i *)sums, total);
    for (int i = 0; i < 8; i++) sum += sums[i];
    _mm256_storeu_si256((__m256i *)sums, first_half);
    int32_t first = 0;
    for (int i = 0; i < 8; i++) first += sums[i];
    out->starts[0] = -128 * first;
    out->starts[1] = -128 * (sum - first);
    out->scale = (largest > LEAST ? largest / LIMIT : 0) + nan;
    out->sum = out->scale * (float)sum;
}

// 4 columns of x, repeated for each row of the lower half; the next 4 for the upper half
SLIP_INLINE __m256i spread(const int8_t *x) {
    const __m256i order = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)x)), order);
}

// 256 * high + low
SLIP_INLINE __m128i join_digits(__m128i high, __m128i low) { return _mm_add_epi32(_mm_slli_epi32(high, 8), low); }

#ifdef __AVXVNNI__
#define USES_VNNI 1
// 8 * count columns of unsigned weights
SLIP_INLINE __m128i dot_unsigned(int count, const __m256i *w, const int8_t *x) {
    __m256i total = _mm256_setzero_si256();
    for (int c = 0; c < count; c++) total = _mm256_dpbusd_avx_epi32(total, w[c], spread(x + 8 * c));
    return _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
}

// `count` columns of signed weights, read as unsigned ones: `half` chooses the activations of Q6_K
SLIP_INLINE __m128i dot_signed(int count, const __m256i *w, const uint8_t *weights, const SlipActivations *x, int half) {
    (void)weights;
    int32_t start = count == 32 ? x->starts[0] + x->starts[1] : x->starts[half];
    __m128i high = dot_unsigned(count / 8, w, x->high + 16 * half), low = dot_unsigned(count / 8, w, x->low + 16 * half);
    return _mm_add_epi32(join_digits(high, low), _mm_set1_epi32(start));
}
#else
#define USES_VNNI 0
// 32 columns of weights from 0 to 31: the sum of two products fits 16 bits, and so does the sum of four such pairs
SLIP_INLINE __m128i dot_unsigned(int count, const __m256i *w, const int8_t *x) {
    __m256i total = _mm256_maddubs_epi16(w[0], spread(x));
    for (int c = 1; c < count; c++) total = _mm256_add_epi16(total, _mm256_maddubs_epi16(w[c], spread(x + 8 * c)));
    total = _mm256_madd_epi16(total, _mm256_set1_epi16(1));
    return _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
}

// `count` columns of signed 8-bit weights times one digit, extended to 16 bits
SLIP_INLINE __m128i dot_digit(int count, const uint8_t *weights, const int8_t *x) {
    __m256i total = _mm256_setzero_si256();  // sums of column pairs: two per row
    for (int c = 0; c < count / 4; c++) {
        __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(weights + 16 * c)));
        int32_t four;
        memcpy(&four, x + 4 * c, 4);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(w, _mm256_cvtepi8_epi16(_mm_set1_epi32(four))));
    }
    return _mm_hadd_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
}

// `count` columns of signed weights: `half` chooses the activations of Q6_K
SLIP_INLINE __m128i dot_signed(int count, const __m256i *w, const uint8_t *weights, const SlipActivations *x, int half) {
    (void)w;
    return join_digits(dot_digit(count, weights, x->high + 16 * half), dot_digit(count, weights, x->low + 16 * half));
}
#endif

// Four weight rows times each token of a tile. Callers pass constants for `layout` and `tokens`.
SLIP_INLINE void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales,
                               const uint16_t *offsets, const SlipActivations *x, int64_t groups, float (*out)[4]) {
    __m128 total[TILE];
    for (int t = 0; t < tokens; t++) total[t] = _mm_setzero_ps();
    for (int64_t g = 0; g < groups; g++, x += tokens) {
        const uint8_t *block = weights + g * slip_weight_bytes(layout);
        __m256i w[4];  // 8 columns of 4 rows each
        if (slip_has_pairs(layout))
            for (int c = 0; c < 2; c++) {
                __m256i pairs = _mm256_loadu_si256((const __m256i *)(block + 32 * c));
                w[c] = _mm256_and_si256(pairs, _mm256_set1_epi8(15));
                w[c + 2] = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
            }
        else if (layout == SLIP_Q5_K || USES_VNNI)
            for (int c = 0; c < 4; c++) {
                w[c] = _mm256_loadu_si256((const __m256i *)(block + 32 * c));
                if (layout != SLIP_Q5_K) w[c] = _mm256_xor_si256(w[c], _mm256_set1_epi8(-128));
            }
        __m128 s[2];
        load_scales(layout, scales, offsets, g, s);
        for (int t = 0; t < tokens; t++) {
            __m128 x_scale = _mm_set1_ps(x[t].scale);
            if (layout == SLIP_Q6_K) {
                for (int half = 0; half < 2; half++) {
                    __m128i sum = dot_signed(16, w + 2 * half, block + 64 * half, x + t, half);
                    total[t] = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(s[half], x_scale), total[t]);
                }
                continue;
            }
            __m128i sum;
            if (layout == SLIP_EIGHT_BITS)
                sum = dot_signed(32, w, block, x + t, 0);
            else
                sum = join_digits(dot_unsigned(4, w, x[t].high), dot_unsigned(4, w, x[t].low));
            total[t] = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(s[0], x_scale), total[t]);
            if (slip_has_offset(layout)) total[t] = _mm_fmadd_ps(s[1], _mm_set1_ps(x[t].sum), total[t]);
        }
    }
    for (int t = 0; t < tokens; t++) _mm_storeu_ps(out[t], total[t]);
}
