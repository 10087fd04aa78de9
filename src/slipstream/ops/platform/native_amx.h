// Tile registers of x86 processors with AMX, shared by the GEMMs that use them.
//
// SLIP_AMX_EMULATED: tiles in plain C, for tests on processors without AMX.
#ifndef SLIP_NATIVE_AMX_H
#define SLIP_NATIVE_AMX_H

#include <stdint.h>
#include <string.h>

#ifdef SLIP_AMX_EMULATED

static inline int has_tiles(void) { return 1; }

#else
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// What is stored before is in memory afterwards: gcc's tile loads do not say that they read memory.
#define STORE_ALL() __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

// Whether the system lets this process use tiles: it has to be asked once.
static inline int has_tiles(void) {
    static int state;  // 0: not asked, 1: yes, 2: no. Threads that ask at once get the same answer
    int known = __atomic_load_n(&state, __ATOMIC_RELAXED);
    if (!known) {
        known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : 2;
        __atomic_store_n(&state, known, __ATOMIC_RELAXED);
    }
    return known == 1;
}

#endif
#endif
