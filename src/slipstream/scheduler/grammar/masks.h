/* Masks that were computed before, by the key of their state: see masks.c. */

#pragma once

#include "json.h"

#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

typedef struct Memory Memory;

/* `max_masks`: that are kept; 0: by their size. Returns NULL if out of memory. */
Memory *slip_memory_open(int64_t mask_words, int64_t max_masks);
void slip_memory_close(Memory *memory);

/* The slot with the mask of this state, kept with at least this room; -1: none. The mask is written to `mask`, unless that
   is NULL. */
int64_t slip_memory_find(Memory *memory, const Key *key, int32_t room, uint32_t *mask);

/* Whether a mask should be kept: its state was seen before. */
bool slip_memory_wants(Memory *memory, const Key *key);

/* Keep a mask; one with less room is replaced. Returns its slot; -1: all slots are in use now. */
int64_t slip_memory_keep(Memory *memory, const Key *key, int32_t room, const uint32_t *mask);

/* Whether the device has the mask of this slot. */
bool slip_memory_is_sent(const Memory *memory, int64_t slot);

/* The device gets these masks with the step of the masks found since the last call: slots from `first` on. */
void slip_memory_send(Memory *memory, const int32_t *slots, int64_t num, int64_t first);

/* One row of the threads of native.c: its grammar takes a token, and its mask is filled. */

#define MAX_FORCED 64 /* forced tokens of a row; as in mask_pool.py */

enum { RUNNING, WRITING, DONE, ABANDONED, ENDED }; /* states of a row; an abandoned one becomes ENDED */

typedef struct {
    int32_t (*consume)(void *matcher, uint32_t token);
    bool (*is_stopped)(const void *matcher);
    bool (*is_error)(const void *matcher);
    int32_t (*forced)(void *matcher, uint32_t *tokens, size_t length);
    int32_t (*mask)(void *matcher, uint32_t *mask, size_t bytes);
} Functions;

typedef struct { /* as ROW in mask_pool.py */
    void *matcher;
    Walker *walker;  /* of a JSON text; NULL: none */
    uint32_t *spare; /* of an abandoned row */
    int32_t index;   /* of its mask among those of the step; -1: no mask is wanted */
    int32_t token;   /* to take first; -1: none */
    int32_t forced;  /* the token that must follow, if it is known; -1: not known */
    /* results */
    int32_t flags;
    int32_t num_forced; /* tokens that must follow, found after `token` */
    float seconds;
    atomic_int state;
    uint32_t tokens[MAX_FORCED];
} Row;

typedef struct { /* the masks of a step */
    uint32_t *bits; /* [masks, words] */
    /* of the device, see `StepMasks` in step.py; NULL: all masks are written to `bits` */
    int32_t *entries, *targets;
    int64_t first; /* entry of the first kept mask */
} Masks;

typedef struct { /* what all rows use */
    Functions functions;
    int32_t end_token; /* bit of a mask: the grammar may end */
    int32_t mask_words;
    Masks masks; /* of the batch */
    Memory *memory;
    atomic_ulong num_found; /* masks that were kept from before */
} Filling;

static inline int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* `scratch`: a mask. */
void slip_process_row(Filling *filling, Row *row, uint32_t *scratch);
