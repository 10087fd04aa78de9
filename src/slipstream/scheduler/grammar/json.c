/* The state of a JSON text under a schema, as a key of 128 bits. Texts with equal keys have the same mask.

   A walker follows the text of one output by bytes. Its key has: the containers that are open, with the names or the
   number of the values in them; whether a name, a value or a comma comes next; and the bytes of an unfinished value. A
   value that is finished is forgotten, because what follows depends only on its container. Inside of a string that the
   schema does not restrict, or only in length, the key has the number of characters instead of the text; inside of such a
   number, where in a number the text is.

   Keys are for masks: what a token cannot reach is left out. An array far from its limits is like any other such array. Of
   the room for spaces or characters, the key has the largest number of them that a token takes (`spaces`, `chars`).

   Nodes are the parts of a schema that `schema_nodes.py` understands. A value of any other part (EXACT) is read to its end,
   and its whole text is part of the key meanwhile. A text that is not as expected has no key from then on. */

#include "json.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 24
enum { AT_VALUE, IN_PLAIN, IN_SCALAR, IN_EXACT, AT_NAME, IN_NAME, AT_COLON, AFTER_VALUE, AT_END }; /* places */

typedef struct {
    Key base; /* of the containers around this one */
    Key names;
    int32_t node, count;
} Frame;

struct Walker {
    const Schema *schema;
    bool is_lost; /* the text was not as expected */
    bool is_first; /* the container has no value yet */
    bool in_string, is_escaped, had_escape;
    uint8_t place;
    uint8_t num_left; /* bytes of an unfinished character or escape that are missing */
    uint8_t number;   /* where in a number */
    uint32_t begun;   /* bytes of an unfinished character or escape */
    int32_t num_spaces; /* before the next value, name or comma */
    int32_t depth; /* open containers */
    int32_t nested; /* containers within a value of kind EXACT */
    int32_t node;   /* of the value */
    int32_t num_chars;
    Key part; /* bytes of the unfinished value or name */
    Frame frames[MAX_DEPTH];
};

/* To the state of an empty text. */
void slip_walker_reset(Walker *walker) {
    const Schema *schema = walker->schema;
    memset(walker, 0, sizeof(Walker));
    walker->schema = schema;
    walker->node = ROOT;
}

Walker *slip_walker_open(const Schema *schema) {
    Walker *walker = malloc(sizeof(Walker));
    if (walker == NULL) return NULL;
    walker->schema = schema;
    slip_walker_reset(walker);
    return walker;
}

Walker *slip_walker_copy(const Walker *walker) {
    Walker *copy = malloc(sizeof(Walker));
    if (copy != NULL) memcpy(copy, walker, sizeof(Walker));
    return copy;
}

void slip_walker_close(Walker *walker) { free(walker); }

/* The number of items as far as a token can tell: it ends at most `reach` of them. */
static uint32_t count_of(const Walker *walker, const Frame *frame) {
    const Node *node = &walker->schema->nodes[frame->node];
    const int32_t reach = walker->schema->max_commas + 2;
    if (frame->count < 0 || node->kind != ARRAY) return (uint32_t)frame->count;
    const bool is_far_from_min = frame->count >= node->min || node->min - frame->count > reach;
    const bool is_far_from_max = node->max < 0 || node->max - frame->count > reach;
    if (!is_far_from_min || !is_far_from_max || !frame->count) return (uint32_t)frame->count;
    return frame->count >= node->min ? 1u << 30 : 1u << 31;
}

static inline Frame *top(Walker *walker) { return &walker->frames[walker->depth - 1]; }

static bool is_object(const Walker *walker) { return walker->frames[walker->depth - 1].count < 0; }

static void end_value(Walker *walker) {
    walker->place = walker->depth ? AFTER_VALUE : AT_END;
    walker->num_spaces = 0;
    walker->is_first = false;
    if (!walker->depth || is_object(walker)) return;
    Frame *frame = top(walker);
    const Node *node = &walker->schema->nodes[frame->node];
    const int32_t most = node->kind != ARRAY ? 1 : node->max >= 0 ? INT32_MAX : node->min > 1 ? node->min : 1;
    if (frame->count < most) frame->count++;
}

