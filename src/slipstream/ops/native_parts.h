// The work of one thread in each op, for callers that combine several ops: one row, one head, or a range of weight rows.
// A result does not depend on which thread computes it. These functions are called and never inlined, so that all callers
// run the same machine code.
#ifndef SLIP_NATIVE_PARTS_H
#define SLIP_NATIVE_PARTS_H

#include <stdint.h>

#define SLIP_BLOCK 32  // weights that share a scale
#define SLIP_PART __attribute__((noinline, noclone))

// norm of x, or of x + residual, which is then written to sum
SLIP_PART void slip_norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, float eps,
                   int64_t size);

// one head turned by a row of the rope table; out may be x
SLIP_PART void slip_rope_head(const float *x, const float *cosines, float *out, int64_t dim, int64_t rotary);

typedef struct {
    int64_t group, dim, query_stride, out_stride;  // heads that share a head of keys; strides from token to token
    int64_t window;                                // keys that a token sees, itself among them; 0: all
    float scale, cap;                              // cap: scores are bounded to it by tanh; 0: they are not
    const float *sinks;                            // scores of a column without a value, by head; NULL: none
} SlipHeads;

typedef struct {
    const float *keys, *values;  // one head of the first slot
    const int64_t *table;        // the row's pages
    int64_t size, slot_stride;   // slots of a page; from slot to slot
} SlipPages;

// one group of heads, tokens of one row; lengths: positions that each token sees
SLIP_PART void slip_attend_tokens(const SlipHeads *heads, const SlipPages *pages, const float *query, float *out,
                        const int64_t *lengths, int64_t num_tokens);

SLIP_PART void slip_silu_row(const float *gate, const float *up, float *out, int64_t size);
SLIP_PART void slip_gelu_tanh_row(const float *gate, const float *up, float *out, int64_t size);

#define SLIP_TILE 8  // tokens that share unpacked weights

// 32 activations: scale * (256 * high + low). Aligned so that no vector of them crosses a cache line.
typedef struct {
    int8_t high[SLIP_BLOCK], low[SLIP_BLOCK];
    float scale, sum;  // sum: of the 32 numbers
} __attribute__((aligned(16))) SlipActivations;

// Activations lie in tiles of 8 tokens, the last one smaller: [tile][group][token]. Where those of a token begin, and
// the stride from one of its groups to the next.
static inline SlipActivations *slip_place(SlipActivations *all, int64_t token, int64_t num_tokens, int64_t groups,
                                          int64_t *stride) {
    int64_t first = token / SLIP_TILE * SLIP_TILE;
    *stride = num_tokens - first < SLIP_TILE ? num_tokens - first : SLIP_TILE;
    return all + first * groups + token - first;
}

// 32 * groups activations of one token
SLIP_PART void slip_quantize(const float *x, SlipActivations *out, int64_t stride, int64_t groups);

// rows [first, last) of a product with low-bit weights; first is a multiple of 4, out [tokens, out_stride]
SLIP_PART void slip_low_bit_rows(const SlipActivations *x, const uint8_t *weights, const uint16_t *scales,
                       const uint16_t *offsets, float *out, int64_t bits, int64_t num_tokens, int64_t num_rows,
                       int64_t groups, int64_t out_stride, int64_t first, int64_t last);

// rows [first, last) of a product with plain weights; out [tokens, out_stride]
SLIP_PART void slip_plain_rows(const float *x, const float *weight, float *out, int64_t num_tokens, int64_t size,
                     int64_t out_stride, int64_t first, int64_t last);

#endif
