// Low-bit GEMM for x86 with AVX2, FMA and F16C. The integer sums of a group are exact, so that results have the same bits
// with and without AVX-VNNI.
//
// With AVX-VNNI a vector holds 8 columns of four weight rows: 4 columns in the lower half, the next 4 in the upper half;
// the halves are added at the end of a group. One instruction multiplies 4 columns and adds them up, for each of the two
// digits of an activation. It takes unsigned weights: signed ones are read as q + 128, and the sum starts at -128 times the
// sum of the activations.
//
// Without it a vector holds 4 columns of four rows, extended to 16 bits, and is multiplied by 4 whole activations: half of
// the products that two digits need.
#include <immintrin.h>
#include <math.h>

#include "native_low_bit_x86.h"

#define AHEAD 4  // blocks of four rows between a block and the one that is prefetched beside it

SLIP_INLINE int32_t sum_lanes(__m256i v) {
    int32_t lanes[8], sum = 0;
    _mm256_storeu_si256((__m256i *)lanes, v);
    for (int i = 0; i < 8; i++) sum += lanes[i];
    return sum;
}

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
    __m256i number[4], halves[2];
    for (int i = 0; i < 4; i++) number[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    for (int i = 0; i < 2; i++) halves[i] = _mm256_add_epi32(number[2 * i], number[2 * i + 1]);
    int32_t first = sum_lanes(halves[0]), sum = first + sum_lanes(halves[1]);
#ifdef __AVXVNNI__
    for (int i = 0; i < 4; i++) {
        int32_t numbers[8];
        _mm256_storeu_si256((__m256i *)numbers, number[i]);
        for (int j = 0; j < 8; j++) {
            out->low[8 * i + j] = (int8_t)numbers[j];
            out->high[8 * i + j] = (int8_t)((numbers[j] + 128) >> 8);
        }
    }
    out->starts[0] = -128 * first;
    out->starts[1] = -128 * (sum - first);
#else
    for (int i = 0; i < 2; i++) {
        __m256i both = _mm256_packs_epi32(number[2 * i], number[2 * i + 1]);
        _mm256_storeu_si256((__m256i *)(out->numbers + 16 * i), _mm256_permute4x64_epi64(both, 0xd8));
    }
#endif
    out->scale = (largest > LEAST ? largest / LIMIT : 0) + nan;
    out->sum = out->scale * (float)sum;
}

#ifdef __AVXVNNI__

#define VECTORS 4  // of a group

// a group of four rows: 8 columns in each vector
SLIP_INLINE void load_weights(int layout, const uint8_t *block, __m256i w[VECTORS]) {
    if (slip_has_pairs(layout)) {
        for (int c = 0; c < 2; c++) {
            __m256i pairs = _mm256_loadu_si256((const __m256i *)(block + 32 * c));
            w[c] = _mm256_and_si256(pairs, _mm256_set1_epi8(15));
            w[c + 2] = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi8(15));
        }
        return;
    }
    for (int c = 0; c < 4; c++) {
        w[c] = _mm256_loadu_si256((const __m256i *)(block + 32 * c));
        if (layout != SLIP_Q5_K) w[c] = _mm256_xor_si256(w[c], _mm256_set1_epi8(-128));
    }
}

// 4 columns of x, repeated for each row of the lower half; the next 4 for the upper half
SLIP_INLINE __m256i spread(const int8_t *x) {
    const __m256i order = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)x)), order);
}

// 8 * count columns times one digit
SLIP_INLINE __m128i dot_digit(int count, const __m256i *w, const int8_t *x) {
    __m256i total = _mm256_setzero_si256();
    for (int c = 0; c < count; c++) total = _mm256_dpbusd_avx_epi32(total, w[c], spread(x + 8 * c));
    return _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
}

// A group times a token: the sum of 16 * halves columns, from column 16 * first on
SLIP_INLINE __m128i dot_halves(int is_signed, int first, int halves, const __m256i w[VECTORS], const SlipActivations *x) {
    __m128i high = dot_digit(2 * halves, w + 2 * first, x->high + 16 * first);
    __m128i low = dot_digit(2 * halves, w + 2 * first, x->low + 16 * first);
    __m128i sum = _mm_add_epi32(_mm_slli_epi32(high, 8), low);
    if (!is_signed) return sum;
    return _mm_add_epi32(sum, _mm_set1_epi32(halves == 2 ? x->starts[0] + x->starts[1] : x->starts[first]));
}

#else

#define VECTORS 8

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

SLIP_INLINE __m128i dot_halves(int is_signed, int first, int halves, const __m256i w[VECTORS], const SlipActivations *x) {
    (void)is_signed;
    __m256i total = _mm256_setzero_si256();  // sums of column pairs: two per row
    for (int c = 0; c < 4 * halves; c++) {
        int64_t four;
        memcpy(&four, x->numbers + 16 * first + 4 * c, 8);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(w[4 * first + c], _mm256_set1_epi64x(four)));
    }
    return _mm_hadd_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
}

#endif

// Four weight rows times each token of a tile. Callers pass constants for `layout` and `tokens`.
SLIP_INLINE void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales,
                               const uint16_t *offsets, const SlipActivations *x, int64_t groups, float (*out)[4]) {
    const int is_signed = layout == SLIP_EIGHT_BITS || layout == SLIP_Q6_K;
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
                    __m128i sum = dot_halves(is_signed, half, 1, w, x + t);
                    total[t] = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(s[half], x_scale), total[t]);
                }
                continue;
            }
            __m128i sum = dot_halves(is_signed, 0, 2, w, x + t);
            total[t] = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(s[0], x_scale), total[t]);
            if (slip_has_offset(layout)) total[t] = _mm_fmadd_ps(s[1], _mm_set1_ps(x[t].sum), total[t]);
        }
    }
    for (int t = 0; t < tokens; t++) _mm_storeu_ps(out[t], total[t]);
}
