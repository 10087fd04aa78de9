// One token of each row over its pages, read where they lie. A thread takes one row and one head of keys at a time;
// keys come in stretches with a running softmax, so what a row gets does not depend on who else is in the batch.
#include <math.h>
#include <stdint.h>

#include "../native_math.h"
#include "../native_parts.h"

#define STRETCH 64

void slip_attend_head(const float *query, float *out, const float *keys, const float *values, const int64_t *pages,
                      int64_t first, int64_t length, int64_t group, int64_t dim, int64_t page_size, int64_t slot_stride,
                      float scale, float cap) {
    float scores[STRETCH], best[group], total[group];
    const float *k[STRETCH + 3], *v[STRETCH + 3];
    for (int64_t g = 0; g < group; g++) {
        best[g] = -INFINITY;
        total[g] = 0;
        for (int64_t d = 0; d < dim; d++) out[g * dim + d] = 0;
    }
    for (int64_t start = first; start < length; start += STRETCH) {
        int64_t count = length - start < STRETCH ? length - start : STRETCH;
        for (int64_t i = 0; i < count; i++) {
            int64_t place = start + i;
            int64_t slot = pages[place / page_size] * page_size + place % page_size;
            k[i] = keys + slot * slot_stride;
            v[i] = values + slot * slot_stride;
        }
        int64_t padded = (count + 3) / 4 * 4;
        for (int64_t i = count; i < padded; i++) {
            k[i] = k[0];
            v[i] = v[0];
        }
        for (int64_t g = 0; g < group; g++) {
            const float *q = query + g * dim;
            float *o = out + g * dim;
            float highest = best[g];
            for (int64_t i = 0; i < padded; i += 4) {
                const float *k0 = k[i], *k1 = k[i + 1], *k2 = k[i + 2], *k3 = k[i + 3];
                float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
                for (int64_t d = 0; d < dim; d++) {
                    s0 += q[d] * k0[d];
                    s1 += q[d] * k1[d];
                    s2 += q[d] * k2[d];
                    s3 += q[d] * k3[d];
                }
                scores[i] = s0 * scale;
                scores[i + 1] = s1 * scale;
                scores[i + 2] = s2 * scale;
                scores[i + 3] = s3 * scale;
            }
            if (cap > 0)
                for (int64_t i = 0; i < padded; i++) scores[i] = cap * slip_tanh(scores[i] / cap);
#pragma omp simd reduction(max : highest)
            for (int64_t i = 0; i < count; i++) highest = scores[i] > highest ? scores[i] : highest;
#pragma omp simd
            for (int64_t i = 0; i < padded; i++) scores[i] = slip_exp(scores[i] - highest);
            for (int64_t i = count; i < padded; i++) scores[i] = 0;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < padded; i++) sum += scores[i];
            float shrink = best[g] == -INFINITY ? 0 : slip_exp(best[g] - highest);
            best[g] = highest;
            total[g] = total[g] * shrink + sum;
            if (start > first && shrink != 1.0f)
                for (int64_t d = 0; d < dim; d++) o[d] *= shrink;
            for (int64_t i = 0; i < padded; i += 4) {
                const float *v0 = v[i], *v1 = v[i + 1], *v2 = v[i + 2], *v3 = v[i + 3];
                float p0 = scores[i], p1 = scores[i + 1], p2 = scores[i + 2], p3 = scores[i + 3];
#pragma omp simd
                for (int64_t d = 0; d < dim; d++) o[d] += p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d];
            }
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float factor = 1.0f / total[g];
        for (int64_t d = 0; d < dim; d++) out[g * dim + d] *= factor;
    }
}

// query [rows, heads, dim] with a stride between rows; keys, values [pages, page_size, kv heads, dim];
// window: how many keys are seen, 0 for all; cap: bound of the scores, 0 for none
void slip_attend_decode(const float *query, float *out, const float *keys, const float *values, const int64_t *tables,
                        const int64_t *lengths, float scale, float cap, int64_t window, int64_t num_rows, int64_t num_heads,
                        int64_t num_kv_heads, int64_t dim, int64_t page_size, int64_t query_stride,
                        int64_t table_stride) {
    int64_t group = num_heads / num_kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t head = 0; head < num_kv_heads; head++) {
            int64_t first = window && lengths[row] > window ? lengths[row] - window : 0;
            slip_attend_head(query + row * query_stride + head * group * dim,
                             out + (row * num_heads + head * group) * dim, keys + head * dim, values + head * dim,
                             tables + row * table_stride, first, lengths[row], group, dim, page_size,
                             num_kv_heads * dim, scale, cap);
        }
}
