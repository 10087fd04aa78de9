/* Threads that advance grammars and fill their masks, without the interpreter lock.

   `slip_masks_start` publishes a batch of rows and returns; `slip_masks_wait` takes part in the work and returns when all
   rows are done. There is one batch at a time. Threads poll for the next batch for a short time before they sleep,
   because waking a thread takes longer than the masks of a step.

   Matchers are those of llguidance; its functions are passed as pointers, so this file needs no header of it. The C
   function that copies a matcher copies its lexer too, so no two rows share anything. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_FORCED 64 /* forced tokens of a row; as in mask_pool.py */

#define MAX_ROWS ((uint64_t)1 << 20) /* of a batch */

enum { STOPPED = 1, ERROR = 2, MAY_END = 4 };

typedef struct {
    int32_t (*consume)(void *matcher, uint32_t token);
    bool (*is_stopped)(const void *matcher);
    bool (*is_error)(const void *matcher);
    int32_t (*forced)(void *matcher, uint32_t *tokens, size_t length);
    int32_t (*mask)(void *matcher, uint32_t *mask, size_t bytes);
} Functions;

typedef struct { /* as ROW in mask_pool.py */
    void *matcher;
    uint32_t *mask; /* NULL: no mask is wanted */
    int32_t token;  /* to take first; -1: none */
    int32_t forced; /* the token that must follow, if it is known; -1: not known */
    /* results */
    int32_t flags;
    int32_t num_forced; /* tokens that must follow, found after `token` */
    float seconds;
    uint32_t tokens[MAX_FORCED];
    uint32_t unused;
} Row;

typedef struct {
    Functions functions;
    int32_t end_token; /* bit of a mask: the grammar may end */
    int32_t mask_words;
    int32_t num_threads;
    int64_t poll_ns; /* how long a thread polls before it sleeps */
    Row *rows;
    atomic_ulong ticket; /* of the next row that is not claimed: number of rows, index */
    atomic_int num_left; /* rows that are not done */
    atomic_ulong batch;  /* number of the batch */
    atomic_bool is_closed;
    atomic_int num_asleep;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    pthread_t *threads;
} Pool;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void fill_mask(const Pool *pool, Row *row) {
    const size_t bytes = (size_t)pool->mask_words * 4;
    if (row->forced >= 0) {
        memset(row->mask, 0, bytes);
        row->mask[row->forced >> 5] = (uint32_t)1 << (row->forced & 31);
    } else if ((row->flags & ERROR) || pool->functions.mask(row->matcher, row->mask, bytes) != 0 ||
               pool->functions.is_error(row->matcher)) {
        row->flags |= ERROR;
        memset(row->mask, 0, bytes); /* no token is possible */
    } else if (row->mask[pool->end_token >> 5] >> (pool->end_token & 31) & 1) {
        row->flags |= MAY_END;
    }
}

static void process_row(const Pool *pool, Row *row) {
    const Functions *functions = &pool->functions;
    const int64_t begin = now_ns();
    row->flags = row->num_forced = 0;
    if (row->token >= 0) {
        (void)!functions->consume(row->matcher, (uint32_t)row->token);
        if (functions->is_stopped(row->matcher)) {
            row->flags = functions->is_error(row->matcher) ? STOPPED | ERROR : STOPPED;
        } else if (row->forced < 0) {
            const int32_t found = functions->forced(row->matcher, row->tokens, MAX_FORCED);
            if (found > 0) {
                row->num_forced = found;
                row->forced = (int32_t)row->tokens[0];
            }
        }
    }
    if (row->mask != NULL && row->flags != STOPPED) fill_mask(pool, row);
    row->seconds = (float)(now_ns() - begin) * 1e-9f;
}

/* A ticket has the number of rows too: a thread that is late finds that its batch has no row left, or claims a row of
   the next batch, which is complete when its first ticket appears. */
static void process_rows(Pool *pool) {
    while (true) {
        const uint64_t ticket = atomic_fetch_add(&pool->ticket, 1);
        const uint64_t index = ticket % MAX_ROWS, num_rows = ticket / MAX_ROWS;
        if (index >= num_rows) return;
        process_row(pool, &pool->rows[index]);
        atomic_fetch_sub(&pool->num_left, 1);
    }
}

static void *run_worker(void *argument) {
    Pool *pool = argument;
    unsigned long seen = 0;
    while (true) {
        const int64_t limit = now_ns() + pool->poll_ns;
        while (atomic_load(&pool->batch) == seen && !atomic_load(&pool->is_closed) && now_ns() < limit) {
            for (int count = 0; count < 16; count++) pause_briefly();
        }
        if (atomic_load(&pool->batch) == seen) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->num_asleep, 1);
            while (atomic_load(&pool->batch) == seen && !atomic_load(&pool->is_closed))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->num_asleep, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        if (atomic_load(&pool->is_closed)) return NULL;
        seen = atomic_load(&pool->batch);
        process_rows(pool);
    }
}

static void wake_all(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

void slip_masks_close(Pool *pool) {
    atomic_store(&pool->is_closed, true);
    wake_all(pool);
    for (int32_t index = 0; index < pool->num_threads; index++) pthread_join(pool->threads[index], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    free(pool->rows);
    free(pool->threads);
    free(pool);
}

/* Returns NULL if out of memory or threads. With `num_threads` 0 the caller of `slip_masks_wait` does all the work. */
Pool *slip_masks_open(const Functions *functions, int64_t end_token, int64_t mask_words, int64_t num_threads,
                      int64_t max_rows, int64_t poll_ns) {
    Pool *pool = calloc(1, sizeof(Pool));
    if (pool == NULL) return NULL;
    pool->functions = *functions;
    pool->end_token = (int32_t)end_token;
    pool->mask_words = (int32_t)mask_words;
    pool->poll_ns = poll_ns;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->rows = calloc((size_t)max_rows, sizeof(Row));
    pool->threads = calloc((size_t)num_threads + 1, sizeof(pthread_t));
    sigset_t all, before; /* signals are for the interpreter's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool failed = !pool->rows || !pool->threads;
    while (!failed && pool->num_threads < num_threads) {
        failed = pthread_create(&pool->threads[pool->num_threads], NULL, run_worker, pool) != 0;
        if (!failed) pool->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return pool;
    slip_masks_close(pool);
    return NULL;
}

/* Where the caller writes the rows of the next batch, and reads their results. */
Row *slip_masks_rows(Pool *pool) { return pool->rows; }

void slip_masks_start(Pool *pool, int64_t num_rows) {
    atomic_store(&pool->num_left, (int)num_rows);
    atomic_store(&pool->ticket, (uint64_t)num_rows * MAX_ROWS);
    atomic_fetch_add(&pool->batch, 1);
    if (atomic_load(&pool->num_asleep)) wake_all(pool);
}

/* Rows of the batch that are not done. */
int64_t slip_masks_left(Pool *pool) { return atomic_load(&pool->num_left); }

void slip_masks_wait(Pool *pool) {
    process_rows(pool);
    while (atomic_load(&pool->num_left)) pause_briefly();
}
