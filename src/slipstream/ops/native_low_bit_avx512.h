// Low-bit GEMM for x86 with AVX-512 and VNNI. Weights and activations are extended to 16 bits, so one dot product takes
// both digits of an activation. A vector holds 8 columns of four weight rows: 4 columns of each row, then the next 4.
// Sums stay spread over the 16 lanes until the end of a row.
#include <immintrin.h>
#include <math.h>

#include "native_low_bit_x86.h"

static void quantize_block(const float *x, SlipActivations *out) {
    __m512 v[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
    // NaN if a number is infinite or NaN
    float nan = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_sub_ps(v[0], v[0]), _mm512_sub_ps(v[1], v[1])));
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1])));
    __m512 inverse = _mm512_set1_ps(largest > LEAST ? LIMIT / largest : 0);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 2; i++) {
        __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        total = _mm512_add_epi32(total, number);
        _mm_storeu_si128((__m128i *)(out->low + 16 * i), _mm512_cvtepi32_epi8(number));
        _mm_storeu_si128((__m128i *)(out->high + 16 * i), _mm512_cvtepi32_epi8(high));
    }
    out->scale = (largest > LEAST ? largest / LIMIT : 0) + nan;
    out->sum = out->scale * (float)_mm512_reduce_add_epi32(total);
}

SLIP_INLINE __m512i load_digits(const int8_t *digits) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)digits));
}

// the value of each row, in the lanes of the row
SLIP_INLINE __m512 spread(__m128 four) {
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3);
    return _mm512_permutexvar_ps(order, _mm512_castps128_ps512(four));
}

// Four weight rows times each token of a tile. Callers pass constants for `layout` and `tokens`.
SLIP_INLINE void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales,
                               const uint16_t *offsets, const SlipActivations *x, int64_t groups, float (*out)[4]) {
    // of 8 columns: the first 4 for each row, then the other 4
    const __m512i orders[4] = {_mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1), _mm512_setr_epi64(2, 2, 2, 2, 3, 3, 3, 3),
                               _mm512_setr_epi64(4, 4, 4, 4, 5, 5, 5, 5), _mm512_setr_epi64(6, 6, 6, 6, 7, 7, 7, 7)};
    __m512 total[TILE];
    __m128 offset_total[TILE];
    for (int t = 0; t < tokens; t++) {
        total[t] = _mm512_setzero_ps();
        offset_total[t] = _mm_setzero_ps();
    }
    for (int64_t g = 0; g < groups; g++, x += tokens) {
        __m512i w[4];
        if (slip_has_pairs(layout)) {
            for (int c = 0; c < 2; c++) {
                __m256i pairs = _mm256_loadu_si256((const __m256i *)(weights + g * 64 + 32 * c));
                __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi8(15));
                __m256i high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
                w[c] = _mm512_cvtepu8_epi16(low);
                w[c + 2] = _mm512_cvtepu8_epi16(high);
            }
        } else {
            for (int c = 0; c < 4; c++) w[c] = load_digits((const int8_t *)weights + g * 128 + 32 * c);
        }
        __m128 s[2];
        load_scales(layout, scales, offsets, g, s);
        __m512 scale = spread(s[0]), last_scale = layout == SLIP_Q6_K ? spread(s[1]) : scale;
        for (int t = 0; t < tokens; t++) {
            __m512i columns = _mm512_add_epi16(_mm512_slli_epi16(load_digits(x[t].high), 8), load_digits(x[t].low));
            __m512i sum = _mm512_setzero_si512();
            __m512 x_scale = _mm512_set1_ps(x[t].scale);
            for (int c = 0; c < 4; c++) {
                if (layout == SLIP_Q6_K && c == 2) {
                    total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, x_scale), total[t]);
                    sum = _mm512_setzero_si512();
                }
                sum = _mm512_dpwssd_epi32(sum, w[c], _mm512_permutexvar_epi64(orders[c], columns));
            }
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(last_scale, x_scale), total[t]);
            if (slip_has_offset(layout))
                offset_total[t] = _mm_fmadd_ps(s[1], _mm_set1_ps(x[t].sum), offset_total[t]);
        }
    }
    for (int t = 0; t < tokens; t++) {
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(total[t]), _mm512_extractf32x8_ps(total[t], 1));
        __m128 rows = _mm_hadd_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        _mm_storeu_ps(out[t], _mm_add_ps(rows, offset_total[t]));
    }
}
