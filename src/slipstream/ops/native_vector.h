// Float vectors of the processor's width.
#ifndef SLIP_NATIVE_VECTOR_H
#define SLIP_NATIVE_VECTOR_H

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
