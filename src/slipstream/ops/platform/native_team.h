// Number of threads of a decode step on a machine that other programs use too.
//
// A step waits for its threads several times. A thread whose core another program holds comes back after milliseconds,
// so one such program can make a step ten times as long; with one thread fewer it has a core to itself. While threads are
// late, fewer are tried, and with fewer threads than the engine has, more are tried again. A trial is a window of steps.
// The number is kept if its steps take less time than the last ones with the number before; a trial that is lost ends at
// once. After each refused trial the next one waits twice as long, unless steps have become much slower meanwhile.
//
// Prompts, and layers that run op by op, are many GEMMs of different sizes, whose times cannot be compared. There a GEMM
// is late if its threads wait for longer than they compute. Three late ones of eight take a thread away, down to half
// of the threads, and after a while without late ones a thread comes back.
//
// Engines on the same cores divide them first.
//
// Results do not depend on the number of threads.
#ifndef SLIP_NATIVE_TEAM_H
#define SLIP_NATIVE_TEAM_H

#include <stdint.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <fcntl.h>
#include <linux/stat.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// How many cores this engine may use while other engines of the same user run on them.
//
// Threads of two engines on the same cores stop each other: a step waits for all its threads. So engines share a table
// in memory, in which each has a slot with its cores and the time until which it counts as running. Each step reads the
// table and takes its part of the cores. Without such a table (other systems, containers that share no memory) only the
// trials below find a number of threads.

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

// The number of threads of a step.

#define TEAM_WINDOW 8       // steps, at most
#define TEAM_LATE 2         // steps of a window with late threads that let it end
#define TEAM_SKIPPED 2      // steps at the start of a trial that do not count: threads move to other cores
#define TEAM_USUAL 16       // steps whose mean time is compared with that of a trial
#define TEAM_WAIT 1.0       // seconds from a refused trial to the next one, at first
#define TEAM_MAX_WAIT 8.0
#define TEAM_JUMP 3         // as many late steps in a row that take so many times the usual one are the usual ones now
#define TEAM_SLOWER 1.5     // times the step when fewer threads were refused: they are tried at once
#define TEAM_MAX_ROWS 64    // more tokens are a long prompt, which has a number of threads of its own
#define GEMM_WINDOW 8       // GEMMs, at most
#define GEMM_LATE 3         // late GEMMs of a window that take a thread away
#define LATE 1e-3           // seconds: a thread that others wait for longer is late

typedef struct {  // GEMMs of prompts, and of layers that run op by op
    int64_t count, late;  // of the window
    int64_t before;       // during a trial of more threads: the number to return to; otherwise 0
    double wait, next;    // as in SlipTeam
} SlipGemms;

typedef struct {
    int64_t most, size;         // threads: of the engine, and of the next step
    int64_t long_size;          // threads of long prompts
    int64_t rows, steps, late;  // steps of the window, the rows of each, and how many had late threads
    double seconds;             // of the window
    double usual;               // seconds of a step with this number of threads and rows
    int64_t counted;            // steps in `usual`
    int64_t jumps;              // late steps in a row that took much longer than usual
    double jump_seconds;        // of these
    int64_t before;             // during a trial: the number to return to; otherwise 0
    double before_usual;        // with that number
    int64_t refused;            // the last refused trial: -1 of fewer threads, 1 of more, 0 none
    double refused_usual;       // of a step when fewer threads were refused
    double wait, next;          // next: time from which trials are allowed
    double gemm;                // seconds of the last GEMM since the layers of a step: the LM head, if our kernels run it
    int64_t gemm_late;          // whether a thread was late in it
    int64_t gemms;              // since the layers of a step: the first is its LM head
    SlipGemms of_short, of_long;
} SlipTeam;

__attribute__((weak)) __thread SlipTeam slip_team;  // of the thread that runs steps; the sources share it

static inline double slip_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// A measurement of one thread that waits for others without giving away its core
typedef struct {
    double start, cpu;
} SlipClock;

static inline double slip_cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static inline SlipClock slip_clock(void) { return (SlipClock){slip_now(), slip_cpu_seconds()}; }

