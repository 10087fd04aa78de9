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

#endif
