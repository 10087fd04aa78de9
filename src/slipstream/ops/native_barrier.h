// A barrier for a team of threads, and the size of the team on a machine that other programs use too.
#ifndef SLIP_NATIVE_BARRIER_H
#define SLIP_NATIVE_BARRIER_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#define SLIP_SPINS 256  // each with a pause of about 50 ns
#define SLIP_PAUSE() __builtin_ia32_pause()
#else
#define SLIP_SPINS 4096
#define SLIP_PAUSE() ((void)0)
#endif
#define SLIP_YIELD_NANOSECONDS 100000  // a waiting thread yields its core for this long, and then sleeps
#define SLIP_STEPS_OF_SMALL_TEAM 64    // then the whole team is tried again

// Waiting threads read `round`; it shares no cache line with what working threads write.
typedef struct {
    _Alignas(128) atomic_int round;
    atomic_int sleeping;
    _Alignas(128) atomic_llong next;  // next work item of the current part
    _Alignas(128) atomic_int arrived;
    atomic_llong waited;  // nanoseconds that threads waited after spinning, all together
} SlipBarrier;

static inline int64_t slip_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static __attribute__((noinline)) void slip_wait_long(SlipBarrier *b, int round) {
    int64_t start = slip_nanoseconds(), now = start;
    while (atomic_load(&b->round) == round) {
#ifdef __linux__
        if (now - start > SLIP_YIELD_NANOSECONDS) {
            atomic_fetch_add(&b->sleeping, 1);
            // returns at once if the round has ended
            syscall(SYS_futex, &b->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
            atomic_fetch_sub(&b->sleeping, 1);
        } else
#endif
            sched_yield();
        now = slip_nanoseconds();
    }
    atomic_fetch_add_explicit(&b->waited, slip_nanoseconds() - start, memory_order_relaxed);
}

// Ends a part: the work items of the next part are counted from 0.
static inline void slip_wait_for_team(SlipBarrier *b, int team) {
    int round = atomic_load_explicit(&b->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) + 1 == team) {
        atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&b->next, 0, memory_order_relaxed);
        atomic_store(&b->round, round + 1);
#ifdef __linux__
        if (atomic_load(&b->sleeping)) syscall(SYS_futex, &b->round, FUTEX_WAKE_PRIVATE, team, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; atomic_load_explicit(&b->round, memory_order_acquire) == round; spins++) {
        if (spins > SLIP_SPINS) {
            slip_wait_long(b, round);
            return;
        }
        SLIP_PAUSE();
    }
}

static atomic_int slip_small_team, slip_small_team_steps;

// threads for the next step, of `all` threads
static int slip_team_size(int all) {
    int steps = atomic_load(&slip_small_team_steps), small = atomic_load(&slip_small_team);
    if (steps <= 0 || small >= all) return all;
    atomic_store(&slip_small_team_steps, steps - 1);
    return small;
}

// After a step: if threads waited for more than a quarter of the time, a smaller team is as fast.
static void slip_adapt_team(SlipBarrier *b, int team, int64_t nanoseconds) {
    if (team > 1 && atomic_load(&b->waited) * 4 > nanoseconds * team) {
        atomic_store(&slip_small_team, team * 3 / 4);
        atomic_store(&slip_small_team_steps, SLIP_STEPS_OF_SMALL_TEAM);
    }
}

#endif
