// Gated activations: activation(gate) * up. A row is [gate, up].
#include <stdint.h>

#include "native_math.h"
#include "native_parts.h"
#include "native_team.h"

void slip_silu_row(const float *gate, const float *up, float *out, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = gate[i] / (1.0f + slip_exp(-gate[i])) * up[i];
}

void slip_gelu_tanh_row(const float *gate, const float *up, float *out, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        float g = gate[i];
        float tanh_part = slip_tanh(0.7978845608f * slip_fma(0.044715f * g * g, g, g));
        out[i] = 0.5f * g * (1.0f + tanh_part) * up[i];
    }
}

static void for_each_row(void (*part)(const float *, const float *, float *, int64_t), const float *gate_up, float *out,
                         int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 16384) num_threads(slip_team_size(num_rows))
    for (int64_t row = 0; row < num_rows; row++)
        part(gate_up + row * 2 * size, gate_up + row * 2 * size + size, out + row * size, size);
}

void slip_silu_and_mul(const float *gate_up, float *out, int64_t num_rows, int64_t size) {
    for_each_row(slip_silu_row, gate_up, out, num_rows, size);
}

void slip_gelu_tanh_and_mul(const float *gate_up, float *out, int64_t num_rows, int64_t size) {
    for_each_row(slip_gelu_tanh_row, gate_up, out, num_rows, size);
}
