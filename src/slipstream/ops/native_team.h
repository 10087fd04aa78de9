// Number of threads of a decode step on a machine that other programs use too.
//
// A step waits for its threads several times. A thread whose core another program holds comes back after milliseconds,
// so one such program can make a step ten times as long; with one thread fewer it has a core to itself. While threads are
// late, fewer are tried, and with fewer threads than the engine has, more are tried again. A trial is a window of steps.
// The number is kept if its steps take less time than the last ones with the number before; a trial that is lost ends at
// once. After each refused trial the next one waits twice as long, unless steps have become much slower meanwhile.
//
// Engines on the same cores divide them first (native_engines.h).
//
// Results do not depend on the number of threads.
#ifndef SLIP_NATIVE_TEAM_H
#define SLIP_NATIVE_TEAM_H

#include <stdint.h>
#include <time.h>

#include "native_engines.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#define TEAM_WINDOW 8       // steps, at most
#define TEAM_LATE 2         // steps of a window with late threads that let it end
#define TEAM_SKIPPED 2      // steps at the start of a trial that do not count: threads move to other cores
#define TEAM_USUAL 16       // steps whose mean time is compared with that of a trial
#define TEAM_WAIT 1.0       // seconds from a refused trial to the next one, at first
#define TEAM_MAX_WAIT 8.0
#define TEAM_SLOWER 1.5     // times the step when fewer threads were refused: they are tried at once
#define TEAM_MAX_ROWS 64    // calls with more tokens are prefill: they take longer than other programs hold a core
#define LATE 1e-3           // seconds: a thread that others wait for longer is late

typedef struct {
    int64_t most, size;         // threads: of the engine, and of the next step
    int64_t rows, steps, late;  // steps of the window, the rows of each, and how many had late threads
    double seconds;             // of the window
    double usual;               // seconds of a step with this number of threads and rows
    int64_t counted;            // steps in `usual`
    int64_t before;             // during a trial: the number to return to; otherwise 0
    double before_usual;        // with that number
    int64_t refused;            // the last refused trial: -1 of fewer threads, 1 of more, 0 none
    double refused_usual;       // of a step when fewer threads were refused
    double wait, next;          // next: time from which trials are allowed
} SlipTeam;

__attribute__((weak)) __thread SlipTeam slip_team;  // of the thread that runs steps; the sources share it

static inline double slip_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static inline void slip_team_open_window(SlipTeam *team) {
    team->steps = team->late = 0;
    team->seconds = 0;
}

// direction: -1 for fewer threads, 1 for more
static inline void slip_team_try(SlipTeam *team, int direction) {
    int64_t size = team->size + direction * (team->size < 16 ? 1 : team->size / 8);
    team->before = team->size;
    team->before_usual = team->usual;
    team->size = size > team->most ? team->most : size;
    team->counted = 0;
    slip_team_open_window(team);
    team->steps = -TEAM_SKIPPED;
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
    slip_team_return(team);
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

// After a step of `rows` rows. `late`: whether a thread was late. Only times of steps with the same number of rows are
// compared.
static inline void slip_team_add(SlipTeam *team, int64_t rows, double seconds, int late, double now) {
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
    if (team->counted < TEAM_USUAL) team->counted++;
    team->usual = team->counted == 1 ? seconds : team->usual + (seconds - team->usual) / team->counted;
    team->seconds += seconds;
    team->late += late;
    team->steps++;
    if (team->before) {
        if (team->steps == TEAM_WINDOW || team->seconds > team->before_usual * TEAM_WINDOW) slip_team_end_trial(team, now);
    } else if (team->steps == TEAM_WINDOW || team->late >= TEAM_LATE) {
        slip_team_end_window(team, now);
    }
}

// Number of threads of the next call, with `rows` tokens
static inline int slip_team_size(int64_t rows) {
#ifdef _OPENMP
    double now = slip_now();
    if (!slip_neighbours.is_open) slip_engines_open(&slip_neighbours, now);
    int64_t most = slip_engines_threads(&slip_neighbours, omp_get_max_threads(), 2 * slip_team.usual, now);
    if (slip_team.most != most) slip_team = (SlipTeam){.most = most, .size = most, .wait = TEAM_WAIT, .usual = slip_team.usual};
    return rows > TEAM_MAX_ROWS ? (int)most : (int)slip_team.size;
#else
    return 1;
#endif
}

#endif
