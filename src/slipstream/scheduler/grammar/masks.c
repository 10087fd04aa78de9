/* Masks that were computed before, by the key of their state. Threads use it without waiting for each other: a slot that
   another thread writes counts as a slot with another key, and a slot that is read is not written.

   A state is kept when it is seen for the second time, so that states that never repeat, such as the digits of numbers,
   replace nothing.

   The device may have a table with the same slots, so that a step sends the number of a slot instead of its mask. A slot
   that was found for the masks of the next step keeps its mask until these are sent (`step`). Later steps may replace it:
   the device runs steps in order. */

#include "masks.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((int64_t)32 << 20)
#define MAX_SETS 4096
#define NUM_WAYS 4     /* slots in which a key may be */
#define NUM_SEEN 16384 /* keys seen last, by hash */

typedef struct {
    atomic_int num_readers; /* -1: it is written */
    atomic_ulong tag;       /* first half of the key */
    Key key;
    int32_t room;        /* of the state, if the key is for states with any room */
    uint32_t *mask;      /* NULL: empty */
    atomic_ulong used;   /* the step that used it last */
    atomic_bool is_sent; /* the device has the mask */
} Slot;

struct Memory {
    int64_t mask_words, num_sets;
    atomic_uint victim;
    atomic_ulong step; /* whose masks are sent next */
    Slot *slots;
    atomic_ulong seen[NUM_SEEN];
};

Memory *slip_memory_open(int64_t mask_words, int64_t max_masks) {
    Memory *memory = calloc(1, sizeof(Memory));
    if (memory == NULL) return NULL;
    const int64_t num_sets = (max_masks ? max_masks : MAX_BYTES / (mask_words * 4)) / NUM_WAYS;
    memory->mask_words = mask_words;
    atomic_store(&memory->step, 1);
    memory->num_sets = num_sets < 1 ? 1 : num_sets > MAX_SETS ? MAX_SETS : num_sets;
    memory->slots = calloc((size_t)memory->num_sets * NUM_WAYS, sizeof(Slot));
    if (memory->slots != NULL) return memory;
    free(memory);
    return NULL;
}

void slip_memory_close(Memory *memory) {
    for (int64_t index = 0; index < memory->num_sets * NUM_WAYS; index++) free(memory->slots[index].mask);
    free(memory->slots);
    free(memory);
}

static Slot *set_of(Memory *memory, const Key *key) {
    return &memory->slots[key->second % (uint64_t)memory->num_sets * NUM_WAYS];
}

static bool begin_reading(Slot *slot) {
    int num = atomic_load(&slot->num_readers);
    while (num >= 0) {
        if (atomic_compare_exchange_weak(&slot->num_readers, &num, num + 1)) return true;
    }
    return false;
}

int64_t slip_memory_find(Memory *memory, const Key *key, int32_t room, uint32_t *mask) {
    Slot *slot = set_of(memory, key);
    for (const Slot *end = slot + NUM_WAYS; slot < end; slot++) {
        if (atomic_load(&slot->tag) != key->first || !begin_reading(slot)) continue;
        const bool is_it = slot->mask != NULL && slot->key.first == key->first && slot->key.second == key->second &&
                           slot->room >= room;
        if (is_it) {
            atomic_store(&slot->used, atomic_load(&memory->step));
            if (mask != NULL) memcpy(mask, slot->mask, (size_t)memory->mask_words * 4);
        }
        atomic_fetch_sub(&slot->num_readers, 1);
        if (is_it) return slot - memory->slots;
    }
    return -1;
}

bool slip_memory_wants(Memory *memory, const Key *key) {
    return atomic_exchange(&memory->seen[key->second % NUM_SEEN], key->first) == key->first;
}

int64_t slip_memory_keep(Memory *memory, const Key *key, int32_t room, const uint32_t *mask) {
    Slot *set = set_of(memory, key), *chosen = NULL;
    for (Slot *slot = set; slot < set + NUM_WAYS; slot++) {
        const uint64_t tag = atomic_load(&slot->tag);
        if (tag == key->first) { /* another thread has kept it, or it was kept with less room */
            if (slot->room >= room) return -1;
            chosen = slot;
            break;
        }
        if (tag == 0 && chosen == NULL) chosen = slot;
    }
    if (chosen == NULL) chosen = set + atomic_fetch_add(&memory->victim, 1) % NUM_WAYS;
    int expected = 0; /* readers */
    if (!atomic_compare_exchange_strong(&chosen->num_readers, &expected, -1)) return -1;
    const uint64_t step = atomic_load(&memory->step);
    const bool has_room = atomic_load(&chosen->used) != step;
    if (has_room && chosen->mask == NULL) chosen->mask = malloc((size_t)memory->mask_words * 4);
    const bool is_kept = has_room && chosen->mask != NULL;
    if (is_kept) {
        memcpy(chosen->mask, mask, (size_t)memory->mask_words * 4);
        chosen->key = *key;
        chosen->room = room;
        atomic_store(&chosen->is_sent, false);
        atomic_store(&chosen->used, step);
        atomic_store(&chosen->tag, key->first);
    }
    atomic_store(&chosen->num_readers, 0);
    return is_kept ? chosen - memory->slots : -1;
}

bool slip_memory_is_sent(const Memory *memory, int64_t slot) { return atomic_load(&memory->slots[slot].is_sent); }

void slip_memory_send(Memory *memory, const int32_t *slots, int64_t num, int64_t first) {
    for (int64_t index = 0; index < num; index++)
        if (slots[index] >= first) atomic_store(&memory->slots[slots[index] - first].is_sent, true);
    atomic_fetch_add(&memory->step, 1);
}

