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

/* Whether two tokens of a mask begin with different bytes: then the grammar forces no text. */
bool slip_walker_is_free(const Walker *walker, const uint32_t *mask, int64_t num_words);
