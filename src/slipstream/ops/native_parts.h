// What one thread does of each op, for those that put several together. The work of one row, head or stretch of
// weight rows; nobody else's result depends on who does it. They are called and never inlined, so that all callers get
// the same machine code and with it the same bits.
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

// x to numbers of 8 bits, their scales [groups], and scale * sum [groups]
SLIP_PART void slip_quantize(const float *x, int8_t *numbers, float *scales, float *sums, int64_t groups);

// rows [first, last) of a product with low-bit weights; first is a multiple of 4, out [tokens, out_stride]
SLIP_PART void slip_low_bit_rows(const int8_t *numbers, const float *scales, const float *sums, const uint8_t *weights,
                       const void *weight_scales, const void *offsets, float *out, int64_t bits, int64_t num_tokens,
                       int64_t num_rows, int64_t groups, int64_t out_stride, int64_t first, int64_t last);

// rows [first, last) of a product with plain weights; out [tokens, out_stride]
SLIP_PART void slip_plain_rows(const float *x, const float *weight, float *out, int64_t num_tokens, int64_t size,
                     int64_t out_stride, int64_t first, int64_t last);

#endif
