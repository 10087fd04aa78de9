// What one thread does of each op, for those that put several together. The work of one row, head or stretch of
// weight rows; nobody else's result depends on who does it.
#ifndef SLIP_NATIVE_PARTS_H
#define SLIP_NATIVE_PARTS_H

#include <stdint.h>

#define SLIP_BLOCK 32  // weights that share a scale

// norm of x, or of x + residual, which is then written to sum
void slip_norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, float eps,
                   int64_t size);

// one head turned by a row of the rope table; out may be x
void slip_rope_head(const float *x, const float *cosines, float *out, int64_t dim, int64_t rotary);

// the heads of one row that share a head of keys, over the row's pages
void slip_attend_head(const float *query, float *out, const float *keys, const float *values, const int64_t *pages,
                      int64_t first, int64_t length, int64_t group, int64_t dim, int64_t page_size, int64_t slot_stride,
                      float scale, float cap);

void slip_silu_row(const float *gate, const float *up, float *out, int64_t size);
void slip_gelu_tanh_row(const float *gate, const float *up, float *out, int64_t size);

// x to numbers of 8 bits, their scales [groups], and scale * sum [groups]
void slip_quantize(const float *x, int8_t *numbers, float *scales, float *sums, int64_t groups);

// rows [first, last) of a product with low-bit weights; first is a multiple of 4, out [tokens, out_stride]
void slip_low_bit_rows(const int8_t *numbers, const float *scales, const float *sums, const uint8_t *weights,
                       const void *weight_scales, const void *offsets, float *out, int64_t bits, int64_t num_tokens,
                       int64_t num_rows, int64_t groups, int64_t out_stride, int64_t first, int64_t last);

// rows [first, last) of a product with plain weights; out [tokens, out_stride]
void slip_plain_rows(const float *x, const float *weight, float *out, int64_t num_tokens, int64_t size,
                     int64_t out_stride, int64_t first, int64_t last);

#endif
