// What offsets add to a product: out[t][n] += sum over groups of (sum of x over the group) * offset[n][group].
#include <stdint.h>

#define BLOCK 32
#define TOKENS 4

void slip_add_group_sums(float *out, const float *x, const float *offset, int64_t num_tokens, int64_t num_rows,
                         int64_t groups) {
    for (int64_t first = 0; first < num_tokens; first += TOKENS) {
        int64_t count = num_tokens - first < TOKENS ? num_tokens - first : TOKENS;
        float sums[TOKENS][groups];
        for (int64_t t = 0; t < TOKENS; t++)
            for (int64_t g = 0; g < groups; g++) {
                float sum = 0;
                if (t < count) {
                    const float *a = x + ((first + t) * groups + g) * BLOCK;
#pragma omp simd reduction(+ : sum)
                    for (int64_t i = 0; i < BLOCK; i++) sum += a[i];
                }
                sums[t][g] = sum;
            }
#pragma omp parallel for if (num_rows * groups > 16384)
        for (int64_t n = 0; n < num_rows; n++) {
            const float *o = offset + n * groups;
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
            for (int64_t g = 0; g < groups; g++) {
                s0 += sums[0][g] * o[g];
                s1 += sums[1][g] * o[g];
                s2 += sums[2][g] * o[g];
                s3 += sums[3][g] * o[g];
            }
            float s[TOKENS] = {s0, s1, s2, s3};
            for (int64_t t = 0; t < count; t++) out[(first + t) * num_rows + n] += s[t];
        }
    }
}
