// Attention over pages, read in slot, for decode rows and prefill chunks.
//
// A tile is a few queries of one KV head: the heads of a group, for one or several tokens of a row. Keys are processed
// in stretches that start at multiples of 64 positions, with an online softmax. The order of each sum depends on
// positions only, so a token gets the same bits alone, in a chunk of any size, and in any batch.
#include <math.h>
#include <stdint.h>

#include "native_math.h"
#include "native_parts.h"
#include "native_team.h"

#define STRETCH 64
#define QUERIES 32  // per tile: they read the keys and values of a stretch while these are in the cache
#define BLOCK 4     // keys per load of a query
#if defined(__AVX2__) && !defined(__AVX512F__)
#define ROWS 2  // queries per load of keys and values; more sums would not fit 16 registers
#else
#define ROWS 4
#endif
#define COLUMNS 4   // vectors of a value per loop
#define WIDTH SLIP_WIDTH
#define WIDE (4 * WIDTH)  // divides a stretch
#define INLINE static inline __attribute__((always_inline))

typedef SlipVector Vector;
typedef struct {
    const float *query;
    float *out;
    int64_t first, length;  // visible positions: [first, length)
    float sink;             // score of a column that has no value; -INFINITY: there is none
} Query;
typedef float Stretch[STRETCH];  // one value per key

// Scores of some queries with four keys. Callers pass a constant for `rows`.
INLINE void score(int rows, const Query *queries, const float *const *keys, int64_t dim, float scale,
                  Stretch *scores) {
    Vector total[ROWS][BLOCK] = {0};
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) {
        Vector k[BLOCK];
        for (int j = 0; j < BLOCK; j++) k[j] = slip_load(keys[j] + d);
        for (int r = 0; r < rows; r++) {
            Vector q = slip_load(queries[r].query + d);
            for (int j = 0; j < BLOCK; j++) total[r][j] = slip_fma_vector(q, k[j], total[r][j]);
        }
    }
    SlipFour sums[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sums[r] = slip_sum_four(total[r][0], total[r][1], total[r][2], total[r][3]);
    for (int r = 0; r < rows; r++) {
        for (int64_t i = d; i < dim; i++)
            for (int j = 0; j < BLOCK; j++) sums[r][j] = slip_fma(queries[r].query[i], keys[j][i], sums[r][j]);
        sums[r] *= scale;
        memcpy(scores[r], &sums[r], sizeof sums[r]);
    }
}

// exp(x - highest) of WIDE values, computed as in slip_exp; four vectors are interleaved to hide latency. The result
// for values above `highest` is undefined.
INLINE void exponentiate(float *x, float highest) {
    typedef int32_t Bits __attribute__((vector_size(sizeof(Vector))));
    const Vector least = slip_fill(-87.0f);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding rounds to an integer, in the low bits
    Vector v[4], n[4], p[4];
    for (int k = 0; k < 4; k++) v[k] = slip_load(x + k * WIDTH) - highest;
    for (int k = 0; k < 4; k++) {
        Bits low = v[k] < least;  // NaN propagates
        v[k] = (Vector)((low & (Bits)least) | (~low & (Bits)v[k]));
    }
#define EACH(result, a, b, c) \
    for (int k = 0; k < 4; k++) result[k] = slip_fma_vector(a, b, c)
    EACH(n, v[k], slip_fill(1.44269504f), slip_fill(shift));
    EACH(v, n[k] - shift, slip_fill(-0.693359375f), v[k]);
    EACH(v, n[k] - shift, slip_fill(2.12194440e-4f), v[k]);
    EACH(p, v[k], slip_fill(1.3981999507e-3f), slip_fill(8.3334519073e-3f));
    EACH(p, p[k], v[k], slip_fill(4.1665795894e-2f));
    EACH(p, p[k], v[k], slip_fill(1.6666665459e-1f));
    EACH(p, p[k], v[k], slip_fill(5.0000001201e-1f));
    EACH(p, p[k] * v[k], v[k], v[k]);
    for (int k = 0; k < 4; k++)
        slip_store(x + k * WIDTH, (p[k] + 1.0f) * (Vector)(((Bits)n[k] << 23) + 0x3f800000));
}

