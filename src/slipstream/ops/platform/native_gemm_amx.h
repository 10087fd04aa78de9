// GEMM of many tokens for x86 with AMX: weights in float32 or bfloat16, activations in float32.
//
// Tiles multiply bfloat16 numbers and add in float32. A float32 number is the sum of three bfloat16 numbers: the nearest
// one, the nearest to what is left, and the rest. Bfloat16 weights times the three parts of an activation are all
// products of float32 arithmetic. Float32 weights have three parts too; of the nine products the six largest are
// computed, what is left out is below 2^-25 of a product.
//
// A tile instruction multiplies 16 weight rows by 16 tokens, 32 columns at a time, so the tile of sums is transposed. A
// pair of columns of a tile is (c, c + 16): shifts and masks make it, on both sides alike. Columns behind the last are 0.
#include "native_amx.h"
#include "native_team.h"

#ifndef AMX_BLOCKS
#define AMX_BLOCKS 8     // 32 weight rows each, of a work item, at most
#endif
#ifndef AMX_PANEL
#define AMX_PANEL 128    // columns split at a time: the parts of the weights stay in L1
#endif
#ifndef AMX_PREFETCH
#define AMX_PREFETCH(p) _mm_prefetch(p, _MM_HINT_T1)
#endif
#define AMX_STEP 32      // columns of a tile
#define AMX_PARTS 3
#ifndef AMX_TOKENS
#define AMX_TOKENS 256   // tokens per work item, at most
#endif
#define AMX_AT_ONCE 512  // tokens split at a time, to limit memory

typedef uint16_t AmxTile[16][32];
typedef float AmxSums[16][16];

#ifdef SLIP_AMX_EMULATED

static __thread struct {
    AmxSums sums[4];
    AmxTile weights[2], tokens[2];
} emulated;

SLIP_INLINE void open_gemm_tiles(void) {}
SLIP_INLINE void close_gemm_tiles(void) {}

static float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#define LOAD_WEIGHTS(n, from) memcpy(emulated.weights[n], from, sizeof(AmxTile))
#define LOAD_TOKENS(n, from) memcpy(emulated.tokens[n], from, sizeof(AmxTile))
#define LOAD_SUMS(n, from) memcpy(emulated.sums[n], from, sizeof(AmxSums))
#define CLEAR_SUMS(n) memset(emulated.sums[n], 0, sizeof(AmxSums))
#define STORE_SUMS(n, to) memcpy(to, emulated.sums[n], sizeof(AmxSums))
#define ADD_PRODUCTS(n, w, t) add_products(emulated.sums[n], emulated.weights[w], emulated.tokens[t])

static void add_products(AmxSums sums, AmxTile weights, AmxTile tokens) {
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int t = 0; t < 16; t++)
                for (int i = 0; i < 2; i++)
                    sums[r][t] = slip_fma(from_bfloat16(weights[r][2 * k + i]), from_bfloat16(tokens[k][2 * t + i]), sums[r][t]);
}

#else

static void open_gemm_tiles(void) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

SLIP_INLINE void close_gemm_tiles(void) { _tile_release(); }

// tile registers 0 to 3: sums; 4 and 5: weights; 6 and 7: tokens. The intrinsics take the text of a number.
#define WEIGHT_TILE_0 4
#define WEIGHT_TILE_1 5
#define TOKEN_TILE_0 6
#define TOKEN_TILE_1 7
#define LOAD_WEIGHTS(n, from) _tile_loadd(WEIGHT_TILE_##n, from, 64)
#define LOAD_TOKENS(n, from) _tile_loadd(TOKEN_TILE_##n, from, 64)
#define LOAD_SUMS(n, from) _tile_loadd(n, from, 64)
#define CLEAR_SUMS(n) _tile_zero(n)
#define STORE_SUMS(n, to) _tile_stored(n, to, 64)
#define ADD_PRODUCTS(n, w, t) ADD_PRODUCTS_OF(n, WEIGHT_TILE_##w, TOKEN_TILE_##t)
#define ADD_PRODUCTS_OF(n, w, t) _tile_dpbf16ps(n, w, t)

#endif

// Rounded to the nearest bfloat16 number, as float32
SLIP_INLINE __m512i round_to_bfloat16(__m512 x) {
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    return _mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000));
}

