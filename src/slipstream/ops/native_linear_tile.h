// Weight rows times tokens, for one type of weights. linear/native.c includes it once per type and defines WEIGHT, the
// loads and the names. Register pressure is at its limit: after a change check that the loop of 3 x 4 sums has no spills.

// One register tile. Callers pass constants for `rows` and `tokens`, so that the loops unroll.
SLIP_INLINE void TILE_NAME(int rows, int tokens, const WEIGHT *weight, const float *x, int64_t size, float *out,
                           int64_t out_stride) {
    Vector total[MAX_ROWS][4][LANES] = {0};
    int64_t i = 0;
    for (; i + WIDTH * LANES <= size; i += WIDTH * LANES)
        for (int l = 0; l < LANES; l++) {
            Vector w[MAX_ROWS];
            for (int r = 0; r < rows; r++) w[r] = LOAD_VECTOR(weight + r * size + i + l * WIDTH);
            for (int t = 0; t < tokens; t++) {
                Vector a = slip_load(x + t * size + i + l * WIDTH);
                for (int r = 0; r < rows; r++) total[r][t][l] = slip_fma_vector(w[r], a, total[r][t][l]);
            }
        }
    float sums[MAX_ROWS][4];
#if MAX_ROWS == 4
    if (tokens == 4)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            SlipFour four = slip_sum_four(total[r][0][0] + total[r][0][1], total[r][1][0] + total[r][1][1],
                                          total[r][2][0] + total[r][2][1], total[r][3][0] + total[r][3][1]);
            memcpy(sums[r], &four, sizeof four);
        }
    else if (rows == 4) {
        SlipFour four = slip_sum_four(total[0][0][0] + total[0][0][1], total[1][0][0] + total[1][0][1],
                                      total[2][0][0] + total[2][0][1], total[3][0][0] + total[3][0][1]);
        for (int r = 0; r < 4; r++) sums[r][0] = four[r];
    } else
#endif
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) sums[r][t] = slip_sum_lanes(total[r][t][0] + total[r][t][1]);
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++) {
            for (int64_t j = i; j < size; j++)
                sums[r][t] = slip_fma(LOAD_ONE(weight[r * size + j]), x[t * size + j], sums[r][t]);
            out[t * out_stride + r] = sums[r][t];
        }
}

static SLIP_PART void ROWS_NAME(const float *x, const WEIGHT *weight, float *out, int64_t num_tokens, int64_t size,
                                int64_t out_stride, int64_t first, int64_t last) {
    int64_t n = first, fours = num_tokens / 4 * 4;
    for (; fours && n + 3 <= last; n += 3) {
        for (int64_t t = 0; t < fours; t += 4)
            TILE_NAME(3, 4, weight + n * size, x + t * size, size, out + t * out_stride + n, out_stride);
        for (int64_t t = fours; t < num_tokens; t++)
            TILE_NAME(3, 1, weight + n * size, x + t * size, size, out + t * out_stride + n, out_stride);
    }
#if MAX_ROWS == 4
    for (; n + 4 <= last; n += 4)
        for (int64_t t = 0; t < num_tokens; t++)
            TILE_NAME(4, 1, weight + n * size, x + t * size, size, out + t * out_stride + n, out_stride);
#endif
    for (; n < last; n++)
        for (int64_t t = 0; t < num_tokens; t += 4) {
            const WEIGHT *row = weight + n * size;
            const float *a = x + t * size;
            float *o = out + t * out_stride + n;
            switch (num_tokens - t) {
                case 1: TILE_NAME(1, 1, row, a, size, o, out_stride); break;
                case 2: TILE_NAME(1, 2, row, a, size, o, out_stride); break;
                case 3: TILE_NAME(1, 3, row, a, size, o, out_stride); break;
                default: TILE_NAME(1, 4, row, a, size, o, out_stride);
            }
        }
}
