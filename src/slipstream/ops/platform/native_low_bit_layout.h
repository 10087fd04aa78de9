// Layouts of weight rows. RowLayout in ops/platform/native.py mirrors the enum, ops/gemm/low_bit/interleaved.py packs the weights.
//
// Low-bit weights: four rows are interleaved, 4 columns at a time. A block of 32 columns of four rows has 128 weights,
// one per byte, or two per byte: column c of the first 16 in the low half, column c + 16 in the high half.
#ifndef SLIP_NATIVE_LOW_BIT_LAYOUT_H
#define SLIP_NATIVE_LOW_BIT_LAYOUT_H

#include <stdint.h>
#include <string.h>

enum {
    SLIP_FLOAT32,     // not low-bit
    SLIP_FOUR_BITS,   // scale * q + offset, both float16, per 32 columns
    SLIP_EIGHT_BITS,  // scale * q, float16, per 32 columns
    SLIP_Q4_K,        // SlipScalesQ45, q of 4 bits
    SLIP_Q5_K,        // SlipScalesQ45, q of 5 bits in a byte
    SLIP_Q6_K,        // SlipScalesQ6, q signed in a byte
    SLIP_BFLOAT16,    // not low-bit: the upper halves of float32
    SLIP_Q4_0,        // scale * (q - 8), float16, per 32 columns
};

// 256 columns of four rows: weight = d * scale * q + dmin * minimum. The file has dmin with the other sign.
typedef struct {
    uint16_t d[4], dmin[4];  // float16
    struct {
        uint8_t scale[4], minimum[4];
    } blocks[8];
} SlipScalesQ45;

// 256 columns of four rows: weight = d * scale * q, with a scale for the first and one for the last 16 columns of a block
typedef struct {
    uint16_t d[4];  // float16
    struct {
        int8_t first[4], last[4];
    } blocks[8];
} SlipScalesQ6;

#define SLIP_INLINE static inline __attribute__((always_inline))

// two weights per byte
SLIP_INLINE int slip_has_pairs(int64_t layout) {
    return layout == SLIP_FOUR_BITS || layout == SLIP_Q4_K || layout == SLIP_Q4_0;
}

SLIP_INLINE int slip_has_offset(int64_t layout) { return layout == SLIP_Q5_K || slip_has_pairs(layout); }

// bytes of a block of four rows and 32 columns: weights, and `scales`
SLIP_INLINE int64_t slip_weight_bytes(int64_t layout) { return slip_has_pairs(layout) ? 64 : 128; }

SLIP_INLINE int64_t slip_scale_bytes(int64_t layout) {
    if (layout == SLIP_Q6_K) return sizeof(SlipScalesQ6) / 8;
    return layout == SLIP_Q4_K || layout == SLIP_Q5_K ? sizeof(SlipScalesQ45) / 8 : 8;
}

static inline float slip_from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    float value;
    memcpy(&value, &bits, 4);
    if (exponent == 0) value = (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    return value;
}

// Scale and offset of block g of row r. Q6_K: scales of the first and of the last 16 columns.
static inline void slip_load_scales(int layout, const uint8_t *scales, const uint16_t *offsets, int64_t g, int r,
                                    float found[2]) {
    if (layout == SLIP_Q4_K || layout == SLIP_Q5_K) {
        const SlipScalesQ45 *s = (const SlipScalesQ45 *)scales + g / 8;
        found[0] = slip_from_half(s->d[r]) * s->blocks[g % 8].scale[r];
        found[1] = slip_from_half(s->dmin[r]) * s->blocks[g % 8].minimum[r];
    } else if (layout == SLIP_Q6_K) {
        const SlipScalesQ6 *s = (const SlipScalesQ6 *)scales + g / 8;
        found[0] = slip_from_half(s->d[r]) * s->blocks[g % 8].first[r];
        found[1] = slip_from_half(s->d[r]) * s->blocks[g % 8].last[r];
    } else {
        found[0] = slip_from_half(((const uint16_t *)scales)[g * 4 + r]);
        found[1] = layout == SLIP_FOUR_BITS ? slip_from_half(offsets[g * 4 + r]) : -8 * found[0];
    }
}

#endif