/* Processes one row: see mask_row.h. */

enum { STOPPED = 1, ERROR = 2, MAY_END = 4 };

static bool may_end(const Filling *filling, const uint32_t *mask) {
    return mask[filling->end_token >> 5] >> (filling->end_token & 31) & 1;
}

/* The slot that keeps a mask that has just been found; -1: none. */
static int64_t keep_mask(Filling *filling, Row *row, const Key *key, const uint32_t *mask) {
    if (!slip_memory_wants(filling->memory, key) || !slip_walker_is_free(row->walker, mask, filling->mask_words)) return -1;
    return slip_memory_keep(filling->memory, key, 0, mask);
}

/* Whether the mask of this state is known, because the state was seen before, or one that has more room for spaces or
   characters. Then no token must follow; the mask is written, if one is wanted, and the slot that keeps it, -1: none. */
static bool recall(Filling *filling, Row *row, uint32_t *mask, int64_t *slot) {
    Key key, with_room;
    if (row->walker == NULL || row->forced >= 0 || !slip_walker_key(row->walker, &key)) return false;
    *slot = slip_memory_find(filling->memory, &key, 0, mask);
    if (*slot < 0) {
        const int32_t room = mask == NULL ? -1 : slip_walker_room(row->walker, &with_room);
        if (room < 0 || slip_memory_find(filling->memory, &with_room, room, mask) < 0) return false;
        slip_walker_limit(row->walker, mask, filling->mask_words, room);
        if (!slip_walker_is_free(row->walker, mask, filling->mask_words)) return false;
        *slot = keep_mask(filling, row, &key, mask);
    }
    if (mask != NULL && may_end(filling, mask)) row->flags |= MAY_END;
    atomic_fetch_add(&filling->num_found, 1);
    return true;
}

/* Returns the slot that keeps the mask; -1: none. */
static int64_t fill_mask(Filling *filling, Row *row, uint32_t *mask) {
    const size_t bytes = (size_t)filling->mask_words * 4;
    if (row->forced >= 0) {
        memset(mask, 0, bytes);
        mask[row->forced >> 5] = (uint32_t)1 << (row->forced & 31);
    } else if ((row->flags & ERROR) || filling->functions.mask(row->matcher, mask, bytes) != 0 ||
               filling->functions.is_error(row->matcher)) {
        row->flags |= ERROR;
        memset(mask, 0, bytes); /* no token is possible */
    } else {
        if (may_end(filling, mask)) row->flags |= MAY_END;
        Key key;
        if (row->walker == NULL || !slip_walker_key(row->walker, &key)) return -1;
        const int64_t slot = keep_mask(filling, row, &key, mask);
        const int32_t room = slip_walker_room(row->walker, &key);
        if (room >= 0) (void)slip_memory_keep(filling->memory, &key, room, mask);
        return slot;
    }
    return -1;
}

/* Write the mask of a row, or where the device has it. `slot`: that keeps the mask; -1: none. */
static void write_mask(Filling *filling, const Row *row, const uint32_t *mask, int64_t slot) {
    const Masks *masks = &filling->masks;
    if (masks->entries != NULL) {
        int32_t *entry = &masks->entries[row->index], *target = &masks->targets[row->index];
        if (row->forced >= 0) {
            *entry = -2 - row->forced;
            *target = -1;
            return;
        }
        if (slot >= 0 && !(row->flags & MAY_END)) { /* the tokens that end a request are its own */
            *entry = (int32_t)(masks->first + slot);
            *target = slip_memory_is_sent(filling->memory, slot) ? -1 : *entry;
            if (*target < 0) return;
        }
    }
    memcpy(masks->bits + (int64_t)row->index * filling->mask_words, mask, (size_t)filling->mask_words * 4);
}

void slip_process_row(Filling *filling, Row *row, uint32_t *scratch) {
    const Functions *functions = &filling->functions;
    const size_t bytes = (size_t)filling->mask_words * 4;
    const int64_t begin = now_ns();
    const bool wants_mask = row->index >= 0;
    int64_t slot = -1;
    bool is_known = false;
    row->flags = row->num_forced = 0;
    if (row->token < 0) {
        is_known = wants_mask && recall(filling, row, scratch, &slot);
    } else {
        (void)!functions->consume(row->matcher, (uint32_t)row->token);
        if (row->walker != NULL) slip_walker_take(row->walker, row->token);
        if (functions->is_stopped(row->matcher)) {
            row->flags = functions->is_error(row->matcher) ? STOPPED | ERROR : STOPPED;
        } else if (!(is_known = recall(filling, row, wants_mask ? scratch : NULL, &slot)) && row->forced < 0) {
            const int32_t found = functions->forced(row->matcher, row->tokens, MAX_FORCED);
            if (found > 0) {
                row->num_forced = found;
                row->forced = (int32_t)row->tokens[0];
            }
        }
    }
    const bool has_mask = wants_mask && row->flags != STOPPED;
    if (has_mask && !is_known) slot = fill_mask(filling, row, scratch);
    row->seconds = (float)(now_ns() - begin) * 1e-9f;
    int expected = RUNNING;
    if (atomic_compare_exchange_strong(&row->state, &expected, WRITING)) {
        if (has_mask) write_mask(filling, row, scratch, slot);
        atomic_store(&row->state, DONE);
    } else {
        if (has_mask) memcpy(row->spare, scratch, bytes);
        atomic_store(&row->state, ENDED);
    }
}
