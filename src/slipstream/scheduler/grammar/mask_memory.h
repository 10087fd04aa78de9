/* Masks that were computed before, by the key of their state: see mask_memory.c. */

#pragma once

#include "json_state.h"

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
