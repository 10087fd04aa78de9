// All layers of a decoder for one token per row: one call and one team of threads. The parts of a layer are those of the
// other ops, so a row's result does not depend on the other rows.
//
// Threads take work items of a part until none is left, and go on when all items are done. They wait for items, not for
// threads: a thread whose core another program occupies delays the others only if it has an unfinished item. When it
// runs again, it passes the parts that are done. A thread that waits yields its core after some spins. In GEMMs a thread
// takes its next item before it computes the current one, at whose end it prefetches the weights of the next.
//
// With one row the parts between the GEMMs are smaller than the wait: every thread computes them for itself, in memory
// of its own, and a layer has 5 waits instead of 10. A late thread may then read inputs of a part while others already
// overwrite them. Its results are not used, since no item of that part is left for it; only the sums of the residual
// have to be right, so with one row the outputs that are added to it all have memory of their own.
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "native_parts.h"
#include "native_team.h"

#define PIECE 24  // float32 or bfloat16 weight rows per work item: whole tiles
#define MAX_LOW_BIT_PIECE 256
#if defined(__x86_64__)
#define SPINS 256  // each with a pause of about 50 ns
#define PAUSE() __builtin_ia32_pause()
#else
#define SPINS 4096
#define PAUSE() ((void)0)
#endif

// native.py mirrors these structures.

typedef struct {  // adjacent weight rows of one format
    const void *numbers, *scales, *offsets;
    int64_t layout;  // native_low_bit_layout.h
    int64_t num_rows;
} Run;

typedef struct {
    const Run *runs;
    const float *bias;
    int64_t num_runs, num_rows, num_columns, is_low_bit;
} Product;

typedef struct {
    const float *attention_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;  // the second and the last may be null
    const float *head_norm;  // [heads + kv heads, dim], or null
    Product qkv, output, gate_up, down;
    float *keys, *values;  // [pages, page_size, kv heads, dim]
    int64_t group;  // cache group: selects slots and page tables
    int64_t rope;   // index of the RoPE table
    int64_t window;
} Layer;

typedef struct {
    int64_t num_layers, hidden, ffn, num_heads, num_kv_heads, dim, rotary, page_size, is_gelu;
    float eps, scale, cap;
    const float *norm;  // of the last hidden states
    const Layer *layers;
} Model;

typedef struct {  // intermediate results of a step
    float *qkv, *attended, *gate_up, *added;
    float *residual, *normed, *active;  // with one row those of a thread
    SlipActivations *activations;       // for low-bit GEMMs; with one row those of a thread
} Space;

typedef struct {
    _Alignas(64) atomic_llong next;  // work item
    atomic_llong done;               // number of items
} Part;

#define PARTS_OF_LAYER 10  // at most; one more follows the layers

typedef struct {
    Part *part;  // the current one; each thread has its own copy of this structure
    const Model *model;
    int64_t num_rows;
    const float *const *ropes;       // [rows, 2, rotary]
    const int64_t *const *slots;     // per group: [rows]
    const int64_t *const *tables;    // per group: [rows, table_stride]
    const int64_t *table_strides;
    const int64_t *lengths;
    Space space;
    int is_alone;  // one row
    int64_t team;  // number of threads
    int saw_late;  // whether this thread waited for a late one
    double since;  // time at which this thread began the current part
} Step;

// quantizes `count` activations of a row, from column `first` of `size`
static void quantize(const Step *step, const float *x, int64_t row, int64_t first, int64_t count, int64_t size) {
    int64_t stride;
    SlipActivations *target = slip_activations_of(step->space.activations, row, step->num_rows, size / SLIP_BLOCK, &stride);
    slip_quantize(x, target + first / SLIP_BLOCK * stride, stride, count / SLIP_BLOCK);
}

// Every thread of the team calls the functions below.

// Whether an item of the current part is left for this thread
static int take_item(const Step *step, int64_t count, int64_t *item) {
    *item = atomic_fetch_add_explicit(&step->part->next, 1, memory_order_relaxed);
    return *item < count;
}

// Ends the current part: this thread has computed `mine` of `count` items, and waits until the others are done.
static void finish_part(Step *step, int64_t mine, int64_t count) {
    Part *part = step->part++;
    if (mine) atomic_fetch_add_explicit(&part->done, mine, memory_order_acq_rel);
    double start = 0;
    for (int spins = 0; atomic_load_explicit(&part->done, memory_order_acquire) < count; spins++) {
        if (spins < SPINS) {
            PAUSE();
            continue;
        }
        if (spins == SPINS) start = slip_now();
        sched_yield();
    }
    double now = slip_now();
    // items of large batches take long too, but then this thread has computed some
    if (start && now - start > LATE && now - start > start - step->since) step->saw_late = 1;
    step->since = now;
}

