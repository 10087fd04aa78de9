// Greedy sampling: the index of the largest logit of each row.
#include <math.h>
#include <stdint.h>

#include "native_team.h"
#include "native_math.h"

#define PART 2048  // columns per pass: they stay in the L1 cache
#define LANES 4    // independent maxima
#define WIDTH SLIP_WIDTH

typedef int32_t Bits __attribute__((vector_size(sizeof(SlipVector))));

// The largest of x[0 .. size). Sets `has_nan` if x has NaN, which no comparison finds.
static float highest_of(const float *x, int64_t size, int *has_nan) {
    SlipVector best[LANES];
    Bits nan = {0};
    for (int l = 0; l < LANES; l++) best[l] = slip_fill(-INFINITY);
    int64_t i = 0;
    for (; i + LANES * WIDTH <= size; i += LANES * WIDTH)
        for (int l = 0; l < LANES; l++) {
            SlipVector v = slip_load(x + i + l * WIDTH);
            Bits higher = v > best[l];
            best[l] = (SlipVector)((higher & (Bits)v) | (~higher & (Bits)best[l]));
            nan |= v != v;
        }
    float highest = -INFINITY;
    for (int l = 0; l < LANES; l++)
        for (int n = 0; n < WIDTH; n++) {
            highest = best[l][n] > highest ? best[l][n] : highest;
            *has_nan |= nan[n] != 0;
        }
    for (; i < size; i++) {
        highest = x[i] > highest ? x[i] : highest;
        *has_nan |= x[i] != x[i];
    }
    return highest;
}

// logits [rows, size]. tokens: the first of equal maxima. A row fails if it has NaN, or nothing above -infinity; its
// token is 0.
void slip_argmax(const float *logits, int64_t *tokens, uint8_t *failed, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows > 1) num_threads(slip_team_size(num_rows))
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = logits + row * size;
        float best = -INFINITY;
        int64_t token = 0;
        int has_nan = 0;
        for (int64_t first = 0; first < size; first += PART) {
            float highest = highest_of(x + first, first + PART < size ? PART : size - first, &has_nan);
            if (highest > best) best = highest, token = first;
        }
        failed[row] = has_nan || !(best > -INFINITY);
        if (!failed[row])
            while (x[token] != best) token++;
        tokens[row] = failed[row] ? 0 : token;
    }
}