/* A container's frame has `count` -1 for an object. */
static void open_container(Walker *walker, bool opens_object) {
    if (walker->depth == MAX_DEPTH) {
        walker->is_lost = true;
        return;
    }
    Key base = walker->schema->root;
    if (walker->depth) {
        const Frame *outer = top(walker);
        base = outer->base;
        mix_key(&base, &outer->names);
        mix(&base, count_of(walker, outer));
    }
    mix(&base, (uint64_t)(uint32_t)walker->node << 1 | opens_object);
    walker->depth++;
    *top(walker) = (Frame){base, EMPTY, walker->node, opens_object ? -1 : 0};
    walker->is_first = true;
    walker->place = opens_object ? AT_NAME : AT_VALUE;
    const Node *node = &walker->schema->nodes[walker->node];
    if (!opens_object && node->kind == ARRAY) walker->node = node->child;
}

static void close_container(Walker *walker) {
    walker->depth--;
    end_value(walker);
}

enum { NO_NUMBER, BEFORE, MINUS, ZERO, DIGITS, POINT, FRACTION, EXPONENT, SIGN, POWER }; /* in a number */

static uint8_t step_number(uint8_t number, uint8_t byte) {
    const bool is_digit = byte >= '0' && byte <= '9';
    switch (number) {
    case BEFORE:
        if (byte == '-') return MINUS; /* fall through */
    case MINUS:
        return byte == '0' ? ZERO : is_digit ? DIGITS : NO_NUMBER;
    case DIGITS:
        if (is_digit) return DIGITS; /* fall through */
    case ZERO:
        return byte == '.' ? POINT : byte == 'e' || byte == 'E' ? EXPONENT : NO_NUMBER;
    case FRACTION:
        if (byte == 'e' || byte == 'E') return EXPONENT; /* fall through */
    case POINT:
        return is_digit ? FRACTION : NO_NUMBER;
    case EXPONENT:
        if (byte == '+' || byte == '-') return SIGN; /* fall through */
    case SIGN:
    case POWER:
        return is_digit ? POWER : NO_NUMBER;
    default:
        return NO_NUMBER;
    }
}

static void begin_value(Walker *walker, uint8_t byte) {
    const int32_t kind = walker->schema->nodes[walker->node].kind;
    walker->part = EMPTY;
    mix(&walker->part, byte);
    walker->in_string = walker->is_escaped = walker->had_escape = false;
    walker->nested = walker->num_chars = 0;
    walker->num_left = 0;
    walker->begun = 0;
    if (byte == '"') {
        walker->in_string = true;
        walker->place = kind == STRING || kind == ANY ? IN_PLAIN : IN_EXACT;
    } else if (byte == '{' || byte == '[') {
        if (kind == ANY || kind == (byte == '{' ? OBJECT : ARRAY)) {
            open_container(walker, byte == '{');
        } else {
            walker->nested = 1;
            walker->place = IN_EXACT;
        }
    } else {
        walker->place = IN_SCALAR;
        walker->number = step_number(BEFORE, byte);
    }
}

/* The end of a name: the node of its value. */
static void end_name(Walker *walker) {
    Frame *frame = top(walker);
    const Schema *schema = walker->schema;
    const Node *node = &schema->nodes[frame->node];
    mix_key(&frame->names, &walker->part);
    walker->place = AT_COLON;
    walker->num_spaces = 0;
    if (node->kind == ANY) {
        walker->node = frame->node;
        return;
    }
    walker->node = node->child;
    for (int32_t index = node->first; index < node->first + node->num; index++) {
        const Property *own = &schema->properties[index];
        if (own->name.first == walker->part.first && own->name.second == walker->part.second) walker->node = own->node;
    }
    if (walker->had_escape) walker->node = 0; /* EXACT */
}

