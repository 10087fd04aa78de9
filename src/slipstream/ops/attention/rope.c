// RoPE: dimension i is rotated with i + half. A table row has all cosines, then all sines, the first half negated.
#include <stdint.h>
#include <string.h>

#include "native_math.h"
#include "native_parts.h"
#include "native_team.h"

void slip_rope_head(const float *x, const float *cosines, float *out, int64_t dim, int64_t rotary) {
    const float *sines = cosines + rotary;
    int64_t half = rotary / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        out[i] = slip_fma(low, cosines[i], high * sines[i]);
        out[i + half] = slip_fma(high, cosines[i + half], low * sines[i + half]);
    }
    if (rotary < dim && out != x) memcpy(out + rotary, x + rotary, (dim - rotary) * sizeof(float));
}

void slip_rope(const float *x, const float *table, float *out, int64_t num_tokens, int64_t num_heads, int64_t dim,
               int64_t rotary, int64_t token_stride) {
#pragma omp parallel for if (num_tokens * num_heads * dim > 65536) num_threads(slip_team_size(num_tokens))
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++)
            slip_rope_head(x + token * token_stride + head * dim, table + token * 2 * rotary,
                           out + (token * num_heads + head) * dim, dim, rotary);
}
