// Skinny GEMM: float32 or bfloat16 weights times float32 activations of a few tokens. bfloat16 weights are extended to
// float32, so a result has the bits that float32 weights of the same values give. With up to three tokens memory
// bandwidth is the limit: ARM reads one weight row from end to end (two rows at a time reach two thirds of the
// bandwidth), x86 four rows, whose sums are then reduced together. With more tokens arithmetic is the limit: the
// register tile is 3 weight rows x 4 tokens, with AVX-512 x 8 tokens, so that 8 tokens read the weights once. The order
// of each sum does not depend on the number of tokens.
#include <stdint.h>
#include <stdlib.h>

#include "native_math.h"
#include "native_parts.h"
#include "native_team.h"

#define WIDTH SLIP_WIDTH
#define PIECE 24   // weight rows per work item of a thread
#define TOKENS 32  // tokens per pass over a piece: both stay in the L2 cache

#ifdef __x86_64__
#define LANES 1  // accumulators per sum: 12 sums of a tile hide the latency of an FMA, 24 fill AVX-512's registers
#define PREFETCH(address) __builtin_prefetch(address, 0, 2)  // into L2
#else
#define LANES 2
#endif
#ifdef __AVX2__
#define MAX_ROWS 4
#else
#define MAX_ROWS 3  // the compiler would spill sums of the larger array
#endif
#ifdef __AVX512F__
#define MAX_TOKENS 8
#else
#define MAX_TOKENS 4
#endif

typedef SlipVector Vector;

#define WEIGHT float
#define LOAD_VECTOR(address) slip_load(address)
#define LOAD_ONE(value) (value)
#define TILE_NAME multiply_float32_tile
#define ROWS_NAME multiply_float32_rows
#include "native_linear_tile.h"
#undef WEIGHT
#undef LOAD_VECTOR
#undef LOAD_ONE
#undef TILE_NAME
#undef ROWS_NAME

static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#define WEIGHT uint16_t
#define LOAD_VECTOR(address) slip_load_bfloat16(address)
#define LOAD_ONE(value) widen(value)
#define TILE_NAME multiply_bfloat16_tile
#define ROWS_NAME multiply_bfloat16_rows
#include "native_linear_tile.h"

#if MAX_TOKENS == 4
#define MAX_WIDENED 4096  // columns: three rows of floats stay in the L1 cache
// As multiply_bfloat16_rows, for more than one tile of tokens: weights are extended once for all of them.
static SLIP_PART void multiply_widened_rows(const float *x, const uint16_t *weight, float *out, int64_t num_tokens, int64_t size,
                                            int64_t out_stride, int64_t first, int64_t last) {
    float wide[3 * MAX_WIDENED];
    int64_t n = first, i;
    for (; n + 3 <= last; n += 3) {
        const uint16_t *rows = weight + n * size;
        i = 0;
#ifdef __aarch64__
        for (; i + 16 <= 3 * size; i += 16) {
            uint16x8_t zeros = vdupq_n_u16(0), a = vld1q_u16(rows + i), b = vld1q_u16(rows + i + 8);
            vst1q_f32(wide + i, vreinterpretq_f32_u16(vzip1q_u16(zeros, a)));
            vst1q_f32(wide + i + 4, vreinterpretq_f32_u16(vzip2q_u16(zeros, a)));
            vst1q_f32(wide + i + 8, vreinterpretq_f32_u16(vzip1q_u16(zeros, b)));
            vst1q_f32(wide + i + 12, vreinterpretq_f32_u16(vzip2q_u16(zeros, b)));
        }
#endif
        for (; i + WIDTH <= 3 * size; i += WIDTH) slip_store(wide + i, slip_load_bfloat16(rows + i));
        for (; i < 3 * size; i++) wide[i] = widen(rows[i]);
        multiply_float32_rows(x, wide, out + n, num_tokens, size, out_stride, 0, 3, wide);
    }
    if (n < last) multiply_bfloat16_rows(x, weight, out, num_tokens, size, out_stride, n, last, weight + n * size);
}
#endif

void slip_plain_rows(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens, int64_t size,
                     int64_t out_stride, int64_t first, int64_t last, const void *next) {
#if MAX_TOKENS == 4
    if (layout == SLIP_BFLOAT16 && num_tokens > 4 && size <= MAX_WIDENED) {
        multiply_widened_rows(x, weight, out, num_tokens, size, out_stride, first, last);
        return;
    }
#endif
    if (layout == SLIP_BFLOAT16)
        multiply_bfloat16_rows(x, weight, out, num_tokens, size, out_stride, first, last, next);
    else
        multiply_float32_rows(x, weight, out, num_tokens, size, out_stride, first, last, next);
}

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && (defined(__AMX_BF16__) || defined(SLIP_AMX_EMULATED))
#define USES_TILES
#include "native_gemm_amx.h"
#endif

// Whether slip_gemm can run: the processor and the system have tiles.
int64_t slip_has_gemm(void) {
#ifdef USES_TILES
    return has_tiles();
#else
    return 0;
#endif
}

// out [tokens, rows] = x [tokens, size] times the transpose of weight [rows, size], for many tokens. Returns 0 if there
// is no such kernel for this processor, or no memory.
int64_t slip_gemm(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens, int64_t num_rows,
                  int64_t size) {
#ifdef USES_TILES
    return gemm_by_amx(x, weight, out, layout, num_tokens, num_rows, size);
#else
    return 0;
#endif
}

// out [tokens, rows] = x [tokens, size] times the transpose of weight [rows, size]
void slip_skinny_gemm(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens,
                      int64_t num_rows, int64_t size) {
    SlipClock clock = slip_clock();
    double end = clock.start;  // of this thread, which then waits for the others
#pragma omp parallel if (num_rows * size > 16384) num_threads(slip_team_size(num_tokens))
    {
#pragma omp for schedule(dynamic, 4) nowait
        for (int64_t n = 0; n < num_rows; n += PIECE) {
            int64_t last = n + PIECE < num_rows ? n + PIECE : num_rows;
            const void *next = slip_plain_row(weight, layout, last < num_rows ? last : n, size);
            for (int64_t t = 0; t < num_tokens; t += TOKENS)
                slip_plain_rows(x + t * size, weight, out + t * num_rows, layout,
                                num_tokens - t < TOKENS ? num_tokens - t : TOKENS, size, num_rows, n, last, next);
        }
#pragma omp master
        end = slip_now();
    }
    slip_team_time_gemm(num_tokens, clock, 0, end);
}
