// Residual add and RMS norm per row, and RMS norm per head.
#include <math.h>
#include <stdint.h>

#include "native_math.h"
#include "native_parts.h"
#include "native_team.h"

#define WIDTH SLIP_WIDTH
#define LANES 4  // independent accumulators per sum, to hide the latency of an FMA

static float sum_squares(const float *x, int64_t size) {
    SlipVector total[LANES] = {0};
    int64_t i = 0;
    for (; i + WIDTH * LANES <= size; i += WIDTH * LANES)
        for (int l = 0; l < LANES; l++) {
            SlipVector v = slip_load(x + i + l * WIDTH);
            total[l] = slip_fma_vector(v, v, total[l]);
        }
    for (; i + WIDTH <= size; i += WIDTH) {
        SlipVector v = slip_load(x + i);
        total[0] = slip_fma_vector(v, v, total[0]);
    }
    float sum = slip_sum_lanes((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < size; i++) sum = slip_fma(x[i], x[i], sum);
    return sum;
}

void slip_norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, float eps,
                   int64_t size) {
    if (residual) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sum[i] = x[i] + residual[i];
        x = sum;
    }
    float factor = 1.0f / sqrtf(sum_squares(x, size) / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

void slip_add_rms_norm(const float *x, const float *residual, const float *weight, float *sum, float *out,
                       float eps, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 32768) num_threads(slip_team_size(num_rows))
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t at = row * size;
        slip_norm_row(x + at, residual ? residual + at : 0, weight, sum + at, out + at, eps, size);
    }
}

// RMS norm per head: x [tokens, heads, size] with a stride between tokens, weight [heads, size]
void slip_norm_heads(const float *x, const float *weight, float *out, float eps, int64_t num_tokens, int64_t num_heads,
                     int64_t size, int64_t token_stride) {
#pragma omp parallel for if (num_tokens * num_heads * size > 32768) num_threads(slip_team_size(num_tokens))
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++)
            slip_norm_row(x + token * token_stride + head * size, 0, weight + head * size, 0,
                          out + (token * num_heads + head) * size, eps, size);
}
