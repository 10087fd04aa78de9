// Low-bit GEMM for x86 with AVX2 and F16C, or with AVX-512.
#ifndef SLIP_NATIVE_LOW_BIT_X86_H
#define SLIP_NATIVE_LOW_BIT_X86_H

#include <immintrin.h>
#include <math.h>

#include "native_low_bit_layout.h"

SLIP_INLINE __m128 from_half(const uint16_t *halves) {
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)halves));
}

// Scale and offset of block g, a lane per row. Q6_K: scales of the first and of the last 16 columns.
SLIP_INLINE void load_scales(int layout, const uint8_t *scales, const uint16_t *offsets, int64_t g, __m128 found[2]) {
    if (layout == SLIP_Q4_K || layout == SLIP_Q5_K) {
        const SlipScalesQ45 *s = (const SlipScalesQ45 *)scales + (g >> 3);
        __m256 both = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&s->blocks[g & 7])));
        found[0] = _mm_mul_ps(from_half(s->d), _mm256_castps256_ps128(both));
        found[1] = _mm_mul_ps(from_half(s->dmin), _mm256_extractf128_ps(both, 1));
    } else if (layout == SLIP_Q6_K) {
        const SlipScalesQ6 *s = (const SlipScalesQ6 *)scales + (g >> 3);
        __m256 both = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&s->blocks[g & 7])));
        found[0] = _mm_mul_ps(from_half(s->d), _mm256_castps256_ps128(both));
        found[1] = _mm_mul_ps(from_half(s->d), _mm256_extractf128_ps(both, 1));
    } else {
        found[0] = found[1] = from_half((const uint16_t *)scales + g * 4);
        if (layout == SLIP_FOUR_BITS) found[1] = from_half(offsets + g * 4);
        if (layout == SLIP_Q4_0) found[1] = _mm_mul_ps(found[0], _mm_set1_ps(-8));
    }
}

#ifdef SLIP_AVX512
// Low-bit GEMM for x86 with AVX-512. A lane is a weight row. The integer sums of a group are exact, so that results have
// the same bits with and without VNNI.
//
// With VNNI a vector holds 4 columns of 16 rows, and a dot product instruction multiplies them by 4 columns of a token,
// which it broadcasts from memory. The two digits of an activation have sums of their own. The instruction multiplies
// unsigned by signed bytes. Signed weights are stored as q and read as q + 128; the integer sum then starts at -128 times
// the sum of the activations.
//
// Without VNNI a vector holds 2 columns of 16 rows, extended to 16 bits, and is multiplied by 2 whole activations: as
// many products as with two digits of 4 columns. Products of bytes (vpmaddubsw) would need as many instructions for
// weights of 4 bits, and saturate for those of 8.

#define TILE_ROWS 16
#define BLOCKS 4  // of four rows

static void quantize_block(const float *x, SlipActivations *out) {
    __m512 v[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
    // NaN if a number is infinite or NaN
    float nan = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_sub_ps(v[0], v[0]), _mm512_sub_ps(v[1], v[1])));
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1])));
    __m512 inverse = _mm512_set1_ps(largest > LEAST ? LIMIT / largest : 0);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 2; i++) {
        __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
        total = _mm512_add_epi32(total, number);
#ifdef __AVX512VNNI__
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i *)(out->low + 16 * i), _mm512_cvtepi32_epi8(number));
        _mm_storeu_si128((__m128i *)(out->high + 16 * i), _mm512_cvtepi32_epi8(high));
        out->starts[i] = -128 * _mm512_reduce_add_epi32(number);
#else
        __m256i in_order = _mm512_cvtepi32_epi16(number);  // of each 4 columns: 0 and 2, then 1 and 3
        in_order = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_order, 0xd8), 0xd8);
        _mm256_storeu_si256((__m256i *)(out->numbers + 16 * i), in_order);
#endif
    }
    out->scale = (largest > LEAST ? largest / LIMIT : 0) + nan;
    out->sum = out->scale * (float)_mm512_reduce_add_epi32(total);
}

SLIP_INLINE __m512i broadcast(const void *four_bytes) {
    int32_t four;
    memcpy(&four, four_bytes, 4);
    return _mm512_set1_epi32(four);
}

// 64 bytes of each block, [4 column groups][4 rows][4 columns], to a vector of 16 rows for each column group
SLIP_INLINE void load_columns(const uint8_t *const *blocks, int64_t at, __m512i w[4]) {
    __m512i b[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) b[i] = _mm512_loadu_si512(blocks[i] + at);
    __m512i low_01 = _mm512_shuffle_i32x4(b[0], b[1], 0x44), high_01 = _mm512_shuffle_i32x4(b[0], b[1], 0xee);
    __m512i low_23 = _mm512_shuffle_i32x4(b[2], b[3], 0x44), high_23 = _mm512_shuffle_i32x4(b[2], b[3], 0xee);
    w[0] = _mm512_shuffle_i32x4(low_01, low_23, 0x88);
    w[1] = _mm512_shuffle_i32x4(low_01, low_23, 0xdd);
    w[2] = _mm512_shuffle_i32x4(high_01, high_23, 0x88);
    w[3] = _mm512_shuffle_i32x4(high_01, high_23, 0xdd);
}

