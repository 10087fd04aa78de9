// Rotary positions: dimension i turns with i + half. A table row has all cosines, then all sines, the first half negated.
#include <stdint.h>
#include <string.h>

void slip_rope(const float *x, const float *table, float *out, int64_t num_tokens, int64_t num_heads, int64_t dim,
               int64_t rotary, int64_t token_stride) {
    int64_t half = rotary / 2;
#pragma omp parallel for if (num_tokens * num_heads * dim > 65536)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float *cosines = table + token * 2 * rotary, *sines = cosines + rotary;
        for (int64_t head = 0; head < num_heads; head++) {
            const float *a = x + token * token_stride + head * dim;
            float *o = out + (token * num_heads + head) * dim;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float low = a[i], high = a[i + half];
                o[i] = low * cosines[i] + high * sines[i];
                o[i + half] = high * cosines[i + half] + low * sines[i + half];
            }
            if (rotary < dim) memcpy(o + rotary, a + rotary, (dim - rotary) * sizeof(float));
        }
    }
}