// Weight rows per work item of low-bit GEMMs. On Neoverse-N1 two threads that take items of 24 rows wait for each other's
// counter as long as for the weights; few threads need few items to be busy. On x86 three items of each thread are
// enough.
static int64_t low_bit_piece(int64_t num_rows, int64_t team) {
#ifdef __aarch64__
    (void)num_rows;
    return SLIP_LOW_BIT_PIECE * (team <= 2 ? 4 : team <= 4 ? 2 : 1);
#else
    int64_t rows = (num_rows / (3 * team) + 15) / 16 * 16;
    if (rows > MAX_LOW_BIT_PIECE) rows = MAX_LOW_BIT_PIECE;
    return rows < SLIP_LOW_BIT_PIECE ? SLIP_LOW_BIT_PIECE : rows;
#endif
}

static int64_t rows_of_item(const Step *step, const Run *run) {
    int is_plain = run->layout == SLIP_FLOAT32 || run->layout == SLIP_BFLOAT16;
    return is_plain ? PIECE : low_bit_piece(run->num_rows, step->team);
}

typedef struct {  // a work item of a GEMM
    const Run *run;
    int64_t row, num_rows;  // of the run
    int64_t before;         // weight rows of the product before the run
} Item;

// Item number `number`. The run is that of `item`, which has a lower number, or a later one.
static Item find_item(const Step *step, Item item, int64_t number, int64_t *first) {
    int64_t size = rows_of_item(step, item.run);
    while ((number - *first) * size >= item.run->num_rows) {
        *first += (item.run->num_rows + size - 1) / size;
        item.before += item.run->num_rows;
        size = rows_of_item(step, ++item.run);
    }
    item.row = (number - *first) * size;
    item.num_rows = item.run->num_rows - item.row < size ? item.run->num_rows - item.row : size;
    return item;
}

// next: the item that this thread computes after it
static void multiply_rows(const Step *step, const Product *product, const Item *item, const Item *next, const float *x,
                          float *out) {
    const Run *run = item->run;
    int64_t stride = product->num_rows, size = product->num_columns, first = item->row, last = first + item->num_rows;
    out += item->before;
    if (run->layout == SLIP_FLOAT32 || run->layout == SLIP_BFLOAT16)
        slip_plain_rows(x, run->numbers, out, run->layout, step->num_rows, size, stride, first, last,
                        slip_plain_row(next->run->numbers, next->run->layout, next->row, size));
    else
        slip_low_bit_rows(step->space.activations, run->numbers, run->scales, run->offsets, out, run->layout,
                          step->num_rows, size / SLIP_BLOCK, stride, first, last);
    if (product->bias)
        for (int64_t t = 0; t < step->num_rows; t++)
            for (int64_t n = first; n < last; n++) out[t * stride + n] += product->bias[item->before + n];
}

static void multiply(Step *step, const Product *product, const float *x, float *out) {
    int64_t count = 0, mine = 0, number, first = 0;  // first: number of the first item of a run
    for (int64_t r = 0; r < product->num_runs; r++)
        count += (product->runs[r].num_rows + rows_of_item(step, &product->runs[r]) - 1) / rows_of_item(step, &product->runs[r]);
    Item item = {product->runs, 0, 0, 0}, next;
    int is_left = take_item(step, count, &number);
    if (is_left) next = find_item(step, item, number, &first);
    for (; is_left; mine++) {
        item = next;
        is_left = take_item(step, count, &number);
        if (is_left) next = find_item(step, item, number, &first);
        multiply_rows(step, product, &item, &next, x, out);
    }
    finish_part(step, mine, count);
}

// adds the output of the previous part to the residual; the norm of the residual is the input of the next part
static void add_and_norm_row(const Step *step, int64_t row, const float *out_norm, const float *norm, const Product *next,
                             float *out) {
    const Space *s = &step->space;
    int64_t size = step->model->hidden;
    float eps = step->model->eps, *residual = s->residual + row * size, *o = out + row * size;
    const float *added = s->added + row * size;
    if (out_norm) {
        slip_norm_row(added, 0, out_norm, 0, o, eps, size);
        added = o;
    }
    slip_norm_row(added, residual, norm, residual, o, eps, size);
    if (next && next->is_low_bit) quantize(step, o, row, 0, size, size);
}