// 8 bytes of each block: the first 4 of all blocks, and the last 4
SLIP_INLINE void load_pairs(const uint8_t *const *blocks, int64_t at, __m128i *first, __m128i *last) {
    __m128i b[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) b[i] = _mm_loadl_epi64((const __m128i *)(blocks[i] + at));
    __m128i b01 = _mm_unpacklo_epi32(b[0], b[1]), b23 = _mm_unpacklo_epi32(b[2], b[3]);
    *first = _mm_unpacklo_epi64(b01, b23);
    *last = _mm_unpackhi_epi64(b01, b23);
}

// four float16 of each block
SLIP_INLINE __m512 load_halves(const uint8_t *const *blocks, int64_t at) {
    __m128i b[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) b[i] = _mm_loadl_epi64((const __m128i *)(blocks[i] + at));
    return _mm512_cvtph_ps(_mm256_set_m128i(_mm_unpacklo_epi64(b[2], b[3]), _mm_unpacklo_epi64(b[0], b[1])));
}

// Scale and offset of group g, a lane per row. Q6_K: scales of the first and of the last 16 columns. `of_eight`: the
// factors of K-quants, loaded with the first of 8 groups.
SLIP_INLINE void load_tile_scales(int layout, const uint8_t *const *scales, const uint8_t *const *offsets, int64_t g,
                                  __m512 of_eight[2], __m512 found[2]) {
    __m128i first, last;
    if (layout == SLIP_Q4_K || layout == SLIP_Q5_K) {
        int64_t at = (g >> 3) * sizeof(SlipScalesQ45);
        if ((g & 7) == 0) {
            of_eight[0] = load_halves(scales, at);
            of_eight[1] = load_halves(scales, at + 8);
        }
        load_pairs(scales, at + 16 + 8 * (g & 7), &first, &last);
        found[0] = _mm512_mul_ps(of_eight[0], _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(first)));
        found[1] = _mm512_mul_ps(of_eight[1], _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(last)));
    } else if (layout == SLIP_Q6_K) {
        int64_t at = (g >> 3) * sizeof(SlipScalesQ6);
        if ((g & 7) == 0) of_eight[0] = load_halves(scales, at);
        load_pairs(scales, at + 8 + 8 * (g & 7), &first, &last);
        found[0] = _mm512_mul_ps(of_eight[0], _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first)));
        found[1] = _mm512_mul_ps(of_eight[0], _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(last)));
    } else {
        found[0] = found[1] = load_halves(scales, g * 8);
        if (layout == SLIP_FOUR_BITS) found[1] = load_halves(offsets, g * 8);
        if (layout == SLIP_Q4_0) found[1] = _mm512_mul_ps(found[0], _mm512_set1_ps(-8));
    }
}

// the addresses of four blocks of four rows
typedef struct {
    const uint8_t *weights[BLOCKS], *scales[BLOCKS], *offsets[BLOCKS];
} TileRows;

SLIP_INLINE TileRows find_tile_rows(int layout, const uint8_t *weights, const uint8_t *scales, const uint16_t *offsets,
                                    int64_t groups, int64_t num_blocks) {
    TileRows rows;
    for (int i = 0; i < BLOCKS; i++) {
        int64_t block = i < num_blocks ? i : num_blocks - 1;  // rows beyond the last block: computed, not used
        rows.weights[i] = weights + block * groups * slip_weight_bytes(layout);
        rows.scales[i] = scales + block * groups * slip_scale_bytes(layout);
        rows.offsets[i] = (const uint8_t *)(offsets + block * groups * 4);
    }
    return rows;
}

#ifdef __AVX512VNNI__

#define VECTORS 8  // of a group

// group g of 16 rows: 4 columns in each vector
SLIP_INLINE void load_weights(int layout, const uint8_t *const *blocks, int64_t g, __m512i w[VECTORS]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if (!slip_has_pairs(layout)) {
        load_columns(blocks, g * 128, w);
        load_columns(blocks, g * 128 + 64, w + 4);
        return;
    }
    load_columns(blocks, g * 64, w);
    for (int c = 0; c < 4; c++) {
        w[c + 4] = _mm512_and_si512(_mm512_srli_epi16(w[c], 4), nibble);
        w[c] = _mm512_and_si512(w[c], nibble);
    }
}

SLIP_INLINE void make_unsigned(__m512i w[VECTORS]) {
    for (int c = 0; c < VECTORS; c++) w[c] = _mm512_xor_si512(w[c], _mm512_set1_epi8(-128));
}

