// Weight rows times tokens, for one type of weights. linear.c includes it once per type and defines WEIGHT, the
// loads and the names. Register pressure is at its limit: after a change check that the loop of 3 x 4 sums has no spills.

#if LANES == 2
#define TOTAL(r, t) (total[r][t][0] + total[r][t][1])
#else
#define TOTAL(r, t) total[r][t][0]
#endif

// One register tile. Callers pass constants for `rows` and `tokens`, so that the loops unroll. `ahead`: the weight rows
// of the next tile, adjacent in memory, which are prefetched from end to end; with several streams at once hardware
// prefetches too little.
SLIP_INLINE void TILE_NAME(int rows, int tokens, const WEIGHT *weight, const WEIGHT *ahead, const float *x, int64_t size,
                           float *out, int64_t out_stride) {
    Vector total[MAX_ROWS][MAX_TOKENS][LANES] = {0};
    int64_t i = 0;
    for (; i + WIDTH * LANES <= size; i += WIDTH * LANES) {
#ifdef PREFETCH
#pragma GCC unroll 4
        for (int64_t byte = 0; byte < (int64_t)(rows * WIDTH * LANES * sizeof(WEIGHT)); byte += 64)
            PREFETCH((const char *)(ahead + rows * i) + byte);
#endif
        for (int l = 0; l < LANES; l++) {
            Vector w[MAX_ROWS];
            for (int r = 0; r < rows; r++) w[r] = LOAD_VECTOR(weight + r * size + i + l * WIDTH);
            for (int t = 0; t < tokens; t++) {
                Vector a = slip_load(x + t * size + i + l * WIDTH);
                for (int r = 0; r < rows; r++) total[r][t][l] = slip_fma_vector(w[r], a, total[r][t][l]);
            }
        }
    }
    float sums[MAX_ROWS][MAX_TOKENS];
#if MAX_ROWS == 4
    if (tokens % 4 == 0)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int t = 0; t < tokens; t += 4) {
                SlipFour four = slip_sum_four(TOTAL(r, t), TOTAL(r, t + 1), TOTAL(r, t + 2), TOTAL(r, t + 3));
                memcpy(sums[r] + t, &four, sizeof four);
            }
    else if (rows == 4)
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            SlipFour four = slip_sum_four(TOTAL(0, t), TOTAL(1, t), TOTAL(2, t), TOTAL(3, t));
            for (int r = 0; r < 4; r++) sums[r][t] = four[r];
        }
    else
#endif
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) sums[r][t] = slip_sum_lanes(TOTAL(r, t));
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++) {
            for (int64_t j = i; j < size; j++)
                sums[r][t] = slip_fma(LOAD_ONE(weight[r * size + j]), x[t * size + j], sums[r][t]);
            out[t * out_stride + r] = sums[r][t];
        }
}

// `rows` and `tokens` from row n and token t on
#define TILE(rows, tokens, t)                                                                               \
    TILE_NAME(rows, tokens, weight + n * size, n + 2 * (rows) <= last ? weight + (n + (rows)) * size : next, \
              x + (t) * size, size, out + (t) * out_stride + n, out_stride)

static SLIP_PART void ROWS_NAME(const float *x, const WEIGHT *weight, float *out, int64_t num_tokens, int64_t size,
                                int64_t out_stride, int64_t first, int64_t last, const WEIGHT *next) {
    int64_t n = first;
    for (; num_tokens >= 4 && n + 3 <= last; n += 3) {
        int64_t t = 0;
#if MAX_TOKENS == 8
        for (; t + 8 <= num_tokens; t += 8) TILE(3, 8, t);
#endif
        for (; t + 4 <= num_tokens; t += 4) TILE(3, 4, t);
        for (; t < num_tokens; t++) TILE(3, 1, t);
    }
#if MAX_ROWS == 4
    for (; n + 4 <= last; n += 4)
        switch (num_tokens) {
            case 1: TILE(4, 1, 0); break;
            case 2: TILE(4, 2, 0); break;
            default: TILE(4, 3, 0);
        }
#endif
    for (; n < last; n++)
        for (int64_t t = 0; t < num_tokens; t += 4) {
            switch (num_tokens - t) {
                case 1: TILE(1, 1, t); break;
                case 2: TILE(1, 2, t); break;
                case 3: TILE(1, 3, t); break;
                default: TILE(1, 4, t);
            }
        }
}
#undef TOTAL
#undef TILE