static void take_exact(Walker *walker, uint8_t byte) {
    mix(&walker->part, byte);
    if (walker->in_string) {
        if (walker->is_escaped) {
            walker->is_escaped = false;
        } else if (byte == '\\') {
            walker->is_escaped = true;
        } else if (byte == '"') {
            walker->in_string = false;
        }
    } else if (byte == '"') {
        walker->in_string = true;
    } else if (byte == '{' || byte == '[') {
        walker->nested++;
    } else if (byte == '}' || byte == ']') {
        walker->nested--;
    }
    if (!walker->in_string && !walker->nested) end_value(walker);
}

static void take_plain(Walker *walker, uint8_t byte) {
    mix(&walker->part, byte);
    if (walker->is_escaped) { /* the byte after a backslash */
        walker->is_escaped = false;
        walker->num_left = byte == 'u' ? 4 : 0;
        walker->begun = byte == 'u' ? 'u' : 0;
    } else if (walker->num_left) {
        if (walker->begun == 'u' && (byte == 'd' || byte == 'D')) walker->had_escape = true; /* half of a character */
        walker->begun = --walker->num_left ? walker->begun << 8 | byte : 0;
    } else if (byte == '"') {
        end_value(walker);
    } else {
        walker->num_chars++;
        walker->is_escaped = byte == '\\';
        walker->num_left = byte < 0xC0 ? 0 : byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
        walker->begun = walker->num_left ? byte : 0;
    }
}

static void take_byte(Walker *walker, uint8_t byte) {
    if (walker->place == IN_SCALAR) {
        if (!is_space(byte) && byte != ',' && byte != ']' && byte != '}') {
            mix(&walker->part, byte);
            walker->number = step_number(walker->number, byte);
            return;
        }
        end_value(walker);
    }
    switch (walker->place) {
    case IN_PLAIN:
        take_plain(walker, byte);
        return;
    case IN_EXACT:
        take_exact(walker, byte);
        return;
    case IN_NAME:
        if (walker->is_escaped) {
            walker->is_escaped = false;
        } else if (byte == '\\') {
            walker->is_escaped = walker->had_escape = true;
        } else if (byte == '"') {
            end_name(walker);
            return;
        }
        mix(&walker->part, byte);
        return;
    default:
        break;
    }
    if (is_space(byte)) {
        walker->num_spaces++;
        return;
    }
    walker->num_spaces = 0;
    if (walker->place == AT_VALUE && !(byte == ']' && walker->is_first)) {
        begin_value(walker, byte);
    } else if (walker->place == AT_NAME && byte == '"') {
        walker->place = IN_NAME;
        walker->part = EMPTY;
        walker->is_escaped = walker->had_escape = false;
    } else if (walker->place == AT_COLON && byte == ':') {
        walker->place = AT_VALUE;
        walker->is_first = false;
    } else if (walker->place == AFTER_VALUE && byte == ',') {
        const Frame *frame = top(walker);
        const Node *node = &walker->schema->nodes[frame->node];
        walker->place = is_object(walker) ? AT_NAME : AT_VALUE;
        walker->node = node->kind == ARRAY ? node->child : frame->node; /* of an object: set by the name */
        walker->is_first = false;
    } else if ((walker->place == AFTER_VALUE || walker->is_first) && walker->depth && byte == (is_object(walker) ? '}' : ']')) {
        close_container(walker);
    } else {
        walker->is_lost = true;
    }
}

void slip_walker_take(Walker *walker, int64_t token) {
    const Schema *schema = walker->schema;
    if (token < 0 || token >= schema->num_tokens || schema->starts[token] == schema->starts[token + 1]) walker->is_lost = true;
    if (walker->is_lost) return;
    for (uint32_t index = schema->starts[token]; index < schema->starts[token + 1] && !walker->is_lost; index++)
        take_byte(walker, schema->bytes[index]);
}