static void add_and_norm(Step *step, const float *out_norm, const float *norm, const Product *next, float *out) {
    int64_t mine = 0, row;
    if (step->is_alone && next) {
        add_and_norm_row(step, 0, out_norm, norm, next, out);
        return;
    }
    for (; take_item(step, step->num_rows, &row); mine++) add_and_norm_row(step, row, out_norm, norm, next, out);
    finish_part(step, mine, step->num_rows);
}

// Norm and RoPE of the queries and of the key of one KV head; writes key and value to the cache.
static void write_head(const Step *step, const Layer *layer, int64_t row, int64_t head) {
    const Model *m = step->model;
    int64_t dim = m->dim, heads = m->num_heads, kv_heads = m->num_kv_heads, group = heads / kv_heads;
    float *of_row = step->space.qkv + row * (heads + 2 * kv_heads) * dim;
    float *query = of_row + head * group * dim, *key = of_row + (heads + head) * dim;
    const float *rope_row = step->ropes[layer->rope] + row * 2 * m->rotary;
    for (int64_t g = 0; g <= group; g++) {
        float *x = g < group ? query + g * dim : key;
        int64_t number = g < group ? head * group + g : heads + head;
        if (layer->head_norm) slip_norm_row(x, 0, layer->head_norm + number * dim, 0, x, m->eps, dim);
        slip_rope_head(x, rope_row, x, dim, m->rotary);
    }
    int64_t slot = (step->slots[layer->group][row] * kv_heads + head) * dim;
    memcpy(layer->keys + slot, key, dim * sizeof(float));
    memcpy(layer->values + slot, of_row + (heads + kv_heads + head) * dim, dim * sizeof(float));
}

static void attend_head(const Step *step, const Layer *layer, int64_t row, int64_t head) {
    const Model *m = step->model;
    int64_t dim = m->dim, heads = m->num_heads, kv_heads = m->num_kv_heads, group = heads / kv_heads;
    SlipHeads shape = {group, dim, 0, 0, layer->window, m->scale, m->cap, NULL};
    SlipPages pages = {layer->keys + head * dim, layer->values + head * dim,
                       step->tables[layer->group] + row * step->table_strides[layer->group], m->page_size,
                       kv_heads * dim};
    slip_attend_tokens(&shape, &pages, step->space.qkv + (row * (heads + 2 * kv_heads) + head * group) * dim,
                       step->space.attended + (row * heads + head * group) * dim, step->lengths + row, 1);
}

// With several rows no row attends before all rows have written: a page that one row completes in this step is
// published in the plan of this step, so another row may read it.
static void attend(Step *step, const Layer *layer) {
    const Space *s = &step->space;
    int64_t kv_heads = step->model->num_kv_heads, size = step->model->num_heads * step->model->dim;
    int64_t count = step->num_rows * kv_heads, mine = 0, item;
    for (; take_item(step, count, &item); mine++) {
        write_head(step, layer, item / kv_heads, item % kv_heads);
        if (step->is_alone) attend_head(step, layer, 0, item);
    }
    finish_part(step, mine, count);
    if (!step->is_alone) {
        for (mine = 0; take_item(step, count, &item); mine++) attend_head(step, layer, item / kv_heads, item % kv_heads);
        finish_part(step, mine, count);
    }
    if (!layer->output.is_low_bit) return;
    if (step->is_alone) {
        quantize(step, s->attended, 0, 0, size, size);
        return;
    }
    for (mine = 0; take_item(step, step->num_rows, &item); mine++)
        quantize(step, s->attended + item * size, item, 0, size, size);
    finish_part(step, mine, step->num_rows);
}

static void activate_piece(const Step *step, const Layer *layer, int64_t row, int64_t first, int64_t count) {
    const Space *s = &step->space;
    int64_t size = step->model->ffn;
    const float *gate = s->gate_up + row * 2 * size + first;
    float *out = s->active + row * size + first;
    (step->model->is_gelu ? slip_gelu_tanh_row : slip_silu_row)(gate, gate + size, out, count);
    if (layer->down.is_low_bit) quantize(step, out, row, first, count, size);
}

static void activate(Step *step, const Layer *layer) {
    int64_t size = step->model->ffn, piece = 8 * SLIP_BLOCK, pieces = (size + piece - 1) / piece;
    if (step->is_alone) {
        activate_piece(step, layer, 0, 0, size);
        return;
    }
    int64_t mine = 0, item;
    for (; take_item(step, step->num_rows * pieces, &item); mine++) {
        int64_t first = item % pieces * piece;
        activate_piece(step, layer, item / pieces, first, size - first < piece ? size - first : piece);
    }
    finish_part(step, mine, step->num_rows * pieces);
}