// The parts of 32 numbers, the largest first: 16 pairs of bfloat16 numbers each.
SLIP_INLINE void split_numbers(__m512 first, __m512 last, __m512i parts[AMX_PARTS]) {
    for (int p = 0; p < AMX_PARTS; p++) {
        __m512i a = round_to_bfloat16(first), b = round_to_bfloat16(last);
        parts[p] = _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
        first = _mm512_sub_ps(first, _mm512_castsi512_ps(a));
        last = _mm512_sub_ps(last, _mm512_castsi512_ps(b));
    }
}

SLIP_INLINE __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

// 16 x 16 numbers of 32 bits
static void transpose(__m512i v[16]) {
    __m512i a[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // v[i + j]: column j of each 128 bits, of four rows
        v[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        __m512i low_01 = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x44), high_01 = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xee);
        __m512i low_23 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x44);
        __m512i high_23 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xee);
        a[j] = _mm512_shuffle_i32x4(low_01, low_23, 0x88);
        a[4 + j] = _mm512_shuffle_i32x4(low_01, low_23, 0xdd);
        a[8 + j] = _mm512_shuffle_i32x4(high_01, high_23, 0x88);
        a[12 + j] = _mm512_shuffle_i32x4(high_01, high_23, 0xdd);
    }
    memcpy(v, a, sizeof a);
}

// 16 tokens, of which `count` exist, and columns [first, first + 32) to a tile for each part
static void split_tokens(const float *x, int64_t count, int64_t first, int64_t size, AmxTile out[AMX_PARTS]) {
    __m512i rows[AMX_PARTS][16];
    __mmask16 mask[2] = {first_lanes(size - first), first_lanes(size - first - 16)};
    for (int t = 0; t < 16; t++) {
        __m512i parts[AMX_PARTS] = {0};
        if (t < count) {
            const float *from = x + t * size + first;
            split_numbers(_mm512_maskz_loadu_ps(mask[0], from), _mm512_maskz_loadu_ps(mask[1], from + 16), parts);
        }
        for (int p = 0; p < AMX_PARTS; p++) rows[p][t] = parts[p];
    }
    for (int p = 0; p < AMX_PARTS; p++) {
        transpose(rows[p]);
        for (int t = 0; t < 16; t++) _mm512_store_si512(out[p][t], rows[p][t]);
    }
}

// 16 weight rows, of which `count` exist, and columns [first, first + 32) to a tile for each part
SLIP_INLINE void split_weights(int layout, const void *weight, int64_t count, int64_t first, int64_t size, AmxTile *out) {
    __mmask16 mask[2] = {first_lanes(size - first), first_lanes(size - first - 16)};
    for (int r = 0; r < 16; r++) {
        int64_t at = (r < count ? r : count - 1) * size + first;  // rows behind the last: computed, not used
        if (layout == SLIP_BFLOAT16) {
            const uint16_t *from = (const uint16_t *)weight + at;
            __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask[0], from));
            __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask[1], from + 16));
            _mm512_store_si512(out[0][r], _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
        } else {
            const float *from = (const float *)weight + at;
            __m512i parts[AMX_PARTS];
            split_numbers(_mm512_maskz_loadu_ps(mask[0], from), _mm512_maskz_loadu_ps(mask[1], from + 16), parts);
            for (int p = 0; p < AMX_PARTS; p++) _mm512_store_si512(out[p][r], parts[p]);
        }
    }
}

// the sums of 16 weight rows and 16 tokens to out [tokens, out_stride]
static void store_sums(AmxSums sums, float *out, int64_t out_stride, int64_t rows, int64_t tokens) {
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_load_si512(sums[i]);
    transpose(v);
    for (int64_t t = 0; t < 16 && t < tokens; t++)
        _mm512_mask_storeu_ps(out + t * out_stride, first_lanes(rows), _mm512_castsi512_ps(v[t]));
}

// Tiles of weights, or of tokens, are loaded one by one, each before the products that need it. A thread that shares the
// tile unit with another computes meanwhile.
#define ADD_WITH_WEIGHTS(p)   \
    LOAD_WEIGHTS(0, w[0][p]); \
    ADD_PRODUCTS(0, 0, 0);    \
    ADD_PRODUCTS(1, 0, 1);    \
    LOAD_WEIGHTS(1, w[1][p]); \
    ADD_PRODUCTS(2, 1, 0);    \
    ADD_PRODUCTS(3, 1, 1)