/* The length of a string as far as a token can tell: the characters that are missing, and those that there is room for. */
static uint64_t chars_left(const Walker *walker, const Node *node) {
    const int32_t num = walker->num_chars, room = node->max - num;
    const uint64_t missing = node->min > num ? (uint64_t)(node->min - num) : 0;
    if (node->max < 0) return missing << 32;
    if (walker->is_escaped || walker->num_left || room < 0 || room > MAX_CHARS) return missing << 32 | (1u << 30 | (uint32_t)num);
    return missing << 32 | (1u << 29 | (uint32_t)walker->schema->chars[room]);
}

/* The spaces before the next value, name or comma, as far as a token can tell. */
static uint32_t spaces_left(const Walker *walker) {
    const int32_t num = walker->num_spaces;
    if (num == 0 || num > MAX_SPACES) return (uint32_t)num;
    return 1u << 30 | walker->schema->spaces[MAX_SPACES - num];
}

#define ANY_ROOM ((uint64_t)1 << 28)

static bool find_key(const Walker *walker, Key *key, bool with_any_room) {
    if (walker->is_lost) return false;
    const Node *node = &walker->schema->nodes[walker->node];
    *key = walker->schema->root;
    if (walker->depth) {
        const Frame *frame = &walker->frames[walker->depth - 1];
        *key = frame->base;
        mix_key(key, &frame->names);
        mix(key, count_of(walker, frame));
    }
    mix(key, walker->place | (uint64_t)walker->is_first << 8);
    switch (walker->place) {
    case IN_PLAIN:
        if (walker->had_escape) {
            mix_key(key, &walker->part);
        } else {
            mix(key, (uint64_t)walker->begun << 4 | (uint64_t)walker->num_left << 1 | walker->is_escaped);
            mix(key, with_any_room ? ANY_ROOM : node->kind == STRING ? chars_left(walker, node) : 0);
        }
        break;
    case IN_SCALAR:
        if (walker->number && (node->kind == ANY || (node->kind == SCALAR && node->min == 0))) {
            mix(key, walker->number);
            break;
        } /* fall through */
    case IN_EXACT:
    case IN_NAME:
        mix_key(key, &walker->part);
        break;
    default:
        mix(key, with_any_room ? ANY_ROOM : spaces_left(walker));
    }
    return true;
}

bool slip_walker_key(const Walker *walker, Key *key) { return find_key(walker, key, false); }

int32_t slip_walker_room(const Walker *walker, Key *key) {
    const Node *node = &walker->schema->nodes[walker->node];
    int32_t room = -1;
    switch (walker->place) {
    case IN_PLAIN:
        if (node->kind != STRING || node->max < 0 || node->min > walker->num_chars || walker->had_escape) return -1;
        if (walker->is_escaped || walker->num_left || node->max - walker->num_chars > MAX_CHARS) return -1;
        room = node->max - walker->num_chars;
        break;
    case IN_SCALAR:
    case IN_EXACT:
    case IN_NAME:
        return -1;
    default:
        if (walker->num_spaces == 0) return -1;
        room = MAX_SPACES - walker->num_spaces;
    }
    return room >= 0 && find_key(walker, key, true) ? room : -1;
}

void slip_walker_limit(const Walker *walker, uint32_t *mask, int64_t num_words, int32_t room) {
    const Schema *schema = walker->schema;
    const uint8_t *taken = walker->place == IN_PLAIN ? schema->chars_of : schema->spaces_of;
    for (int64_t word = 0; word < num_words && word * 32 < schema->num_tokens; word++) {
        if (!mask[word]) continue;
        const int64_t end = schema->num_tokens - word * 32 < 32 ? schema->num_tokens - word * 32 : 32;
        uint32_t allowed = ~(uint32_t)0;
        for (int64_t bit = 0; bit < end; bit++) allowed &= ~((uint32_t)(taken[word * 32 + bit] > room) << bit);
        mask[word] &= allowed;
    }
}