static void run_layers(Step *step, float *hidden) {
    const Model *m = step->model;
    Space *s = &step->space;
    int64_t kept = step->is_alone ? m->hidden : 0;  // memory of the output before
    const float *norm_before = 0;
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        add_and_norm(step, norm_before, layer->attention_norm, &layer->qkv, s->normed);
        multiply(step, &layer->qkv, s->normed, s->qkv);
        attend(step, layer);
        multiply(step, &layer->output, s->attended, s->added += kept);
        add_and_norm(step, layer->attention_out_norm, layer->mlp_norm, &layer->gate_up, s->normed);
        multiply(step, &layer->gate_up, s->normed, s->gate_up);
        activate(step, layer);
        multiply(step, &layer->down, s->active, s->added += kept);
        norm_before = layer->mlp_out_norm;
    }
    add_and_norm(step, norm_before, m->norm, 0, hidden);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// `space` with the memory of a thread
static Space space_of(Space space, char *memory, int64_t num_rows, int64_t groups, int64_t hidden) {
    space.activations = (SlipActivations *)memory;
    space.residual = (float *)(space.activations + num_rows * groups);
    space.normed = space.residual + num_rows * hidden;
    space.active = space.normed + num_rows * hidden;
    return space;
}

// x [rows, hidden]: embeddings; hidden [rows, hidden]: receives the output of the last norm. Returns 0 if out of
// memory.
int64_t slip_decode_layers(const Model *model, const float *x, float *hidden, const float *const *ropes,
                           const int64_t *const *slots, const int64_t *const *tables, const int64_t *table_strides,
                           const int64_t *lengths, int64_t num_rows) {
    int64_t h = model->hidden, heads = model->num_heads * model->dim, kv = model->num_kv_heads * model->dim;
    int64_t widest = larger(h, larger(heads, model->ffn));
    int64_t groups = widest / SLIP_BLOCK + 1;
    int is_alone = num_rows == 1;
    // residual, normed, active and activations: once, or for each thread, on cache lines of its own
    int64_t team = slip_team_size(num_rows), copies = is_alone ? team : 1;
    int64_t own = num_rows * (groups * sizeof(SlipActivations) + (2 * h + model->ffn) * sizeof(float));
    own = (own + 127) / 128 * 128;
    int64_t outputs = is_alone ? 2 * model->num_layers + 1 : 1;
    int64_t parts = (model->num_layers * PARTS_OF_LAYER + 1) * sizeof(Part);
    int64_t shared = num_rows * (outputs * h + 2 * heads + 2 * kv + 2 * model->ffn) * sizeof(float);
    char *memory = aligned_alloc(128, (parts + 127 + copies * own + shared + 127) / 128 * 128);
    if (!memory) return 0;
    Part *first_part = (Part *)memory;
    memset(first_part, 0, parts);
    char *of_threads = memory + (parts + 127) / 128 * 128;
    float *next = (float *)(of_threads + copies * own);
#define TAKE(count) (next += num_rows * (count), next - num_rows * (count))
    Space space = {.added = TAKE(outputs * h), .qkv = TAKE(heads + 2 * kv), .attended = TAKE(heads), .gate_up = TAKE(2 * model->ffn)};
    // the first norm adds the output of the previous part, which is zero here
    memset(space.added, 0, num_rows * h * sizeof(float));
    Space of_step = space_of(space, of_threads, num_rows, groups, h);
    if (!is_alone) memcpy(of_step.residual, x, num_rows * h * sizeof(float));
    SlipClock clock = slip_clock();
    double end = clock.start;  // of this thread, which then waits for the others
    int late = 0;
#pragma omp parallel num_threads(team) reduction(|| : late)
    {
        int64_t copy = 0;
#ifdef _OPENMP
        if (is_alone) copy = omp_get_thread_num();
#endif
        Step step = {first_part, model, num_rows, ropes, slots, tables, table_strides, lengths,
                     space_of(space, of_threads + copy * own, num_rows, groups, h), is_alone, team, 0, slip_now()};
        if (is_alone) memcpy(step.space.residual, x, h * sizeof(float));
        run_layers(&step, hidden);
        late = step.saw_late;
#pragma omp master
        end = slip_now();
    }
    double now = slip_now();
    late = late || now - end > LATE || slip_away(clock, now) > LATE;
    slip_team_add(&slip_team, num_rows, now - clock.start, late, now);
    free(memory);
    return 1;
}
