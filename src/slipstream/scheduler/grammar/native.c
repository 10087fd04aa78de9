/* Threads that advance grammars and fill their masks, without the interpreter lock.

   `slip_masks_start` publishes a batch of rows and returns; `slip_masks_wait` returns when all rows are done, or when its
   time is over. One batch is published at a time. Threads poll for the next batch for a short time before they sleep,
   because waking a thread takes longer than the masks of a step.

   A row that is not done in time can be abandoned: its thread goes on, and writes the mask to the row's spare buffer, so
   that the buffer of the step can be used. The entry of such a row is not part of a batch until its thread has ended.

   The mask of a state of a JSON text that was seen before is copied (json.c, masks.c). If the device has a table
   of such masks, its number is written instead.

   Matchers are those of llguidance; its functions are passed as pointers, so this file needs no header of it. The C
   function that copies a matcher copies its lexer too, so no two rows share anything. */

#include "masks.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#if defined(__linux__)
#endif

#define MAX_ROWS ((uint64_t)1 << 20) /* entries */

#define SPIN_NS 20000       /* then a caller that waits sleeps between two looks, on a machine with few cores */
#define LONG_SPIN_NS 300000 /* where threads poll too */
#define MIN_SLEEP_NS 100000

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    uint32_t *scratch; /* a mask */
    pthread_t thread;
} Worker;

struct Pool {
    Filling filling;
    int32_t num_threads, max_threads;
    int64_t poll_ns; /* how long a thread polls before it sleeps */
    Row *rows;
    atomic_ulong ticket; /* of the next entry that is not claimed: end of the batch, entry */
    atomic_ulong batch;  /* number of the batch */
    atomic_llong started;  /* when it was published, in nanoseconds */
    atomic_llong period;   /* time between two batches, a moving mean; 0: not known, or too long to wait for */
    atomic_bool is_closed;
    atomic_int num_asleep;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    Worker *workers;
    int32_t *leftover; /* abandoned entries that no thread had claimed when the next batch began; under the mutex */
    atomic_int num_leftover;
};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* A ticket has the end of its batch too: a thread that is late finds that its batch has no entry left, or claims an entry
   of the next batch, which is complete when its first ticket appears. */
static void process_rows(Pool *pool, uint32_t *scratch) {
    while (true) {
        const uint64_t ticket = atomic_fetch_add(&pool->ticket, 1);
        const uint64_t entry = ticket % MAX_ROWS, end = ticket / MAX_ROWS;
        if (entry >= end) break;
        slip_process_row(&pool->filling, &pool->rows[entry], scratch);
    }
    while (atomic_load(&pool->num_leftover)) {
        Row *row = NULL;
        pthread_mutex_lock(&pool->mutex);
        const int count = atomic_load(&pool->num_leftover);
        if (count) {
            row = &pool->rows[pool->leftover[count - 1]];
            atomic_store(&pool->num_leftover, count - 1);
        }
        pthread_mutex_unlock(&pool->mutex);
        if (row != NULL) slip_process_row(&pool->filling, row, scratch);
    }
}

