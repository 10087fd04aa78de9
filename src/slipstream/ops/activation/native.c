// silu(gate) * up, where a row is [gate, up].
#include <stdint.h>

#include "../native_math.h"

void slip_silu_and_mul(const float *gate_up, float *out, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 16384)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        float *o = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) o[i] = gate[i] / (1.0f + slip_exp(-gate[i])) * up[i];
    }
}