// Scores to weights, in slot, over [begin, end) of the stretch at `start`. Masked keys get weight 0. The sums of
// earlier stretches are rescaled to the new maximum.
static void weigh(const Query *query, float *scores, int64_t start, int64_t begin, int64_t end, int64_t dim, float cap,
                  float *best, float *total) {
    int64_t from = query->first - start > begin ? query->first - start : begin;
    int64_t to = query->length - start < end ? query->length - start : end;
    if (cap > 0)
#pragma omp simd
        for (int64_t i = begin; i < end; i++) scores[i] = cap * slip_tanh(scores[i] / cap);
    float highest = *best;
#pragma omp simd reduction(max : highest)
    for (int64_t i = from; i < to; i++) highest = scores[i] > highest ? scores[i] : highest;
    for (int64_t i = begin / WIDE * WIDE; i < end; i += WIDE) exponentiate(scores + i, highest);
    for (int64_t i = begin; i < from && i < end; i++) scores[i] = 0;
    for (int64_t i = to > begin ? to : begin; i < end; i++) scores[i] = 0;
    float sums[4] = {0};
    for (int64_t i = begin; i < end; i += 4)
        for (int n = 0; n < 4; n++) sums[n] += scores[i + n];
    float shrink = *best == -INFINITY ? 0 : slip_exp(*best - highest);
    *best = highest;
    *total = slip_fma(*total, shrink, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (shrink != 1)
        for (int64_t d = 0; d < dim; d++) query->out[d] *= shrink;
}

// Adds weighted values to some queries' outputs: `columns` vectors of each, from dimension d on.
INLINE void add_values(int rows, int columns, const Query *queries, const float *const *values, int64_t begin,
                       int64_t end, int64_t d, const Stretch *weights) {
    Vector total[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) total[r][c] = slip_load(queries[r].out + d + c * WIDTH);
    for (int64_t i = begin; i < end; i += BLOCK) {
#ifdef __aarch64__
        float32x4_t w[ROWS];
        for (int r = 0; r < rows; r++) w[r] = vld1q_f32(weights[r] + i);
#define ADD(c, j) total[r][c] = vfmaq_laneq_f32(total[r][c], v[c], w[r], j)
#else
#define ADD(c, j) total[r][c] = slip_fma_vector(v[c], slip_fill(weights[r][i + j]), total[r][c])
#endif
#define ADD_KEY(j)                                                                                       \
    {                                                                                                    \
        Vector v[COLUMNS];                                                                               \
        for (int c = 0; c < columns; c++) v[c] = slip_load(values[i + j] + d + c * WIDTH);               \
        for (int r = 0; r < rows; r++)                                                                   \
            for (int c = 0; c < columns; c++) ADD(c, j);                                                 \
    }
        ADD_KEY(0) ADD_KEY(1) ADD_KEY(2) ADD_KEY(3)
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) slip_store(queries[r].out + d + c * WIDTH, total[r][c]);
}

INLINE void score_all(int rows, const Query *queries, const float *const *keys, int64_t begin, int64_t end,
                      int64_t dim, float scale, Stretch *scores) {
    for (int64_t i = begin; i < end; i += BLOCK)
        score(rows, queries, keys + i, dim, scale, (Stretch *)(scores[0] + i));
}

INLINE void add_all(int rows, const Query *queries, const float *const *values, int64_t begin, int64_t end,
                    int64_t dim, const Stretch *weights) {
    int64_t d = 0;
    for (; d + COLUMNS * WIDTH <= dim; d += COLUMNS * WIDTH)
        add_values(rows, COLUMNS, queries, values, begin, end, d, weights);
    for (; d + WIDTH <= dim; d += WIDTH) add_values(rows, 1, queries, values, begin, end, d, weights);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++)
            for (int64_t i = begin; i < end; i++) queries[r].out[d] = slip_fma(values[i][d], weights[r][i], queries[r].out[d]);
}

#if ROWS == 4
#define BY_ROWS(rows, call, ...)             \
    switch (rows) {                          \
        case 1: call(1, __VA_ARGS__); break; \
        case 2: call(2, __VA_ARGS__); break; \
        case 3: call(3, __VA_ARGS__); break; \
        default: call(4, __VA_ARGS__);       \
    }
#else
#define BY_ROWS(rows, call, ...)             \
    switch (rows) {                          \
        case 1: call(1, __VA_ARGS__); break; \
        default: call(2, __VA_ARGS__);       \
    }
#endif

// Addresses of the keys and values of positions [start + low, start + high).
static void find_keys(const SlipPages *pages, int64_t start, int64_t low, int64_t high, const float **keys,
                        const float **values) {
    int64_t page = (start + low) / pages->size, slot = (start + low) % pages->size;
    for (int64_t i = low; i < high; page++, slot = 0) {
        int64_t at = (pages->table[page] * pages->size + slot) * pages->slot_stride;
        for (; i < high && slot < pages->size; i++, slot++, at += pages->slot_stride) {
            keys[i] = pages->keys + at;
            values[i] = pages->values + at;
        }
    }
}

// Keys or values that are read several times are copied to contiguous memory: at the strides of the cache they would
// evict each other from L1.
static void pack(const float **rows, int64_t begin, int64_t end, int64_t dim, int num_queries, float *packed) {
    if (num_queries <= ROWS) return;
    for (int64_t i = begin; i < end; i++) rows[i] = memcpy(packed + i * dim, rows[i], dim * sizeof(float));
}

