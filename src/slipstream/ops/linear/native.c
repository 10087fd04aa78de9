// Products of a few tokens with plain weights: four rows of weights meet four tokens, and their 16 sums stay in
// registers while both are read once. A token's result does not depend on its neighbours.
#include <stdint.h>
#include <string.h>

typedef float Vector __attribute__((vector_size(16)));

static inline Vector load(const float *a) {
    Vector v;
    memcpy(&v, a, sizeof v);
    return v;
}

static void tile(const float *const *rows, const float *const *x, int64_t size, float result[4][4]) {
    Vector total[4][4] = {0};
    int64_t i = 0;
    for (; i + 4 <= size; i += 4) {
        Vector w[4] = {load(rows[0] + i), load(rows[1] + i), load(rows[2] + i), load(rows[3] + i)};
        for (int t = 0; t < 4; t++) {
            Vector a = load(x[t] + i);
            for (int n = 0; n < 4; n++) total[t][n] += w[n] * a;
        }
    }
    for (int t = 0; t < 4; t++)
        for (int n = 0; n < 4; n++) {
            Vector v = total[t][n];
            float sum = (v[0] + v[1]) + (v[2] + v[3]);
            for (int64_t j = i; j < size; j++) sum += rows[n][j] * x[t][j];
            result[t][n] = sum;
        }
}

// out [tokens, rows] = x [tokens, size] times weight [rows, size]
void slip_few_tokens(const float *x, const float *weight, float *out, int64_t num_tokens, int64_t num_rows,
                     int64_t size) {
#pragma omp parallel for if (num_rows * size > 16384)
    for (int64_t n = 0; n < num_rows; n += 4) {
        // past the end the last one stands in, and is not written
        const float *rows[4], *tokens[4];
        for (int64_t i = 0; i < 4; i++) rows[i] = weight + (n + i < num_rows ? n + i : num_rows - 1) * size;
        for (int64_t t = 0; t < num_tokens; t += 4) {
            for (int64_t i = 0; i < 4; i++) tokens[i] = x + (t + i < num_tokens ? t + i : num_tokens - 1) * size;
            float result[4][4];
            tile(rows, tokens, size, result);
            for (int64_t i = 0; i < 4 && t + i < num_tokens; i++)
                memcpy(out + (t + i) * num_rows + n, result[i], (num_rows - n < 4 ? num_rows - n : 4) * sizeof(float));
        }
    }
}
