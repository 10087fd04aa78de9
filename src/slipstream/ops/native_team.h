// Number of threads of a decode step on a machine that other programs use too.
//
// A step waits for its threads several times. A thread whose core another program holds comes back after milliseconds,
// so one such program can make a step ten times as long; with one thread fewer it has a core to itself. Steps are
// measured in windows, which end early if threads are late: then a search starts. The next windows run with fewer and fewer
// threads, until no thread is late, and the fastest number stays. Later, after waits that double, one window tries more
// threads again.
//
// Results do not depend on the number of threads.
#ifndef SLIP_NATIVE_TEAM_H
#define SLIP_NATIVE_TEAM_H

#include <stdint.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define TEAM_WINDOW 8       // steps, at most
#define TEAM_LATE 2         // of them with late threads: they end the window
#define TEAM_WAIT 1.0       // seconds from a search to the next one, or to a trial of more threads, at first
#define TEAM_MAX_WAIT 60.0
#define LATE 1e-3           // seconds: a thread that others wait for longer is late

enum { TEAM_SETTLED, TEAM_SEARCHING, TEAM_RAISED };

typedef struct {
    int64_t most, size;              // threads: of the engine, and of the next step
    int64_t state, steps, late, rows;  // steps of the window, those with late threads, and the rows of each
    double seconds;                  // of the window; when it ends, of a step of it
    int64_t best;                    // number of threads to return to
    double best_seconds;             // of a step with it
    double wait, next;               // next: time of the next search or trial
} SlipTeam;

__attribute__((weak)) __thread SlipTeam slip_team;  // of the thread that runs steps; the sources share it

static inline double slip_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static inline int64_t slip_team_step(int64_t size) { return size < 16 ? 1 : size / 8; }

static inline void slip_team_settle(SlipTeam *team, int64_t size, double now) {
    team->state = TEAM_SETTLED;
    team->size = size;
    team->next = now + team->wait;
    team->wait = team->wait * 2 < TEAM_MAX_WAIT ? team->wait * 2 : TEAM_MAX_WAIT;
}

static inline void slip_team_close_window(SlipTeam *team, double now) {
    int is_late = team->late >= TEAM_LATE, is_best = team->state == TEAM_SETTLED || team->seconds < team->best_seconds;
    if (team->state == TEAM_RAISED) {
        if (!is_late && is_best) {
            team->wait = TEAM_WAIT;
            team->best = team->size;
        }
        slip_team_settle(team, team->best, now);
    } else if (team->state == TEAM_SEARCHING || (is_late && now >= team->next)) {
        if (is_best) {
            team->best = team->size;
            team->best_seconds = team->seconds;
        }
        if (is_late && team->size > 1) {
            team->state = TEAM_SEARCHING;
            team->size -= slip_team_step(team->size);
        } else {
            slip_team_settle(team, team->best, now);
        }
    } else if (team->size < team->most && now >= team->next) {
        team->best = team->size;
        team->best_seconds = team->seconds;
        team->state = TEAM_RAISED;
        team->size += slip_team_step(team->size);
        if (team->size > team->most) team->size = team->most;
    }
}

// After a step of `rows` rows. `late`: whether a thread was late. Windows have steps with the same number of rows, since
// their times are compared.
static inline void slip_team_add(SlipTeam *team, int64_t rows, double seconds, int late, double now) {
    if (team->most < 2) return;
    if (rows != team->rows) {
        team->rows = rows;
        team->steps = team->late = 0;
        team->seconds = 0;
        if (team->state != TEAM_SETTLED) slip_team_settle(team, team->best, now);
    }
    team->seconds += seconds;
    team->late += late;
    if (++team->steps < TEAM_WINDOW && team->late < TEAM_LATE) return;
    team->seconds /= team->steps;
    slip_team_close_window(team, now);
    team->steps = team->late = 0;
    team->seconds = 0;
}

// Number of threads of the next step
static inline int slip_team_size(void) {
#ifdef _OPENMP
    int most = omp_get_max_threads();
    if (slip_team.most != most) slip_team = (SlipTeam){.most = most, .size = most, .best = most, .wait = TEAM_WAIT};
    return (int)slip_team.size;
#else
    return 1;
#endif
}

#endif
