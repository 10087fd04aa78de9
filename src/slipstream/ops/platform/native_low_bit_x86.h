// Scales of low-bit weights for x86 with AVX2 and F16C.
#ifndef SLIP_NATIVE_LOW_BIT_X86_H
#define SLIP_NATIVE_LOW_BIT_X86_H

#include <immintrin.h>

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

#endif
