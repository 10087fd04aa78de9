/* The state of a JSON text under a schema, as a key of 128 bits: see json_state.c. */

#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    uint64_t first, second;
} Key;

typedef struct Walker Walker;

/* Take a token. */
void slip_walker_take(Walker *walker, int64_t token);

/* The key of the present state; false if it has none. */
bool slip_walker_key(const Walker *walker, Key *key);

/* The room for spaces or characters that the state has; -1: it is not limited, or not counted. The key is that of all
   states that differ in the room only: the mask of a state with less room is that of one with more, limited. */
int32_t slip_walker_room(const Walker *walker, Key *key);

/* Remove tokens that take more than this room. */
void slip_walker_limit(const Walker *walker, uint32_t *mask, int64_t num_words, int32_t room);

/* Whether two tokens of a mask begin with different bytes: then the grammar forces no text. */
bool slip_walker_is_free(const Walker *walker, const uint32_t *mask, int64_t num_words);
