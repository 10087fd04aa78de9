// Vectors of floats in the width of the processor.
#ifndef SLIP_NATIVE_VECTOR_H
#define SLIP_NATIVE_VECTOR_H

#include <string.h>

#if defined(__AVX512F__)
#define SLIP_WIDTH 16
#elif defined(__AVX2__)
#define SLIP_WIDTH 8
#else
#define SLIP_WIDTH 4
#endif

typedef float SlipVector __attribute__((vector_size(4 * SLIP_WIDTH)));

static inline SlipVector slip_load(const float *a) {
    SlipVector v;
    memcpy(&v, a, sizeof v);
    return v;
}

static inline void slip_store(float *a, SlipVector v) { memcpy(a, &v, sizeof v); }

#endif
