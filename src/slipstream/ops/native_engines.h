// How many cores this engine may use while other engines of the same user run on them.
//
// Threads of two engines on the same cores stop each other: a step waits for all its threads. So engines share a table
// in memory, in which each has a slot with its cores and the time until which it counts as running. Each step reads the
// table and takes its part of the cores. Without such a table (other systems, containers that share no memory) only the
// trials of native_team.h find a number of threads.
#ifndef SLIP_NATIVE_ENGINES_H
#define SLIP_NATIVE_ENGINES_H

#include <stdint.h>
#ifdef __linux__
#include <fcntl.h>
#include <linux/stat.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef SLIP_ENGINES_FOLDER
#define SLIP_ENGINES_FOLDER "/dev/shm"
#endif
#define ENGINE_TABLE "slipstream-engines-1"  // other layouts need another number
#define ENGINE_SLOTS 32
#define ENGINE_PAUSE 0.05  // seconds without a step after which an engine does not count
#define ENGINE_CORES 16    // words of 64 bits; machines with more cores have no table

typedef struct {
    uint64_t owner;    // the number of an engine; 0: none
    double until;      // the engine runs steps until then, by the monotonic clock
    int64_t threads;   // that it has at most
    uint64_t cores[ENGINE_CORES];  // a bit for each
    uint64_t unused[13];           // to whole cache lines
} SlipEngine;

typedef struct {
    SlipEngine *table;  // NULL: none
    int64_t slot;
    uint64_t owner;
    uint64_t cores[ENGINE_CORES];
    int is_open;
} SlipNeighbours;

static inline int slip_engines_overlap(const uint64_t *a, const uint64_t *b) {
    for (int i = 0; i < ENGINE_CORES; i++)
        if (a[i] & b[i]) return 1;
    return 0;
}

// Makes sure that the engine has a slot. Slots of engines that have not run for a second may be taken.
static inline int slip_engines_claim(SlipNeighbours *me, double now) {
    if (__atomic_load_n(&me->table[me->slot].owner, __ATOMIC_RELAXED) == me->owner) return 1;
    for (int64_t i = 0; i < ENGINE_SLOTS; i++) {
        SlipEngine *engine = &me->table[i];
        uint64_t before = __atomic_load_n(&engine->owner, __ATOMIC_RELAXED);
        if (engine->until > now - 1 && engine->until < now + 3600) continue;  // later: of another start of the machine
        if (!__atomic_compare_exchange_n(&engine->owner, &before, me->owner, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        me->slot = i;
        for (int j = 0; j < ENGINE_CORES; j++) engine->cores[j] = me->cores[j];
        return 1;
    }
    return 0;
}

// The number of threads for an engine that has `most`, from now on and for `seconds`, about the time of a step.
static inline int64_t slip_engines_threads(SlipNeighbours *me, int64_t most, double seconds, double now) {
    if (!me->table || !slip_engines_claim(me, now)) return most;
    SlipEngine *mine = &me->table[me->slot];
    mine->threads = most;
    double until = now + seconds + ENGINE_PAUSE;
    __atomic_store(&mine->until, &until, __ATOMIC_RELAXED);
    int64_t others = 0, before = 0, wanted = 0, cores = 0;
    for (int64_t i = 0; i < ENGINE_SLOTS; i++) {
        const SlipEngine *engine = &me->table[i];
        if (i == me->slot || engine->until < now || engine->until > now + 3600) continue;
        if (!slip_engines_overlap(engine->cores, me->cores)) continue;
        others++;
        before += i < me->slot;
        wanted += engine->threads;
    }
    if (!others) return most;
    for (int i = 0; i < ENGINE_CORES; i++) cores += __builtin_popcountll(me->cores[i]);
    int64_t part = cores * (before + 1) / (others + 1) - cores * before / (others + 1), left = cores - wanted;
    if (left > part) part = left;  // the others want less
    return part < 1 ? 1 : part < most ? part : most;
}

#ifdef __linux__
// fstat of C libraries since 2.33 has another name in the library, which older ones lack
static inline int slip_engines_is_own(int file) {
    struct statx status;
    const int of_file = 0x1000;  // AT_EMPTY_PATH
    return !syscall(SYS_statx, file, "", of_file, STATX_UID, &status) && status.stx_uid == getuid();
}
#endif

// Opens the table of this user. One that another user has made is not used: it could become shorter.
static inline void slip_engines_open(SlipNeighbours *me, double now) {
    *me = (SlipNeighbours){.is_open = 1};
#ifdef __linux__
    char path[256];
    int64_t size = ENGINE_SLOTS * sizeof(SlipEngine);
    if (syscall(SYS_sched_getaffinity, 0, sizeof me->cores, me->cores) < 0) return;
    me->owner = ((uint64_t)getpid() << 40 ^ (uint64_t)(uintptr_t)me ^ (uint64_t)(now * 1e9)) | 1;
    snprintf(path, sizeof path, SLIP_ENGINES_FOLDER "/" ENGINE_TABLE "-%u", (unsigned)getuid());
    int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (slip_engines_is_own(file) && !ftruncate(file, size)) {
        void *table = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (table != MAP_FAILED) me->table = table;
    }
    close(file);
#endif
}

__attribute__((weak)) __thread SlipNeighbours slip_neighbours;  // of the thread that runs steps; the sources share it

#endif
