// Residual add and RMS norm of each row in one pass.
#include <math.h>
#include <stdint.h>

#include "../native_parts.h"

void slip_norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, float eps,
                   int64_t size) {
    float squares = 0;
    if (residual) {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) {
            float v = x[i] + residual[i];
            sum[i] = v;
            squares += v * v;
        }
        x = sum;
    } else {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
    }
    float factor = 1.0f / sqrtf(squares / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

void slip_add_rms_norm(const float *x, const float *residual, const float *weight, float *sum, float *out,
                       float eps, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 32768)
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t at = row * size;
        slip_norm_row(x + at, residual ? residual + at : 0, weight, sum + at, out + at, eps, size);
    }
}
