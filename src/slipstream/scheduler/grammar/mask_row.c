/* Processes one row: see mask_row.h. */

#include "mask_row.h"

#include <string.h>

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
