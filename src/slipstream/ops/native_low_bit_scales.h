// Scales of low-bit weights in plain C.
#ifndef SLIP_NATIVE_LOW_BIT_SCALES_H
#define SLIP_NATIVE_LOW_BIT_SCALES_H

#include <stdint.h>
#include <string.h>

#include "native_low_bit_layout.h"

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
