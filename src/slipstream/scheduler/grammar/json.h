/* The state of a JSON text under a schema, as a key of 128 bits: see json.c. */

#pragma once

#include <stdbool.h>
#include <stddef.h>
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

/* A JSON schema as the walkers of json.c read it, and what they need to know about the tokens. */

#define ROOT 2 /* node */
#define MAX_SPACES 64 /* in a row; WHITESPACE in translate.py */
#define MAX_CHARS 254 /* of a string, if the room for them is counted */

enum { EXACT, SCALAR, STRING, OBJECT, ARRAY, ANY }; /* kinds of nodes; as in schema_nodes.py */

typedef struct { /* as NODE in schema_nodes.py */
    int32_t kind;
    int32_t min, max;   /* items of an array, characters of a string; of a scalar: 0: a number without limits; -1: none */
    int32_t child;      /* node of the items, or of other properties */
    int32_t first, num; /* properties */
} Node;

typedef struct {
    Key name;
    int32_t node;
} Property;

typedef struct {
    Node *nodes;
    Property *properties;
    Key root;
    const uint8_t *bytes;   /* of all tokens */
    const uint32_t *starts; /* [tokens + 1]; special tokens have no bytes */
    int64_t num_tokens;
    int32_t max_commas; /* in a token */
    /* of each token: spaces that it begins with, characters of a string that it has up to a quote; 255: or more */
    uint8_t *spaces_of, *chars_of;
    /* by the number that there is room for: the largest number that a token takes and that is not larger */
    uint8_t spaces[MAX_SPACES + 1], chars[MAX_CHARS + 1];
} Schema;

static const Key EMPTY = {0x243F6A8885A308D3u, 0x13198A2E03707344u};

static inline void mix(Key *key, uint64_t value) {
    key->first = (key->first ^ value) * 0x9E3779B97F4A7C15u;
    key->first ^= key->first >> 29;
    key->second = (key->second + value) * 0xC2B2AE3D27D4EB4Fu;
    key->second ^= key->second >> 31;
}

static inline void mix_key(Key *key, const Key *other) {
    mix(key, other->first);
    mix(key, other->second);
}

static inline Key key_of(const uint8_t *text, size_t size) {
    Key key = EMPTY;
    for (size_t index = 0; index < size; index++) mix(&key, text[index]);
    return key;
}

static inline bool is_space(uint8_t byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }
