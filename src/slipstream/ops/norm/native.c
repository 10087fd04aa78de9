// Residual add and RMS norm of each row in one pass.
#include <math.h>
#include <stdint.h>

void slip_add_rms_norm(const float *x, const float *residual, const float *weight, float *sum, float *out,
                       float eps, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 32768)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *a = x + row * size;
        float *s = sum + row * size, *o = out + row * size;
        float squares = 0;
        if (residual) {
            const float *b = residual + row * size;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < size; i++) {
                float v = a[i] + b[i];
                s[i] = v;
                squares += v * v;
            }
            a = s;
        } else {
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < size; i++) squares += a[i] * a[i];
        }
        float factor = 1.0f / sqrtf(squares / (float)size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) o[i] = a[i] * factor * weight[i];
    }
}
