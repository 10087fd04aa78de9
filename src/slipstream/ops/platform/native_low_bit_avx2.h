// Low-bit GEMM for x86 with AVX2, FMA and F16C. A vector holds 4 columns of four weight rows, extended to 16 bits, and is
// multiplied by 4 whole activations; with AVX-VNNI one instruction adds the products up too. Two digits of 8 bits would need
// as many products and a permutation of each activation. The integer sums of a group are exact.
#include <immintrin.h>
#include <math.h>

#include "native_low_bit_x86.h"

#define AHEAD 4  // blocks of four rows between a block and the one that is prefetched beside it

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
    __m256i number[4], total = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        number[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        total = _mm256_add_epi32(total, number[i]);
    }
    int32_t sums[8], sum = 0;
    _mm256_storeu_si256((__m256i *)sums, total);
    for (int i = 0; i < 8; i++) sum += sums[i];
    for (int i = 0; i < 2; i++) {
        __m256i both = _mm256_packs_epi32(number[2 * i], number[2 * i + 1]);
        _mm256_storeu_si256((__m256i *)(out->numbers + 16 * i), _mm256_permute4x64_epi64(both, 0xd8));
    }
    out->scale = (largest > LEAST ? largest / LIMIT : 0) + nan;
    out->sum = out->scale * (float)sum;
}

#define VECTORS 8  // of a group

// a group of four rows: 4 columns in each vector
SLIP_INLINE void load_weights(int layout, const uint8_t *block, __m256i w[VECTORS]) {
    for (int c = 0; c < slip_weight_bytes(layout) / 16; c++) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(block + 16 * c));
        if (slip_has_pairs(layout)) {
            __m256i pairs = _mm256_cvtepu8_epi16(bytes);
            w[c] = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
            w[c + 4] = _mm256_srli_epi16(pairs, 4);
        } else {
            w[c] = _mm256_cvtepi8_epi16(bytes);
        }
    }
}

// a * b + total, for pairs of 16-bit numbers
SLIP_INLINE __m256i add_products(__m256i total, __m256i a, __m256i b) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(total, a, b);
#else
    return _mm256_add_epi32(total, _mm256_madd_epi16(a, b));
#endif
}

// A group times a token: the sum of 16 * halves columns, from column 16 * first on
SLIP_INLINE __m128i dot_halves(int first, int halves, const __m256i w[VECTORS], const SlipActivations *x) {
    __m256i total = _mm256_setzero_si256();  // sums of column pairs: two per row
    for (int c = 0; c < 4 * halves; c++) {
        int64_t four;
        memcpy(&four, x->numbers + 16 * first + 4 * c, 8);
        total = add_products(total, w[4 * first + c], _mm256_set1_epi64x(four));
    }
    return _mm_hadd_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
}

// Four weight rows times each token of a tile. Callers pass constants for `layout` and `tokens`.
SLIP_INLINE void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales,
                               const uint16_t *offsets, const SlipActivations *x, int64_t groups, float (*out)[4]) {
    __m128 total[TILE];
    for (int t = 0; t < tokens; t++) total[t] = _mm_setzero_ps();
    for (int64_t g = 0; g < groups; g++, x += tokens) {
        const uint8_t *block = weights + g * slip_weight_bytes(layout);
        __m256i w[VECTORS];
        load_weights(layout, block, w);
        for (int line = 0; line < slip_weight_bytes(layout); line += 64)
            _mm_prefetch(block + AHEAD * groups * slip_weight_bytes(layout) + line, _MM_HINT_T1);
        __m128 s[2];
        load_scales(layout, scales, offsets, g, s);
        for (int t = 0; t < tokens; t++) {
            __m128 x_scale = _mm_set1_ps(x[t].scale);
            if (layout == SLIP_Q6_K) {
                for (int half = 0; half < 2; half++) {
                    __m128i sum = dot_halves(half, 1, w, x + t);
                    total[t] = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(s[half], x_scale), total[t]);
                }
                continue;
            }
            __m128i sum = dot_halves(0, 2, w, x + t);
            total[t] = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(s[0], x_scale), total[t]);
            if (slip_has_offset(layout)) total[t] = _mm_fmadd_ps(s[1], _mm_set1_ps(x[t].sum), total[t]);
        }
    }
    for (int t = 0; t < tokens; t++) _mm_storeu_ps(out[t], total[t]);
}