// Seconds for which another program held the core of this thread since then
static inline double slip_away(SlipClock since, double now) { return now - since.start - (slip_cpu_seconds() - since.cpu); }

static inline SlipTeam slip_team_of(int64_t most) {
    return (SlipTeam){.most = most, .size = most, .long_size = most, .wait = TEAM_WAIT};
}

static inline void slip_team_open_window(SlipTeam *team) {
    team->steps = team->late = 0;
    team->seconds = 0;
}

static inline void slip_team_try_size(SlipTeam *team, int64_t size) {
    team->before = team->size;
    team->before_usual = team->usual;
    team->size = size > team->most ? team->most : size;
    team->counted = 0;
    slip_team_open_window(team);
    team->steps = -TEAM_SKIPPED;
}

// direction: -1 for fewer threads, 1 for more
static inline void slip_team_try(SlipTeam *team, int direction) {
    slip_team_try_size(team, team->size + direction * (team->size < 16 ? 1 : team->size / 8));
}

static inline void slip_team_return(SlipTeam *team) {
    team->size = team->before;
    team->usual = team->before_usual;
    team->counted = TEAM_USUAL;
    team->before = 0;
    slip_team_open_window(team);
}

static inline void slip_team_end_trial(SlipTeam *team, double now) {
    int fewer = team->size < team->before;
    if (team->seconds < team->before_usual * team->steps) {
        team->before = team->refused = 0;
        team->wait = TEAM_WAIT;
        team->next = now + team->wait;
        if (fewer && team->late >= TEAM_LATE && team->size > 1)
            slip_team_try(team, -1);
        else
            slip_team_open_window(team);
        return;
    }
    int64_t half = team->before / 2;
    int tries_half = fewer && team->size > half && team->late;
    slip_team_return(team);
    if (tries_half) {  // two other programs make three of four threads as slow as four
        slip_team_try_size(team, half);
        return;
    }
    team->refused = fewer ? -1 : 1;
    if (fewer) team->refused_usual = team->usual;
    team->next = now + team->wait;
    team->wait = team->wait * 2 < TEAM_MAX_WAIT ? team->wait * 2 : TEAM_MAX_WAIT;
}

static inline void slip_team_end_window(SlipTeam *team, double now) {
    int fewer = team->late >= TEAM_LATE && team->size > 1, more = team->size < team->most;
    int is_slower = team->refused == -1 && team->usual > TEAM_SLOWER * team->refused_usual;
    if (fewer && is_slower)
        slip_team_try(team, -1);
    else if (now < team->next || (!fewer && !more))
        slip_team_open_window(team);
    else if (fewer && more)
        slip_team_try(team, team->refused == -1 ? 1 : -1);  // in turns
    else
        slip_team_try(team, fewer ? -1 : 1);
}

// After a GEMM outside of the layers of a step. Returns whether the number of threads `size` has changed.
static inline int slip_gemms_add(SlipGemms *gemms, int64_t *size, int64_t most, int late, double now) {
    int64_t least = most / 2 > 1 ? most / 2 : 1, was = *size;
    gemms->count++;
    gemms->late += late;
    if (gemms->late < GEMM_LATE && gemms->count < GEMM_WINDOW) return 0;
    if (gemms->late >= GEMM_LATE) {
        double wait = gemms->before ? 2 * gemms->wait : TEAM_WAIT;
        int64_t fewer = *size - (*size < 16 ? 1 : *size / 8);
        *size = gemms->before ? gemms->before : was <= least ? was : fewer < least ? least : fewer;
        gemms->wait = wait < TEAM_MAX_WAIT ? wait : TEAM_MAX_WAIT;
        gemms->next = now + gemms->wait;
        gemms->before = 0;
    } else if (gemms->before) {
        gemms->before = 0;
        gemms->wait = TEAM_WAIT;
        gemms->next = now + gemms->wait;
    } else if (*size < most && now > gemms->next && !gemms->late) {
        gemms->before = *size;
        *size += *size < 16 ? 1 : *size / 8;
        if (*size > most) *size = most;
    }
    gemms->count = gemms->late = 0;
    return *size != was;
}