// A group times a token: the sum of 16 * halves columns, from column 16 * first on
SLIP_INLINE __m512i dot_halves(int is_signed, int first, int halves, const __m512i w[VECTORS], const SlipActivations *x) {
    __m512i high = _mm512_setzero_si512(), low = high;
    if (is_signed) low = _mm512_set1_epi32(halves == 2 ? x->starts[0] + x->starts[1] : x->starts[first]);
    for (int c = 0; c < 4 * halves; c++) {
        high = _mm512_dpbusd_epi32(high, w[4 * first + c], broadcast(x->high + 16 * first + 4 * c));
        low = _mm512_dpbusd_epi32(low, w[4 * first + c], broadcast(x->low + 16 * first + 4 * c));
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

#else

#define VECTORS 16

// Group g of 16 rows. Of each 4 columns 0 and 2 are in a vector, 1 and 3 in the next one: no shuffle is needed.
SLIP_INLINE void load_weights(int layout, const uint8_t *const *blocks, int64_t g, __m512i w[VECTORS]) {
    const __m512i nibble = _mm512_set1_epi16(15);
    __m512i columns[8];
    if (!slip_has_pairs(layout)) {
        load_columns(blocks, g * 128, columns);
        load_columns(blocks, g * 128 + 64, columns + 4);
        for (int c = 0; c < 8; c++) {
            w[2 * c] = _mm512_srai_epi16(_mm512_slli_epi16(columns[c], 8), 8);
            w[2 * c + 1] = _mm512_srai_epi16(columns[c], 8);
        }
        return;
    }
    load_columns(blocks, g * 64, columns);
    for (int c = 0; c < 4; c++) {
        w[2 * c] = _mm512_and_si512(columns[c], nibble);
        w[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(columns[c], 8), nibble);
        w[2 * c + 8] = _mm512_and_si512(_mm512_srli_epi16(columns[c], 4), nibble);
        w[2 * c + 9] = _mm512_srli_epi16(columns[c], 12);
    }
}

SLIP_INLINE void make_unsigned(__m512i w[VECTORS]) { (void)w; }  // 16-bit products are signed

SLIP_INLINE __m512i dot_halves(int is_signed, int first, int halves, const __m512i w[VECTORS], const SlipActivations *x) {
    (void)is_signed;
    __m512i total = _mm512_setzero_si512();
    for (int c = 0; c < 8 * halves; c++)
        total = _mm512_add_epi32(total, _mm512_madd_epi16(w[8 * first + c], broadcast(x->numbers + 16 * first + 2 * c)));
    return total;
}

#endif

// Up to 16 weight rows, in `num_blocks` blocks of four, times each token of a tile. Callers pass constants for `layout`
// and `tokens`.
SLIP_INLINE void multiply_tile(int layout, int tokens, const uint8_t *weights, const uint8_t *scales,
                               const uint16_t *offsets, const SlipActivations *x, int64_t groups, int64_t num_blocks,
                               float (*out)[TILE_ROWS]) {
    const TileRows rows = find_tile_rows(layout, weights, scales, offsets, groups, num_blocks);
    int is_signed = layout == SLIP_EIGHT_BITS || layout == SLIP_Q6_K;
    int64_t bytes = slip_weight_bytes(layout);
    __m512 total[TILE], of_eight[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int t = 0; t < tokens; t++) total[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, x += tokens) {
        __m512i w[VECTORS];
        load_weights(layout, rows.weights, g, w);
        for (int i = 0; i < BLOCKS; i++)  // the next 16 rows
            for (int line = 0; line < bytes; line += 64)
                _mm_prefetch(rows.weights[i] + BLOCKS * groups * bytes + g * bytes + line, _MM_HINT_T1);
        if (is_signed) make_unsigned(w);
        __m512 s[2];
        load_tile_scales(layout, rows.scales, rows.offsets, g, of_eight, s);
        for (int t = 0; t < tokens; t++) {
            __m512 x_scale = _mm512_set1_ps(x[t].scale);
            if (layout == SLIP_Q6_K) {
                for (int half = 0; half < 2; half++) {
                    __m512i sum = dot_halves(is_signed, half, 1, w, x + t);
                    total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(s[half], x_scale), total[t]);
                }
                continue;
            }
            __m512i sum = dot_halves(is_signed, 0, 2, w, x + t);
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(s[0], x_scale), total[t]);
            if (slip_has_offset(layout)) total[t] = _mm512_fmadd_ps(s[1], _mm512_set1_ps(x[t].sum), total[t]);
        }
    }
    for (int t = 0; t < tokens; t++) _mm512_storeu_ps(out[t], total[t]);
}

#else
// Low-bit GEMM for x86 with AVX2, FMA and F16C. A vector holds 4 columns of four weight rows, extended to 16 bits, and is
// multiplied by 4 whole activations; with AVX-VNNI one instruction adds the products up too. Two digits of 8 bits would need
// as many products and a permutation of each activation. The integer sums of a group are exact.

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

#endif
#endif
