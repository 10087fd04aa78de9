// All layers of a decoder for one token per row: one call, one team of threads, a barrier between the parts of a layer.
// The parts are those of the other ops, so a row's result does not depend on the other rows.
//
// Threads take work items of a part until none is left. A thread that waits at a barrier yields its core after some
// spins: when another program occupied a core, two threads spinning on the other core made a step five times as long.
//
// With one row the parts between the GEMMs are smaller than a barrier: every thread computes them for itself, in memory
// of its own, and a layer has 5 barriers instead of 10.
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "../native_parts.h"

#define PIECE 24  // float32 or bfloat16 weight rows per work item: whole tiles
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
    int team;
    atomic_int arrived, round;
    atomic_llong next;  // next work item of the current part
} Barrier;

typedef struct {
    Barrier *barrier;
    const Model *model;
    int64_t num_rows;
    const float *const *ropes;       // [rows, 2, rotary]
    const int64_t *const *slots;     // per group: [rows]
    const int64_t *const *tables;    // per group: [rows, table_stride]
    const int64_t *table_strides;
    const int64_t *lengths;
    Space space;
    int is_alone;  // one row: every thread has its own copy of this structure
} Step;

// quantizes `count` activations of a row, from column `first` of `size`
static void quantize(const Step *step, const float *x, int64_t row, int64_t first, int64_t count, int64_t size) {
    int64_t stride;
    SlipActivations *target = slip_activations_of(step->space.activations, row, step->num_rows, size / SLIP_BLOCK, &stride);
    slip_quantize(x, target + first / SLIP_BLOCK * stride, stride, count / SLIP_BLOCK);
}

// Every thread of the team calls the functions below; each function ends with a barrier.

static int64_t take_item(const Step *step) {
    return atomic_fetch_add_explicit(&step->barrier->next, 1, memory_order_relaxed);
}

static void wait_for_team(const Step *step) {
    Barrier *m = step->barrier;
    int round = atomic_load_explicit(&m->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&m->arrived, 1, memory_order_acq_rel) + 1 == m->team) {
        atomic_store_explicit(&m->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&m->next, 0, memory_order_relaxed);
        atomic_store_explicit(&m->round, round + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&m->round, memory_order_acquire) == round; spins++)
        if (spins > SPINS)
            sched_yield();
        else
            PAUSE();
}