#define ADD_WITH_TOKENS(p)   \
    LOAD_TOKENS(0, x[0][p]); \
    ADD_PRODUCTS(0, 0, 0);   \
    ADD_PRODUCTS(2, 1, 0);   \
    LOAD_TOKENS(1, x[1][p]); \
    ADD_PRODUCTS(1, 0, 1);   \
    ADD_PRODUCTS(3, 1, 1)

// 32 weight rows times 32 tokens and 32 columns. w [2 blocks of rows][part], x [2 blocks of tokens][part]. Parts of tokens
// come from L2, so each is loaded once.
SLIP_INLINE void multiply_step(int layout, AmxTile (*w)[AMX_PARTS], AmxTile (*x)[AMX_PARTS]) {
    LOAD_TOKENS(0, x[0][2]);
    LOAD_TOKENS(1, x[1][2]);
    ADD_WITH_WEIGHTS(0);
    ADD_WITH_TOKENS(1);
    if (layout == SLIP_FLOAT32) {
        ADD_WITH_WEIGHTS(1);
    }
    ADD_WITH_TOKENS(0);
    if (layout == SLIP_FLOAT32) {
        ADD_WITH_WEIGHTS(2);
        ADD_WITH_WEIGHTS(0);
    }
}

// One work item: weight rows [n, n + 32 * AMX_BLOCKS) times tokens [0, num_tokens). x: [step][block of tokens][part], with
// `blocks` blocks in a step, an even number. The columns of a panel are read for all weight rows, so that the parts of the
// tokens come from L2. sums: memory of the thread.
SLIP_INLINE void multiply_by_amx(int layout, AmxTile (*x)[AMX_PARTS], int64_t blocks, const void *weight, float *out,
                                 int64_t num_tokens, int64_t num_rows, int64_t size, int64_t out_stride,
                                 AmxSums (*sums)[AMX_TOKENS / 32][4]) {
    _Alignas(64) AmxTile w[AMX_PANEL / AMX_STEP][2][AMX_PARTS];
    int64_t element = layout == SLIP_BFLOAT16 ? 2 : 4;
    for (int64_t first = 0; first < size; first += AMX_PANEL) {
        int64_t steps = (size - first < AMX_PANEL ? size - first : AMX_PANEL) + AMX_STEP - 1;
        steps /= AMX_STEP;
        AmxTile(*of_panel)[AMX_PARTS] = x + first / AMX_STEP * blocks;
        for (int64_t n = 0; n < num_rows; n += 32) {
            for (int64_t s = 0; s < steps; s++)
                for (int b = 0; b < 2; b++) {
                    int64_t row = n + b * 16 < num_rows ? n + b * 16 : n;
                    split_weights(layout, (const char *)weight + row * size * element, num_rows - row,
                                  first + s * AMX_STEP, size, w[s][b]);
                }
#ifndef SLIP_AMX_EMULATED
            STORE_ALL();
#endif
            int is_last = n + 32 >= num_rows;  // then the next panel follows
            const char *next = (const char *)weight + (is_last ? 0 : n + 32) * size * element;
            int64_t column = is_last ? first + AMX_PANEL : first;
            int64_t lines = AMX_PANEL * element / 64, at = 0, share = (32 * lines * 32 + num_tokens - 1) / num_tokens;
            for (int64_t t = 0; t < num_tokens; t += 32) {
                for (int64_t i = 0; i < share; i++, at++)
                    if (column + at % lines * (64 / element) < size && at / lines < (is_last ? num_rows : num_rows - n - 32))
                        AMX_PREFETCH(next + (at / lines * size + column) * element + at % lines * 64);
                AmxSums *found = sums[n / 32][t / 32];
                if (first) {
                    LOAD_SUMS(0, found[0]);
                    LOAD_SUMS(1, found[1]);
                    LOAD_SUMS(2, found[2]);
                    LOAD_SUMS(3, found[3]);
                } else {
                    CLEAR_SUMS(0);
                    CLEAR_SUMS(1);
                    CLEAR_SUMS(2);
                    CLEAR_SUMS(3);
                }
                for (int64_t s = 0; s < steps; s++) multiply_step(layout, w[s], of_panel + s * blocks + t / 16);
                STORE_SUMS(0, found[0]);
                STORE_SUMS(1, found[1]);
                STORE_SUMS(2, found[2]);
                STORE_SUMS(3, found[3]);
            }
        }
    }
#ifndef SLIP_AMX_EMULATED
    STORE_ALL();
#endif
    for (int64_t n = 0; n < num_rows; n += 32)
        for (int64_t t = 0; t < num_tokens; t += 32)
            for (int i = 0; i < 4; i++) {
                int64_t row = n + i / 2 * 16, token = t + i % 2 * 16;
                if (row < num_rows && token < num_tokens)
                    store_sums(sums[n / 32][t / 32][i], out + token * out_stride + row, out_stride, num_rows - row,
                               num_tokens - token);
            }
}

