/* Makes schemas for json_state.c. */

#include "json_schema.h"

#include <stdlib.h>
#include <string.h>

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