bool slip_walker_is_free(const Walker *walker, const uint32_t *mask, int64_t num_words) {
    const Schema *schema = walker->schema;
    int found = -1;
    for (int64_t word = 0; word < num_words; word++) {
        for (uint32_t bits = mask[word]; bits; bits &= bits - 1) {
            const int64_t token = word * 32 + __builtin_ctz(bits);
            if (token >= schema->num_tokens || schema->starts[token] == schema->starts[token + 1]) return true; /* the end */
            const int byte = schema->bytes[schema->starts[token]];
            if (found >= 0 && byte != found) return true;
            found = byte;
        }
    }
    return false;
}

/* Makes schemas for json.c. */

/* Characters of a string that a token has, up to a quote. An escape is one, also if its end is missing. */
static int32_t num_chars_of(const uint8_t *text, const uint8_t *end) {
    int32_t num = 0;
    for (; text < end && *text != '"'; text++) {
        if ((*text & 0xC0) == 0x80) continue; /* the rest of a character */
        num++;
        if (*text == '\\') text += text + 1 < end && text[1] == 'u' ? 5 : 1;
    }
    return num;
}

/* For each room the largest number that occurs and is not larger. `found`: numbers that occur are not zero. */
static void find_largest(uint8_t *found, int32_t size) {
    for (int32_t room = 1; room < size; room++) found[room] = found[room] ? (uint8_t)room : found[room - 1];
}

void slip_schema_close(Schema *schema) {
    free(schema->nodes);
    free(schema->properties);
    free(schema->spaces_of);
    free(schema->chars_of);
    free(schema);
}

/* `names` and `lengths`: of all properties. Returns NULL if out of memory. */
Schema *slip_schema_open(const Node *nodes, int64_t num_nodes, const uint8_t *names, const int32_t *lengths,
                         const int32_t *targets, int64_t num_properties, const Key *root, const uint8_t *bytes,
                         const uint32_t *starts, int64_t num_tokens) {
    Schema *schema = calloc(1, sizeof(Schema));
    if (schema == NULL) return NULL;
    schema->nodes = malloc((size_t)num_nodes * sizeof(Node));
    schema->properties = malloc((size_t)(num_properties + 1) * sizeof(Property));
    schema->spaces_of = malloc((size_t)num_tokens + 1);
    schema->chars_of = malloc((size_t)num_tokens + 1);
    if (schema->nodes == NULL || schema->properties == NULL || schema->spaces_of == NULL || schema->chars_of == NULL) {
        slip_schema_close(schema);
        return NULL;
    }
    memcpy(schema->nodes, nodes, (size_t)num_nodes * sizeof(Node));
    for (int64_t index = 0; index < num_properties; index++) {
        schema->properties[index] = (Property){key_of(names, (size_t)lengths[index]), targets[index]};
        names += lengths[index];
    }
    schema->root = *root;
    schema->bytes = bytes;
    schema->starts = starts;
    schema->num_tokens = num_tokens;
    for (int64_t token = 0; token < num_tokens; token++) {
        int32_t num = 0;
        const uint8_t *begin = bytes + starts[token], *end = bytes + starts[token + 1];
        for (const uint8_t *byte = begin; byte < end; byte++) num += *byte == ',';
        if (num > schema->max_commas) schema->max_commas = num;
        int32_t num_spaces = 0;
        while (begin + num_spaces < end && is_space(begin[num_spaces])) num_spaces++;
        if (num_spaces && num_spaces <= MAX_SPACES) schema->spaces[num_spaces] = 1;
        schema->spaces_of[token] = (uint8_t)(num_spaces < 255 ? num_spaces : 255);
        const int32_t num_chars = num_chars_of(begin, end);
        if (num_chars && num_chars <= MAX_CHARS) schema->chars[num_chars] = 1;
        schema->chars_of[token] = (uint8_t)(num_chars < 255 ? num_chars : 255);
    }
    find_largest(schema->spaces, MAX_SPACES + 1);
    find_largest(schema->chars, MAX_CHARS + 1);
    return schema;
}
