/* Masks that were computed before, by the key of their state: see mask_memory.c. */

#pragma once

#include "json_state.h"

typedef struct Memory Memory;

/* Returns NULL if out of memory. */
Memory *slip_memory_open(int64_t mask_words);
void slip_memory_close(Memory *memory);

/* Whether the mask of this state is kept, with at least this room. It is written to `mask`, unless that is NULL. */
bool slip_memory_find(Memory *memory, const Key *key, int32_t room, uint32_t *mask);

/* Whether a mask should be kept: its state was seen before. */
bool slip_memory_wants(Memory *memory, const Key *key);

/* Keep a mask; one with less room is replaced. */
void slip_memory_keep(Memory *memory, const Key *key, int32_t room, const uint32_t *mask);
