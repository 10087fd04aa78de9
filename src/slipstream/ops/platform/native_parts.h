// The part of each op that one thread computes (a row, a head, or a range of weight rows), for kernels that fuse ops.
// A result does not depend on the thread. These functions are never inlined, so that all callers run the same code.
#ifndef SLIP_NATIVE_PARTS_H
#define SLIP_NATIVE_PARTS_H

#include <stdint.h>

#include "native_low_bit_layout.h"

#define SLIP_BLOCK 32  // weights per scale
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SLIP_AVX512  // what all servers with AVX-512 have; VNNI is tested for where it is used
#endif
#ifndef SLIP_LOW_BIT_PIECE  // weight rows per work item of a thread: whole tiles of the kernel
#ifdef SLIP_AVX512
#define SLIP_LOW_BIT_PIECE 48
#else
#define SLIP_LOW_BIT_PIECE 24
#endif
#endif
#define SLIP_PART __attribute__((noinline, noclone))

// norm of x; with a residual, norm of x + residual, and the sum is stored in `sum`
SLIP_PART void slip_norm_row(const float *x, const float *residual, const float *weight, float *sum, float *out, float eps,
                   int64_t size);

// RoPE of one head by a row of the table; out may be x
SLIP_PART void slip_rope_head(const float *x, const float *cosines, float *out, int64_t dim, int64_t rotary);

typedef struct {
    int64_t group, dim, query_stride, out_stride;  // query heads per KV head; strides between tokens
    int64_t window;                                // keys visible to a token, including its own; 0: all
    float scale, cap;                              // cap: soft cap of the scores (tanh); 0: none
    const float *sinks;                            // per query head: score of a virtual key without a value; NULL: none
} SlipHeads;

typedef struct {
    const float *keys, *values;  // one KV head of slot 0
    const int64_t *table;        // page table of the row
    int64_t size, slot_stride;   // slots per page; stride between slots
} SlipPages;

// attention of one group of query heads for tokens of one row; lengths: visible positions per token
SLIP_PART void slip_attend_tokens(const SlipHeads *heads, const SlipPages *pages, const float *query, float *out,
                        const int64_t *lengths, int64_t num_tokens);

SLIP_PART void slip_silu_row(const float *gate, const float *up, float *out, int64_t size);
SLIP_PART void slip_gelu_tanh_row(const float *gate, const float *up, float *out, int64_t size);

#define SLIP_TILE 8  // tokens per unpacked block of weights

// 32 activations: scale * (256 * high + low). Aligned so that no vector load crosses a cache line.
typedef struct {
    union {
        struct {
            int8_t high[SLIP_BLOCK], low[SLIP_BLOCK];
        };
        int16_t numbers[SLIP_BLOCK];  // instead of the digits: AVX2, and AVX-512 without VNNI, in their order
    };
    float scale, sum;   // sum: of the 32 activations
    int32_t starts[2];  // -128 times the sum of the first and of the last 16 integers; AVX-512 with VNNI only
} __attribute__((aligned(16))) SlipActivations;

// Activations are stored in tiles of 8 tokens, the last one smaller: [tile][group][token]. Returns the first group of a
// token, and the stride between its groups.
static inline SlipActivations *slip_activations_of(SlipActivations *all, int64_t token, int64_t num_tokens, int64_t groups,
                                          int64_t *stride) {
    int64_t first = token / SLIP_TILE * SLIP_TILE;
    *stride = num_tokens - first < SLIP_TILE ? num_tokens - first : SLIP_TILE;
    return all + first * groups + token - first;
}

// quantizes 32 * groups activations of one token
SLIP_PART void slip_quantize(const float *x, SlipActivations *out, int64_t stride, int64_t groups);

// weight rows [first, last) of a low-bit GEMM; first is a multiple of 4; out [tokens, out_stride]
SLIP_PART void slip_low_bit_rows(const SlipActivations *x, const uint8_t *weights, const void *scales,
                       const uint16_t *offsets, float *out, int64_t layout, int64_t num_tokens, int64_t groups,
                       int64_t out_stride, int64_t first, int64_t last);

// the address of a row of weights of SLIP_FLOAT32 or SLIP_BFLOAT16
static inline const void *slip_plain_row(const void *weight, int64_t layout, int64_t row, int64_t size) {
    return (const char *)weight + row * size * (layout == SLIP_BFLOAT16 ? 2 : 4);
}

// weight rows [first, last) of a GEMM with weights of SLIP_FLOAT32 or SLIP_BFLOAT16; out [tokens, out_stride]. next: the
// weights that this thread reads after them, for prefetching
SLIP_PART void slip_plain_rows(const float *x, const void *weight, float *out, int64_t layout, int64_t num_tokens,
                     int64_t size, int64_t out_stride, int64_t first, int64_t last, const void *next);

#endif