static void attend_tile(const Query *queries, int num, const SlipPages *pages, int64_t dim, float scale, float cap) {
    float scores[QUERIES][STRETCH], best[QUERIES], total[QUERIES];
    const float *keys[STRETCH], *values[STRETCH];
    float packed[num > ROWS ? STRETCH * dim : 1];
    int64_t first = queries[0].first, length = queries[0].length;
    for (int r = 0; r < num; r++) {
        first = queries[r].first < first ? queries[r].first : first;
        length = queries[r].length > length ? queries[r].length : length;
        best[r] = queries[r].sink;
        total[r] = best[r] == -INFINITY ? 0 : 1;
        memset(scores[r], 0, sizeof scores[r]);
        memset(queries[r].out, 0, dim * sizeof(float));
    }
    for (int64_t start = first / STRETCH * STRETCH; start < length; start += STRETCH) {
        int64_t low = first > start ? first - start : 0, high = length - start < STRETCH ? length - start : STRETCH;
        int64_t begin = low / BLOCK * BLOCK, end = (high + BLOCK - 1) / BLOCK * BLOCK;
        find_keys(pages, start, low, high, keys, values);
        for (int64_t i = begin; i < end; i++) {  // outside of the tile's keys one of them is used, with weight 0
            if (i >= low && i < high) continue;
            keys[i] = keys[low];
            values[i] = values[low];
        }
        pack(keys, begin, end, dim, num, packed);
        for (int r = 0; r < num; r += ROWS)
            BY_ROWS(num - r, score_all, queries + r, keys, begin, end, dim, scale, scores + r)
        for (int r = 0; r < num; r++)
            weigh(&queries[r], scores[r], start, begin, end, dim, cap, &best[r], &total[r]);
        pack(values, begin, end, dim, num, packed);
        for (int r = 0; r < num; r += ROWS)
            BY_ROWS(num - r, add_all, queries + r, values, begin, end, dim, scores + r)
    }
    for (int r = 0; r < num; r++) {
        float factor = 1.0f / total[r];
        for (int64_t d = 0; d < dim; d++) queries[r].out[d] *= factor;
    }
}

void slip_attend_tokens(const SlipHeads *heads, const SlipPages *pages, const float *query, float *out,
                        const int64_t *lengths, int64_t num_tokens) {
    Query queries[QUERIES];
    int num = 0;
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t g = 0; g < heads->group; g++) {
            int64_t length = lengths[token], window = heads->window;
            queries[num++] = (Query){
                query + token * heads->query_stride + g * heads->dim, out + token * heads->out_stride + g * heads->dim,
                window && length > window ? length - window : 0, length, heads->sinks ? heads->sinks[g] : -INFINITY};
            if (num == QUERIES || (token + 1 == num_tokens && g + 1 == heads->group)) {
                attend_tile(queries, num, pages, heads->dim, heads->scale, heads->cap);
                num = 0;
            }
        }
}

// query [tokens, heads, dim] with a stride between tokens; keys, values [pages, page_size, kv heads, dim]; tables
// [rows, table_stride]; lengths [tokens]: visible positions per token. Tiles [tiles, 3]: row, first token, number of
// tokens; without them each token is a row. sinks [heads] or NULL. window: visible keys, 0 for all; cap: soft cap of
// the scores, 0 for none
void slip_attend(const float *query, float *out, const float *keys, const float *values, const int64_t *tables,
                 const int64_t *lengths, const int64_t *tiles, const float *sinks, float scale, float cap,
                 int64_t window, int64_t num_tiles, int64_t num_heads, int64_t num_kv_heads, int64_t dim,
                 int64_t page_size, int64_t query_stride, int64_t table_stride) {
    int64_t group = num_heads / num_kv_heads, last = (num_tiles - 1) * 3;
    int64_t num_tokens = tiles && num_tiles ? tiles[last + 1] + tiles[last + 2] : num_tiles;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(slip_team_size(num_tokens))
    for (int64_t tile = 0; tile < num_tiles; tile++)
        for (int64_t head = 0; head < num_kv_heads; head++) {
            SlipHeads heads = {group, dim, query_stride, num_heads * dim, window, scale, cap,
                               sinks ? sinks + head * group : NULL};
            int64_t row = tiles ? tiles[tile * 3] : tile, token = tiles ? tiles[tile * 3 + 1] : tile;
            SlipPages pages = {keys + head * dim, values + head * dim, tables + row * table_stride, page_size,
                               num_kv_heads * dim};
            slip_attend_tokens(&heads, &pages, query + token * query_stride + head * group * dim,
                               out + (token * num_heads + head * group) * dim, lengths + token,
                               tiles ? tiles[tile * 3 + 2] : 1);
        }
}