static SLIP_PART void multiply_amx_item(int64_t layout, AmxTile (*x)[AMX_PARTS], int64_t blocks, const void *weight,
                                        float *out, int64_t num_tokens, int64_t num_rows, int64_t size,
                                        int64_t out_stride, AmxSums (*sums)[AMX_TOKENS / 32][4]) {
    if (layout == SLIP_BFLOAT16)
        multiply_by_amx(SLIP_BFLOAT16, x, blocks, weight, out, num_tokens, num_rows, size, out_stride, sums);
    else
        multiply_by_amx(SLIP_FLOAT32, x, blocks, weight, out, num_tokens, num_rows, size, out_stride, sums);
}

// Weight rows of a work item: as many as there is memory for, but three items for each thread or more
static int64_t item_rows(int64_t num_rows, int64_t chunks, int64_t threads) {
    int64_t items = (3 * threads + chunks - 1) / chunks, rows = (num_rows / items + 31) / 32 * 32;
    return rows < 32 ? 32 : rows > 32 * AMX_BLOCKS ? 32 * AMX_BLOCKS : rows;
}

// Returns 0 if out of memory. Arguments as slip_gemm.
static int64_t gemm_by_amx(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens,
                           int64_t num_rows, int64_t size) {
    int64_t at_once = num_tokens < AMX_AT_ONCE ? num_tokens : AMX_AT_ONCE;
    int64_t steps = (size + AMX_STEP - 1) / AMX_STEP, element = layout == SLIP_BFLOAT16 ? 2 : 4;
    AmxTile(*split)[AMX_PARTS] = aligned_alloc(64, (at_once + 31) / 32 * 2 * steps * sizeof *split);
    if (!split) return 0;
    int64_t team = slip_team_size(num_tokens), rows = item_rows(num_rows, (at_once + AMX_TOKENS - 1) / AMX_TOKENS, team);
    int has_memory = 1;
    SlipClock clock = slip_clock();
    double end = clock.start, waited = 0;  // of this thread: when it waits for the others, and for how long it has before
#pragma omp parallel num_threads(team) reduction(&& : has_memory)
    {
        AmxSums(*sums)[AMX_TOKENS / 32][4] = aligned_alloc(64, AMX_BLOCKS * sizeof *sums);
        has_memory = sums != NULL;
        open_gemm_tiles();
        for (int64_t start = 0; start < num_tokens; start += AMX_AT_ONCE) {
            int64_t tokens = num_tokens - start < AMX_AT_ONCE ? num_tokens - start : AMX_AT_ONCE;
            int64_t blocks = (tokens + 31) / 32 * 2, chunks = (tokens + AMX_TOKENS - 1) / AMX_TOKENS;
            int64_t chunk = (blocks / 2 + chunks - 1) / chunks * 32;  // tokens of a work item
            if (start) {
#pragma omp barrier
            }
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < blocks * steps; i++) {
                int64_t first = start + i % blocks * 16;
                split_tokens(x + first * size, num_tokens - first, i / blocks * AMX_STEP, size, split[i]);
            }
            double divided = slip_now();
#pragma omp barrier
#pragma omp master
            waited += slip_now() - divided;
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t i = 0; i < (num_rows + rows - 1) / rows * chunks; i++) {
                int64_t n = i / chunks * rows, t = i % chunks * chunk;
                if (t >= tokens || !sums) continue;
                multiply_amx_item(layout, split + t / 16, blocks, (const char *)weight + n * size * element,
                                  out + (start + t) * num_rows + n, tokens - t < chunk ? tokens - t : chunk,
                                  num_rows - n < rows ? num_rows - n : rows, size, num_rows, sums);
            }
        }
#pragma omp master
        end = slip_now();
        close_gemm_tiles();
        free(sums);
    }
    slip_team_time_gemm(num_tokens, clock, waited, end);
    free(split);
    return has_memory;
}