/* A thread that polls takes time from the other thread of its core, so it sleeps for most of a step. */
static void sleep_until_due(Pool *pool) {
    const int64_t period = atomic_load(&pool->period);
    if (!period || !pool->poll_ns) return;
    const int64_t due = atomic_load(&pool->started) + period * 3 / 4;
    if (due - now_ns() < MIN_SLEEP_NS) return;
    const struct timespec time = {due / 1000000000, due % 1000000000};
    (void)!clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static void *run_worker(void *argument) {
    Worker *worker = argument;
    Pool *pool = worker->pool;
    unsigned long seen = 0;
#if defined(__linux__)
    prctl(PR_SET_TIMERSLACK, 1);
#endif
    while (true) {
        sleep_until_due(pool);
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
        process_rows(pool, worker->scratch);
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
    for (int32_t index = 0; index < pool->num_threads; index++) pthread_join(pool->workers[index].thread, NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    for (int32_t index = 0; index < pool->max_threads && pool->workers; index++) free(pool->workers[index].scratch);
    if (pool->filling.memory) slip_memory_close(pool->filling.memory);
    free(pool->rows);
    free(pool->leftover);
    free(pool->workers);
    free(pool);
}

/* Returns NULL if out of memory or threads. */
Pool *slip_masks_open(const Functions *functions, int64_t end_token, int64_t mask_words, int64_t num_threads,
                      int64_t num_entries, int64_t poll_ns, int64_t max_masks) {
    Pool *pool = calloc(1, sizeof(Pool));
    if (pool == NULL) return NULL;
    pool->filling.functions = *functions;
    pool->filling.end_token = (int32_t)end_token;
    pool->filling.mask_words = (int32_t)mask_words;
    pool->max_threads = (int32_t)num_threads;
    pool->poll_ns = poll_ns;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->rows = calloc((size_t)num_entries, sizeof(Row));
    pool->filling.memory = slip_memory_open(mask_words, max_masks);
    pool->leftover = calloc((size_t)num_entries, sizeof(int32_t));
    pool->workers = calloc((size_t)num_threads, sizeof(Worker));
    sigset_t all, before; /* signals are for the interpreter's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool failed = !pool->rows || !pool->filling.memory || !pool->leftover || !pool->workers;
    while (!failed && pool->num_threads < num_threads) {
        Worker *worker = &pool->workers[pool->num_threads];
        worker->pool = pool;
        worker->scratch = calloc((size_t)mask_words, 4);
        failed = !worker->scratch || pthread_create(&worker->thread, NULL, run_worker, worker) != 0;
        if (!failed) pool->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return pool;
    slip_masks_close(pool);
    return NULL;
}

/* The entries: where the caller writes the rows of the next batch, and reads their results. */
Row *slip_masks_rows(Pool *pool) { return pool->rows; }

/* Masks that were copied from states seen before. */
int64_t slip_masks_num_found(Pool *pool) { return (int64_t)atomic_load(&pool->filling.num_found); }

/* Publish the entries from `first` on, whose masks are written to `masks`. No thread uses them. `inputs`: of each row
   matcher, walker, token, forced and index. */
void slip_masks_start(Pool *pool, int64_t first, int64_t num_rows, const Masks *masks, const int64_t *inputs) {
    pool->filling.masks = *masks;
    for (int64_t entry = first; entry < first + num_rows; entry++, inputs += 5) {
        Row *row = &pool->rows[entry];
        row->matcher = (void *)inputs[0];
        row->walker = (Walker *)inputs[1];
        row->token = (int32_t)inputs[2];
        row->forced = (int32_t)inputs[3];
        row->index = (int32_t)inputs[4];
        atomic_store_explicit(&row->state, RUNNING, memory_order_relaxed); /* the ticket publishes it */
    }
    const int64_t now = now_ns(), since = now - atomic_exchange(&pool->started, now);
    const int64_t before = atomic_load(&pool->period);
    atomic_store(&pool->period, since > pool->poll_ns ? 0 : !before || since < before ? since : before + (since - before) / 8);
    const uint64_t next = (uint64_t)(first + num_rows) * MAX_ROWS + (uint64_t)first;
    const uint64_t old = atomic_exchange(&pool->ticket, next);
    if (old % MAX_ROWS < old / MAX_ROWS) { /* all of them are abandoned */
        pthread_mutex_lock(&pool->mutex);
        int count = atomic_load(&pool->num_leftover);
        for (uint64_t entry = old % MAX_ROWS; entry < old / MAX_ROWS; entry++) pool->leftover[count++] = (int32_t)entry;
        atomic_store(&pool->num_leftover, count);
        pthread_mutex_unlock(&pool->mutex);
    }
    atomic_fetch_add(&pool->batch, 1);
    if (atomic_load(&pool->num_asleep)) wake_all(pool);
}

/* The masks of the step are complete: the device gets those with these targets, and keeps them. */
void slip_masks_send(Pool *pool, const int32_t *targets, int64_t num, int64_t first) {
    slip_memory_send(pool->filling.memory, targets, num, first);
}

static bool is_over(Row *row) {
    const int state = atomic_load(&row->state);
    return state == DONE || state == ENDED;
}

/* Waits for the entries from `first` on, for so many nanoseconds; negative: without a limit. Returns how many are not
   done. */
int64_t slip_masks_wait(Pool *pool, int64_t first, int64_t num_rows, int64_t limit_ns) {
    const int64_t begin = now_ns(), end = first + num_rows;
    const int64_t spin_ns = pool->poll_ns ? LONG_SPIN_NS : SPIN_NS;
    int64_t entry = first;
    while (true) {
        while (entry < end && is_over(&pool->rows[entry])) entry++;
        if (entry == end) return 0;
        const int64_t waited = now_ns() - begin;
        if (limit_ns >= 0 && waited >= limit_ns) break;
        if (waited < spin_ns) {
            pause_briefly();
        } else {
            const struct timespec nap = {0, 20000};
            nanosleep(&nap, NULL);
        }
    }
    int64_t num_left = 0;
    for (; entry < end; entry++) num_left += !is_over(&pool->rows[entry]);
    return num_left;
}

/* Writes the numbers of the rows, counted from `first`, that have flags or forced tokens, or took longer. Returns how
   many. */
int64_t slip_masks_changed(Pool *pool, int64_t first, int64_t num_rows, float seconds, int32_t *numbers) {
    int64_t count = 0;
    for (int64_t number = 0; number < num_rows; number++) {
        const Row *row = &pool->rows[first + number];
        if (row->flags || row->num_forced || row->seconds > seconds) numbers[count++] = (int32_t)number;
    }
    return count;
}

/* Whether the row is abandoned: its thread will write the mask to the spare buffer. Otherwise it is done. */
int64_t slip_masks_abandon(Pool *pool, int64_t entry) {
    Row *row = &pool->rows[entry];
    int expected = RUNNING;
    if (atomic_compare_exchange_strong(&row->state, &expected, ABANDONED)) return 1;
    while (!is_over(row)) pause_briefly();
    return 0;
}

/* The tokens of texts that grammars force. The tokenizer is a Python function, which needs the interpreter lock; the
   texts repeat, so their tokens are kept here. */

#define NUM_TEXTS 4096

typedef size_t (*Tokenize)(const void *user, const uint8_t *text, size_t size, uint32_t *tokens, size_t room);

typedef struct {
    uint8_t *text;
    size_t size;
    uint32_t *tokens;
    size_t num_tokens;
} Text;

typedef struct {
    Tokenize tokenize;
    pthread_mutex_t mutex;
    Text texts[NUM_TEXTS]; /* by hash */
} Texts;

/* Returns NULL if out of memory. */
Texts *slip_texts_open(Tokenize tokenize) {
    Texts *texts = calloc(1, sizeof(Texts));
    if (texts == NULL) return NULL;
    texts->tokenize = tokenize;
    pthread_mutex_init(&texts->mutex, NULL);
    return texts;
}

static void clear_text(Text *text) {
    free(text->text);
    free(text->tokens);
    memset(text, 0, sizeof(Text));
}

void slip_texts_close(Texts *texts) {
    for (size_t index = 0; index < NUM_TEXTS; index++) clear_text(&texts->texts[index]);
    pthread_mutex_destroy(&texts->mutex);
    free(texts);
}

static size_t copy_tokens(const uint32_t *from, size_t num, uint32_t *tokens, size_t room) {
    memcpy(tokens, from, (num < room ? num : room) * sizeof(uint32_t));
    return num;
}

/* As `Tokenize`, with the texts as user data. */
size_t slip_texts_tokenize(const void *user, const uint8_t *text, size_t size, uint32_t *tokens, size_t room) {
    Texts *texts = (Texts *)user;
    uint64_t hash = 14695981039346656037u;
    for (size_t index = 0; index < size; index++) hash = (hash ^ text[index]) * 1099511628211u;
    Text *own = &texts->texts[hash % NUM_TEXTS];
    pthread_mutex_lock(&texts->mutex);
    if (own->text != NULL && own->size == size && memcmp(own->text, text, size) == 0) {
        const size_t num = copy_tokens(own->tokens, own->num_tokens, tokens, room);
        pthread_mutex_unlock(&texts->mutex);
        return num;
    }
    pthread_mutex_unlock(&texts->mutex);
    Text made = {malloc(size), size, malloc(size * sizeof(uint32_t)), 0}; /* a token has at least one byte */
    if (size == 0 || made.text == NULL || made.tokens == NULL) {
        clear_text(&made);
        return size == 0 ? 0 : texts->tokenize(NULL, text, size, tokens, room);
    }
    memcpy(made.text, text, size);
    made.num_tokens = texts->tokenize(NULL, text, size, made.tokens, size);
    const size_t num = copy_tokens(made.tokens, made.num_tokens, tokens, room);
    if (num == 0) { /* it failed */
        clear_text(&made);
        return 0;
    }
    pthread_mutex_lock(&texts->mutex);
    Text old = *own;
    *own = made;
    pthread_mutex_unlock(&texts->mutex);
    clear_text(&old);
    return num;
}