static void multiply(const Step *step, const Product *product, const float *x, float *out) {
    const Space *s = &step->space;
    int64_t first_row = 0, first_piece = 0, stride = product->num_rows, size = product->num_columns;
    int64_t piece = take_item(step);
    for (int64_t r = 0; r < product->num_runs; r++) {
        const Run *run = &product->runs[r];
        int is_plain = run->layout == SLIP_FLOAT32 || run->layout == SLIP_BFLOAT16;
        int64_t size_of_piece = is_plain ? PIECE : SLIP_LOW_BIT_PIECE;
        int64_t after = first_piece + (run->num_rows + size_of_piece - 1) / size_of_piece;
        for (; piece < after; piece = take_item(step)) {
            int64_t first = (piece - first_piece) * size_of_piece;
            int64_t last = first + size_of_piece < run->num_rows ? first + size_of_piece : run->num_rows;
            float *o = out + first_row;
            if (is_plain)
                slip_plain_rows(x, run->numbers, o, run->layout, step->num_rows, size, stride, first, last);
            else
                slip_low_bit_rows(s->activations, run->numbers, run->scales, run->offsets, o, run->layout,
                                  step->num_rows, size / SLIP_BLOCK, stride, first, last);
            if (product->bias)
                for (int64_t t = 0; t < step->num_rows; t++)
                    for (int64_t n = first; n < last; n++) o[t * stride + n] += product->bias[first_row + n];
        }
        first_row += run->num_rows;
        first_piece = after;
    }
    wait_for_team(step);
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

static void add_and_norm(const Step *step, const float *out_norm, const float *norm, const Product *next, float *out) {
    if (step->is_alone && next) {
        add_and_norm_row(step, 0, out_norm, norm, next, out);
        return;
    }
    for (int64_t row = take_item(step); row < step->num_rows; row = take_item(step))
        add_and_norm_row(step, row, out_norm, norm, next, out);
    wait_for_team(step);
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
static void attend(const Step *step, const Layer *layer) {
    const Space *s = &step->space;
    int64_t kv_heads = step->model->num_kv_heads, size = step->model->num_heads * step->model->dim;
    int64_t pieces = step->num_rows * kv_heads;
    for (int64_t piece = take_item(step); piece < pieces; piece = take_item(step)) {
        write_head(step, layer, piece / kv_heads, piece % kv_heads);
        if (step->is_alone) attend_head(step, layer, 0, piece);
    }
    wait_for_team(step);
    if (!step->is_alone) {
        for (int64_t piece = take_item(step); piece < pieces; piece = take_item(step))
            attend_head(step, layer, piece / kv_heads, piece % kv_heads);
        wait_for_team(step);
    }
    if (!layer->output.is_low_bit) return;
    if (step->is_alone) {
        quantize(step, s->attended, 0, 0, size, size);
        return;
    }
    for (int64_t row = take_item(step); row < step->num_rows; row = take_item(step))
        quantize(step, s->attended + row * size, row, 0, size, size);
    wait_for_team(step);
}

static void activate_piece(const Step *step, const Layer *layer, int64_t row, int64_t first, int64_t count) {
    const Space *s = &step->space;
    int64_t size = step->model->ffn;
    const float *gate = s->gate_up + row * 2 * size + first;
    float *out = s->active + row * size + first;
    (step->model->is_gelu ? slip_gelu_tanh_row : slip_silu_row)(gate, gate + size, out, count);
    if (layer->down.is_low_bit) quantize(step, out, row, first, count, size);
}

static void activate(const Step *step, const Layer *layer) {
    int64_t size = step->model->ffn, piece = 8 * SLIP_BLOCK, pieces = (size + piece - 1) / piece;
    if (step->is_alone) {
        activate_piece(step, layer, 0, 0, size);
        return;
    }
    for (int64_t at = take_item(step); at < step->num_rows * pieces; at = take_item(step)) {
        int64_t first = at % pieces * piece;
        activate_piece(step, layer, at / pieces, first, size - first < piece ? size - first : piece);
    }
    wait_for_team(step);
}

static void run_layers(const Step *step, float *hidden) {
    const Model *m = step->model;
    const Space *s = &step->space;
    const float *norm_before = 0;
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        add_and_norm(step, norm_before, layer->attention_norm, &layer->qkv, s->normed);
        multiply(step, &layer->qkv, s->normed, s->qkv);
        attend(step, layer);
        multiply(step, &layer->output, s->attended, s->added);
        add_and_norm(step, layer->attention_out_norm, layer->mlp_norm, &layer->gate_up, s->normed);
        multiply(step, &layer->gate_up, s->normed, s->gate_up);
        activate(step, layer);
        multiply(step, &layer->down, s->active, s->added);
        norm_before = layer->mlp_out_norm;
    }
    add_and_norm(step, norm_before, m->norm, 0, hidden);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int team_size(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
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
    int64_t copies = is_alone ? team_size() : 1;
    int64_t own = num_rows * (groups * sizeof(SlipActivations) + (2 * h + model->ffn) * sizeof(float));
    own = (own + 127) / 128 * 128;
    int64_t shared = num_rows * (h + 2 * heads + 2 * kv + 2 * model->ffn) * sizeof(float);
    char *memory = aligned_alloc(128, (copies * own + shared + 127) / 128 * 128);
    if (!memory) return 0;
    float *next = (float *)(memory + copies * own);
#define TAKE(count) (next += num_rows * (count), next - num_rows * (count))
    Space space = {.added = TAKE(h), .qkv = TAKE(heads + 2 * kv), .attended = TAKE(heads), .gate_up = TAKE(2 * model->ffn)};
    // the first norm adds the output of the previous part, which is zero here
    memset(space.added, 0, num_rows * h * sizeof(float));
    Barrier barrier = {.team = 1};
#pragma omp parallel
    {
        int64_t copy = 0;
#ifdef _OPENMP
        if (is_alone) copy = omp_get_thread_num();
#endif
        Step step = {&barrier, model, num_rows, ropes, slots, tables, table_strides, lengths, space, is_alone};
        Space *s = &step.space;
        s->activations = (SlipActivations *)(memory + copy * own);
        s->residual = (float *)(s->activations + num_rows * groups);
        s->normed = s->residual + num_rows * h;
        s->active = s->normed + num_rows * h;
#pragma omp single
        {
            if (!is_alone) memcpy(s->residual, x, num_rows * h * sizeof(float));
#ifdef _OPENMP
            barrier.team = omp_get_num_threads();
#endif
        }
        if (is_alone) memcpy(s->residual, x, h * sizeof(float));
        run_layers(&step, hidden);
    }
    free(memory);
    return 1;
}
