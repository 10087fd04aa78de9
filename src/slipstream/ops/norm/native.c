// Residual add and RMS norm of each row, and RMS norm of each head.
#include <math.h>
#include <stdint.h>

#include "../native_parts.h"

void slip_norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, float eps,
                   int64_t size) {
    float squares = 0;
    if (residual) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sum[i] = x[i] + residual[i];
        x = sum;
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
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

// of each head, x [tokens, heads, size] with a stride between tokens, weight [heads, size]
void slip_norm_heads(const float *x, const float *weight, float *out, float eps, int64_t num_tokens, int64_t num_heads,
                     int64_t size, int64_t token_stride) {
#pragma omp parallel for if (num_tokens * num_heads * size > 32768)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++)
            slip_norm_row(x + token * token_stride + head * size, 0, weight + head * size, 0,
                          out + (token * num_heads + head) * size, eps, size);
}
