// Fused multiply-add, and exp in arithmetic that compilers vectorize, with an error of at most 2 ulp in float32.
//
// The compiler never contracts multiply and add (-ffp-contract=off): it would decide for each copy of a loop, and a
// result could depend on which copy computed it. Code that wants a fused multiply-add calls slip_fma.
#ifndef SLIP_NATIVE_MATH_H
#define SLIP_NATIVE_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

// a * b + c, rounded once on processors with an FMA instruction, else twice
static inline float slip_fma(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float slip_exp(float x) {
    x = x < -87.0f ? -87.0f : x;  // NaN propagates
    x = x > 88.0f ? 88.0f : x;
    // x = n * ln 2 + r, with ln 2 in two parts
    float n = rintf(x * 1.44269504f);
    float r = slip_fma(n, -0.693359375f, x);
    r = slip_fma(n, 2.12194440e-4f, r);
    float p = 1.3981999507e-3f;
    p = slip_fma(p, r, 8.3334519073e-3f);
    p = slip_fma(p, r, 4.1665795894e-2f);
    p = slip_fma(p, r, 1.6666665459e-1f);
    p = slip_fma(p, r, 5.0000001201e-1f);
    p = slip_fma(p * r, r, r) + 1.0f;
    int32_t power = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}

static inline float slip_tanh(float x) { return 1.0f - 2.0f / (slip_exp(2.0f * x) + 1.0f); }

// Float vectors of the processor's width.

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

// a * b + c, rounded as slip_fma rounds
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

typedef float SlipFour __attribute__((vector_size(16)));

// The sum of each of four vectors. The order of a sum is fixed: it does not depend on the other vectors.
static inline __attribute__((always_inline)) SlipFour slip_sum_four(SlipVector a, SlipVector b, SlipVector c, SlipVector d) {
#if defined(__aarch64__)
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
#elif defined(__AVX512F__) && defined(__AVX512DQ__)
    __m512 v[4] = {(__m512)a, (__m512)b, (__m512)c, (__m512)d};
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3])));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return (SlipFour)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
    __m256 v[4] = {(__m256)a, (__m256)b, (__m256)c, (__m256)d};
    __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1])));
    __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3])));
    __m256 all = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
    return (SlipFour)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
    SlipVector v[4] = {a, b, c, d};
    SlipFour sums = {0};
    for (int j = 0; j < 4; j++)
        for (int n = 0; n < SLIP_WIDTH; n += 4) sums[j] += (v[j][n] + v[j][n + 1]) + (v[j][n + 2] + v[j][n + 3]);
    return sums;
#endif
}

// The sum of one vector. On x86 in the order of slip_sum_four; elsewhere in order of the lanes.
static inline float slip_sum_lanes(SlipVector v) {
#ifdef __AVX2__
    return slip_sum_four(v, v, v, v)[0];
#else
    float sum = 0;
    for (int n = 0; n < SLIP_WIDTH; n++) sum += v[n];
    return sum;
#endif
}

#endif
