/* Masks that were computed before, by the key of their state. Threads use it without waiting for each other: a slot that
   another thread writes counts as a slot with another key, and a slot that is read is not written.

   A state is kept when it is seen for the second time, so that states that never repeat, such as the digits of numbers,
   replace nothing.

   The device may have a table with the same slots, so that a step sends the number of a slot instead of its mask. A slot
   that was found for the masks of the next step keeps its mask until these are sent (`step`). Later steps may replace it:
   the device runs steps in order. */

#include "mask_memory.h"

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
