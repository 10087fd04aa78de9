// Float vectors of the processor's width.
#ifndef SLIP_NATIVE_VECTOR_H
#define SLIP_NATIVE_VECTOR_H

#include <stdint.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define SLIP_WIDTH 16
#elif defined(__AVX2__)
#define SLIP_WIDTH 8
#else
#define SLIP_WIDTH 4
#endif

typedef float SlipVector __attribute__((vector_size(4 * SLIP_WIDTH)));

static inline SlipVector slip_load(const float *a) {
    SlipVector v;
    memcpy(&v, a, sizeof v);
    return v;
}

// the same number of bfloat16 values: the upper halves of float32 values
static inline SlipVector slip_load_bfloat16(const uint16_t *a) {
#if defined(__AVX512F__)
    return (SlipVector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a)), 16);
#elif defined(__AVX2__)
    return (SlipVector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)a)), 16);
#elif defined(__aarch64__)
    return (SlipVector)vshll_n_u16(vld1_u16(a), 16);
#else
    uint32_t bits[SLIP_WIDTH];
    for (int n = 0; n < SLIP_WIDTH; n++) bits[n] = (uint32_t)a[n] << 16;
    SlipVector v;
    memcpy(&v, bits, sizeof v);
    return v;
#endif
}

static inline void slip_store(float *a, SlipVector v) { memcpy(a, &v, sizeof v); }

static inline SlipVector slip_fill(float a) { return a - (SlipVector){0}; }

// a * b + c, rounded as slip_fma rounds (native_math.h)
static inline __attribute__((always_inline)) SlipVector slip_fma_vector(SlipVector a, SlipVector b, SlipVector c) {
#if defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#elif defined(__AVX512F__)
    return (SlipVector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (SlipVector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// sum of the lanes, in order
static inline float slip_sum_lanes(SlipVector v) {
    float sum = 0;
    for (int n = 0; n < SLIP_WIDTH; n++) sum += v[n];
    return sum;
}

#endif