// After a GEMM of `rows` tokens. late: whether a thread was late; waited: whether that took longer than the GEMM itself
static inline void slip_team_add_gemm(SlipTeam *team, int64_t rows, double seconds, int late, int waited, double now) {
    team->gemm = seconds;
    team->gemm_late = late;
    if (++team->gemms == 1) return;  // the LM head
    if (team->next > team->of_short.next) team->of_short.next = team->next;
    if (rows > TEAM_MAX_ROWS) {
        slip_gemms_add(&team->of_long, &team->long_size, team->most, waited, now);
    } else if (slip_gemms_add(&team->of_short, &team->size, team->most, waited, now)) {
        team->counted = team->before = 0;
        team->next = now + team->wait;
        slip_team_open_window(team);
    }
}

// The same for a GEMM that began at `clock`. end: when the calling thread had no work left and waited for the others;
// before: seconds for which it waited for them in the middle
static inline void slip_team_time_gemm(int64_t rows, SlipClock clock, double before, double end) {
    double now = slip_now(), all = now - clock.start, wait = before + now - end, away = slip_away(clock, now);
    int waited = (wait > LATE && wait > all / 2) || (away > LATE && away > all / 2);
    slip_team_add_gemm(&slip_team, rows, all, wait > LATE || away > LATE, waited, now);
}

// After the layers of a step of `rows` rows; the LM head of the step before counts too. `late`: whether a thread was late.
// Only times of steps with the same number of rows are compared.
static inline void slip_team_add(SlipTeam *team, int64_t rows, double seconds, int late, double now) {
    seconds += team->gemm;
    late = late || team->gemm_late;
    team->gemm = 0;
    team->gemm_late = team->gemms = 0;
    if (team->of_short.before) {  // that trial is about GEMMs
        team->size = team->of_short.before;
        team->of_short.before = team->of_short.count = team->of_short.late = 0;
    }
    if (team->most < 2) {
        team->usual = seconds;
        return;
    }
    if (rows != team->rows) {
        team->rows = rows;
        if (team->before) slip_team_return(team);
        slip_team_open_window(team);
        team->counted = team->refused = 0;
    }
    if (team->steps < 0) {
        team->steps++;
        return;
    }
    if (late && !team->before && team->size > 1 && team->counted == TEAM_USUAL && seconds > TEAM_JUMP * team->usual) {
        team->jumps++;
        team->jump_seconds += seconds;
    } else {
        team->jumps = team->jump_seconds = 0;
    }
    if (team->counted < TEAM_USUAL) team->counted++;
    team->usual = team->counted == 1 ? seconds : team->usual + (seconds - team->usual) / team->counted;
    team->seconds += seconds;
    team->late += late;
    team->steps++;
    if (team->jumps == TEAM_JUMP) {  // another program has begun to run
        team->usual = team->jump_seconds / team->jumps;
        team->jumps = team->jump_seconds = 0;
        slip_team_try(team, -1);
        return;
    }
    if (team->before) {
        if (team->steps == TEAM_WINDOW || team->seconds > team->before_usual * TEAM_WINDOW) slip_team_end_trial(team, now);
    } else if (!team->jumps && (team->steps >= TEAM_WINDOW || team->late >= TEAM_LATE)) {
        slip_team_end_window(team, now);
    }
}

// Number of threads of the next call, with `rows` tokens
static inline int64_t slip_team_choose(SlipTeam *team, int64_t rows) {
    if (rows > TEAM_MAX_ROWS) return team->long_size;
    if (team->before && rows != team->rows) slip_team_return(team);  // a trial is about steps with equal rows
    return team->size;
}

static inline int slip_team_size(int64_t rows) {
#ifdef _OPENMP
    double now = slip_now();
    if (!slip_neighbours.is_open) slip_engines_open(&slip_neighbours, now);
    int64_t most = slip_engines_threads(&slip_neighbours, omp_get_max_threads(), 2 * slip_team.usual, now);
    if (slip_team.most != most) {
        double usual = slip_team.usual;
        slip_team = slip_team_of(most);
        slip_team.usual = usual;
    }
    return (int)slip_team_choose(&slip_team, rows);
#else
    return 1;
#endif
}

#endif
