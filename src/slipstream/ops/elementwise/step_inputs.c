// Token ids, positions, lengths, cache slots and page tables of a step, from tables of all rows.
#include <stdint.h>
#include <string.h>

// native.py mirrors this structure. The null pointers are those that StepRows has as None.
typedef struct {
    int64_t *computed;                    // [rows]
    const int64_t *next_tokens, *tables;  // [rows, next_stride], [groups, rows, pages_per_row]
    const int64_t *rows, *counts, *token_rows, *offsets, *host_ids;
    int64_t *ids, *positions, *lengths, *slots, *pages;  // [T], [T], [B], [groups, T], [groups, B, width]
    int64_t num_tokens, num_rows, num_groups, num_table_rows, next_stride, pages_per_row, page_size, width, advance;
} Inputs;

static int64_t token_id(const Inputs *in, int64_t t, int64_t row) {
    const int64_t *own = in->next_tokens + row * in->next_stride;
    if (!in->host_ids) return own[0];
    if (in->host_ids[t] >= 0) return in->host_ids[t];
    int64_t id = own[-1 - in->host_ids[t]];
    return id > 0 ? id : 0;
}

void slip_gather_inputs(const Inputs *in) {
    for (int64_t t = 0; t < in->num_tokens; t++) {
        int64_t row = in->token_rows ? in->token_rows[t] : in->rows[t];
        int64_t position = in->computed[row] + (in->offsets ? in->offsets[t] : 0);
        in->ids[t] = token_id(in, t, row);
        in->positions[t] = position;
        for (int64_t g = 0; g < in->num_groups; g++) {
            int64_t page = in->tables[(g * in->num_table_rows + row) * in->pages_per_row + position / in->page_size];
            in->slots[g * in->num_tokens + t] = page * in->page_size + position % in->page_size;
        }
    }
    for (int64_t b = 0; b < in->num_rows; b++) {
        in->lengths[b] = in->computed[in->rows[b]] + (in->counts ? in->counts[b] : 1);
        for (int64_t g = 0; g < in->num_groups; g++)
            memcpy(in->pages + (g * in->num_rows + b) * in->width,
                   in->tables + (g * in->num_table_rows + in->rows[b]) * in->pages_per_row, in->width * sizeof(int64_t));
    }
    if (in->advance)
        for (int64_t b = 0; b < in->num_rows; b++) in->computed[in->rows[b]] = in->lengths[b];
}
